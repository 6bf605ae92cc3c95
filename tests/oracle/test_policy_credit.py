"""What each token is credited with, against slow loops; controllers; options that are refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms import ALGORITHMS
from posttrain.algorithms.policy import standardize
from posttrain.core import ops
from posttrain.core.errors import UsageError
from posttrain.core.types import Sample

from . import slow_policy
from .test_policy_losses import ONLINE, algorithm, drawn, label

GROUPED = ["cispo", "gmpo", "grpo", "gspo", "rloo", "sapo"]

KL_IN_REWARD = [
    {"kl_coef": 0.0},
    {"kl_coef": 0.3, "kl_in": "reward"},
    {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k2"},
    {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k3"},
    {"kl_coef": 0.3, "kl_in": "loss"},
]


def of_the_reward(options):
    """(weight, estimator) of the KL that is taken off rewards."""
    in_reward = options.get("kl_in") == "reward"
    return {"kl": options["kl_coef"] if in_reward else 0.0, "estimator": options.get("kl_estimator", "k1")}


def same_credit(rows, expected, read=lambda sample: sample.advantages):
    for sample in rows:
        wanted = [expected[id(sample)].get(t, 0.0) for t in range(len(sample))]
        assert read(sample).dtype == np.float32
        assert read(sample).tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("options", KL_IN_REWARD, ids=label)
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_group_norm(name, options, old):
    for scale, epsilon in ((True, 1e-6), (True, 0.5), (False, 1e-6)):
        rows = drawn(np.random.default_rng(0), old=old)

        def gains(rewards, scale=scale, epsilon=epsilon):
            centred = [r - slow_policy.mean(rewards) for r in rewards]
            return slow_policy.standardize(rewards, epsilon) if scale else centred

        expected = slow_policy.group_credit(rows, gains, **of_the_reward(options))
        scored = algorithm(name, scale_by_std=scale, std_epsilon=epsilon, **options).assign_credit(rows)
        assert scored == rows
        same_credit(rows, expected)


@pytest.mark.parametrize("options", KL_IN_REWARD, ids=label)
def test_deviation_of_the_batch(options):
    rows = drawn(np.random.default_rng(0))
    weights = of_the_reward(options)
    everything = slow_policy.std([slow_policy.whole_reward(row, **weights) for row in rows]) + 0.1

    def gains(rewards):
        return [(r - slow_policy.mean(rewards)) / everything for r in rewards]

    expected = slow_policy.group_credit(rows, gains, **weights)
    algorithm("grpo", std_over="batch", std_epsilon=0.1, **options).assign_credit(rows)
    same_credit(rows, expected)


def test_rewards_normalised_one_by_one():
    """GDPO: each reward over its deviation in the group, their weighted sum over its deviation in the batch."""
    rng = np.random.default_rng(0)
    rows, weights = drawn(rng), (2.0, -0.5, 1.0)
    for row in rows:
        row.reward_terms = tuple((weight, float(rng.normal())) for weight in weights)
    for row in rows[:3]:  # a reward that is equal in the whole group says nothing
        row.reward_terms = (*row.reward_terms[:2], (1.0, 0.1 + 0.2))
    sums = {}
    for group in slow_policy.groups_of(rows):
        parts = [slow_policy.standardize([row.reward_terms[k][1] for row in group], 0.01) for k in range(3)]
        for i, row in enumerate(group):
            sums[id(row)] = sum(weight * part[i] for weight, part in zip(weights, parts, strict=True))
    final = slow_policy.standardize([sums[id(row)] for row in rows], 0.01)
    algorithm("grpo", multi_objective_aggregation="normalize_then_sum", std_epsilon=0.01).assign_credit(rows)
    expected = {id(row): dict.fromkeys(slow_policy.counted(row), x) for row, x in zip(rows, final, strict=True)}
    same_credit(rows, expected)


def test_a_reward_that_does_not_apply_is_left_out_of_its_mean_and_deviation():
    """GDPO with None from a reward function: NaN in the terms; the completion gets 0 from that reward."""
    rng = np.random.default_rng(3)
    rows = drawn(rng)
    for i, row in enumerate(rows):
        row.reward_terms = ((1.0, math.nan if i % 3 == 1 else float(rng.normal())), (0.5, float(rng.normal())))
    sums = {}
    for group in slow_policy.groups_of(rows):
        known = [row for row in group if not math.isnan(row.reward_terms[0][1])]
        first = slow_policy.standardize([row.reward_terms[0][1] for row in known], 0.01) if known else []
        second = slow_policy.standardize([row.reward_terms[1][1] for row in group], 0.01)
        for row, x in zip(group, second, strict=True):
            sums[id(row)] = 0.5 * x
        for row, x in zip(known, first, strict=True):
            sums[id(row)] += x
    final = slow_policy.standardize([sums[id(row)] for row in rows], 0.01)
    algorithm("grpo", multi_objective_aggregation="normalize_then_sum", std_epsilon=0.01).assign_credit(rows)
    same_credit(rows, {id(r): dict.fromkeys(slow_policy.counted(r), x) for r, x in zip(rows, final, strict=True)})


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", ["length_weighted_mean", "best_minus_second"])
def test_other_baselines_of_a_group(kind, scaled):
    rows = drawn(np.random.default_rng(4))
    expected = {}
    for group in slow_policy.groups_of(rows):
        rewards, lengths = [row.reward for row in group], [max(1, len(slow_policy.counted(row))) for row in group]
        if kind == "length_weighted_mean":
            gains = slow_policy.length_weighted(rewards, lengths)
        else:
            gains = slow_policy.best_minus_second(rewards)
        scale = slow_policy.std(rewards) + 0.1 if scaled else 1.0
        for row, gain in zip(group, gains, strict=True):
            expected[id(row)] = dict.fromkeys(slow_policy.counted(row), gain / scale)
    algorithm("grpo", group_advantage=kind, scale_by_std=scaled, std_epsilon=0.1).assign_credit(rows)
    same_credit(rows, expected)


def test_tokens_are_dropped_by_their_covariance():
    """Clip-Cov: only tokens within the bounds, as many as the share says, drawn anew for each batch, as resumed."""
    rows = drawn(np.random.default_rng(6), old=False)
    plain, again = (algorithm("grpo", **options) for options in ({}, {"clip_cov_fraction": 0.1, "clip_cov_low": 0.2}))
    plain.assign_credit(rows)
    places = [(row, t) for row in rows for t in slow_policy.counted(row)]
    before = {(id(row), t): float(row.advantages[t]) for row, t in places}
    logprobs = {(id(row), t): float(row.logprobs[t]) for row, t in places}
    means = [sum(numbers.values()) / len(places) for numbers in (logprobs, before)]
    covariance = {at: (logprobs[at] - means[0]) * (before[at] - means[1]) for at in before}
    seen = []
    for _ in range(2):
        again.assign_credit(rows)
        dropped = {at for at, (row, t) in zip(before, places, strict=True) if row.advantages[t] != before[at]}
        assert all(row.advantages[t] == 0 for at, (row, t) in zip(before, places, strict=True) if at in dropped)
        assert all(0.2 < covariance[at] < 5.0 for at in dropped)
        assert len(dropped) == min(int(0.1 * len(places)), sum(0.2 < c < 5.0 for c in covariance.values())) > 0
        seen.append(dropped)
    resumed = algorithm("grpo", clip_cov_fraction=0.1, clip_cov_low=0.2)
    resumed.load_state({**again.state(), "batches": 1.0})
    resumed.assign_credit(rows)
    assert {at for at, (row, t) in zip(before, places, strict=True) if row.advantages[t] != before[at]} == seen[1]
    assert again.state()["batches"] == 2.0


@pytest.mark.parametrize("old", [True, False])
def test_tokens_with_the_largest_covariance_are_held_near_the_old_policy(old):
    """KL-Cov: those of the whole batch, and at least one; their completions are trained on, also without advantages."""
    for fraction in (0.2, 1e-6):
        rows = drawn(np.random.default_rng(9), old=old)
        algo = algorithm("grpo", kl_cov_fraction=fraction, mini_batch_size=4)
        algo.assign_credit(rows)
        expected = slow_policy.largest_covariances(rows, fraction)
        marked = {(i, int(t)) for i, row in enumerate(rows) for t in np.flatnonzero(row.penalties)}
        assert marked == expected and len(marked) >= 1
        for row in rows:
            row.advantages = np.zeros_like(row.advantages)
        assert [algo.has_gradient(row) for row in rows] == [bool(np.any(row.penalties)) for row in rows]


def weights_of(rows, shares):
    """The chance of each row, where rows of the same reward share that of their reward."""
    rewards = [row.reward for row in rows]
    return [shares[reward] / rewards.count(reward) for reward in rewards]


def test_covariances_are_those_of_the_tokens_that_are_trained():
    """Completions that were cut off and are masked use up no share of KL-Cov or Clip-Cov."""
    options = {"mask_truncated_completions": True, "mini_batch_size": 4}
    for chosen in ({"kl_cov_fraction": 0.2}, {"clip_cov_fraction": 0.5, "clip_cov_low": -9.0, "clip_cov_high": 9.0}):
        rows, others = (drawn(np.random.default_rng(9)) for _ in range(2))
        for number, row in enumerate((*rows, *others)):
            row.penalties, row.finish = None, "stop" if number % 3 else "length"
        assert len(rows) % 3 == 0
        algorithm("grpo", **options).assign_credit(others)
        algorithm("grpo", **options, **chosen).assign_credit(rows)
        pairs = zip(rows, others, strict=True)
        unchanged = [np.array_equal(a.advantages, b.advantages) and a.penalties is None for a, b in pairs]
        assert all(unchanged[::3]) and not all(unchanged)
        if "kl_cov_fraction" in chosen:
            trained = [row for row in rows if row.finish != "length"]
            count = sum(int(row.mask.sum()) for row in trained)
            assert sum(int(row.penalties.sum()) for row in trained) == int(0.2 * count)


def test_completions_are_drawn_by_their_rewards():
    """PF-PPO: as many as there were, the same for the same seed, in proportion to the weights of arXiv:2409.06957."""
    rows = drawn(np.random.default_rng(2))
    for row, reward in zip(rows, (-3.0, 1.0, 2.0, 0.0) * 3, strict=True):
        row.reward = reward
    expected = {
        "power": {-3.0: 9 / 14, 1.0: 1 / 14, 2.0: 4 / 14, 0.0: 0.0},
        "best_and_worst": {-3.0: 0.5, 1.0: 0.0, 2.0: 0.5, 0.0: 0.0},
        "best_and_random": {-3.0: 1 / 7, 1.0: 1 / 7, 2.0: 4 / 7, 0.0: 1 / 7},
    }
    for kind, shares in expected.items():
        algo = algorithm("ppo", resample_by_reward=kind)
        draws = [algo.trained_samples(rows, (3, step)) for step in range(500)]
        assert all(len(drawn_rows) == len(rows) for drawn_rows in draws)
        seen = [row.reward for drawn_rows in draws for row in drawn_rows]
        for reward, share in shares.items():
            deviation = (share * (1 - share) / len(seen)) ** 0.5
            assert abs(seen.count(reward) / len(seen) - share) <= 5 * deviation, (kind, reward)
        order = np.random.default_rng((3, 7, 0)).choice(len(rows), size=len(rows), p=weights_of(rows, shares))
        assert [id(row) for row in draws[7]] != [id(rows[i]) for i in order]  # the numbers that shuffle mini-batches
        again = algo.trained_samples(rows, (3, 7))
        assert [id(row) for row in again] == [id(row) for row in draws[7]]
    assert algorithm("ppo").trained_samples(rows, (3, 7)) == rows
    cut = algorithm("ppo", resample_by_reward="power", mask_truncated_completions=True)
    rows[0].finish = "length"
    assert rows[0] not in cut.trained_samples(rows, (3, 7)) and len(cut.trained_samples(rows, (3, 7))) == len(rows) - 1
    for row in rows:
        row.reward = 0.0
    assert algorithm("ppo", resample_by_reward="power").trained_samples(rows, (3, 7)) == rows
    with pytest.raises(UsageError, match=r"resample_power is 3\.0, but algo.resample_by_reward is none"):
        algorithm("ppo", resample_power=3.0)


def test_leave_one_out_normalised():
    rows = drawn(np.random.default_rng(1))
    plain = slow_policy.group_credit(rows, slow_policy.leave_one_out)
    per_row = []
    for group in slow_policy.groups_of(rows):
        per_row += slow_policy.leave_one_out([row.reward for row in group])
    final = slow_policy.standardize(per_row, 1e-6)
    algorithm("rloo", kl_coef=0.0, normalize_advantages=True).assign_credit(rows)
    assert plain.keys() == {id(row) for row in rows}
    same_credit(rows, {id(r): dict.fromkeys(slow_policy.counted(r), x) for r, x in zip(rows, final, strict=True)})


def test_the_weight_of_the_entropy_follows_its_target():
    algo = algorithm("grpo", entropy_coef=0.01, entropy_target=0.5, entropy_coef_delta=0.02, entropy_coef_max=0.04)
    assert algo.forward_request(len).entropy_gradient
    seen = []
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.6, 0.6):
        algo.after_step({"entropy": entropy}, 1)
        seen.append((round(algo.entropy_weight, 9), algo.entropy_is_low))
    assert seen == [(0.03, True), (0.04, True), (0.04, True), (0.02, False), (0.0, False), (0.0, False)]
    resumed = algorithm("grpo", entropy_coef=0.01, entropy_target=0.5)
    resumed.load_state(algo.state())
    assert (resumed.entropy_weight, resumed.entropy_is_low) == (0.0, False)


@pytest.mark.parametrize("options", KL_IN_REWARD, ids=label)
def test_leave_one_out(options):
    rows = drawn(np.random.default_rng(1))
    expected = slow_policy.group_credit(rows, slow_policy.leave_one_out, **of_the_reward(options))
    algorithm("rloo", **options).assign_credit(rows)
    same_credit(rows, expected)


@pytest.mark.parametrize("options", KL_IN_REWARD, ids=label)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce(baseline, gamma, options):
    rows = drawn(np.random.default_rng(2))
    expected = slow_policy.reinforce_credit(rows, gamma, baseline, **of_the_reward(options))
    algorithm("reinforce", gamma=gamma, baseline=baseline, **options).assign_credit(rows)
    same_credit(rows, expected)
    tokens = np.concatenate([sample.advantages[sample.mask] for sample in rows])
    assert tokens.mean() == pytest.approx(0, abs=1e-6) and tokens.std(ddof=1) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("options", KL_IN_REWARD, ids=label)
def test_remax(options):
    assert ALGORITHMS["remax"].greedy_baseline
    assert not any(cls.greedy_baseline for name, cls in ALGORITHMS.items() if cls.online and name != "remax")
    rows = drawn(np.random.default_rng(3))
    expected = slow_policy.remax_credit(rows, **of_the_reward(options))
    algorithm("remax", **options).assign_credit(rows)
    same_credit(rows, expected)


@pytest.mark.parametrize("options", KL_IN_REWARD, ids=label)
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("whiten", [True, False])
def test_generalised_advantages(whiten, gamma, gae_lambda, options):
    """Tokens of an environment between two turns are stepped over: the samples have such masks."""
    rows = drawn(np.random.default_rng(4))
    expected, returns = slow_policy.gae_credit(rows, gamma, gae_lambda, whiten, **of_the_reward(options))
    algorithm("ppo", gamma=gamma, gae_lambda=gae_lambda, whiten_advantages=whiten, **options).assign_credit(rows)
    same_credit(rows, expected)
    same_credit(rows, returns, lambda sample: sample.returns)


def answer(reward, group=0, mask=(0, 1, 1)):
    return Sample(
        tokens=np.arange(len(mask), dtype=np.int32), mask=np.array(mask, dtype=bool), reward=reward, group=group
    )


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_that_teaches_nothing_gets_exactly_zero(name):
    equal = 0.1 + 0.2  # not a number that its mean would give back exactly
    rows = [answer(equal, 0) for _ in range(3)] + [answer(0.7, 1)] + [answer(1.0, 2), answer(0.0, 2)]
    algorithm(name, kl_coef=0.0).assign_credit(rows)
    assert [row.advantages.any() for row in rows] == [False] * 4 + [True] * 2
    assert all(np.isfinite(row.advantages).all() for row in rows)


@pytest.mark.parametrize("name", ONLINE)
def test_one_answer_in_all_or_one_without_tokens_is_no_accident(name):
    for rows in ([answer(1.0, mask=(0, 1))], [answer(1.0, mask=(0, 0))], [answer(1.0, mask=(0,)), answer(0.0)]):
        for row in rows:
            row.values = np.zeros(len(row), dtype=np.float32)
        algorithm(name, kl_coef=0.0).assign_credit(rows)
        for row in rows:
            assert np.isfinite(row.advantages).all() and not row.advantages[~row.mask].any()


def test_an_answer_without_counted_tokens_still_counts_in_its_group():
    """Answers cut off at the limit may be left out of the loss; the others are judged against them all the same."""
    rows = [answer(1.0), answer(0.0, mask=(0, 0, 0)), answer(0.0, mask=(0, 0))]
    algorithm("grpo", scale_by_std=False).assign_credit(rows)
    assert rows[0].advantages.tolist() == pytest.approx([0, 2 / 3, 2 / 3])
    assert not rows[1].advantages.any()


numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(numbers, st.floats(0, 1), st.floats(0, 1), st.randoms())
def test_advantages_with_and_without_bootstrapping(rewards, gamma, gae_lambda, random):
    r = np.array(rewards, dtype=np.float64)
    v = np.array([random.uniform(-5, 5) for _ in rewards])
    following = np.append(v[1:], 0.0)
    assert ops.gae(r, v, gamma, 0.0) == pytest.approx(r + gamma * following - v)
    assert ops.gae(r, v, gamma, 1.0) + v == pytest.approx(ops.discounted(r, gamma), abs=1e-8)
    found = ops.gae(r, v, gamma, gae_lambda)
    for t in range(len(r) - 1):  # the recurrence of the paper
        delta = r[t] + gamma * v[t + 1] - v[t]
        assert found[t] == pytest.approx(delta + gamma * gae_lambda * found[t + 1], abs=1e-8)


def test_nothing_is_to_come_where_there_is_nothing():
    empty = np.zeros(0)
    assert len(ops.discounted(empty, 0.9)) == len(ops.discounted(empty, 1.0)) == len(ops.gae(empty, empty, 1, 1)) == 0


@settings(deadline=None, max_examples=60)
@given(numbers, st.floats(0.5, 10), st.floats(-50, 50), st.randoms())
def test_standardized_numbers_know_neither_unit_nor_origin_nor_order(values, scale, shift, random):
    x = np.array(values, dtype=np.float64)
    found = standardize(x, 0.0)
    assert np.isfinite(found).all()
    if np.ptp(x) > 1e-3:
        assert standardize(x * scale + shift, 0.0) == pytest.approx(found, abs=1e-6)
        assert found.mean() == pytest.approx(0, abs=1e-6) and found.std(ddof=1) == pytest.approx(1)
        order = random.sample(range(len(x)), len(x))
        assert standardize(x[order], 0.0) == pytest.approx(found[order], abs=1e-9)
    elif np.ptp(x) == 0:
        assert not found.any()


def test_the_weight_of_the_kl_follows_its_target():
    """arXiv:1909.08593: e = clip(KL / target - 1, -0.2, 0.2); weight *= 1 + e n / horizon."""
    rng = np.random.default_rng(0)
    algo = algorithm("ppo", kl_coef=0.1, kl_target=2.0, kl_horizon=100)
    weight = 0.1
    for step in range(30):
        rows = drawn(rng)
        kls = [float((row.old_logprobs - row.ref_logprobs)[row.mask].sum()) for row in rows]
        kl = sum(kls) / len(kls)
        algo.assign_credit(rows)
        algo.after_step({}, len(rows))
        weight *= 1 + max(-0.2, min(0.2, kl / 2.0 - 1)) * len(rows) / 100
        assert algo.kl_weight == pytest.approx(weight, rel=1e-5), step
    resumed = algorithm("ppo", kl_coef=0.1, kl_target=2.0, kl_horizon=10_000)
    resumed.load_state(algo.state())
    assert resumed.kl_weight == algo.kl_weight != 0.1

    before = [row.advantages for row in drawn_and_scored(algorithm("rloo", kl_coef=0.1))]
    adapted = algorithm("rloo", kl_coef=0.1)
    adapted.load_state({"kl_weight": 0.5})
    assert any((a != b).any() for a, b in zip(before, (r.advantages for r in drawn_and_scored(adapted)), strict=True))
    as_given = [row.advantages.tolist() for row in drawn_and_scored(algorithm("rloo", kl_coef=0.5))]
    assert [row.advantages.tolist() for row in drawn_and_scored(adapted)] == as_given


def drawn_and_scored(algo):
    return algo.assign_credit(drawn(np.random.default_rng(0)))


def test_a_weight_without_a_target_stays_and_one_can_never_turn_negative():
    fixed = algorithm("grpo", kl_coef=0.1)
    drawn_and_scored(fixed)
    fixed.after_step({}, 1000)
    assert fixed.kl_weight == 0.1
    hasty = algorithm("grpo", kl_coef=0.1, kl_target=1e6, kl_horizon=1)
    drawn_and_scored(hasty)
    hasty.after_step({}, 1000)
    assert hasty.kl_weight == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"clip_low": 1.5}, r"algo\.clip_low is 1\.5.*from 0 to 1"),
        ("grpo", {"clip_high": -0.1}, r"algo\.clip_high is -0\.1"),
        ("grpo", {"kl_coef": float("nan")}, r"algo\.kl_coef is nan"),
        ("grpo", {"importance_cap": -1.0}, r"algo\.importance_cap"),
        ("grpo", {"dual_clip": 1.1}, r"algo\.dual_clip is 1\.1: it must be above 1 \+ algo\.clip_high, 1\.2"),
        ("cispo", {"dual_clip": 9.0}, r"algo\.dual_clip is 9\.0, but the loss of cispo"),
        ("gmpo", {"dual_clip": 3.0}, r"algo\.dual_clip is 3\.0, but the loss of gmpo"),
        ("sapo", {"dual_clip": 3.0}, r"algo\.dual_clip is 3\.0, but the loss of sapo"),
        ("sapo", {"clip_low": 0.2}, r"algo\.clip_low is 0\.2, but sapo"),
        ("sapo", {"temperature_negative": 0.0}, r"algo\.temperature_negative is 0\.0"),
        ("grpo", {"importance_floor": 3.0}, r"algo\.importance_floor is 3\.0, above algo\.importance_cap, 2\.0"),
        ("grpo", {"importance_cap": 0.0, "importance_mode": "token_mask"}, r"algo\.importance_mode is token_mask, but"),
        ("grpo", {"kl_clip": 10.0}, r"algo\.kl_clip is 10\.0, but algo\.kl_coef is 0"),
        ("rloo", {"kl_bias_correction": True}, r"algo\.kl_bias_correction .*algo\.kl_in to loss"),
        (
            "grpo",
            {"multi_objective_aggregation": "normalize_then_sum", "scale_by_std": False},
            r"algo\.multi_objective_aggregation normalize_then_sum",
        ),
        ("grpo", {"epochs_per_batch": 0}, r"algo\.epochs_per_batch is 0.*at least 1"),
        ("grpo", {"mini_batch_size": -1}, r"algo\.mini_batch_size"),
        ("grpo", {"reference": "there"}, r"algo\.reference is there, but algo\.kl_coef is 0"),
        ("grpo", {"kl_target": 6.0}, r"algo\.kl_target is 6\.0, but algo\.kl_coef is 0"),
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k1"}, r"algo\.kl_estimator k1 .*algo\.kl_in"),
        ("reinforce", {"gamma": 1.1}, r"algo\.gamma is 1\.1"),
        ("ppo", {"gae_lambda": -0.1}, r"algo\.gae_lambda"),
        ("ppo", {"value_clip": -0.1}, r"algo\.value_clip"),
        ("ppo", {"share_critic": True, "critic": "there"}, r"algo\.share_critic .*algo\.critic is there"),
        ("ppo", {"share_critic": True, "freeze_actor_steps": 3}, r"algo\.freeze_actor_steps is 3.*algo\.share_critic"),
    ],
)
def test_bad_values_name_the_option(name, options, message):
    with pytest.raises(UsageError, match=message):
        algorithm(name, **options)


def test_what_the_loop_asks_for():
    assert algorithm("grpo").needs() == set() and algorithm("grpo").unit == "token"
    assert algorithm("grpo", kl_coef=0.1, epochs_per_batch=2).needs() == {"ref_logprobs", "old_logprobs"}
    assert algorithm("grpo", mini_batch_size=4).several_updates() and not algorithm("grpo").several_updates()
    assert algorithm("grpo", loss_aggregation="sample_mean").unit == algorithm("gspo").unit == "sample"
    assert algorithm("ppo").needs() == {"ref_logprobs", "values"} and algorithm("ppo", kl_coef=0.0).needs() == {
        "values"
    }
    assert algorithm("ppo", critic="there").critic().path == "there"
    frozen = algorithm("ppo", freeze_actor_steps=2)
    assert [frozen.policy_frozen(step) for step in (1, 2, 3)] == [True, True, False]
    assert {name: algorithm(name).min_samples_per_prompt() for name in ONLINE} == {
        **dict.fromkeys(GROUPED, 2),
        **dict.fromkeys(["ppo", "reinforce", "remax"], 1),
    }
    assert algorithm("reinforce", baseline=True).min_samples_per_prompt() == 2
    assert algorithm("grpo", entropy_coef=0.1).forward_request(len).entropy_gradient
    assert not algorithm("grpo").forward_request(len).entropy_gradient


# Credit over turns


def with_turns(rng, rows):
    """Divide each sample into up to three turns, with rewards and states of their own; some replies count nowhere."""
    for row in rows:
        last = len(row)
        cuts = sorted({1, *rng.integers(1, max(2, last), 2).tolist()})
        ends = [*cuts[1:], last]
        states = rng.choice(["a", "b", ""], len(cuts)).tolist()
        row.turns = tuple((f, e, float(rng.normal()), s) for f, e, s in zip(cuts, ends, states, strict=True))
    return rows


@pytest.mark.parametrize("options", [KL_IN_REWARD[0], KL_IN_REWARD[1], KL_IN_REWARD[4]], ids=label)
@pytest.mark.parametrize("credit", ["turn", "step_group"])
@pytest.mark.parametrize("name", GROUPED)
def test_turns_are_compared(name, credit, options):
    gains = {"rloo": slow_policy.leave_one_out}.get(name, lambda rewards: slow_policy.standardize(rewards, 1e-6))
    given = {"credit": credit, "turn_discount": 0.7, **options}
    given |= {"step_group_weight": 0.5} if credit == "step_group" else {}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        rows = with_turns(rng, drawn(rng))
        weight = given.get("step_group_weight", 1.0)
        expected = slow_policy.turn_credit(rows, gains, credit, 0.7, weight, **of_the_reward(options))
        algorithm(name, **given).assign_credit(rows)
        same_credit(rows, expected)
        assert any(len(set(row.advantages[row.mask].tolist())) > 1 for row in rows)  # not one for all turns


@pytest.mark.parametrize("options", [KL_IN_REWARD[0], KL_IN_REWARD[1]], ids=label)
def test_rewards_of_turns_are_at_their_ends(options):
    rng = np.random.default_rng(0)
    rows = with_turns(rng, drawn(rng))
    weights = of_the_reward(options)
    credit = {
        id(row): slow_policy.to_go(
            slow_policy.turn_token_rewards(row, row.reward, weights["kl"], weights["estimator"]), 0.9
        )
        for row in rows
    }
    algorithm("reinforce", credit="turn", gamma=0.9, **options).assign_credit(rows)
    same_credit(rows, slow_policy.batch_standardized(credit))


@pytest.mark.parametrize("name", GROUPED)
def test_what_credit_over_turns_does_not_depend_on(name):
    def credit(change=lambda rows: rows, **options):
        rng = np.random.default_rng(1)
        rows = change(with_turns(rng, drawn(rng)))
        algorithm(name, kl_coef=0.0, **options).assign_credit(rows)
        return {row.tokens.tobytes(): row.advantages.tolist() for row in rows}

    def one_turn(rows):
        for row in rows:
            row.turns = ()
        return rows

    whole = credit()
    assert credit(one_turn) == whole == credit(one_turn, credit="turn")  # to the bit
    assert credit(credit="step_group", step_group_weight=0.0) == whole
    for mode in ("turn", "step_group"):
        found = credit(credit=mode)
        assert found != whole
        reversed_groups = credit(lambda rows: sorted(rows, key=lambda row: (row.group, -rows.index(row))), credit=mode)
        for key, advantages in found.items():
            assert reversed_groups[key] == pytest.approx(advantages, abs=1e-5)


def test_turns_that_cannot_be_compared_are_refused():
    for name, options, complaint in (
        ("ppo", {"credit": "step_group"}, "credit is step_group"),
        ("reinforce", {"credit": "turn", "turn_discount": 0.9}, "turn_discount is set"),
        ("grpo", {"credit": "turn", "std_over": "batch"}, "std_over"),
        ("grpo", {"step_group_weight": 0.5}, "step_group_weight is 0.5"),
        ("rloo", {"credit": "turn", "normalize_advantages": True}, "normalize_advantages"),
        ("grpo", {"credit": "turn", "turn_discount": 1.5}, "turn_discount is 1.5"),
    ):
        with pytest.raises(UsageError, match=complaint):
            algorithm(name, **options).check()
