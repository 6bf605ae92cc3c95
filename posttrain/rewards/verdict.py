"""What a reward function is asked about, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Where a row keeps the right answer, in the order in which we look.
LABELS = ("ground_truth", "solution", "answer", "label", "labels")


@dataclass(slots=True, frozen=True, kw_only=True)
class Completion:
    """A model's answer with its prompt and the data row that this came from."""

    prompt: str  # as the model saw it
    messages: list[dict[str, Any]]  # the prompt's
    text: str  # the model's answer, without special tokens
    finish: str  # stop, length, error
    tokens: int  # of the answer
    columns: dict[str, Any]  # of the data row; JSON can hold them


@dataclass(slots=True, frozen=True, kw_only=True)
class Verdict:
    """What one reward function says of one completion."""

    value: float | None  # None: it failed, which is never counted as 0
    kind: Literal["ok", "error", "timeout"]
    reason: str = ""  # why the verifier says so; of a failure the traceback
    seconds: float = 0.0


def combine(verdicts: Sequence[Verdict | None], weights: Sequence[float]) -> float | None:
    """The weighted sum; None if any function failed."""
    total = 0.0
    for verdict, weight in zip(verdicts, weights, strict=True):
        if verdict is None or verdict.value is None:
            return None
        total += weight * verdict.value
    return total


def label_of(columns: dict[str, Any]) -> Any:
    """The right answer as the row gives it; None if it gives none."""
    for name in LABELS:
        if columns.get(name) is not None:
            return columns[name]
    nested = columns.get("reward_model")  # verl
    return nested.get("ground_truth") if isinstance(nested, dict) else None
