"""What losses are fed with, from logits: token log-probabilities, divergences from a teacher, the router's balance."""

import math

import numpy as np
import pytest
import torch

from posttrain.core import ops
from posttrain.nn import logprobs as chunked

from . import slow


def log_softmax(row, temperature=1.0):
    scaled = [x / temperature for x in row]
    top = max(scaled)
    normaliser = top + math.log(sum(math.exp(x - top) for x in scaled))
    return [x - normaliser for x in scaled]


def kl(p, q):
    """From log-probabilities."""
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def merged(logp, kept):
    """The log-probabilities of the tokens that are kept, and of all others together."""
    others = sum(math.exp(x) for i, x in enumerate(logp) if i not in kept)
    return [logp[i] for i in kept] + [math.log(others)]


def divergence(student_rows, teacher_rows, kind, beta, temperature, top_k=0):
    result = 0.0
    for student_row, teacher_row in zip(student_rows, teacher_rows, strict=True):
        student, teacher = log_softmax(student_row, temperature), log_softmax(teacher_row, temperature)
        if top_k:
            kept = sorted(range(len(teacher)), key=lambda i, row=teacher: -row[i])[:top_k]
            student, teacher = merged(student, kept), merged(teacher, kept)
        if kind == "forward_kl":
            result += kl(teacher, student)
        elif kind == "reverse_kl":
            result += kl(student, teacher)
        else:
            mixed = [
                math.log(beta * math.exp(t) + (1 - beta) * math.exp(s)) for s, t in zip(student, teacher, strict=True)
            ]
            result += beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)
    return result


@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.2)])
def test_divergence_and_its_gradient(kind, beta, temperature, top_k, monkeypatch):
    monkeypatch.setattr(chunked, "LOGITS_PER_CHUNK", 10)  # two positions a chunk
    rng = np.random.default_rng(0)
    student = torch.tensor(rng.normal(0, 2, (7, 5))).requires_grad_()
    teacher = torch.tensor(rng.normal(0, 2, (7, 5))).requires_grad_()
    found = chunked.token_divergence(student, teacher, lambda x: x, lambda x: x, 5, kind, beta, temperature, top_k)
    found.sum().backward()

    def formula(values):
        return divergence(values, teacher.tolist(), kind, beta, temperature, top_k)

    assert found.sum().item() == pytest.approx(formula(student.tolist()), rel=1e-9)
    where = [(i, j) for i in range(7) for j in range(5)]
    expected = slow.gradient(formula, student.tolist(), where)
    for i, j in where:
        assert student.grad[i, j].item() == pytest.approx(expected[i, j], rel=1e-7, abs=1e-8)
    assert teacher.grad is None, "the teacher is not trained"


def test_token_logprobs_their_gradient_and_the_entropy(monkeypatch):
    monkeypatch.setattr(chunked, "LOGITS_PER_CHUNK", 10)
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(0, 2, (7, 5))).requires_grad_()
    targets = torch.tensor(rng.integers(0, 5, 7))
    logprobs, entropy = chunked.token_logprobs(logits, targets, lambda x: x, 5)
    logprobs.sum().backward()

    def formula(values):
        return sum(log_softmax(row)[target] for row, target in zip(values, targets.tolist(), strict=True))

    assert logprobs.sum().item() == pytest.approx(formula(logits.tolist()), rel=1e-9)
    where = [(i, j) for i in range(7) for j in range(5)]
    expected = slow.gradient(formula, logits.tolist(), where)
    for i, j in where:
        assert logits.grad[i, j].item() == pytest.approx(expected[i, j], rel=1e-7, abs=1e-8)
    plain = [-sum(math.exp(x) * x for x in log_softmax(row)) for row in logits.tolist()]
    assert entropy.tolist() == pytest.approx(plain, rel=1e-9)
    assert not entropy.requires_grad


def test_router_balance_is_a_sum_over_samples():
    """E * sum_e f_e P_e of each sample, times its tokens; f is the share of choices, P the mean probability."""
    rng = np.random.default_rng(2)
    layers, lengths, experts, chosen = 2, [3, 4], 4, 2
    logits = [torch.tensor(rng.normal(0, 1, (sum(lengths), experts))) for _ in range(layers)]
    sample_of = torch.tensor([0] * 3 + [1] * 4)
    expected, first = 0.0, 0
    for length in lengths:
        tokens = [log_softmax(layer[t].tolist()) for layer in logits for t in range(first, first + length)]
        probability = [sum(math.exp(row[e]) for row in tokens) / len(tokens) for e in range(experts)]
        share = [
            sum(e in sorted(range(experts), key=lambda k, row=row: -row[k])[:chosen] for row in tokens) / len(tokens)
            for e in range(experts)
        ]
        expected += length * experts * sum(f * p for f, p in zip(share, probability, strict=True))
        first += length
    found = ops.router_balance(logits, chosen, sample_of, len(lengths))
    assert found.item() == pytest.approx(expected, rel=1e-5)  # float32 inside
