"""Intervals cover as often as they say, the paired test errs as often as it says, against counting and binomials."""

import math
from itertools import product

import numpy as np
import pytest

from posttrain.core.errors import DataError
from posttrain.core.statistics import compare, mean, share, sign_test
from posttrain.harness.inspect_ai import RequestSeeds
from posttrain.inference.completion_files import CompletionExample
from posttrain.inference.evaluation import failures, figures, paired, results_by_prompt


def answer(index, reward, text="x", first=None):
    parts = {"a": reward if first is None else first, "b": 0.0}
    row = {"index": index, "reward": reward, "rewards": parts if reward is not None else {}, "columns": {"answer": "7"}}
    prompt = [{"role": "user", "content": f"q{index}"}]
    return CompletionExample(prompt=prompt, plain=False, text=text, row=row, origin=f"rows.jsonl:{index}")


def test_figures_against_counting():
    rewards = {0: [1, 0, 1, 0], 1: [0, 0, 0, 0], 2: [1, 1, 1, 1], 3: [0, 0, 0, 1]}
    prompts = results_by_prompt(answer(index, value) for index, values in rewards.items() for value in values)
    found = figures(prompts)
    assert found["reward (mean@4)"].value == found["accuracy (mean@4)"].value == pytest.approx(7 / 16)
    chances = []
    for values in rewards.values():
        chosen = [any(pair) for pair in ((a, b) for i, a in enumerate(values) for b in values[i + 1 :])]
        chances.append(sum(chosen) / len(chosen))
    assert found["pass@2"].value == pytest.approx(np.mean(chances))
    assert found["pass@4"].value == pytest.approx(3 / 4) and "pass@8" not in found
    assert all(figure.low <= figure.value <= figure.high for figure in found.values())


def test_what_counts_as_right_and_what_could_not_be_scored():
    prompts = results_by_prompt([answer(0, 3.0, first=0.4), answer(0, None), answer(1, None)], right=0.5)
    assert figures(prompts)["accuracy (mean@1)"].value == 0 and figures(prompts)["reward (mean@1)"].value == 3
    assert [asked.failed for asked in prompts.values()] == [1, 1]
    assert figures(results_by_prompt([answer(0, 3.0, first=0.4)], right=0.3))["accuracy (mean@1)"].value == 1
    with pytest.raises(DataError, match="no completion"):
        figures(results_by_prompt([answer(0, None)]))


@pytest.mark.parametrize("p", [0.02, 0.3, 0.95])
def test_the_interval_of_a_share_covers_it(p):
    random, hits = np.random.default_rng(0), 0
    for _ in range(2000):
        found = share(list((random.random(60) < p).astype(float)))
        hits += found.low <= p <= found.high
    assert 0.92 < hits / 2000 < 0.985


def test_the_interval_of_shares_of_several_answers_covers_it():
    """Prompts differ in difficulty; four answers to each."""
    random, hits, widths = np.random.default_rng(0), 0, []
    for _ in range(1000):
        difficulties = random.beta(2, 3, size=50)
        found = share(list(random.binomial(4, difficulties) / 4))
        hits += found.low <= 0.4 <= found.high
        widths.append(found.high - found.low)
    assert 0.92 < hits / 1000 < 0.98
    assert np.mean(widths) < share([0.0] * 30 + [1.0] * 20).high - share([0.0] * 30 + [1.0] * 20).low


def test_an_interval_is_not_empty_where_all_answers_are_alike():
    assert share([0.0] * 10).high > 0.2 and share([1.0] * 10).low < 0.8 and share([1.0] * 10).high == 1
    assert mean([2.0]).low == mean([2.0]).high == 2


def test_the_paired_test_against_the_binomial():
    """Differences of one size: the sign test."""
    for better, worse in ((5, 0), (7, 2), (1, 1), (12, 2)):
        n, k = better + worse, max(better, worse)
        exact = min(1.0, 2 * sum(math.comb(n, j) for j in range(k, n + 1)) / 2**n)
        assert sign_test([1.0] * better + [-1.0] * worse + [0.0] * 9) == pytest.approx(exact)
    many = sign_test([1.0] * 30 + [-1.0] * 14)
    exact = 2 * sum(math.comb(44, j) for j in range(30, 45)) / 2**44
    assert many == pytest.approx(exact, rel=0.25) and many == sign_test([1.0] * 30 + [-1.0] * 14)
    assert sign_test([0.0] * 5) == 1


def test_the_paired_test_against_all_sign_changes():
    differences = [0.5, -0.25, 1.0, 2.0, -0.125, 0.75]
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in product((-1, 1), repeat=6)]
    observed = abs(sum(differences))
    assert sign_test(differences) == pytest.approx(sum(abs(s) >= observed - 1e-9 for s in sums) / 64)


def test_equal_models_are_seldom_called_different():
    random = np.random.default_rng(1)
    found = [sign_test(list(random.normal(size=25))) for _ in range(200)]
    assert 0.01 < np.mean(np.array(found) < 0.05) < 0.1


def test_comparison():
    found = compare([0.0, 1.0, 0.5, 0.5], [1.0, 1.0, 0.0, 1.0])
    assert (found.better, found.worse, found.same) == (2, 1, 1)
    assert found.difference.value == pytest.approx(0.25) and found.difference.low < 0 < found.difference.high
    first = results_by_prompt([answer(0, 1.0), answer(1, 0.0), answer(2, None)])
    second = results_by_prompt([answer(1, 1.0), answer(2, 1.0), answer(0, 0.5)])
    assert [(a.reward, b.reward) for a, b in paired(first, second)] == [(1.0, 0.5), (0.0, 1.0)]
    with pytest.raises(DataError, match="in common"):
        paired(first, {})


def test_failures_begin_with_the_worst():
    prompts = results_by_prompt(
        [answer(0, 1.0), answer(0, 0.0, "bad"), answer(1, 0.0, "no"), answer(1, 0.0), answer(2, 1.0)]
    )
    rows = failures(prompts)
    assert [(row["prompt"], row["right"], row["answer"], row["expected"]) for row in rows] == [
        ("q1", "0 of 2", "no", "7"),
        ("q0", "1 of 2", "bad", "7"),
    ]


def test_each_epoch_of_a_sample_has_a_seed_of_its_own():
    """Otherwise all epochs of inspect-ai would have the same completion, whatever the temperature."""
    one, other = np.array([1, 2, 3], dtype=np.int32), np.array([1, 2, 4], dtype=np.int32)
    first, again = RequestSeeds(), RequestSeeds()
    found = [first.next_seed(prompt, 0) for prompt in (one, one, other, one)]
    assert len(set(found)) == 4
    assert {again.next_seed(prompt, 0) for prompt in (other, one, one, one)} == set(found)  # in whichever order
