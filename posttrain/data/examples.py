"""What a row can be understood as, and how its cells are read: every fault names its row, its column and the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from posttrain.data.sources import Row
from posttrain.errors import DataError

Message: TypeAlias = dict[str, str]  # role, content

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
LABELS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "+": 1.0, "-": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row whose columns were understood."""

    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Example):
    """Plain text to learn whole."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(Example):
    """A conversation; what the assistant says in it is learned."""

    messages: list[Message]
    plain: bool = False  # prompt and completion were mere strings, so that no chat template is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Example):
    """A prompt with a better and a worse answer."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float = 0.0
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled(Example):
    """A prompt and an answer that is good (1) or bad (0)."""

    prompt: list[Message]
    answer: list[Message]
    label: float
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepwise(Example):
    """A prompt and an answer in steps, each right or wrong."""

    prompt: list[Message]
    steps: list[str]
    labels: list[float]  # probability that the step is right
    plain: bool = False


# Cells


def fault(row: Row, column: str, reason: str) -> DataError:
    """The error for a cell."""
    return DataError(f"{row.origin}: {column}: {reason}")


def value_of(row: Row, column: str) -> Any:
    """The cell, which must not be null."""
    value = row.values[column]
    if value is None:
        raise fault(row, column, "null")
    return value


def text_of(row: Row, column: str, value: Any) -> str:
    """The value, which must be text."""
    if value is None:
        raise fault(row, column, "null")
    if not isinstance(value, str):
        raise fault(row, column, f"expected text, found {type(value).__name__}")
    return value


def filled_text(row: Row, column: str, value: Any, what: str) -> str:
    """The value, which must be text and not blank."""
    text = text_of(row, column, value)
    if not text.strip():
        raise fault(row, column, f"empty {what}")
    return text


def list_of(row: Row, column: str) -> list[Any]:
    """The cell, which must be a list and not empty."""
    value = value_of(row, column)
    if not isinstance(value, list):
        raise fault(row, column, f"expected a list, found {type(value).__name__}")
    if not value:
        raise fault(row, column, "empty list")
    return value


def optional_text(row: Row, column: str) -> str:
    """The text of a cell that may be missing or null."""
    value = row.values.get(column)
    return "" if value is None else text_of(row, column, value)


def number(row: Row, column: str) -> float:
    """The cell, which must be a finite number."""
    value = value_of(row, column)
    try:  # csv files have numbers as text
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise fault(row, column, f"expected a number, found {value!r}")
    return found


def label_of(row: Row, column: str, value: Any, soft: bool = False) -> float:
    """1 for right, 0 for wrong; soft: any probability."""
    if value is None:
        raise fault(row, column, "null")
    if isinstance(value, str) and value.lower() in LABELS:
        return LABELS[value.lower()]
    if isinstance(value, int | float) and (value in (0, 1) or (soft and 0 <= value <= 1)):
        return float(value)
    wanted = 'true/false, 0/1, "+"/"-" or a number from 0 to 1' if soft else "true/false or 0/1"
    raise fault(row, column, f"expected {wanted}, found {value!r}")


def margin(row: Row) -> float:
    """By how much the chosen answer is better, if the row says."""
    if row.values.get("margin") is not None:
        return number(row, "margin")
    if row.values.get("chosen_score") is not None and row.values.get("rejected_score") is not None:
        return number(row, "chosen_score") - number(row, "rejected_score")
    return 0.0


# Conversations


def messages_of(row: Row, column: str) -> list[Message]:
    """The cell, which must be a list of messages."""
    if row.values.get("tools"):
        raise fault(row, "tools", "tool definitions cannot be used yet; write them into the system message")
    return [message_of(row, f"{column}[{index}]", value) for index, value in enumerate(list_of(row, column))]


def message_of(row: Row, column: str, value: Any) -> Message:
    """A message in either spelling: role and content, or from and value."""
    if not isinstance(value, dict):
        raise fault(row, column, f"expected a message with role and content, found {type(value).__name__}")
    role_key, content_key = ("from", "value") if "from" in value else ("role", "content")
    for key in (role_key, content_key):
        if key not in value:
            raise fault(row, column, f"the message has no {key!r}; its keys are: {', '.join(map(str, value))}")
    if value.get("tool_calls"):
        raise fault(row, column, "tool_calls cannot be used yet; write the call as text into the content")
    role = text_of(row, f"{column}.{role_key}", value[role_key])
    if role not in ROLES:
        raise fault(row, f"{column}.{role_key}", f"unknown role {role!r}; known are {', '.join(ROLES)}")
    return turn(ROLES[role], text_of(row, f"{column}.{content_key}", value[content_key]))


def check_answers(row: Row, column: str, messages: list[Message], first: int = 0) -> None:
    """The assistant must have the last word, and say something each time, from message `first` on."""
    if messages[-1]["role"] != "assistant":
        raise fault(row, column, f"the last message must be the assistant's, not the {messages[-1]['role']}'s")
    for index, message in enumerate(messages):
        if index >= first and message["role"] == "assistant" and not message["content"].strip():
            raise fault(row, f"{column}[{index}]", "empty response")


def prompt_of(row: Row, column: str) -> list[Message]:
    """The cell as messages: text is the user's."""
    if isinstance(value_of(row, column), str):
        return [turn("user", filled_text(row, column, row.values[column], "prompt"))]
    messages = messages_of(row, column)
    if messages[-1]["role"] == "assistant":
        raise fault(row, column, "the last message of a prompt cannot be the assistant's")
    return messages


def answer_of(row: Row, column: str, prompt: list[Message]) -> list[Message]:
    """What follows the prompt: text, a message, or messages that may repeat the prompt first."""
    value = value_of(row, column)
    if isinstance(value, str):
        return [turn("assistant", filled_text(row, column, value, "response"))]
    messages = [message_of(row, column, value)] if isinstance(value, dict) else messages_of(row, column)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if not messages or messages[0]["role"] != "assistant":
        raise fault(row, column, "expected the assistant's message after the prompt")
    check_answers(row, column, messages)
    return messages


def are_strings(row: Row, *columns: str) -> bool:
    """Whether all these cells are mere text."""
    return all(isinstance(row.values[column], str) for column in columns)


def turn(role: str, content: str) -> Message:
    """One message."""
    return {"role": role, "content": content}


def system_of(row: Row) -> list[Message]:
    """The system message, if there is one."""
    system = optional_text(row, "system")
    return [turn("system", system)] if system else []
