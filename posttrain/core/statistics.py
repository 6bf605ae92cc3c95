"""Statistics of evaluations: estimates with 95% confidence intervals, pass@k, and two models compared in pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from posttrain.core.errors import UsageError

RANDOM_SIGNS = 20_000  # sign vectors that are drawn if there are too many to try all
EXACT_TEST_LIMIT = 14  # number of differences up to which all sign vectors are tried


@dataclass(slots=True, frozen=True)
class Figure:
    """An estimate and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean(values: Sequence[float]) -> Figure:
    middle, half = math.fsum(values) / len(values), half_width(values)
    return Figure(middle, middle - half, middle + half)


def share(values: Sequence[float]) -> Figure:
    """Return the mean of values from 0 to 1 with Wilson's interval, which is not empty if all values are equal.

    The sample size is that of single completions with this variance: means of several completions vary less.
    """
    middle, size = math.fsum(values) / len(values), float(len(values))
    variance = float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
    if variance > 0:
        size = max(size, middle * (1 - middle) / variance * len(values))
    z = 1.96
    centre = (middle + z * z / (2 * size)) / (1 + z * z / size)
    half = z * math.sqrt(middle * (1 - middle) / size + z * z / (4 * size * size)) / (1 + z * z / size)
    return Figure(middle, min(middle, max(0.0, centre - half)), max(middle, min(1.0, centre + half)))


@dataclass(slots=True, frozen=True)
class Comparison:
    """The second model against the first, prompt by prompt."""

    difference: Figure
    better: int  # prompts where the second is better
    worse: int
    same: int
    p: float  # probability of a difference this large if the models were equally good


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare paired values with Fisher's randomization test on the signs of their differences."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    return Comparison(
        difference=mean(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        same=sum(d == 0 for d in differences),
        p=sign_test(differences),
    )


def compare_rows(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Comparison]:
    """Compare the first model with the second on the examples of both, by task and metric.

    An example is the same if its task, its content and its prompt are.
    """
    others = {row["key"]: row["scores"] for row in second}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in first:
        for name, value in row["scores"].items():
            if (other := others.get(row["key"], {}).get(name)) is not None:
                pairs.setdefault(f"{row['task']}/{name}", []).append((other, value))
    if not pairs:
        raise UsageError("the two evaluations have no example in common: other tasks, other data or other prompts")
    return {name: compare([a for a, _ in found], [b for _, b in found]) for name, found in pairs.items()}


def sign_test(differences: Sequence[float]) -> float:
    """Return the two-sided p value; exact for few differences, else from random signs with a fixed seed."""
    moved = np.array([d for d in differences if d != 0])
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) * (1 - 1e-12)  # the order of summation must not matter
    if len(moved) <= EXACT_TEST_LIMIT:
        signs = np.array(list(product((-1, 1), repeat=len(moved))))
        return float(np.mean(np.abs(signs @ moved) >= observed))
    random, hits = np.random.default_rng(0), 0
    for _ in range(RANDOM_SIGNS // 1000):
        signs = random.integers(0, 2, size=(1000, len(moved))) * 2 - 1
        hits += int(np.sum(np.abs(signs @ moved) >= observed))
    return (hits + 1) / (RANDOM_SIGNS + 1)


def pass_at(k: int, n: int, correct: int) -> float:
    """Estimate without bias the probability that one of k completions is correct, where `correct` of n were.

    arXiv:2107.03374, eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95% confidence interval of the mean."""
    return 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
