"""pass@k and its intervals, against counting."""

from itertools import combinations

import numpy as np
import pytest

from posttrain.core.statistics import half_width, pass_at


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(n):
    for right in range(n + 1):
        answers = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            chosen = list(combinations(answers, k))
            assert pass_at(k, n, right) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_the_interval_covers_the_mean_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        values = random.normal(3.0, 2.0, size=50)
        hits += abs(values.mean() - 3.0) <= half_width(values)
    assert 0.92 < hits / 2000 < 0.97
    assert half_width([1.0]) == 0.0
