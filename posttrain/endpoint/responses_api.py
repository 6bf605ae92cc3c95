"""OpenAI's Responses API, `/v1/responses`: requests as those of chat completions, and responses as items and events.

Nothing is stored: a client sends all items of its conversation with each request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from posttrain.data.encoding.tool_formats import MessageDelta
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.protocol import CompletionRequest, ResponseFormat, TokenLogprob, read_chat
from posttrain.endpoint.request_fields import wrong_field

SAME = {"model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_k", "min_p", "repetition_penalty"}
SAME |= {"seed", "stop"}  # not part of OpenAI's API, as the three before
WITHOUT_EFFECT = {"metadata", "store", "user", "service_tier", "safety_identifier", "prompt_cache_key"}
WITHOUT_EFFECT |= {"prompt_cache_retention", "stream_options"}
# Fields that are accepted only with a value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "top_logprobs": (0,),
}
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
INCOMPLETE = "max_output_tokens"
OWN_NAMES = {"max_tokens": INCOMPLETE, "response_format": "text.format"}  # of fields of chat completions


def read_responses(body: dict[str, Any]) -> CompletionRequest:
    """Read a request of the Responses API; errors name its own fields."""
    given = {name: value for name, value in body.items() if value is not None}
    chat = {name: given.pop(name) for name in SAME if name in given}
    shown = {name: given.get(name) for name in ("instructions", "metadata")}
    chat["messages"] = read_items(given.pop("input", None), given.pop("instructions", None))
    if "max_output_tokens" in given:
        chat["max_tokens"] = given.pop("max_output_tokens")
        shown["max_output_tokens"] = chat["max_tokens"]
    shown["tools"] = given.get("tools", [])
    if "tools" in given:
        chat["tools"] = read_tools(given.pop("tools"))
    shown["tool_choice"] = given.get("tool_choice", "auto")
    if "tool_choice" in given:
        chat["tool_choice"] = read_choice(given.pop("tool_choice"))
    shown["text"] = given.get("text") or {"format": {"type": "text"}}
    if "text" in given:
        chat["response_format"] = read_text_format(given.pop("text"))
    for name in [name for name in given if name in NEUTRAL]:
        if given.pop(name) not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
    if unknown := set(given) - WITHOUT_EFFECT:
        name = min(unknown)
        hint = "; responses are not stored: send all items in input" if name == "previous_response_id" else ""
        raise ApiError(400, f"{name} is not supported by this server{hint}", param=name, code="unsupported_parameter")
    try:
        request = read_chat(chat)
    except ApiError as error:
        found, param = str(error), error.param or ""
        if param.startswith("messages"):  # the error names the message that an item is part of
            raise ApiError(400, f"input, read as messages: {found}", param="input", code=error.code) from None
        if param in OWN_NAMES:
            own = OWN_NAMES[param]
            raise ApiError(400, found.replace(param, own), param=own, code=error.code) from None
        raise
    request.responses = shown | {
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
    }
    return request


def read_items(value: Any, instructions: Any) -> list[dict[str, Any]]:
    """Return `instructions` and `input` as messages of chat completions; items of one reply become one message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong_field("input", value, "a text, or a list of items")
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    reply: dict[str, Any] | None = None  # the message of the assistant that further items are part of
    for place, item in enumerate(value):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise wrong_field(where, item, "an object")
        kind = item.get("type", "message")
        is_reply = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if not is_reply:
            messages.append(other_item(item, kind, where))
            reply = None
            continue
        full = reply is not None and (bool(reply["content"]) or "tool_calls" in reply)
        if reply is None or (full and kind == "reasoning") or (kind == "message" and full):
            reply = {"role": "assistant", "content": ""}
            messages.append(reply)
        add_to_reply(reply, item, kind, where)
    return messages


def add_to_reply(reply: dict[str, Any], item: dict[str, Any], kind: str, where: str) -> None:
    """Add an item to the message of the assistant that it is part of."""
    if kind == "message":
        reply["content"] = text_of(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        reply["reasoning_content"] = text_of(parts, f"{where}.content")
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        reply.setdefault("tool_calls", []).append(call)


def other_item(item: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Return an item that the model has not written as a message."""
    if kind == "function_call_output":
        output = text_of(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), f"{where}.content")}
    raise ApiError(
        400,
        f"{where}.type is {json.dumps(kind)[:60]}; expected message, reasoning, function_call or function_call_output",
        param=f"{where}.type",
    )


def text_of(value: Any, where: str) -> Any:
    """Return the text of `content` or `output`: a text, or a list of parts."""
    if not isinstance(value, list):
        return value  # checked when the message is read
    texts: list[str] = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else None
        if not isinstance(text, str):
            raise ApiError(400, f"{where}: this model reads text only", param=where)
        texts.append(text)
    return "".join(texts)


def read_tools(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise wrong_field("tools", value, "a list of tools")
    for place, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ApiError(400, f"tools[{place}]: this server has tools of the type function only", param="tools")
    return [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in value]


def read_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def read_text_format(value: Any) -> Any:
    """Return `text` as the `response_format` of chat completions."""
    if not isinstance(value, dict) or set(value) - {"format", "verbosity"} or value.get("verbosity") is not None:
        raise wrong_field("text", value, "an object with format")
    format = value.get("format") or {"type": "text"}
    if isinstance(format, dict) and format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}
    return format


class ResponsesFormat(ResponseFormat):
    """Builds responses of the Responses API, whole or as events: reasoning, a message, and calls are items."""

    def __init__(self, model: str, id_length: int, shown: dict[str, Any]) -> None:
        """`shown`: fields of the request that the response repeats."""
        super().__init__(True, model, id_length)
        self.shown = shown
        self.items: list[dict[str, Any]] = []  # of a stream, so far; the last one may go on
        self.open = False  # whether it does
        self.number = 0  # of the next event
        self.finish = ""

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        (choice,) = choices
        message, ended = choice["message"], choice["finish_reason"] != "length"
        items: list[dict[str, Any]] = []
        if reasoning := message.get("reasoning_content"):
            items.append(self.item("reasoning", len(items), reasoning))
        calls = message.get("tool_calls", ())
        if message["content"] or not calls:  # clients leave reasoning out: the message says that there was a turn
            items.append(self.item("message", len(items), message["content"] or ""))
        items += [self.call_item(call, len(items) + place) for place, call in enumerate(calls)]
        if not ended:
            items[-1]["status"] = "incomplete"
        return self.response(items, "completed" if ended else "incomplete", usage)

    def response(self, items: list[dict[str, Any]], status: str, usage: dict[str, int] | None) -> dict[str, Any]:
        """Return the object that a response is, and that the first and last events of a stream hold."""
        counts: dict[str, Any] | None = usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": INCOMPLETE} if status == "incomplete" else None,
            "model": self.model,
            "output": items,
            "previous_response_id": None,
            "store": False,
            **self.shown,
            "usage": counts,
        }

    def item(self, kind: str, place: int, text: str, status: str = "completed") -> dict[str, Any]:
        """Return an item with one text: the message, or its reasoning."""
        if kind == "reasoning":
            parts = [{"type": "reasoning_text", "text": text}]
            return {"type": kind, "id": f"rs_{self.name}_{place}", "summary": [], "content": parts, "status": status}
        parts = [self.text_part(text)]
        name = f"msg_{self.name}_{place}"
        return {"type": kind, "id": name, "role": "assistant", "status": status, "content": parts}

    @staticmethod
    def text_part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def call_item(self, call: dict[str, Any], place: int) -> dict[str, Any]:
        start = {"type": "function_call", "id": f"fc_{self.name}_{place}", "call_id": call["id"]}
        return {**start, **call["function"], "status": "completed"}

    def chunk(
        self,
        index: int,
        text: str | MessageDelta,
        tokens: Sequence[TokenLogprob] | None,
        finish: str | None,
        *,
        first: bool = False,
        seed: int = 0,
        calls_before: int = 0,
    ) -> bytes:
        assert isinstance(text, MessageDelta), "responses are messages"
        events: list[bytes] = []
        if first:
            begun = self.response([], "in_progress", None)
            events += [
                self.event("response.created", response=begun),
                self.event("response.in_progress", response=begun),
            ]
        if text.reasoning:
            self.add_text("reasoning", text.reasoning, events)
        if text.content:
            self.add_text("message", text.content, events)
        for call in self.calls(text, seed, calls_before):
            self.add_call(call, events)
        if finish:
            self.finish = finish
            if all(item["type"] == "reasoning" for item in self.items):  # as above
                self.add_text("message", "", events)
            self.close_item(events, "incomplete" if finish == "length" else "completed")
        return b"".join(events)

    def last(self, usage: dict[str, int], *, show_usage: bool) -> bytes:
        status = "incomplete" if self.finish == "length" else "completed"
        return self.event(f"response.{status}", response=self.response(self.items, status, usage))

    def event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        shown = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {shown}\n\n".encode()

    def place(self) -> dict[str, Any]:
        """Return the fields by which an event names the last item."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def add_text(self, kind: str, text: str, events: list[bytes]) -> None:
        """Add text to the item of this kind, which begins if the last one is another."""
        if not self.open or self.items[-1]["type"] != kind:
            self.close_item(events)
            self.items.append(self.item(kind, len(self.items), "", "in_progress"))
            self.open = True
            begun = {**self.items[-1], "content": []}
            events.append(self.event("response.output_item.added", output_index=len(self.items) - 1, item=begun))
            part = self.items[-1]["content"][0]
            events.append(self.event("response.content_part.added", **self.place(), content_index=0, part=dict(part)))
        self.items[-1]["content"][0]["text"] += text
        if text:
            added: dict[str, Any] = {"delta": text} | ({"logprobs": []} if kind == "message" else {})
            name = "output_text" if kind == "message" else "reasoning_text"
            events.append(self.event(f"response.{name}.delta", **self.place(), content_index=0, **added))

    def close_item(self, events: list[bytes], status: str = "completed") -> None:
        """End the last item, if it is one with text that goes on."""
        if not self.open:
            return
        self.open, item = False, self.items[-1]
        item["status"] = status
        part = item["content"][0]
        said: dict[str, Any] = {"text": part["text"]} | ({"logprobs": []} if item["type"] == "message" else {})
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        events.append(self.event(f"response.{name}.done", **self.place(), content_index=0, **said))
        events.append(self.event("response.content_part.done", **self.place(), content_index=0, part=part))
        events.append(self.event("response.output_item.done", output_index=len(self.items) - 1, item=item))

    def add_call(self, call: dict[str, Any], events: list[bytes]) -> None:
        """Add a call, which is complete when it is sent."""
        self.close_item(events)
        item = self.call_item(call, len(self.items))
        self.items.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        events.append(self.event("response.output_item.added", output_index=len(self.items) - 1, item=begun))
        arguments = item["arguments"]
        events.append(self.event("response.function_call_arguments.delta", **self.place(), delta=arguments))
        done = {"name": item["name"], "arguments": arguments}
        events.append(self.event("response.function_call_arguments.done", **self.place(), **done))
        events.append(self.event("response.output_item.done", output_index=len(self.items) - 1, item=item))
