"""Read the cells of a record; every error names the record, the column and the reason."""

from __future__ import annotations

import json
import math
from typing import Any

from posttrain.core.errors import DataError
from posttrain.data.reading.examples import Message
from posttrain.data.reading.records import Record

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


def cell_error(record: Record, column: str, reason: str) -> DataError:
    """Return the error for a cell."""
    return DataError(f"{record.origin}: {column}: {reason}")


def value_of(record: Record, column: str) -> Any:
    """Return a cell, which must not be null."""
    value = record.values[column]
    if value is None:
        raise cell_error(record, column, "null")
    return value


def text_of(record: Record, column: str, value: Any) -> str:
    """Check that a value is text."""
    if value is None:
        raise cell_error(record, column, "null")
    if not isinstance(value, str):
        raise cell_error(record, column, f"expected text, found {type(value).__name__}")
    return value


def filled_text(record: Record, column: str, value: Any, what: str) -> str:
    """Check that a value is text and not blank."""
    text = text_of(record, column, value)
    if not text or text.isspace():
        raise cell_error(record, column, f"empty {what}")
    return text


def list_of(record: Record, column: str) -> list[Any]:
    """Return a cell, which must be a non-empty list."""
    value = value_of(record, column)
    if not isinstance(value, list):
        raise cell_error(record, column, f"expected a list, found {type(value).__name__}")
    if not value:
        raise cell_error(record, column, "empty list")
    return value


def optional_text(record: Record, column: str) -> str:
    """Return the text of a cell; "" if it is missing or null."""
    value = record.values.get(column)
    return "" if value is None else text_of(record, column, value)


def number_of(record: Record, column: str) -> float:
    """Return a cell, which must be a finite number."""
    value = value_of(record, column)
    try:  # csv files store numbers as text
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise cell_error(record, column, f"expected a number, found {value!r}")
    return found


def label_of(record: Record, column: str, value: Any, soft: bool = False) -> float:
    """Return 1 for good and 0 for bad; `soft` also allows probabilities."""
    if value is None:
        raise cell_error(record, column, "null")
    if isinstance(value, str) and value.lower() in LABELS:
        return LABELS[value.lower()]
    if isinstance(value, int | float) and (value in (0, 1) or (soft and 0 <= value <= 1)):
        return float(value)
    wanted = 'true/false, 0/1, "+"/"-" or a number from 0 to 1' if soft else "true/false or 0/1"
    raise cell_error(record, column, f"expected {wanted}, found {value!r}")


def margin_of(record: Record) -> float:
    """Return by how much the chosen completion is better; 0 if the record has no margin and no scores."""
    if record.values.get("margin") is not None:
        return number_of(record, "margin")
    if record.values.get("chosen_score") is not None and record.values.get("rejected_score") is not None:
        return number_of(record, "chosen_score") - number_of(record, "rejected_score")
    return 0.0


# Conversations


def messages_of(record: Record, column: str, allow_tools: bool = False) -> list[Message]:
    """Return a cell, which must be a list of messages."""
    if record.values.get("tools") and not allow_tools:
        raise cell_error(record, "tools", "this format does not support tool definitions; write them into the text")
    return [message_of(record, f"{column}[{index}]", value) for index, value in enumerate(list_of(record, column))]


def message_of(record: Record, column: str, value: Any) -> Message:
    """Read a message with the keys role and content, or from and value."""
    if not isinstance(value, dict):
        raise cell_error(record, column, f"expected a message with role and content, found {type(value).__name__}")
    role_key, content_key = ("from", "value") if "from" in value else ("role", "content")
    calls = value.get("tool_calls")
    for key in (role_key, content_key):
        if key not in value and not (calls and key == content_key):
            raise cell_error(record, column, f"the message has no {key!r}; its keys are {', '.join(map(str, value))}")
    role = text_of(record, f"{column}.{role_key}", value[role_key])
    if role not in ROLES:
        raise cell_error(record, f"{column}.{role_key}", f"unknown role {role!r}; known are {', '.join(ROLES)}")
    content = value.get(content_key)
    if not isinstance(content, str):
        content = "" if content is None and calls else content_of(record, f"{column}.{content_key}", content)
    message = make_message(ROLES[role], content)
    if calls:
        if message["role"] != "assistant":
            raise cell_error(record, column, "only messages of the assistant can have tool_calls")
        message["tool_calls"] = tool_calls_of(record, f"{column}.tool_calls", calls)
    elif message["role"] == "tool":  # some templates write which call a result belongs to
        message |= {key: value[key] for key in ("name", "tool_call_id") if isinstance(value.get(key), str)}
    return message


def content_of(record: Record, column: str, value: Any) -> str:
    """Read a content: text, or a list of text parts."""
    if not isinstance(value, list):
        return text_of(record, column, value)
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise cell_error(record, f"{column}[{index}]", f"a part of type {kind!r}; only text is supported")
        texts.append(text_of(record, f"{column}[{index}]", part.get("text") if isinstance(part, dict) else part))
    return "".join(texts)


def tool_calls_of(record: Record, column: str, value: Any) -> list[Any]:
    """Read tool calls: names, and arguments as an object or as JSON text of one."""
    if not isinstance(value, list):
        raise cell_error(record, column, f"expected a list, found {type(value).__name__}")
    calls: list[Any] = []
    for index, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise cell_error(record, f"{column}[{index}]", "expected a function with a name and arguments")
        arguments = parse_json(record, f"{column}[{index}].arguments", function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise cell_error(
                record, f"{column}[{index}].arguments", f"expected an object, found {type(arguments).__name__}"
            )
        with_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({"type": "function", **with_id, "function": {"name": function["name"], "arguments": arguments}})
    return calls


def tools_of(record: Record) -> list[Any] | None:
    """Read tool definitions, if there are any: a list, or JSON text of one."""
    if not record.values.get("tools"):
        return None
    tools = parse_json(record, "tools", record.values["tools"])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise cell_error(record, "tools", "expected a list of tool definitions")
    return tools or None


def parse_json(record: Record, column: str, value: Any) -> Any:
    """Parse text as JSON; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise cell_error(record, column, f"cannot be read as JSON: {error}") from None


def check_assistant_messages(record: Record, column: str, messages: list[Message], first: int = 0) -> None:
    """Check that the last message is the assistant's, and that none of the assistant's is empty from `first` on."""
    if messages[-1]["role"] != "assistant":
        raise cell_error(record, column, f"the last message must be the assistant's, not the {messages[-1]['role']}'s")
    for index, message in enumerate(messages):
        empty = not message["content"].strip() and "tool_calls" not in message
        if index >= first and message["role"] == "assistant" and empty:
            raise cell_error(record, f"{column}[{index}]", "empty completion")


def prompt_of(record: Record, column: str, allow_tools: bool = False) -> list[Message]:
    """Read a prompt: messages, or text of the user."""
    if isinstance(value_of(record, column), str):
        return [make_message("user", filled_text(record, column, record.values[column], "prompt"))]
    messages = messages_of(record, column, allow_tools)
    if messages[-1]["role"] == "assistant":
        raise cell_error(record, column, "the last message of a prompt must not be the assistant's")
    return messages


def completion_of(record: Record, column: str, prompt: list[Message]) -> list[Message]:
    """Read a completion: text, a message, or messages that may repeat the prompt first."""
    value = value_of(record, column)
    if isinstance(value, str):
        return [make_message("assistant", filled_text(record, column, value, "completion"))]
    messages = [message_of(record, column, value)] if isinstance(value, dict) else messages_of(record, column)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if not messages or messages[0]["role"] != "assistant":
        raise cell_error(record, column, "expected the assistant's message after the prompt")
    check_assistant_messages(record, column, messages)
    return messages


def are_strings(record: Record, *columns: str) -> bool:
    """Whether all these cells are plain text."""
    return all(isinstance(record.values[column], str) for column in columns)


def make_message(role: str, content: str) -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def system_of(record: Record) -> list[Message]:
    """Return the system message as a list, empty if there is none."""
    system = optional_text(record, "system")
    return [make_message("system", system)] if system else []
