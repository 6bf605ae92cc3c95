"""The fused head's divergence from a teacher equals the one that autograd computes from whole logits."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from posttrain.core.types import ForwardRequest, Loss, Objective, Sample
from posttrain.data.packing import collate
from posttrain.nn import lm_head
from posttrain.nn import logprobs as chunked
from posttrain.nn.kernels import reference
from posttrain.nn.lm_head import EarlyGradients, FusedHead

KINDS = ["forward_kl", "reverse_kl", "jsd"]


def heads(vocabulary: int = 37) -> tuple[torch.nn.Linear, torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A student and a wider teacher, with hidden states of 9 positions."""
    torch.manual_seed(0)
    student, teacher = (torch.nn.Linear(size, vocabulary, bias=False) for size in (8, 12))
    return student, teacher, torch.randn(9, 8), torch.randn(9, 12)


WEIGHTS = torch.arange(9.0) - 3  # what the loss multiplies the positions with; 0 for one of them


def early_gradients(errors: list[torch.Tensor], device: str = "cpu") -> EarlyGradients:
    """Gradients of the weighted sum of the divergences of 9 tokens."""
    batch = collate([Sample(tokens=np.arange(10, dtype=np.int32), mask=np.arange(10) > 0)], torch.device(device))
    weights = WEIGHTS.to(device)
    objective = Objective(
        request=ForwardRequest(names=frozenset({"divergence"})),
        loss=lambda out, batch: Loss(total=(out.divergence[batch.counted] * weights).sum()),
        unit="token",
        separable=True,
    )
    return EarlyGradients(objective, batch, 1.0, errors.append)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_divergence_and_its_gradients(kind, temperature, monkeypatch):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CPU_CHUNK", 4 * 37)  # chunks of 2 positions
    student, teacher, hidden, teacher_hidden = heads()
    errors: list[torch.Tensor] = []

    def gradients(route: str) -> list[torch.Tensor]:
        states = hidden.clone().requires_grad_()
        student.weight.grad = None
        if route == "whole":
            found = chunked.token_divergence(states, teacher_hidden, student, teacher, 37, kind, 0.3, temperature)
        else:
            one, other = FusedHead(student, reference, multiple=4), FusedHead(teacher, reference, multiple=4)
            early = early_gradients(errors) if route == "early" else None
            found = one.divergence(states, other, teacher_hidden, kind, 0.3, temperature, early)
        (found * WEIGHTS).sum().backward()
        return [found.detach(), states.grad, student.weight.grad]

    expected = gradients("whole")
    for route in ("fused", "early"):
        for found, wanted in zip(gradients(route), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert errors == [0.0]


def test_the_logits_of_both_models_are_computed_once():
    """Of a separable loss: a product with each head, and the two products of the gradients."""
    student, teacher, hidden, teacher_hidden = heads()
    product = 2 * len(hidden) * 37  # FLOPs per number of a hidden state
    for early, expected in ((early_gradients([]), 3 * 8 + 12), (None, 4 * 8 + 2 * 12)):
        with FlopCounterMode(display=False) as counter:
            one, other = (FusedHead(each, reference, multiple=1) for each in (student, teacher))
            states = hidden.clone().requires_grad_()
            one.divergence(states, other, teacher_hidden, "reverse_kl", 0.5, 1.0, early).sum().backward()
        assert counter.get_total_flops() == product * expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_on_the_gpu_in_half_precision(kind, monkeypatch):
    """The same with and without a second computation of the logits, and near those of whole logits."""
    from posttrain.nn.kernels import triton

    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 4 * 40)  # chunks of 2 positions
    student, teacher, hidden, teacher_hidden = (part.to("cuda", torch.bfloat16) for part in heads(40))
    weights, errors = WEIGHTS.cuda(), list[torch.Tensor]()
    found = {}
    for route in ("whole", "fused", "early"):
        states = hidden.clone().requires_grad_()
        student.weight.grad = None
        if route == "whole":
            logits = (lambda x: student(x).float()), (lambda x: teacher(x).float())
            value = chunked.token_divergence(states, teacher_hidden, *logits, 40, kind, 0.3, 1.0)
        else:
            one, other = FusedHead(student, triton, multiple=4), FusedHead(teacher, triton, multiple=4)
            early = early_gradients(errors, "cuda") if route == "early" else None
            value = one.divergence(states, other, teacher_hidden, kind, 0.3, 1.0, early)
        (value * weights).sum().backward()
        found[route] = [value.detach(), states.grad, student.weight.grad]
    for whole, fused, early_one in zip(*found.values(), strict=True):
        assert torch.equal(fused, early_one)
        torch.testing.assert_close(fused.float(), whole.float(), rtol=0.05, atol=0.02)
    assert not any(errors)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_the_gpu_equal_the_reference(kind):
    from posttrain.nn.kernels import triton

    torch.manual_seed(0)
    logits, teacher = (3 * torch.randn(5, 10_007) for _ in range(2))
    gradient = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0])
    expected = reference.divergence(logits, teacher, 0.8, kind, 0.3)
    found = triton.divergence(logits.cuda(), teacher.cuda(), 0.8, kind, 0.3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
    by_logits = reference.divergence_backward(logits.clone(), teacher, 0.8, kind, 0.3, *expected[1:], gradient)
    of_gpu = triton.divergence_backward(logits.cuda(), teacher.cuda(), 0.8, kind, 0.3, *found[1:], gradient.cuda())
    torch.testing.assert_close(of_gpu.cpu(), by_logits, rtol=1e-3, atol=1e-7)
