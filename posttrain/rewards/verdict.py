"""What a reward function scores, and the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

NO_REWARD = "no reward applies: all of them returned None"  # a failure that no function is to blame for


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

    value: float | None  # None: the function failed or does not apply, which is never counted as 0
    kind: Literal["ok", "error", "timeout", "not_applicable"]
    reason: str = ""  # how the value came about; the traceback of a failure
    seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)  # of a judge: requests, tokens, cost, refusals ...
    replies: list[dict[str, Any]] = field(default_factory=list)  # of a judge: what it replied, by key of the question

    @property
    def applies(self) -> bool:
        """False if the function returned None: it has no opinion about this completion, which is no failure."""
        return self.kind != "not_applicable"

    @property
    def failed(self) -> bool:
        return self.value is None and self.applies


def group_by_prompt(completions: Sequence[Completion]) -> list[int]:
    """Number the prompts, and return the number of each completion's prompt."""
    numbers: dict[str, int] = {}
    keys = [json.dumps([each.prompt, each.messages], default=str) for each in completions]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def combine(verdicts: Sequence[Verdict | None], weights: Sequence[float]) -> float | None:
    """Return the weighted sum of the rewards that apply; None if any function failed, or if none applies."""
    total, missing = 0.0, 0
    for verdict, weight in zip(verdicts, weights, strict=True):
        if verdict is None or verdict.failed:
            return None
        if verdict.value is None:
            missing += weight != 0
        else:
            total += weight * verdict.value
    return None if missing and missing == sum(weight != 0 for weight in weights) else total
