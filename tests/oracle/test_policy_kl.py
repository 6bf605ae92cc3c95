"""The KL to the reference: what its estimators expect, and that training on it brings the policy back."""

import numpy as np
import pytest
import torch

from posttrain.core import ops
from posttrain.core.types import Outputs, Sample
from posttrain.nn import logprobs as chunked

from .batches import batch_of
from .test_policy_losses import algorithm

PLACES, WORDS = 3, 5


def tables(seed=0):
    """Logits of policy and reference: a distribution over five words at each of three places."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(PLACES, WORDS, generator=generator, dtype=torch.float64) for _ in range(2)]


def exact_kl(p, q):
    return float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_expect_the_kl(estimator):
    policy, reference = tables()
    log_ratio = policy.log_softmax(-1) - reference.log_softmax(-1)
    expected = (policy.softmax(-1) * ops.kl_estimate(log_ratio, estimator)).sum()
    assert float(expected) == pytest.approx(exact_kl(policy, reference), rel=1e-12)
    assert (ops.kl_estimate(log_ratio, "k3") >= 0).all()


def test_k2_expects_the_kl_to_second_order():
    policy, reference = tables()
    for step, tolerance in ((0.1, 0.1), (0.01, 0.01)):
        near = reference + step * (policy - reference)
        log_ratio = near.log_softmax(-1) - reference.log_softmax(-1)
        expected = float((near.softmax(-1) * ops.kl_estimate(log_ratio, "k2")).sum())
        assert expected == pytest.approx(exact_kl(near, reference), rel=tolerance)


def test_gradients_in_expectation():
    """In the loss k2 follows KL(policy || reference), k3 KL(reference || policy), and k1 nothing at all."""
    policy, reference = tables()

    def expected_gradient(estimator):
        logits = policy.clone().requires_grad_()
        log_ratio = logits.log_softmax(-1) - reference.log_softmax(-1)
        (policy.softmax(-1) * ops.kl_estimate(log_ratio, estimator)).sum().backward()
        return logits.grad

    def gradient_of(divergence):
        logits = policy.clone().requires_grad_()
        divergence(logits.log_softmax(-1), reference.log_softmax(-1)).sum().backward()
        return logits.grad

    assert torch.allclose(expected_gradient("k1"), torch.zeros(PLACES, WORDS, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(expected_gradient("k2"), gradient_of(lambda p, q: chunked.kl(p, q)), atol=1e-12)
    assert torch.allclose(expected_gradient("k3"), gradient_of(lambda p, q: chunked.kl(q, p)), atol=1e-12)


def test_k3_times_the_ratio_follows_the_kl_whatever_policy_sampled():
    """Tokens of an older policy, weighted by the ratio: the gradient is that of KL(policy || reference)."""
    policy, reference = tables()
    older = tables(seed=7)[0].log_softmax(-1)
    logits = policy.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    corrected = algorithm("grpo", kl_coef=1.0, kl_bias_correction=True)
    terms = corrected.kl_terms(logp - reference.log_softmax(-1), logp - older)
    (older.exp() * terms).sum().backward()
    expected = policy.clone().requires_grad_()
    chunked.kl(expected.log_softmax(-1), reference.log_softmax(-1)).sum().backward()
    assert torch.allclose(logits.grad, expected.grad, atol=1e-12)


def test_in_the_reward_only_k1_follows_the_kl():
    """k3 there follows KL(policy || reference) minus KL(reference || policy): it may lead away from the reference."""
    policy, reference = tables()

    def expected_gradient(estimator):
        logits = policy.clone().requires_grad_()
        logp = logits.log_softmax(-1)
        cost = ops.kl_estimate((logp - reference.log_softmax(-1)).detach(), estimator)
        (policy.softmax(-1) * cost * logp).sum().backward()
        return logits.grad

    logits = policy.clone().requires_grad_()
    forwards, backwards = (chunked.kl(*pair).sum() for pair in in_both_orders(logits, reference))
    (to,) = torch.autograd.grad(forwards, logits, retain_graph=True)
    (fro,) = torch.autograd.grad(backwards, logits)
    assert torch.allclose(expected_gradient("k1"), to, atol=1e-12)
    assert torch.allclose(expected_gradient("k3"), to - fro, atol=1e-12)
    assert float((expected_gradient("k3") * to).sum()) < 0, "descending on it raises the KL here"


def in_both_orders(logits, reference):
    p, q = logits.log_softmax(-1), reference.log_softmax(-1)
    return (p, q), (q, p)


def draw(policy, reference, answers, group, generator):
    """Answers of three words each, with reward 0."""
    logp, logq = policy.log_softmax(-1), reference.log_softmax(-1)
    words = torch.multinomial(policy.softmax(-1), answers, replacement=True, generator=generator).T  # [answers, places]
    places = torch.arange(PLACES)
    rows = []
    for index, chosen in enumerate(words):
        pad = np.zeros(1, dtype=np.float32)
        rows.append(
            Sample(
                tokens=np.append(0, chosen.numpy()).astype(np.int32),
                mask=np.arange(PLACES + 1) > 0,
                logprobs=np.append(pad, logp[places, chosen].numpy()).astype(np.float32),
                ref_logprobs=np.append(pad, logq[places, chosen].numpy()).astype(np.float32),
                values=np.zeros(PLACES + 1, dtype=np.float32),
                group=index // group,
            )
        )
    return rows, words


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"kl_in": "loss", "kl_estimator": "k2", "loss_aggregation": "sample_mean"}),
        ("grpo", {"kl_in": "loss", "kl_estimator": "k3", "loss_aggregation": "sample_mean"}),
        ("grpo", {"kl_in": "loss", "kl_bias_correction": True}),
        ("gspo", {"kl_in": "loss"}),
        ("gmpo", {"kl_in": "loss"}),
        ("sapo", {"kl_in": "loss"}),
        ("cispo", {"kl_in": "loss"}),
        ("grpo", {"kl_in": "reward", "scale_by_std": False}),
        ("rloo", {}),
        ("remax", {}),
        ("reinforce", {}),
        ("reinforce", {"baseline": True}),
        ("ppo", {}),
    ],
    ids=str,
)
def test_without_a_reward_the_policy_returns_to_the_reference(name, options):
    policy, reference = tables()
    algo = algorithm(name, kl_coef=10.0, **options)
    generator = torch.Generator().manual_seed(1)
    start = exact_kl(policy, reference)
    for _ in range(25):
        rows, words = draw(policy, reference, 256, 8, generator)
        batch = batch_of(algo.assign_credit(rows))
        logits = policy.clone().requires_grad_()
        picked = logits.log_softmax(-1)[torch.arange(PLACES), words]  # [answers, places]
        logprobs = torch.nn.functional.pad(picked, (1, 0)).flatten()
        loss = algo.loss(Outputs(logprobs=logprobs, entropy=torch.zeros_like(logprobs)), batch).total
        loss.backward()
        policy = policy - 0.3 * logits.grad / logits.grad.norm()
    assert exact_kl(policy, reference) < 0.2 * start, f"{exact_kl(policy, reference):.3f} of {start:.3f}"
