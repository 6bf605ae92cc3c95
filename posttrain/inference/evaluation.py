"""How good scored answers are: accuracy, mean@n and pass@k with intervals, failures, and two models compared.

A prompt is the unit: answers to one prompt are alike, so intervals and tests count prompts, not answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from posttrain.core.errors import DataError
from posttrain.inference.completion_files import Answer
from posttrain.rewards.verdict import label_of
from posttrain.train.held_out_eval import CORRECT_ABOVE, half_width, pass_at

FLIPS = 20_000  # random sign changes, where all of them are too many
FEW = 14  # differences of which all sign changes are tried


@dataclass(slots=True, frozen=True)
class Figure:
    """An estimate and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(slots=True)
class Asked:
    """A prompt, the answers to it that could be scored, and how many could not."""

    answers: list[Answer]
    right: list[bool]
    failed: int

    @property
    def reward(self) -> float:
        return math.fsum(answer.reward or 0.0 for answer in self.answers) / len(self.answers)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


def by_prompt(answers: Iterable[Answer], right: float = CORRECT_ABOVE) -> dict[str, Asked]:
    """Prompts in the order of the file; an answer is right when its first reward is above `right`."""
    found: dict[str, Asked] = {}
    for answer in answers:
        asked = found.setdefault(answer.group, Asked([], [], 0))
        if answer.reward is None:
            asked.failed += 1
        else:
            asked.answers.append(answer)
            asked.right.append(first_reward(answer) > right)
    return found


def first_reward(answer: Answer) -> float:
    parts = answer.row.get("rewards")
    value = next(iter(parts.values()), None) if isinstance(parts, dict) else answer.reward
    if not isinstance(value, int | float):
        raise DataError(f"{answer.origin}: it has no reward; write one with: posttrain score")
    return float(value)


def figures(prompts: dict[str, Asked]) -> dict[str, Figure]:
    """Of all prompts with an answer that could be scored."""
    scored = [asked for asked in prompts.values() if asked.answers]
    if not scored:
        raise DataError("no answer could be scored")
    n = max(len(asked.right) for asked in scored)
    found = {
        f"reward (mean@{n})": mean([asked.reward for asked in scored]),
        f"accuracy (mean@{n})": share([asked.accuracy for asked in scored]),
    }
    k = 1
    while k <= n and n > 1:
        enough = [asked.right for asked in scored if len(asked.right) >= k]
        found[f"pass@{k}"] = share([pass_at(k, len(right), sum(right)) for right in enough])
        k *= 2
    return found


def mean(values: Sequence[float]) -> Figure:
    middle, half = math.fsum(values) / len(values), half_width(values)
    return Figure(middle, middle - half, middle + half)


def share(values: Sequence[float]) -> Figure:
    """A mean of values from 0 to 1, with Wilson's interval, which is not empty where all are the same.

    Of the size that a sample of single answers with this variance would have: shares of several answers vary less.
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
    p: float  # of a difference like this or larger, were the models equally good


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Paired values; the test changes the signs of their differences at random (Fisher's), and assumes no more."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    return Comparison(
        difference=mean(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        same=sum(d == 0 for d in differences),
        p=sign_test(differences),
    )


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided; exact where there are few differences, else from random signs, the same ones every time."""
    moved = np.array([d for d in differences if d != 0])
    if not len(moved):
        return 1.0
    observed = abs(moved.sum()) * (1 - 1e-12)  # sums in another order are no smaller
    if len(moved) <= FEW:
        signs = np.array(list(product((-1, 1), repeat=len(moved))))
        return float(np.mean(np.abs(signs @ moved) >= observed))
    random, hits = np.random.default_rng(0), 0
    for _ in range(FLIPS // 1000):
        signs = random.integers(0, 2, size=(1000, len(moved))) * 2 - 1
        hits += int(np.sum(np.abs(signs @ moved) >= observed))
    return (hits + 1) / (FLIPS + 1)


def paired(first: dict[str, Asked], second: dict[str, Asked]) -> list[tuple[Asked, Asked]]:
    """Prompts that both models have a scored answer to."""
    found = [(a, second[key]) for key, a in first.items() if key in second and a.answers and second[key].answers]
    if not found:
        raise DataError("the models have no prompt in common")
    return found


# Failures


def failures(prompts: dict[str, Asked]) -> list[dict[str, object]]:
    """Wrong answers, one a prompt, those of the prompts first that are most seldom right."""
    wrong = [asked for asked in prompts.values() if asked.answers and not all(asked.right)]
    rows = []
    for asked in sorted(wrong, key=lambda asked: (asked.accuracy, asked.reward)):
        answer = asked.answers[asked.right.index(False)]
        rows.append(
            {
                "origin": str(answer.row.get("origin", answer.origin)),
                "right": f"{sum(asked.right)} of {len(asked.right)}",
                "prompt": str(answer.prompt[-1]["content"]),
                "expected": label_of(answer.columns),
                "answer": answer.text,
                "reward": answer.reward,
            }
        )
    return rows
