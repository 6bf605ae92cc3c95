import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from posttrain.core import ops
from posttrain.nn import logprobs as chunked


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked, "LOGITS_PER_CHUNK", 3 * 17)  # 3 positions of a vocabulary of 17


def head_of(weight):
    return lambda hidden: hidden @ weight.T


def test_token_logprobs_and_entropy_equal_the_full_softmax(small_chunks):
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 17, (10,))
    upstream = torch.randn(10, dtype=torch.float64)

    logprobs, entropy = chunked.token_logprobs(hidden, targets, head_of(weight), 17)
    found = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))

    full = (hidden @ weight.T).log_softmax(-1)
    expected = torch.autograd.grad((full.gather(-1, targets[:, None])[:, 0] * upstream).sum(), (hidden, weight))
    assert torch.allclose(logprobs, full.gather(-1, targets[:, None])[:, 0], atol=1e-12)
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1), atol=1e-12)
    assert not entropy.requires_grad
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_no_tensor_of_all_logits_is_kept_for_the_backward_pass(small_chunks):
    hidden = torch.randn(30, 8, requires_grad=True)
    weight = torch.randn(17, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        logprobs, _ = chunked.token_logprobs(hidden, torch.randint(0, 17, (30,)), head_of(weight), 17)
    assert logprobs.shape == (30,)
    assert kept and max(kept) <= weight.numel(), "logits of a chunk were kept instead of being made again"


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_divergence_equals_a_slow_loop(small_chunks, kind):
    torch.manual_seed(1)
    hidden, teacher_hidden = torch.randn(7, 4).double(), torch.randn(7, 4).double()
    weight, teacher_weight = torch.randn(17, 4).double(), torch.randn(17, 4).double()
    found = chunked.token_divergence(
        hidden, teacher_hidden, head_of(weight), head_of(teacher_weight), 17, kind, jsd_beta=0.3, temperature=2.0
    )
    for i in range(7):
        p = softmax([(float(teacher_hidden[i] @ row)) / 2.0 for row in teacher_weight])
        q = softmax([(float(hidden[i] @ row)) / 2.0 for row in weight])
        m = [0.3 * a + 0.7 * b for a, b in zip(p, q, strict=True)]
        expected = {
            "forward_kl": slow_kl(p, q),
            "reverse_kl": slow_kl(q, p),
            "jsd": 0.3 * slow_kl(p, m) + 0.7 * slow_kl(q, m),
        }[kind]
        assert float(found[i]) == pytest.approx(expected, abs=1e-9)


def softmax(logits):
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def slow_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_router_balance_of_one_sample_is_the_usual_loss():
    torch.manual_seed(2)
    logits = [torch.randn(9, 4), torch.randn(9, 4)]
    found = ops.router_balance(logits, 2, torch.zeros(9, dtype=torch.long), 1)
    assert float(found / 9) == pytest.approx(float(load_balancing_loss_func(tuple(logits), 4, 2)), rel=1e-6)


def test_router_balance_is_a_sum_over_samples():
    torch.manual_seed(3)
    logits = [torch.randn(9, 4), torch.randn(9, 4)]
    both = ops.router_balance(logits, 2, torch.tensor([0] * 5 + [1] * 4), 2)
    first = ops.router_balance([x[:5] for x in logits], 2, torch.zeros(5, dtype=torch.long), 1)
    second = ops.router_balance([x[5:] for x in logits], 2, torch.zeros(4, dtype=torch.long), 1)
    assert float(both) == pytest.approx(float(first + second), rel=1e-6)


def test_learning_rate():
    def rate(step, schedule, warmup=10):
        return ops.learning_rate_at(step, 110, 2.0, schedule, warmup, 0.1)

    for schedule in ("cosine", "linear", "constant"):
        assert rate(1, schedule) == pytest.approx(0.2)
        assert rate(10, schedule) == pytest.approx(2.0)
    assert rate(110, "constant") == 2.0
    assert rate(110, "cosine") == pytest.approx(0.2)
    assert rate(110, "linear") == pytest.approx(0.2)
    assert rate(60, "linear") == pytest.approx(1.1)
    assert rate(60, "cosine") == pytest.approx(1.1)
    assert rate(35, "cosine") == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rate(1, "linear", warmup=0) == pytest.approx(2.0 * (0.1 + 0.9 * 109 / 110))
    assert rate(500, "cosine") == pytest.approx(0.2), "past the end the rate stays at its minimum"
