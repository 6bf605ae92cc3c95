"""Scored answers -> rows to train on: the best of each prompt, pairs, prompts that name their reward, the best of all.

Every answer is either used or counted under the reason why it is not: `read` is the sum of all the other counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError, UsageError
from posttrain.inference.completion_files import Answer, read_answers, write_rows
from posttrain.inference.model import CONDITION, conditioned

Row = dict[str, Any]


@dataclass(slots=True)
class Selection:
    """Rows that `posttrain sft` (pairs: `posttrain dpo`) reads as they are."""

    rows: list[Row]
    counts: dict[str, int]
    """read: answers; used: answers that are in the rows; the others by reason."""

    def __str__(self) -> str:
        return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in self.counts.items() if number)


def select_file(method: str, file: str, out: Path, *values: Any, map_keys: str = "") -> Selection:
    """Write the rows that a method of METHODS makes of a file of scored answers; DataError if there are none."""
    selected = METHODS[method](read_answers(file, map_keys), *values)
    if not selected.rows:
        raise DataError(f"{file}: nothing is left to train on: {selected}")
    write_rows(out, selected.rows)
    return selected


def best_of_n(answers: Sequence[Answer]) -> Selection:
    """The answer with the highest reward to each prompt, the first of equals."""
    usable, counts = usable_answers(answers)
    best = [highest(group) for group in by_prompt(usable)]
    return selection(map(as_chat, best), counts, used=len(best), worse=len(usable) - len(best))


def pairs(answers: Sequence[Answer]) -> Selection:
    """The best answer to each prompt against the worst; without those that are worth, or say, the same."""
    usable, counts = usable_answers(answers)
    rows: list[Row] = []
    dropped = dict.fromkeys(("alone", "ties", "equal_texts", "between"), 0)
    for group in by_prompt(usable):
        best, worst = highest(group), lowest(group)
        if len(group) == 1:
            dropped["alone"] += 1
        elif worth(best) == worth(worst):
            dropped["ties"] += len(group)
        elif best.text.strip() == worst.text.strip():
            dropped["equal_texts"] += len(group)
        else:
            rows.append(as_pair(best, worst))
            dropped["between"] += len(group) - 2
    return selection(rows, counts, used=2 * len(rows), **dropped)


def condition(answers: Sequence[Answer], template: str = CONDITION) -> Selection:
    """All answers, each to a prompt that says what it is worth."""
    usable, counts = usable_answers(answers)
    rows = [as_chat(answer, conditioned(answer.prompt, worth(answer), template)) for answer in usable]
    return selection(rows, counts, used=len(rows))


def threshold(answers: Sequence[Answer], least: float) -> Selection:
    """Answers with at least this reward."""
    if not math.isfinite(least):
        raise UsageError(f"min_reward is {least}; it must be a number")
    usable, counts = usable_answers(answers)
    kept = [answer for answer in usable if worth(answer) >= least]
    return selection(map(as_chat, kept), counts, used=len(kept), worse=len(usable) - len(kept))


def top_fraction(answers: Sequence[Answer], fraction: float) -> Selection:
    """The best part of all answers, in the order of the file; of equals at the edge the first ones."""
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction is {fraction}; it must be above 0 and at most 1")
    usable, counts = usable_answers(answers)
    order = sorted(range(len(usable)), key=lambda place: -worth(usable[place]))
    kept = sorted(order[: math.ceil(fraction * len(usable))])
    return selection((as_chat(usable[place]) for place in kept), counts, used=len(kept), worse=len(usable) - len(kept))


# Parts


def usable_answers(answers: Sequence[Answer]) -> tuple[list[Answer], dict[str, int]]:
    """Those that have a reward and say something: nobody can learn from the others."""
    scored = [answer for answer in answers if answer.reward is not None]
    filled = [answer for answer in scored if answer.text.strip()]
    return filled, {"read": len(answers), "failed": len(answers) - len(scored), "empty": len(scored) - len(filled)}


def by_prompt(answers: Iterable[Answer]) -> list[list[Answer]]:
    """Answers to the same prompt together, wherever in the file they are."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    return list(groups.values())


def worth(answer: Answer) -> float:
    assert answer.reward is not None, "answers without a reward were left out before"
    return answer.reward


def highest(group: Sequence[Answer]) -> Answer:
    return max(group, key=worth)


def lowest(group: Sequence[Answer]) -> Answer:
    return min(group, key=worth)


def as_chat(answer: Answer, prompt: list[Any] | None = None) -> Row:
    """A row for `posttrain sft`."""
    asked = answer.prompt if prompt is None else prompt
    return {
        "prompt": asked[0]["content"] if answer.plain else asked,
        "completion": answer.text,
        "reward": answer.reward,
        "origin": str(answer.row.get("origin", answer.origin)),
    }


def as_pair(best: Answer, worst: Answer) -> Row:
    """A row for `posttrain dpo`."""
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
    assert counts["read"] == sum(counts.values()) - counts["read"], f"answers got lost: {counts}"
    return Selection(list(rows), counts)


METHODS: dict[str, Callable[..., Selection]] = {
    "best-of-n": best_of_n,
    "pairs": pairs,
    "condition": condition,
    "threshold": threshold,
    "top-fraction": top_fraction,
}
