"""Statistics of scored completions: accuracy, mean@n and pass@k with intervals, failures, two models compared.

A prompt is the unit: completions of one prompt are correlated, so intervals and tests count prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.core.errors import DataError
from posttrain.core.statistics import Comparison, Figure, compare, mean, pass_at, share
from posttrain.data.ground_truth import ground_truth_of
from posttrain.inference.completion_files import CompletionExample
from posttrain.train.held_out_eval import CORRECT_ABOVE


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


# Two models


def compare_models(first: dict[str, PromptResult], second: dict[str, PromptResult]) -> dict[str, Comparison]:
    """Compare the first model with the second, prompt by prompt: by reward and by accuracy."""
    pairs = paired(second, first)
    return {
        "reward": compare([a.reward for a, _ in pairs], [b.reward for _, b in pairs]),
        "accuracy": compare([a.accuracy for a, _ in pairs], [b.accuracy for _, b in pairs]),
    }


def paired(first: dict[str, PromptResult], second: dict[str, PromptResult]) -> list[tuple[PromptResult, PromptResult]]:
    """Return the prompts for which both models have a scored completion."""
    found = [
        (a, second[key]) for key, a in first.items() if key in second and a.completions and second[key].completions
    ]
    if not found:
        raise DataError("the models have no prompt in common")
    return found


# Examples


def example_rows(prompts: dict[str, PromptResult]) -> list[dict[str, object]]:
    """Return a row with scores per prompt, as the evaluation with a harness writes per example."""
    scored = [(key, result) for key, result in prompts.items() if result.completions]
    return [
        {
            "task": "prompts",
            "index": index,
            "key": key,
            "scores": {"reward": result.reward, "accuracy": result.accuracy},
            "target": ground_truth_of(result.completions[0].columns),
            "replies": [completion.text for completion in result.completions],
        }
        for index, (key, result) in enumerate(scored)
    ]


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
