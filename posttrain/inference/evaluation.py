"""Statistics of scored completions: accuracy, mean@n and pass@k with intervals, failures, two models compared.

A prompt is the unit: completions of one prompt are correlated, so intervals and tests count prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from posttrain.core.errors import DataError
from posttrain.data.ground_truth import ground_truth_of
from posttrain.inference.completion_files import CompletionExample
from posttrain.train.held_out_eval import CORRECT_ABOVE, half_width, pass_at

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


@dataclass(slots=True)
class PromptResult:
    """The scored completions of one prompt, and the number of those that could not be scored."""

    completions: list[CompletionExample]
    right: list[bool]
    failed: int

    @property
    def reward(self) -> float:
        return math.fsum(completion.reward or 0.0 for completion in self.completions) / len(self.completions)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


def results_by_prompt(
    completions: Iterable[CompletionExample], right: float = CORRECT_ABOVE
) -> dict[str, PromptResult]:
    """Group completions by prompt, in the order of the file; one is right if its first reward is above `right`."""
    found: dict[str, PromptResult] = {}
    for completion in completions:
        result = found.setdefault(completion.group, PromptResult([], [], 0))
        if completion.reward is None:
            result.failed += 1
        else:
            result.completions.append(completion)
            result.right.append(first_reward(completion) > right)
    return found


def first_reward(completion: CompletionExample) -> float:
    parts = completion.row.get("rewards")
    value = next(iter(parts.values()), None) if isinstance(parts, dict) else completion.reward
    if not isinstance(value, int | float):
        raise DataError(f"{completion.origin}: the row has no reward; add rewards with: posttrain score")
    return float(value)


def figures(prompts: dict[str, PromptResult]) -> dict[str, Figure]:
    """Compute the figures over all prompts with a scored completion."""
    scored = [result for result in prompts.values() if result.completions]
    if not scored:
        raise DataError("no completion could be scored")
    n = max(len(result.right) for result in scored)
    found = {
        f"reward (mean@{n})": mean([result.reward for result in scored]),
        f"accuracy (mean@{n})": share([result.accuracy for result in scored]),
    }
    k = 1
    while k <= n and n > 1:
        enough = [result.right for result in scored if len(result.right) >= k]
        found[f"pass@{k}"] = share([pass_at(k, len(right), sum(right)) for right in enough])
        k *= 2
    return found


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


# Two models


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


def compare_models(first: dict[str, PromptResult], second: dict[str, PromptResult]) -> dict[str, Comparison]:
    """Compare the first model with the second, prompt by prompt: by reward and by accuracy."""
    pairs = paired(second, first)
    return {
        "reward": compare([a.reward for a, _ in pairs], [b.reward for _, b in pairs]),
        "accuracy": compare([a.accuracy for a, _ in pairs], [b.accuracy for _, b in pairs]),
    }


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


def paired(first: dict[str, PromptResult], second: dict[str, PromptResult]) -> list[tuple[PromptResult, PromptResult]]:
    """Return the prompts for which both models have a scored completion."""
    found = [
        (a, second[key]) for key, a in first.items() if key in second and a.completions and second[key].completions
    ]
    if not found:
        raise DataError("the models have no prompt in common")
    return found


# Failures


def failures(prompts: dict[str, PromptResult]) -> list[dict[str, object]]:
    """Return one wrong completion per prompt; prompts with the lowest accuracy first."""
    wrong = [result for result in prompts.values() if result.completions and not all(result.right)]
    rows = []
    for result in sorted(wrong, key=lambda result: (result.accuracy, result.reward)):
        completion = result.completions[result.right.index(False)]
        rows.append(
            {
                "origin": str(completion.row.get("origin", completion.origin)),
                "right": f"{sum(result.right)} of {len(result.right)}",
                "prompt": str(completion.prompt[-1]["content"]),
                "expected": ground_truth_of(completion.columns),
                "answer": completion.text,
                "reward": completion.reward,
            }
        )
    return rows
