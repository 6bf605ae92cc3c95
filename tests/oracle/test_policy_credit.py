"""What each token is credited with, against slow loops; controllers; options that are refused."""

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

GROUPED = ["cispo", "grpo", "gspo", "rloo"]

KL_IN_REWARD = [
    {"kl": 0.0},
    {"kl": 0.3, "kl_in": "reward"},
    {"kl": 0.3, "kl_in": "reward", "kl_estimator": "k2"},
    {"kl": 0.3, "kl_in": "reward", "kl_estimator": "k3"},
    {"kl": 0.3, "kl_in": "loss"},
]


def of_the_reward(options):
    """(weight, estimator) of the KL that is taken off rewards."""
    in_reward = options.get("kl_in") == "reward"
    return {"kl": options["kl"] if in_reward else 0.0, "estimator": options.get("kl_estimator", "k1")}


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
    algorithm("ppo", gamma=gamma, gae_lambda=gae_lambda, whiten=whiten, **options).assign_credit(rows)
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
    algorithm(name, kl=0.0).assign_credit(rows)
    assert [row.advantages.any() for row in rows] == [False] * 4 + [True] * 2
    assert all(np.isfinite(row.advantages).all() for row in rows)


@pytest.mark.parametrize("name", ONLINE)
def test_one_answer_in_all_or_one_without_tokens_is_no_accident(name):
    for rows in ([answer(1.0, mask=(0, 1))], [answer(1.0, mask=(0, 0))], [answer(1.0, mask=(0,)), answer(0.0)]):
        for row in rows:
            row.values = np.zeros(len(row), dtype=np.float32)
        algorithm(name, kl=0.0).assign_credit(rows)
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
    algo = algorithm("ppo", kl=0.1, kl_target=(2.0, 100))
    weight = 0.1
    for step in range(30):
        rows = drawn(rng)
        kls = [float((row.old_logprobs - row.ref_logprobs)[row.mask].sum()) for row in rows]
        kl = sum(kls) / len(kls)
        algo.assign_credit(rows)
        algo.after_step({}, len(rows))
        weight *= 1 + max(-0.2, min(0.2, kl / 2.0 - 1)) * len(rows) / 100
        assert algo.kl_weight == pytest.approx(weight, rel=1e-5), step
    resumed = algorithm("ppo", kl=0.1, kl_target=(2.0, 10_000))
    resumed.load_state(algo.state())
    assert resumed.kl_weight == algo.kl_weight != 0.1

    before = [row.advantages for row in drawn_and_scored(algorithm("rloo", kl=0.1))]
    adapted = algorithm("rloo", kl=0.1)
    adapted.load_state({"kl_weight": 0.5})
    assert any((a != b).any() for a, b in zip(before, (r.advantages for r in drawn_and_scored(adapted)), strict=True))
    as_given = [row.advantages.tolist() for row in drawn_and_scored(algorithm("rloo", kl=0.5))]
    assert [row.advantages.tolist() for row in drawn_and_scored(adapted)] == as_given


def drawn_and_scored(algo):
    return algo.assign_credit(drawn(np.random.default_rng(0)))


def test_a_weight_without_a_target_stays_and_one_can_never_turn_negative():
    fixed = algorithm("grpo", kl=0.1)
    drawn_and_scored(fixed)
    fixed.after_step({}, 1000)
    assert fixed.kl_weight == 0.1
    hasty = algorithm("grpo", kl=0.1, kl_target=(1e6, 1))
    drawn_and_scored(hasty)
    hasty.after_step({}, 1000)
    assert hasty.kl_weight == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"clip_low": 1.5}, r"algo\.clip_low is 1\.5.*from 0 to 1"),
        ("grpo", {"clip_high": -0.1}, r"algo\.clip_high is -0\.1"),
        ("grpo", {"kl": float("nan")}, r"algo\.kl is nan"),
        ("grpo", {"importance_cap": -1.0}, r"algo\.importance_cap"),
        ("grpo", {"epochs_per_batch": 0}, r"algo\.epochs_per_batch is 0.*at least 1"),
        ("grpo", {"mini_batch_size": -1}, r"algo\.mini_batch_size"),
        ("grpo", {"reference": "there"}, r"algo\.reference is there but algo\.kl is 0"),
        ("grpo", {"kl_target": (6.0, 10)}, r"algo\.kl_target is 6\.0 but algo\.kl is 0"),
        ("grpo", {"kl": 0.1, "kl_estimator": "k1"}, r"algo\.kl_estimator k1 .*algo\.kl_in"),
        ("reinforce", {"gamma": 1.1}, r"algo\.gamma is 1\.1"),
        ("ppo", {"gae_lambda": -0.1}, r"algo\.gae_lambda"),
        ("ppo", {"value_clip": -0.1}, r"algo\.value_clip"),
        ("ppo", {"shared_trunk": 1.0, "critic": "there"}, r"algo\.shared_trunk .*algo\.critic there"),
        ("ppo", {"shared_trunk": 1.0, "freeze_actor_steps": 3}, r"algo\.freeze_actor_steps is 3.*algo\.shared_trunk"),
    ],
)
def test_bad_values_name_the_option(name, options, message):
    with pytest.raises(UsageError, match=message):
        algorithm(name, **options)


def test_what_the_loop_asks_for():
    assert algorithm("grpo").needs() == set() and algorithm("grpo").unit == "token"
    assert algorithm("grpo", kl=0.1, epochs_per_batch=2).needs() == {"ref_logprobs", "old_logprobs"}
    assert algorithm("grpo", mini_batch_size=4).several_updates() and not algorithm("grpo").several_updates()
    assert algorithm("grpo", average="sample").unit == algorithm("gspo").unit == "sample"
    assert algorithm("ppo").needs() == {"ref_logprobs", "values"} and algorithm("ppo", kl=0.0).needs() == {"values"}
    assert algorithm("ppo", critic="there").critic().path == "there"
    frozen = algorithm("ppo", freeze_actor_steps=2)
    assert [frozen.policy_frozen(step) for step in (1, 2, 3)] == [True, True, False]
    assert {name: algorithm(name).min_samples_per_prompt() for name in ONLINE} == {
        **dict.fromkeys(GROUPED, 2),
        **dict.fromkeys(["ppo", "reinforce", "remax"], 1),
    }
    assert algorithm("reinforce", baseline=True).min_samples_per_prompt() == 2
    assert algorithm("grpo", entropy=0.1).forward_request(len).entropy_gradient
    assert not algorithm("grpo").forward_request(len).entropy_gradient
