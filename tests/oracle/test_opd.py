"""On-policy distillation: credit, loss and gradient against slow loops; both forms agree in expectation."""

import math

import numpy as np
import pytest
import torch

from posttrain.algorithms import RolloutSettings
from posttrain.algorithms.opd import OPD
from posttrain.core.errors import UsageError
from posttrain.core.types import Outputs
from posttrain.nn import logprobs as chunked

from . import slow_policy
from .batches import batch_of, per_sample_lists, random_logprobs
from .test_policy_kl import draw, tables
from .test_policy_losses import LONGEST, drawn, label, outputs_near, same_gradient, spots


def opd(**options):
    return OPD(OPD.Config(teacher="there", **options), RolloutSettings(max_completion_tokens=LONGEST))


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "options", [{}, {"reward_coef": 0.5}, {"divergence_clip": 0.4, "distill_coef": 0.3}], ids=label
)
def test_a_token_is_credited_with_how_much_more_the_teacher_likes_it(options, gamma, old):
    """A_t = sum_k gamma^(k - t) log(teacher / student), clipped, times its weight; plus the group's advantage."""
    rows = drawn(np.random.default_rng(0), old=old)
    bound = options.get("divergence_clip", math.inf)
    group = slow_policy.group_credit(rows, lambda rewards: slow_policy.standardize(rewards, 1e-6))
    algo = opd(objective="policy_gradient", gamma=gamma, **options)
    assert algo.needs() == {"ref_logprobs"} and algo.reference_path() == "there" and algo.teacher_path() == ""
    algo.assign_credit(rows)
    for row in rows:
        own = row.old_logprobs if old else row.logprobs
        gains = {t: slow_policy.clip(row.ref_logprobs[t] - own[t], -bound, bound) for t in slow_policy.counted(row)}
        taught = slow_policy.to_go(gains, gamma)
        wanted = [
            options.get("distill_coef", 1.0) * taught[t] + options.get("reward_coef", 0.0) * group[id(row)][t]
            if t in taught
            else 0.0
            for t in range(len(row))
        ]
        assert row.advantages.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_aggregation": "sample_mean", "distill_coef": 0.3},
        {"divergence_clip": 0.7, "loss_aggregation": "fixed_length"},
        {"reward_coef": 0.5, "distill_coef": 2.0},
        {"reward_coef": 0.5, "loss_aggregation": "sample_mean", "dual_clip": 1.3},
    ],
    ids=label,
)
def test_the_divergence_is_added_up_like_the_policy_term(options, seed):
    rng = np.random.default_rng(seed)
    algo = opd(**options)
    rows = drawn(rng)
    batch = batch_of(rows)
    out = outputs_near(rng, rows, batch)
    out.divergence = (-random_logprobs(rng, batch).detach()).requires_grad_()
    loss = algo.loss(out, batch)
    loss.total.backward()
    now, chaos = per_sample_lists(out.logprobs, batch), per_sample_lists(out.entropy, batch)
    share = {
        "token_mean": lambda row: 1,
        "sample_mean": lambda row: len(slow_policy.counted(row)),
        "fixed_length": lambda row: LONGEST,
    }[options.get("loss_aggregation", "token_mean")]
    rewarded = {k: v for k, v in options.items() if k in ("loss_aggregation", "dual_clip")} | {"longest": LONGEST}

    def taught(values):
        bound, weight = options.get("divergence_clip", math.inf), options.get("distill_coef", 1.0)
        return sum(weight * min(bound, values[i][j]) / share(rows[i]) for i, j in spots(rows))

    def policy(values):
        return slow_policy.policy(rows, values, now, chaos, **rewarded) if "reward_coef" in options else 0.0

    divergences = per_sample_lists(out.divergence, batch)
    assert loss.total.item() == pytest.approx(taught(divergences) + policy(now), rel=1e-9)
    same_gradient(out.divergence.grad, taught, divergences, rows, batch)
    if "reward_coef" in options:
        same_gradient(out.logprobs.grad, policy, now, rows, batch)
    measured = [x.item() for x in loss.metrics["divergence"]]
    assert measured == pytest.approx([sum(divergences[i][j] for i, j in spots(rows)), len(batch.counted)])


def test_both_forms_have_the_gradient_of_the_reverse_kl():
    """Over very many completions, with tokens that do not depend on each other."""
    student, teacher = tables()
    rows, words = draw(student, teacher, 60_000, 1, torch.Generator().manual_seed(0))
    algo = opd(objective="policy_gradient", importance_cap=0.0, loss_aggregation="sample_mean")
    batch = batch_of(algo.assign_credit(rows))
    logits = student.clone().requires_grad_()
    picked = logits.log_softmax(-1)[torch.arange(3), words]
    logprobs = torch.nn.functional.pad(picked, (1, 0)).flatten()
    algo.loss(Outputs(logprobs=logprobs, entropy=torch.zeros_like(logprobs)), batch).total.backward()
    exact = student.clone().requires_grad_()
    chunked.token_divergence(exact, teacher, lambda x: x, lambda x: x, 5, "reverse_kl", 0.5, 1.0).mean().backward()
    assert torch.allclose(logits.grad / 60_000, exact.grad, atol=4e-3) and exact.grad.abs().max() > 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coef": 0.1}, r"algo\.kl_coef is 0\.1, but opd has a teacher"),
        ({"distill_coef": 0.0}, r"algo\.distill_coef is 0"),
        ({"entropy_coef": 0.1}, r"algo\.entropy_coef is 0\.1.*algo\.reward_coef"),
        ({"gamma": 0.5}, r"algo\.gamma is 0\.5.*algo\.objective"),
        ({"objective": "policy_gradient", "divergence": "jsd"}, r"algo\.divergence is jsd.*algo\.objective"),
        ({"objective": "policy_gradient", "divergence_top_k": 9}, r"algo\.divergence_top_k is 9"),
        ({"divergence_top_k": -1}, r"algo\.divergence_top_k is -1"),
        ({"jsd_beta": 1.0}, r"algo\.jsd_beta is 1\.0"),
    ],
)
def test_options_that_conflict(options, message):
    with pytest.raises(UsageError, match=message):
        opd(**options)
    with pytest.raises(UsageError, match=r"algo\.teacher is not set"):
        OPD(OPD.Config())


def test_what_the_loop_asks_for():
    assert opd().outputs() == {"divergence"} and opd().teacher_path() == "there" and not opd().needs()
    assert opd(reward_coef=1.0).outputs() == {"divergence", "logprobs", "entropy"}
    assert (opd().min_samples_per_prompt(), opd(reward_coef=1.0).min_samples_per_prompt()) == (1, 2)
    assert not opd().config.needs_reward() and opd(reward_coef=1.0).config.needs_reward()
    request = opd(divergence="jsd", jsd_beta=0.3, temperature=2.0, divergence_top_k=7).forward_request(len)
    assert (request.divergence, request.jsd_beta, request.temperature, request.divergence_top_k) == ("jsd", 0.3, 2.0, 7)
