"""What a reward function scores, and the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(slots=True, frozen=True, kw_only=True)
class Completion:
    """A completion with its prompt and the data example that this came from."""

    prompt: str  # as the model saw it
    messages: list[dict[str, Any]]  # the prompt's
    text: str  # what the model generated, without special tokens
    finish: str  # stop, length, error
    tokens: int  # of the completion
    columns: dict[str, Any]  # of the data example; JSON can represent them


@dataclass(slots=True, frozen=True, kw_only=True)
class Verdict:
    """The result of one reward function for one completion."""

    value: float | None  # None: the function failed, which is never counted as 0
    kind: Literal["ok", "error", "timeout"]
    reason: str = ""  # how the value came about; the traceback of a failure
    seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)  # of a judge: requests, tokens, cost, refusals ...
    replies: list[dict[str, Any]] = field(default_factory=list)  # of a judge: what it replied, by key of the question


def group_by_prompt(completions: Sequence[Completion]) -> list[int]:
    """Number the prompts, and return the number of each completion's prompt."""
    numbers: dict[str, int] = {}
    keys = [json.dumps([each.prompt, each.messages], default=str) for each in completions]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def combine(verdicts: Sequence[Verdict | None], weights: Sequence[float]) -> float | None:
    """Return the weighted sum, or None if any function failed."""
    total = 0.0
    for verdict, weight in zip(verdicts, weights, strict=True):
        if verdict is None or verdict.value is None:
            return None
        total += weight * verdict.value
    return total
