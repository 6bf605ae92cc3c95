"""What a row can be understood as, and how its cells are read: every fault names its row, its column and the reason."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from posttrain.core.errors import DataError
from posttrain.data.reading.records import Record

Message: TypeAlias = dict[str, Any]  # role, content; with tools also tool_calls, tool_call_id, name

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
class TextExample(Example):
    """Plain text to learn whole."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExample(Example):
    """A conversation; what the assistant says in it is learned."""

    messages: list[Message]
    plain: bool = False  # prompt and completion were mere strings, so that no chat template is needed
    tools: list[Any] | None = None  # definitions, for templates that have a place for them


@dataclass(frozen=True, slots=True, kw_only=True)
class PairExample(Example):
    """A prompt with a better and a worse answer."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float = 0.0
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledExample(Example):
    """A prompt and an answer that is good (1) or bad (0)."""

    prompt: list[Message]
    answer: list[Message]
    label: float
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepwiseExample(Example):
    """A prompt and an answer in steps, each right or wrong."""

    prompt: list[Message]
    steps: list[str]
    labels: list[float]  # probability that the step is right
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExample(Example):
    """A prompt to answer. What an answer is worth is for reward functions to say, which are given the columns."""

    prompt: list[Message]
    plain: bool = False
    tools: list[Any] | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # all of the row's, and ground_truth where the format has one


# Cells


def fault(row: Record, column: str, reason: str) -> DataError:
    """The error for a cell."""
    return DataError(f"{row.origin}: {column}: {reason}")


def value_of(row: Record, column: str) -> Any:
    """The cell, which must not be null."""
    value = row.values[column]
    if value is None:
        raise fault(row, column, "null")
    return value


def text_of(row: Record, column: str, value: Any) -> str:
    """The value, which must be text."""
    if value is None:
        raise fault(row, column, "null")
    if not isinstance(value, str):
        raise fault(row, column, f"expected text, found {type(value).__name__}")
    return value


def filled_text(row: Record, column: str, value: Any, what: str) -> str:
    """The value, which must be text and not blank."""
    text = text_of(row, column, value)
    if not text or text.isspace():
        raise fault(row, column, f"empty {what}")
    return text


def list_of(row: Record, column: str) -> list[Any]:
    """The cell, which must be a list and not empty."""
    value = value_of(row, column)
    if not isinstance(value, list):
        raise fault(row, column, f"expected a list, found {type(value).__name__}")
    if not value:
        raise fault(row, column, "empty list")
    return value


def optional_text(row: Record, column: str) -> str:
    """The text of a cell that may be missing or null."""
    value = row.values.get(column)
    return "" if value is None else text_of(row, column, value)


def number(row: Record, column: str) -> float:
    """The cell, which must be a finite number."""
    value = value_of(row, column)
    try:  # csv files have numbers as text
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise fault(row, column, f"expected a number, found {value!r}")
    return found


def label_of(row: Record, column: str, value: Any, soft: bool = False) -> float:
    """1 for right, 0 for wrong; soft: any probability."""
    if value is None:
        raise fault(row, column, "null")
    if isinstance(value, str) and value.lower() in LABELS:
        return LABELS[value.lower()]
    if isinstance(value, int | float) and (value in (0, 1) or (soft and 0 <= value <= 1)):
        return float(value)
    wanted = 'true/false, 0/1, "+"/"-" or a number from 0 to 1' if soft else "true/false or 0/1"
    raise fault(row, column, f"expected {wanted}, found {value!r}")


def margin(row: Record) -> float:
    """By how much the chosen answer is better, if the row says."""
    if row.values.get("margin") is not None:
        return number(row, "margin")
    if row.values.get("chosen_score") is not None and row.values.get("rejected_score") is not None:
        return number(row, "chosen_score") - number(row, "rejected_score")
    return 0.0


# Conversations


def messages_of(row: Record, column: str, tools_too: bool = False) -> list[Message]:
    """The cell, which must be a list of messages."""
    if row.values.get("tools") and not tools_too:
        raise fault(row, "tools", "definitions of tools cannot be used in this format; write them as text")
    return [message_of(row, f"{column}[{index}]", value) for index, value in enumerate(list_of(row, column))]


def message_of(row: Record, column: str, value: Any) -> Message:
    """A message in either spelling: role and content, or from and value."""
    if not isinstance(value, dict):
        raise fault(row, column, f"expected a message with role and content, found {type(value).__name__}")
    role_key, content_key = ("from", "value") if "from" in value else ("role", "content")
    calls = value.get("tool_calls")
    for key in (role_key, content_key):
        if key not in value and not (calls and key == content_key):
            raise fault(row, column, f"the message has no {key!r}; its keys are: {', '.join(map(str, value))}")
    role = text_of(row, f"{column}.{role_key}", value[role_key])
    if role not in ROLES:
        raise fault(row, f"{column}.{role_key}", f"unknown role {role!r}; known are {', '.join(ROLES)}")
    content = value.get(content_key)
    if not isinstance(content, str):
        content = "" if content is None and calls else content_of(row, f"{column}.{content_key}", content)
    message = turn(ROLES[role], content)
    if calls:
        if message["role"] != "assistant":
            raise fault(row, column, "tool_calls are for the assistant to make")
        message["tool_calls"] = calls_of(row, f"{column}.tool_calls", calls)
    elif message["role"] == "tool":  # some templates tell whose result it is
        message |= {key: value[key] for key in ("name", "tool_call_id") if isinstance(value.get(key), str)}
    return message


def content_of(row: Record, column: str, value: Any) -> str:
    """A content as text, or as a list of text parts."""
    if not isinstance(value, list):
        return text_of(row, column, value)
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise fault(row, f"{column}[{index}]", f"a part of type {kind!r}; only text can be used")
        texts.append(text_of(row, f"{column}[{index}]", part.get("text") if isinstance(part, dict) else part))
    return "".join(texts)


def calls_of(row: Record, column: str, value: Any) -> list[Any]:
    """Calls of tools: names, and arguments as an object, which files often have as JSON."""
    if not isinstance(value, list):
        raise fault(row, column, f"expected a list, found {type(value).__name__}")
    calls: list[Any] = []
    for index, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise fault(row, f"{column}[{index}]", "expected a function with a name and arguments")
        arguments = parsed(row, f"{column}[{index}].arguments", function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise fault(row, f"{column}[{index}].arguments", f"expected an object, found {type(arguments).__name__}")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({"type": "function", **named, "function": {"name": function["name"], "arguments": arguments}})
    return calls


def tools_of(row: Record) -> list[Any] | None:
    """Definitions of tools, if the row has them: a list, or JSON of one."""
    if not row.values.get("tools"):
        return None
    tools = parsed(row, "tools", row.values["tools"])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fault(row, "tools", "expected a list of definitions")
    return tools or None


def parsed(row: Record, column: str, value: Any) -> Any:
    """The value; of text, what it says as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise fault(row, column, f"cannot be read as JSON: {error}") from None


def check_answers(row: Record, column: str, messages: list[Message], first: int = 0) -> None:
    """The assistant must have the last word, and say something each time, from message `first` on."""
    if messages[-1]["role"] != "assistant":
        raise fault(row, column, f"the last message must be the assistant's, not the {messages[-1]['role']}'s")
    for index, message in enumerate(messages):
        silent = not message["content"].strip() and "tool_calls" not in message
        if index >= first and message["role"] == "assistant" and silent:
            raise fault(row, f"{column}[{index}]", "empty response")


def prompt_of(row: Record, column: str, tools_too: bool = False) -> list[Message]:
    """The cell as messages: text is the user's."""
    if isinstance(value_of(row, column), str):
        return [turn("user", filled_text(row, column, row.values[column], "prompt"))]
    messages = messages_of(row, column, tools_too)
    if messages[-1]["role"] == "assistant":
        raise fault(row, column, "the last message of a prompt cannot be the assistant's")
    return messages


def answer_of(row: Record, column: str, prompt: list[Message]) -> list[Message]:
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


def are_strings(row: Record, *columns: str) -> bool:
    """Whether all these cells are mere text."""
    return all(isinstance(row.values[column], str) for column in columns)


def turn(role: str, content: str) -> Message:
    """One message."""
    return {"role": role, "content": content}


def system_of(row: Record) -> list[Message]:
    """The system message, if there is one."""
    system = optional_text(row, "system")
    return [turn("system", system)] if system else []
