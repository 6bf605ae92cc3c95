"""Turns scored completions into training data: best of n, pairs, conditioned prompts, a threshold, a top fraction.

Every completion is either used or counted with the reason why not: `read` is the sum of all other counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError, UsageError
from posttrain.inference.completion_files import CompletionExample, read_completions, write_rows
from posttrain.inference.model import CONDITION, conditioned

Row = dict[str, Any]


@dataclass(slots=True)
class Selection:
    """Rows that `posttrain sft` (pairs: `posttrain dpo`) reads, and counts."""

    rows: list[Row]
    counts: dict[str, int]
    """read: completions in the file; used: those in the rows; the others by reason."""

    def __str__(self) -> str:
        return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in self.counts.items() if number)


def select_file(method: str, file: str, out: Path, *values: Any, map_keys: str | Mapping[str, Any] = "") -> Selection:
    """Write the rows that a method of METHODS selects from a file of scored completions; DataError if none are left."""
    selected = METHODS[method](read_completions(file, map_keys), *values)
    if not selected.rows:
        raise DataError(f"{file}: no row is left to train on: {selected}")
    write_rows(out, selected.rows)
    return selected


def best_of_n(completions: Sequence[CompletionExample]) -> Selection:
    """Keep the completion with the highest reward of each prompt; of equal ones the first."""
    usable, counts = usable_completions(completions)
    best = [highest(group) for group in by_prompt(usable)]
    return selection(map(as_chat, best), counts, used=len(best), worse=len(usable) - len(best))


def pairs(completions: Sequence[CompletionExample]) -> Selection:
    """Pair the best completion of each prompt with the worst, unless their rewards or texts are equal."""
    usable, counts = usable_completions(completions)
    rows: list[Row] = []
    dropped = dict.fromkeys(("alone", "ties", "equal_texts", "between"), 0)
    for group in by_prompt(usable):
        best, worst = highest(group), lowest(group)
        if len(group) == 1:
            dropped["alone"] += 1
        elif reward_of(best) == reward_of(worst):
            dropped["ties"] += len(group)
        elif best.text.strip() == worst.text.strip():
            dropped["equal_texts"] += len(group)
        else:
            rows.append(as_pair(best, worst))
            dropped["between"] += len(group) - 2
    return selection(rows, counts, used=2 * len(rows), **dropped)


def condition(completions: Sequence[CompletionExample], template: str = CONDITION) -> Selection:
    """Keep all completions; each prompt states the reward of its completion."""
    usable, counts = usable_completions(completions)
    rows = [
        as_chat(completion, conditioned(completion.prompt, reward_of(completion), template)) for completion in usable
    ]
    return selection(rows, counts, used=len(rows))


def threshold(completions: Sequence[CompletionExample], min_reward: float) -> Selection:
    """Keep completions with at least this reward."""
    if not math.isfinite(min_reward):
        raise UsageError(f"min_reward is {min_reward}; it must be a number")
    usable, counts = usable_completions(completions)
    kept = [completion for completion in usable if reward_of(completion) >= min_reward]
    return selection(map(as_chat, kept), counts, used=len(kept), worse=len(usable) - len(kept))


def top_fraction(completions: Sequence[CompletionExample], fraction: float) -> Selection:
    """Keep this fraction of all completions with the highest rewards, in the order of the file."""
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction is {fraction}; it must be above 0 and at most 1")
    usable, counts = usable_completions(completions)
    order = sorted(range(len(usable)), key=lambda place: -reward_of(usable[place]))
    kept = sorted(order[: math.ceil(fraction * len(usable))])
    return selection((as_chat(usable[place]) for place in kept), counts, used=len(kept), worse=len(usable) - len(kept))


# Parts


def usable_completions(completions: Sequence[CompletionExample]) -> tuple[list[CompletionExample], dict[str, int]]:
    """Return the completions with a reward and a text that is not empty, and counts of the others."""
    scored = [completion for completion in completions if completion.reward is not None]
    filled = [completion for completion in scored if completion.text.strip()]
    return filled, {
        "read": len(completions),
        "failed": len(completions) - len(scored),
        "empty": len(scored) - len(filled),
    }


def by_prompt(completions: Iterable[CompletionExample]) -> list[list[CompletionExample]]:
    """Group completions by prompt, wherever they are in the file."""
    groups: dict[str, list[CompletionExample]] = {}
    for completion in completions:
        groups.setdefault(completion.group, []).append(completion)
    return list(groups.values())


def reward_of(completion: CompletionExample) -> float:
    assert completion.reward is not None, "completions without a reward were left out before"
    return completion.reward


def highest(group: Sequence[CompletionExample]) -> CompletionExample:
    return max(group, key=reward_of)


def lowest(group: Sequence[CompletionExample]) -> CompletionExample:
    return min(group, key=reward_of)


def as_chat(completion: CompletionExample, prompt: list[Any] | None = None) -> Row:
    """Return a row for `posttrain sft`."""
    messages = completion.prompt if prompt is None else prompt
    return {
        "prompt": messages[0]["content"] if completion.plain else messages,
        "completion": completion.text,
        "reward": completion.reward,
        "origin": str(completion.row.get("origin", completion.origin)),
    }


def as_pair(best: CompletionExample, worst: CompletionExample) -> Row:
    """Return a row for `posttrain dpo`."""
    return {
        "prompt": best.trainable_prompt,
        "chosen": best.text,
        "rejected": worst.text,
        "chosen_reward": best.reward,
        "rejected_reward": worst.reward,
        "origin": str(best.row.get("origin", best.origin)),
    }


def selection(rows: Iterable[Row], counts: dict[str, int], *, used: int, **dropped: int) -> Selection:
    counts = {"read": counts["read"], "used": used, "failed": counts["failed"], "empty": counts["empty"], **dropped}
    assert counts["read"] == sum(counts.values()) - counts["read"], f"completions got lost: {counts}"
    return Selection(list(rows), counts)


METHODS: dict[str, Callable[..., Selection]] = {
    "best-of-n": best_of_n,
    "pairs": pairs,
    "condition": condition,
    "threshold": threshold,
    "top-fraction": top_fraction,
}
