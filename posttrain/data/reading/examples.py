"""Define the kinds of examples that records are parsed into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""role, content; where it has them tool_calls, tool_call_id, name, reasoning_content; train: False if it is masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A parsed record."""

    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextExample(Example):
    """Plain text; every token is trained on."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExample(Example):
    """A conversation; the assistant's messages are trained on."""

    messages: list[Message]
    plain: bool = False  # prompt and completion are plain strings, so that no chat template is needed
    tools: list[Any] | None = None  # tool definitions, for chat templates that support them


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentsExample(Example):
    """Text in segments that is trained on or not; it has its control tokens already, no chat template is applied."""

    segments: list[tuple[str, bool]]  # text, and whether it is trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class PairExample(Example):
    """A prompt with a chosen and a rejected completion."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float | None = None  # None: the data has none
    plain: bool = False
    raw: bool = False  # prompt and completion are one text each; no chat template is applied


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledExample(Example):
    """A prompt and a completion that is good (1) or bad (0)."""

    prompt: list[Message]
    completion: list[Message]
    label: float
    plain: bool = False
    raw: bool = False  # prompt and completion are one text each; no chat template is applied
    cut_off: bool = False  # the completion ended at a limit of tokens, without an end-of-turn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepwiseExample(Example):
    """A prompt and a completion in steps, each correct or incorrect."""

    prompt: list[Message]
    steps: list[str]
    labels: list[float]  # probability that the step is correct
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExample(Example):
    """A prompt for generation. Reward functions receive its columns together with the completion."""

    prompt: list[Message]
    plain: bool = False
    tools: list[Any] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of the record, and ground_truth where the format has one."""
