"""Each policy-gradient loss and its gradient equal the slow loop's; what they report; what they do at the edges."""

import math

import numpy as np
import pytest
import torch

from posttrain.algorithms import ALGORITHMS, RolloutSettings
from posttrain.core.types import Outputs

from . import slow, slow_policy
from .batches import batch_of, per_sample_lists, random_logprobs, samples

ONLINE = sorted(name for name, cls in ALGORITHMS.items() if cls.online and name != "opd")  # test_opd.py
LONGEST = 9

CLIPPED_RATIO = [
    {},
    {"clip_low": 0.1, "clip_high": 0.28},
    {"clip_low": 0.0, "clip_high": 0.0},
    {"loss_aggregation": "sample_mean"},
    {"loss_aggregation": "fixed_length"},
    {"importance_cap": 0.0},
    {"importance_cap": 1.1},
    {"kl_coef": 0.3},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_estimator": "k3", "loss_aggregation": "sample_mean"},
    {"kl_coef": 0.3, "kl_in": "reward"},
    {"entropy_coef": 0.2},
    {"dual_clip": 1.3},
    {"importance_mode": "token_mask", "importance_floor": 0.9, "importance_cap": 1.2},
    {"importance_mode": "token_truncate", "importance_floor": 0.9, "importance_cap": 1.2},
    {"importance_mode": "sequence_truncate", "importance_floor": 0.8, "importance_cap": 1.2},
    {"importance_mode": "sequence_mask", "importance_cap": 1.3},
    {"importance_mode": "geometric_mask", "importance_floor": 0.9, "importance_cap": 1.1},
    {"off_policy_mask_threshold": 0.05},
    {"top_entropy_fraction": 0.5, "kl_coef": 0.2},
    {"kl_cov_fraction": 0.4, "kl_cov_coef": 0.7, "mini_batch_size": 4, "clip_low": 0.0, "clip_high": 0.0},
    {"kl_coef": 0.3, "kl_bias_correction": True},
    {"kl_coef": 0.3, "kl_clip": 0.4},
    {"kl_coef": 0.3, "kl_clip": 0.4, "kl_estimator": "k2", "kl_bias_correction": False},
    {
        "kl_coef": 0.1,
        "kl_in": "loss",
        "entropy_coef": 0.05,
        "loss_aggregation": "fixed_length",
        "importance_cap": 1.5,
        "clip_high": 0.4,
    },
]
CASES = [
    *(("grpo", options) for options in CLIPPED_RATIO),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2, "loss_aggregation": "token_mean", "importance_cap": 1.1}),
    ("gspo", {"clip_low": 0.0, "clip_high": 0.0, "kl_coef": 0.2, "entropy_coef": 0.1}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("cispo", {"clip_low": 0.0, "clip_high": 0.0, "kl_coef": 0.2, "loss_aggregation": "sample_mean"}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.2, "importance_cap": 1.05}),
    ("gmpo", {"clip_low": 0.0, "clip_high": 0.0, "kl_coef": 0.2, "loss_aggregation": "token_mean"}),
    ("sapo", {}),
    ("sapo", {"temperature_positive": 4.0, "temperature_negative": 9.0, "importance_mode": "token_mask"}),
    ("sapo", {"loss_aggregation": "token_mean", "kl_coef": 0.2, "entropy_coef": 0.1}),
    ("rloo", {}),
    ("reinforce", {}),
    ("remax", {}),
    ("ppo", {}),
    ("ppo", {"kl_in": "loss", "loss_aggregation": "sample_mean"}),
]


def label(value):
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items()) or "default"


def algorithm(name, **options):
    cls = ALGORITHMS[name]
    return cls(cls.Config(**options), RolloutSettings(max_completion_tokens=LONGEST))


def stream(rng, sample, low=-1.0, high=1.0):
    return rng.uniform(low, high, len(sample)).astype(np.float32)


def drawn(rng, *, old=True):
    """Samples as a rollout leaves them; positions that do not count hold numbers that no loss may read."""
    rows = samples(rng, 3)
    for sample in rows:
        sample.logprobs = stream(rng, sample, -2.0, -0.1)
        sample.old_logprobs = sample.logprobs + stream(rng, sample, -0.3, 0.3) if old else None
        sample.advantages, sample.values, sample.returns = (stream(rng, sample) for _ in range(3))
        sample.penalties = (np.arange(len(sample)) % 3 < 2).astype(np.float32)
        sample.reward = float(rng.normal())
    return rows


def outputs_near(rng, rows, batch):
    """Current log-probabilities near the sampler's, and entropies; both with gradients."""
    near = np.concatenate([sample.logprobs + rng.normal(0, 0.3, len(sample)) for sample in rows])
    logprobs = torch.where(batch.mask, torch.tensor(near), torch.tensor(1e6, dtype=torch.float64)).requires_grad_()
    entropy = torch.tensor(rng.uniform(0, 2, len(near))).requires_grad_()
    return Outputs(logprobs=logprobs, entropy=entropy, values=random_logprobs(rng, batch))


def spots(rows):
    return [(i, j) for i, row in enumerate(rows) for j in np.flatnonzero(row.mask).tolist()]


def same_gradient(found, formula, values, rows, batch):
    expected = slow.gradient(formula, values, spots(rows), h=1e-4)
    for i, row in enumerate(per_sample_lists(found, batch)):
        for j, value in enumerate(row):
            assert value == pytest.approx(expected.get((i, j), 0.0), rel=1e-6, abs=1e-7), (i, j)
            assert rows[i].mask[j] or value == 0.0, "a token that does not count has a gradient"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("old", [True, False], ids=["several-updates", "one-update"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=label)
def test_loss_and_gradient(name, options, old, seed):
    rng = np.random.default_rng(seed)
    algo = algorithm(name, **options)
    rows = drawn(rng, old=old)
    if name == "gmpo":  # the sign of the completion's advantage decides which ratios are clipped
        for sample in rows:
            sample.advantages = np.full(len(sample), rng.uniform(-1, 1), dtype=np.float32)
    batch = batch_of(rows)
    out = outputs_near(rng, rows, batch)
    loss = algo.loss(out, batch).total
    loss.backward()

    now, chaos = per_sample_lists(out.logprobs, batch), per_sample_lists(out.entropy, batch)
    defaults = {
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sample_mean"},
        "gmpo": {"clip_low": 0.4, "clip_high": 0.4, "loss_aggregation": "sample_mean"},
        "cispo": {"clip_low": 1.0, "clip_high": 4.0},
        "sapo": {"clip_low": 0.0, "clip_high": 0.0, "loss_aggregation": "sample_mean"},
        "rloo": {"kl_coef": 0.05, "kl_in": "reward"},
        "reinforce": {"kl_coef": 0.01, "kl_in": "reward"},
        "remax": {"kl_coef": 0.01, "kl_in": "reward"},
        "ppo": {"kl_coef": 0.02, "kl_in": "reward"},
    }
    kind = name if name in ("gspo", "gmpo", "cispo", "sapo") else "ppo"
    wanted = {"kind": kind, "longest": LONGEST} | defaults.get(name, {}) | options

    def formula(values):
        return slow_policy.policy(rows, values, now, chaos, **wanted)

    assert loss.item() == pytest.approx(formula(now), rel=1e-9, abs=1e-9)
    same_gradient(out.logprobs.grad, formula, now, rows, batch)
    weight, share = wanted.get("entropy_coef", 0.0), {i: len(slow_policy.counted(row)) for i, row in enumerate(rows)}
    divisor = {"token_mean": lambda i: 1, "sample_mean": lambda i: max(1, share[i]), "fixed_length": lambda i: LONGEST}
    grad = [[0.0] * len(row) for row in rows] if out.entropy.grad is None else per_sample_lists(out.entropy.grad, batch)
    for i, j in spots(rows):
        assert grad[i][j] == pytest.approx(
            -weight / divisor[wanted.get("loss_aggregation", "token_mean")](i), abs=1e-12
        )


@pytest.mark.parametrize("seed", range(3))
def test_the_first_grpo_of_mindrlhf_is_a_choice_of_options(seed):
    rng = np.random.default_rng(seed)
    options = {
        "clip_low": 0.0,
        "clip_high": 0.0,
        "kl_coef": 0.01,
        "loss_aggregation": "sample_mean",
        "importance_cap": 0.0,
    }
    algo = algorithm("grpo", **options, std_epsilon=1e-4)
    rows = drawn(rng, old=False)
    batch = batch_of(rows)
    out = outputs_near(rng, rows, batch)
    loss = algo.loss(out, batch).total
    loss.backward()
    now = per_sample_lists(out.logprobs, batch)

    def formula(values):
        return slow_policy.mindrlhf(rows, values, now)

    assert loss.item() == pytest.approx(formula(now), rel=1e-9)
    same_gradient(out.logprobs.grad, formula, now, rows, batch)
    algo.compute_advantages(rows)
    for group in slow_policy.groups_of(rows):
        expected = slow_policy.standardize([sample.reward for sample in group], 1e-4)
        for sample, gain in zip(group, expected, strict=True):
            assert sample.advantages[sample.mask] == pytest.approx(gain, rel=1e-5)


@pytest.mark.parametrize("value_clip", [0.2, 0.0, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_the_critics_loss_and_gradient(value_clip, seed):
    rng = np.random.default_rng(seed)
    algo = algorithm("ppo", value_clip=value_clip, loss_aggregation="sample_mean")
    rows = drawn(rng)
    batch = batch_of(rows)
    values = torch.tensor(rng.uniform(-1, 1, len(batch.tokens))).requires_grad_()
    loss = algo.critic_loss(Outputs(values=values), batch)
    loss.total.backward()
    now = per_sample_lists(values, batch)

    def formula(moved):
        return slow_policy.values(rows, moved, value_clip)

    assert loss.total.item() == pytest.approx(formula(now), rel=1e-9)
    same_gradient(values.grad, formula, now, rows, batch)
    n = len(batch.counted)
    error = sum((now[i][j] - rows[i].returns.tolist()[j]) ** 2 for i, j in spots(rows))
    assert [x.item() for x in loss.metrics["value_error"]] == pytest.approx([error, n])
    assert [x.item() for x in loss.metrics["value"]] == pytest.approx([sum(now[i][j] for i, j in spots(rows)), n])


@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "fixed_length"])
def test_with_a_shared_critic_the_policy_loss_holds_the_value_loss(aggregation):
    rng = np.random.default_rng(0)
    rows = drawn(rng)
    batch = batch_of(rows)
    out = outputs_near(rng, rows, batch)
    apart = algorithm("ppo", loss_aggregation=aggregation)
    together = algorithm("ppo", loss_aggregation=aggregation, share_critic=True, value_loss_coef=0.7)
    assert together.outputs() - apart.outputs() == {"values"} and together.needs() >= {"values"}
    expected = slow_policy.values(rows, per_sample_lists(out.values, batch), 0.2, aggregation, LONGEST)
    found = together.loss(out, batch).total - apart.loss(out, batch).total
    assert found.item() == pytest.approx(0.7 * expected, rel=1e-9)


def test_texts_mixed_in():
    rng = np.random.default_rng(0)
    rows = drawn(rng)
    batch = batch_of(rows)
    out = outputs_near(rng, rows, batch)
    loss = algorithm("ppo").pretrain_loss(out, batch, weight=0.3)
    expected = slow.nll(rows, per_sample_lists(out.logprobs, batch))
    assert loss.total.item() == pytest.approx(0.3 * expected)
    assert loss.metrics["pretrain_nll"].item() == pytest.approx(expected)


def test_metrics():
    rng = np.random.default_rng(4)
    rows = drawn(rng)
    for sample in rows[::2]:
        sample.staleness = 1.0
    batch = batch_of(rows)
    out = outputs_near(rng, rows, batch)
    metrics = algorithm("grpo", kl_coef=0.1, kl_estimator="k2").loss(out, batch).metrics
    now, chaos, n = per_sample_lists(out.logprobs, batch), per_sample_lists(out.entropy, batch), len(batch.counted)
    clipped, kl, gaps = 0, 0.0, []
    apart = {False: [], True: []}
    for i, j in spots(rows):
        ratio, advantage = math.exp(now[i][j] - rows[i].old_logprobs.tolist()[j]), rows[i].advantages[j]
        clipped += (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
        kl += slow_policy.kl_k(now[i][j] - rows[i].ref_logprobs.tolist()[j], "k3")
        gaps.append(rows[i].old_logprobs.tolist()[j] - rows[i].logprobs.tolist()[j])
        apart[i % 2 == 0].append(math.exp(gaps[-1]) - 1 - gaps[-1])
    assert 0 < clipped < n and all(apart.values())
    expected = {
        "clipped": (clipped, n),
        "kl": (kl, n),
        "entropy": (sum(chaos[i][j] for i, j in spots(rows)), n),
        "sampler_ratio": (sum(math.exp(gap) for gap in gaps), n),
        "sampler_kl": (sum(apart[False]), len(apart[False])),
        "policy_drift": (sum(apart[True]), len(apart[True])),
        "largest_sampler_ratio": (math.exp(max(gaps)),),
        "largest_sampler_ratio_inverse": (math.exp(-min(gaps)),),
    }
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        parts = value if isinstance(value, tuple) else (value,)
        assert [part.item() for part in parts] == pytest.approx(list(expected[name]), rel=1e-9), name
        assert not any(part.requires_grad for part in parts), name


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("old", [True, False])
def test_at_equal_weights_every_ratio_is_exactly_one(name, old):
    rng = np.random.default_rng(1)
    rows = drawn(rng)
    for sample in rows:
        sample.old_logprobs = sample.logprobs.copy() if old else None
    batch = batch_of(rows)
    out = Outputs(logprobs=batch.logprobs.float(), entropy=torch.zeros(len(batch.tokens)))
    metrics = algorithm(name, kl_coef=0.0).loss(out, batch).metrics
    n = len(batch.counted)
    assert [x.item() for x in metrics["sampler_ratio"]] == [n, n]
    assert metrics["sampler_kl"][0].item() == 0 and metrics["clipped"][0].item() == 0
    assert metrics["largest_sampler_ratio"].item() == 1 and metrics["largest_sampler_ratio_inverse"].item() == 1


@pytest.mark.parametrize("name", ONLINE)
def test_a_batch_without_a_counted_token_is_finite_and_has_a_gradient_path(name):
    rng = np.random.default_rng(0)
    algo = algorithm(name, kl_coef=0.1, entropy_coef=0.1)
    rows = [sample for sample in drawn(rng) if not sample.mask.any()]
    algo.assign_credit(rows)
    batch = batch_of(rows)
    out = outputs_near(rng, rows, batch)
    loss = algo.loss(out, batch)
    loss.total.backward()
    assert loss.total.item() == 0 and not out.logprobs.grad.any()
    assert all(
        torch.isfinite(torch.stack(list(v) if isinstance(v, tuple) else [v])).all() for v in loss.metrics.values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [-5e3, 5e3])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("name", ONLINE)
def test_weights_that_ran_away_leave_a_finite_loss(name, advantage, far, dtype):
    """A ratio of exp(5000) must not become an infinity that turns into NaN when the advantage is 0."""
    rng = np.random.default_rng(0)
    rows = drawn(rng)
    for sample in rows:
        sample.advantages = np.full(len(sample), advantage, dtype=np.float32)
    batch = batch_of(rows)
    logprobs = (batch.logprobs + far).to(dtype).requires_grad_()
    out = Outputs(logprobs=logprobs, entropy=torch.ones(len(batch.tokens), dtype=dtype))
    loss = algorithm(name, kl_coef=0.1, kl_in="loss").loss(out, batch).total
    loss.backward()
    assert math.isfinite(loss.item()) and logprobs.grad.isfinite().all()
