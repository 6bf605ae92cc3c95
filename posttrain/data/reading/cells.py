"""Read the cells of a record; every error names the record, the column and the reason."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

from posttrain.core.errors import DataError
from posttrain.data.reading.examples import Message
from posttrain.data.reading.records import Record

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
GOOD, BAD = ("true", "1", "+", "good", "desirable", "chosen"), ("false", "0", "-", "bad", "undesirable", "rejected")
LABELS = dict.fromkeys(GOOD, 1.0) | dict.fromkeys(BAD, 0.0)
SCORE_PAIRS = (
    ("chosen_score", "rejected_score"),
    ("score_chosen", "score_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_reward", "rejected_reward"),
    ("reward_chosen", "reward_rejected"),
    ("chosen_avg_rating", "rejected_avg_rating"),
)
"""Columns whose difference is the margin of a pair, in the spellings of public data sets."""
QUARANTINE = "data.on_bad_example: quarantine leaves such records out and counts them"
"""Advice for records of a public data set that cannot be used although nothing is wrong with the file."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message may have its reasoning, apart from its content."""
TRAIN_KEYS = ("weight", "train", "loss_weight", "loss")
"""Keys that say whether a message is trained on: OpenAI, axolotl, LLaMA-Factory, AgentInstruct and ms-swift."""
WEIGHT_COLUMNS = ("weight", "loss_weight", "sample_weight")
"""Columns with the weight of a whole example."""
MESSAGE_KEYS = {
    *("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call", "train_detail"),
    *(*REASONING, *TRAIN_KEYS),
}
"""Keys of a message that are read."""
TEMPLATE_OPTIONS = "chat_template_kwargs"
"""A column with values for the chat template (smoltalk2, TRL)."""
CONTEXT_COLUMNS = ("context", "passage", "article")
"""Columns with a text that a question is about."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
MEDIA_MARK = re.compile(r"\A\s*<(?:image|video|audio)>|<(?:image|video|audio)>\s*\Z")
"""Stands for a picture, a video or a sound at the beginning or the end of a user's message (LLaVA, LLaMA-Factory)."""
DIALOGUE_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
HELPSTEER_TURN = re.compile(r"\s*<extra_id_1>(User|Assistant)\n")
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
TOOL_RESPONSE = re.compile(r"\A\s*<tool_response>\s*(.*?)\s*</tool_response>\s*\Z", re.DOTALL)


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
        found = str(value) if isinstance(value, float) and not math.isfinite(value) else type(value).__name__
        first = isinstance(value, list) and bool(value) and column in record.values
        take = f'; to take its first item: data.map_keys {{"{column}": "{column}.0"}}' if first else ""
        raise cell_error(record, column, f"expected text, found {found}{take}")
    return value


def filled_text(record: Record, column: str, value: Any, what: str) -> str:
    """Check that a value is text and not blank."""
    text = text_of(record, column, value)
    if not text or text.isspace():
        raise cell_error(record, column, f"empty {what}")
    return text


def list_of(record: Record, column: str) -> list[Any]:
    """Return a cell, which must be a non-empty list, or JSON text of one."""
    value = value_of(record, column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(record, column, value)
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


def number_as_text(value: Any) -> Any:
    """Return a number as text, as it would be in a csv file; other values, and NaN, unchanged."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return str(value) if is_number else value


def object_of(record: Record, column: str, value: Any) -> dict[str, Any]:
    """Check that a value is an object."""
    if not isinstance(value, dict):
        raise cell_error(record, column, f"expected an object, found {type(value).__name__}")
    return value


def nested_value(record: Record, path: str) -> Any:
    """Return a value inside a cell, such as `info.title` or `answers.0.text`, which must not be null.

    Names are keys of objects and numbers are indices of lists; text is parsed as JSON where the path goes on in it.
    """
    if path in record.values:
        return value_of(record, path)
    value: Any = record.values
    for part in path.split("."):
        if isinstance(value, str):
            value = parse_json(record, path, value)
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.lstrip("-").isdigit() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            raise cell_error(record, path, f"{part!r} is missing there")
    if value is None:
        raise cell_error(record, path, "null")
    return value


def label_of(record: Record, column: str, value: Any, soft: bool = False) -> float:
    """Return 1 for good and 0 for bad; `soft` also allows probabilities."""
    if value is None:
        raise cell_error(record, column, "null")
    if isinstance(value, str) and value.strip().lower() in LABELS:
        return LABELS[value.strip().lower()]
    if isinstance(value, int | float) and (value in (0, 1) or (soft and 0 <= value <= 1)):
        return float(value)
    wanted = 'true/false, 0/1, "+"/"-" or a number from 0 to 1' if soft else "true/false, 0/1 or good/bad"
    convert = 'convert it with a function, data.map_keys {"function": "FILE.py:FUNCTION"}'
    raise cell_error(record, column, f"expected {wanted}, found {value!r}; {convert}")


def margin_of(record: Record) -> float | None:
    """Return by how much the chosen completion is better; None if the record has no margin and no scores."""
    if record.values.get("margin") is not None:
        return number_of(record, "margin")
    for chosen, rejected in SCORE_PAIRS:
        if record.values.get(chosen) is not None and record.values.get(rejected) is not None:
            return number_of(record, chosen) - number_of(record, rejected)
    return None


# Conversations


def messages_of(record: Record, column: str, allow_tools: bool = False) -> list[Message]:
    """Return a cell, which must be a list of messages."""
    if not allow_tools:
        refuse_tools(record)
    return [message_of(record, f"{column}[{index}]", value) for index, value in enumerate(list_of(record, column))]


def message_of(record: Record, column: str, value: Any) -> Message:
    """Read a message with the keys role and content, or from and value."""
    if not isinstance(value, dict):
        raise cell_error(record, column, f"expected a message with role and content, found {type(value).__name__}")
    role_key, content_key = ("role", "content") if value.get("from") is None else ("from", "value")
    value = _with_tool_calls(record, column, value)
    calls = value.get("tool_calls")
    for key in (role_key, content_key):
        if key not in value and not (calls and key == content_key):
            raise cell_error(record, column, f"the message has no {key!r}; its keys are {', '.join(map(str, value))}")
    role = text_of(record, f"{column}.{role_key}", value[role_key]).lower()
    if role not in ROLES:
        tags = json.dumps({"role_tag": role_key, "content_tag": content_key, "assistant_tag": value[role_key]})
        fix = f'if it is the assistant\'s, data.map_keys {{"tags": {tags}}}; likewise user_tag, system_tag'
        raise cell_error(
            record, f"{column}.{role_key}", f"unknown role {value[role_key]!r}; known are {', '.join(ROLES)}; {fix}"
        )
    value, content = _typed_parts(record, f"{column}.{content_key}", value, value.get(content_key))
    calls = value.get("tool_calls")
    if not isinstance(content, str):
        content = "" if content is None and calls else content_of(record, f"{column}.{content_key}", content)
    message = make_message(ROLES[role], content)
    if message["role"] == "user":
        _refuse_media_mark(record, f"{column}.{content_key}", content)
    if role == "function_call":
        calls = parse_json(record, f"{column}.{content_key}", content)
        calls, message["content"] = calls if isinstance(calls, list) else [calls], ""
    elif message["role"] == "assistant" and not calls and TOOL_CALL.search(content):
        where = f"{column}.{content_key}"
        calls = [parse_json(record, where, call) for call in TOOL_CALL.findall(content)]
        message["content"] = TOOL_CALL.sub("", content).strip()
    if calls:
        if message["role"] != "assistant":
            raise cell_error(record, column, "only messages of the assistant can have tool_calls")
        message["tool_calls"] = tool_calls_of(record, f"{column}.tool_calls", calls)
    elif message["role"] == "tool":  # some templates write which call a result belongs to
        message |= {key: value[key] for key in ("name", "tool_call_id") if isinstance(value.get(key), str)}
        if result := TOOL_RESPONSE.match(content):  # the template writes the tags
            message["content"] = result[1]
    if reasoning := _reasoning_of(record, column, value, message["role"]):
        message["reasoning_content"] = reasoning
    if not _is_trained(record, column, value, message["role"]):
        message["train"] = False
    return message


def _with_tool_calls(record: Record, column: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with OpenAI's earlier key `function_call` as a tool call."""
    call = message.get("function_call")
    if not call:
        return message
    if message.get("tool_calls"):
        raise cell_error(record, column, "has both function_call and tool_calls; keep one of them")
    return {**message, "tool_calls": [call]}


def _typed_parts(record: Record, column: str, message: dict[str, Any], content: Any) -> tuple[dict[str, Any], Any]:
    """Move reasoning and tool calls among the parts of a content (LLaMA-Factory v1) to the keys of the message."""
    if not isinstance(content, list) or not any(isinstance(part, dict) and "value" in part for part in content):
        return message, content
    kept: list[Any] = []
    further: dict[str, Any] = {}
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "reasoning":
            further["reasoning_content"] = further.get("reasoning_content", "") + str(part["value"])
        elif kind == "tool_call":
            call = parse_json(record, f"{column}[{index}].value", part["value"])
            further.setdefault("tool_calls", []).extend(call if isinstance(call, list) else [call])
        else:
            kept.append(part)
    return {**message, **further}, kept


def _reasoning_of(record: Record, column: str, value: dict[str, Any], role: str) -> str:
    """Return the reasoning of a message, which is separate from its content, or ""."""
    found = {key: value[key] for key in REASONING if value.get(key)}
    for key, text in found.items():
        if role != "assistant":
            raise cell_error(record, f"{column}.{key}", "only messages of the assistant can have reasoning")
        text_of(record, f"{column}.{key}", text)
    if len(set(found.values())) > 1:
        raise cell_error(record, column, f"{' and '.join(found)} differ; keep one of them")
    return next(iter(found.values()), "")


def _is_trained(record: Record, column: str, value: dict[str, Any], role: str) -> bool:
    """Return whether the keys of a message allow training on it; its role and position are checked elsewhere."""
    if value.get("train_detail") is not None:
        raise cell_error(record, f"{column}.train_detail", "parts of a message cannot be masked; use train, for all")
    given = {key: value[key] for key in TRAIN_KEYS if value.get(key) is not None}
    for key, weight in given.items():
        if weight not in (0, 1):  # true and false are 1 and 0
            raise cell_error(record, f"{column}.{key}", f"is {weight!r}; a message is trained on (1) or not (0)")
        if weight and role != "assistant" and key != "weight":
            raise cell_error(record, f"{column}.{key}", f"is {weight!r}, but only the assistant's text is trained on")
    if len(set(map(int, given.values()))) > 1:
        raise cell_error(record, column, f"{' and '.join(given)} contradict each other")
    return all(given.values())


def _refuse_media_mark(record: Record, column: str, text: str) -> None:
    if "<" in text and (mark := MEDIA_MARK.search(text)):
        raise cell_error(record, column, f"contains {mark.group().strip()}; only text can be trained on")


def refuse_media(record: Record) -> None:
    """Raise a DataError if the record has pictures, videos, sounds or bytes, which would be left out silently."""
    for column, value in record.values.items():
        if (column in MEDIA_COLUMNS and value) or _has_bytes(value):
            remove = f'to train on the text alone, remove the column with data.map_keys {{"{column}": ""}}'
            kind = "holds bytes; " if column not in MEDIA_COLUMNS else ""
            raise cell_error(record, column, f"{kind}only text can be trained on; {remove}")


def refuse_template_options(record: Record) -> None:
    """Raise a DataError if the record has values for the chat template, which would write another text with them."""
    options = record.values.get(TEMPLATE_OPTIONS)
    if isinstance(options, dict) and (given := [key for key, value in options.items() if value not in (None, "", [])]):
        remove = f'remove the column with data.map_keys {{"{TEMPLATE_OPTIONS}": ""}}'
        reason = f"the chat template cannot be given {', '.join(map(str, given))}; put the text into messages and tools"
        raise cell_error(record, TEMPLATE_OPTIONS, f"{reason}, or {remove}")


def refuse_weight(record: Record) -> None:
    """Raise a DataError if the whole example has a weight, which would have no effect."""
    for column in WEIGHT_COLUMNS:
        value = record.values.get(column)
        if value is not None and number_of(record, column) != 1:
            remove = f'leave such examples out, or remove the column with data.map_keys {{"{column}": ""}}'
            raise cell_error(record, column, f"is {value!r}: examples cannot be weighted; {remove}")


def refuse_tools(record: Record) -> None:
    """Raise a DataError if tools are defined for a format that cannot give them to the chat template."""
    if record.values.get("tools"):
        raise cell_error(record, "tools", "this format does not support tool definitions; write them into the text")


def refuse_unused_context(record: Record, used: Collection[str], question: str) -> None:
    """Raise a DataError if a text that the column `question` is about would be left out of the prompt."""
    for column in CONTEXT_COLUMNS:
        if column not in used and isinstance(record.values.get(column), str) and record.values[column].strip():
            join = f'{{"{question}": "{{{column}}}\\n\\n{{{question}}}"}}'
            reason = f"would not be part of the prompt; join it with the question by data.map_keys {join}"
            raise cell_error(record, column, f'{reason}, or remove it with {{"{column}": ""}}')


def _has_bytes(value: Any) -> bool:
    """Whether a cell is bytes, or a structure with bytes, as parquet files store pictures."""
    if isinstance(value, dict):
        return any(isinstance(item, bytes) for item in value.values())
    if isinstance(value, list) and value:
        return _has_bytes(value[0])
    return isinstance(value, bytes)


def content_of(record: Record, column: str, value: Any) -> str:
    """Read a content: text, or a list of text parts."""
    if not isinstance(value, list):
        return text_of(record, column, value)
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise cell_error(record, f"{column}[{index}]", f"a part of type {kind!r}; only text is supported")
        text = part.get("text", part.get("value")) if isinstance(part, dict) else part
        texts.append(text_of(record, f"{column}[{index}]", text))
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
    """Read a prompt: messages, or text of the user; the column `system` comes first."""
    value = value_of(record, column)
    if isinstance(value, str) and not _is_json_messages(value):
        text = filled_text(record, column, value, "prompt")
        _refuse_media_mark(record, column, text)
        messages = prompt_turns(text)
    else:
        messages = messages_of(record, column, allow_tools)
    if not messages or messages[-1]["role"] == "assistant":
        raise cell_error(record, column, "the last message of a prompt must not be the assistant's")
    return with_system(record, column, without_train_key(messages))


def _is_json_messages(text: str) -> bool:
    """Whether a text is a JSON list of messages, as some files store conversations."""
    if not re.match(r"\s*\[\s*\{", text):
        return False
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return all(isinstance(message, dict) and ("role" in message or "from" in message) for message in messages)


def prompt_turns(text: str) -> list[Message]:
    """Return the turns of a prompt that is a dialogue (hh-rlhf, Nectar, HelpSteer2), else the text as one message."""
    first, *parts = HELPSTEER_TURN.split(text)
    if parts and first.strip():
        turns = zip(parts[::2], parts[1::2], strict=True)
        later = [make_message(name.lower(), content.strip()) for name, content in turns]
        return [make_message("user", first.strip()), *later]
    messages = dialogue_of(text)
    if {message["role"] for message in messages} != {"user", "assistant"} or messages[0]["role"] != "user":
        return [make_message("user", text)]
    if messages[-1]["role"] == "assistant" and not messages[-1]["content"]:  # "Assistant:" asks for a completion
        messages.pop()
    return messages


def dialogue_of(text: str) -> list[Message]:
    """Return the turns of a text in the form "\\n\\nHuman: ...\\n\\nAssistant: ..."; [] if it has another form.

    A repeated marker continues the turn.
    """
    before, *parts = DIALOGUE_TURN.split(text)
    if before.strip():
        return []
    messages: list[Message] = []
    for name, content in zip(parts[0::2], parts[1::2], strict=True):
        role = ROLES[name.lower()]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{content.strip()}".strip()
        else:
            messages.append(make_message(role, content.strip()))
    return messages


def completion_of(record: Record, column: str, prompt: list[Message]) -> list[Message]:
    """Read a completion: text, a message, or messages that may repeat the prompt first."""
    value = value_of(record, column)
    if isinstance(value, str):
        return [make_message("assistant", filled_text(record, column, value, "completion"))]
    messages = [message_of(record, column, value)] if isinstance(value, dict) else messages_of(record, column)
    beginning = [message for message in prompt if message["role"] != "system" or messages[0]["role"] == "system"]
    if without_train_key(messages[: len(beginning)]) == beginning:
        messages = messages[len(beginning) :]
    if not messages or messages[0]["role"] != "assistant":
        whole = 'if it is a whole conversation, remove the prompt with data.map_keys {"prompt": ""}'
        raise cell_error(record, column, f"expected the assistant's message after the prompt; {whole}")
    check_assistant_messages(record, column, messages)
    if any("train" in message for message in messages):
        raise cell_error(record, column, "a completion is trained on whole: its messages cannot be excluded one by one")
    return messages


def without_train_key(messages: list[Message]) -> list[Message]:
    """Return the messages without the key `train`, which has no meaning in a prompt."""
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


def with_system(record: Record, column: str, messages: list[Message]) -> list[Message]:
    """Put the text of the column `system` before the messages; they must not have another system message."""
    system = system_of(record)
    if not system or messages[:1] == system:
        return messages
    if messages and messages[0]["role"] == "system":
        raise cell_error(record, "system", f"differs from the system message in {column}; remove one of them")
    return system + messages


def check_same_prompt(record: Record, column: str, messages: list[Message]) -> None:
    """Check a column `prompt` next to a conversation: it must be a message of the user, or the first messages."""
    prompt = record.values.get("prompt")
    if not prompt:
        return
    if isinstance(prompt, str) and not _is_json_messages(prompt):
        same = any(m["role"] == "user" and m["content"].strip() == prompt.strip() for m in messages)
    else:
        first = messages_of(record, "prompt", allow_tools=True)
        same = without_train_key(messages[: len(first)]) == without_train_key(first)
    if not same:
        remove = f'remove one with data.map_keys, {{"prompt": ""}} or {{"{column}": ""}}'
        raise cell_error(record, "prompt", f"is not a part of {column}; which of them is meant is not clear: {remove}")


def is_plain(record: Record, prompt: list[Message], *columns: str) -> bool:
    """Whether these cells are plain text and the prompt is one of them, unchanged: no chat template is needed."""
    texts = [record.values[column] for column in columns]
    return all(isinstance(text, str) for text in texts) and len(prompt) == 1 and prompt[0]["content"] in texts


def make_message(role: str, content: str) -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def system_of(record: Record) -> list[Message]:
    """Return the system message as a list, empty if there is none; the column may have one of three names."""
    found = {column: text for column in SYSTEM_COLUMNS if (text := optional_text(record, column))}
    if len(set(found.values())) > 1:
        first, second, *_ = found
        raise cell_error(record, second, f"differs from the column {first}; remove one of them")
    return [make_message("system", text) for text in list(found.values())[:1]]
