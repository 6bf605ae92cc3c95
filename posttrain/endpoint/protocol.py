"""OpenAI's API in JSON: requests, checked field by field, and the shape of responses."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.encoding.tool_formats import MessageDelta, MessageParser, ToolFormat, read_object
from posttrain.data.reading.examples import Message
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.request_fields import RequestFields, wrong_field
from posttrain.endpoint.tools import Output, read_output
from posttrain.engines.base import Sampling
from posttrain.engines.grammar import GrammarConstraint

MAX_CHOICES = 128  # completions per request
MAX_MESSAGES = 1024  # per conversation; the time to encode them grows with their square
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1024  # of each token of a prompt; for teachers of distillation
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
COMMON = {"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "stop", "seed"}
COMMON |= {"stream", "stream_options", "logprobs", "ignore_eos"}


@dataclass(slots=True, frozen=True)
class ParseOptions:
    """How the text of a completion becomes a message; see MessageParser."""

    tools: ToolFormat | None = None
    thinks: bool = False
    in_reasoning: bool = False
    several: bool = True
    marks: frozenset[int] = frozenset()  # special tokens that are part of the format

    def parser(self) -> MessageParser:
        return MessageParser(self.tools, thinks=self.thinks, in_reasoning=self.in_reasoning, several=self.several)


@dataclass(slots=True, kw_only=True)
class CompletionRequest:
    """The body of a request, read and checked."""

    chat: bool
    adapter: str = ""  # that the field `model` names
    messages: list[Message] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)  # of /v1/completions
    sampling: Sampling  # without stop ids, which are the model's; max_tokens 0: as many as there is room for
    n: int = 1
    seed: int | None = None
    stream: bool = False
    usage: bool = False  # a last event with the token counts, for streams
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    echo: bool = False  # the response begins with the prompt
    prompt_logprobs: int | None = None  # likeliest tokens at each place of the prompt, besides its own; None: not asked
    generate: bool = True  # without it only the prompt's log-probabilities are computed
    output: Output = field(default_factory=Output)
    parsing: ParseOptions = field(default_factory=ParseOptions)  # of the model's chat template
    constraint: GrammarConstraint | None = None
    end_texts: tuple[str, ...] = ()  # end a completion like stop texts, and are part of it
    responses: dict[str, Any] | None = None  # of /v1/responses: fields that the response repeats


def read_chat(body: dict[str, Any]) -> CompletionRequest:
    tools = {"tools", "tool_choice", "parallel_tool_calls", "response_format"}
    fields = RequestFields(body, COMMON | tools | {"messages", "max_completion_tokens", "top_logprobs"})
    top_logprobs = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    logprobs = fields.flag("logprobs")
    if top_logprobs and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    limit = "max_completion_tokens" if "max_completion_tokens" in fields.body else "max_tokens"
    output = read_output(fields)
    if fields.flag("ignore_eos") and (output.tools or output.schema):
        raise ApiError(400, "ignore_eos: a message with tools or a response_format has an end", param="ignore_eos")
    return CompletionRequest(
        chat=True,
        output=output,
        messages=read_messages(fields.body.get("messages")),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        **read_common(fields, limit, 0),
    )


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    fields = RequestFields(body, COMMON | {"prompt", "echo", "prompt_logprobs"})
    logprobs = "logprobs" in fields.body and fields.body["logprobs"] is not False
    echo, generate = fields.flag("echo"), fields.body.get("max_tokens") != 0
    if echo and not generate:
        del fields.body["max_tokens"]
    prompt_logprobs = None
    if fields.body.get("prompt_logprobs") is not None:
        prompt_logprobs = fields.integer("prompt_logprobs", 0, 0, MAX_PROMPT_LOGPROBS)
        if fields.flag("stream") or (echo and logprobs):
            raise ApiError(400, "prompt_logprobs: not with stream, nor with echo and logprobs", param="prompt_logprobs")
    return CompletionRequest(
        chat=False,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        generate=generate,
        prompts=read_prompts(fields.body.get("prompt")),
        logprobs=logprobs,
        top_logprobs=fields.integer("logprobs", 0, 0, MAX_TOP_LOGPROBS) if logprobs else 0,
        **read_common(fields, "max_tokens", 16),  # OpenAI's default
    )


def read_common(fields: RequestFields, limit: str, default_limit: int) -> dict[str, Any]:
    options = fields.body.get("stream_options", {})
    if not isinstance(options, dict):
        raise wrong_field("stream_options", options, "an object")
    top_k = fields.integer("top_k", 0, -1)
    sampling = Sampling(
        max_tokens=fields.integer(limit, default_limit, 1) if limit in fields.body else default_limit,
        temperature=fields.number("temperature", 1.0, 0.0, 100.0),
        top_p=fields.number("top_p", 1.0, 1e-6, 1.0),
        top_k=max(0, top_k),  # some clients write -1 for all
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        stop_texts=read_stops(fields.body.get("stop", [])),
    )
    return {
        "sampling": sampling,
        "n": fields.integer("n", 1, 1, MAX_CHOICES),
        "seed": fields.integer("seed", 0, -(2**63), 2**64) if "seed" in fields.body else None,
        "stream": fields.flag("stream"),
        "usage": options.get("include_usage") is True,
        "ignore_eos": fields.flag("ignore_eos"),
    }


def read_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise wrong_field("stop", value, f"a text, or at most {MAX_STOPS} texts")
    return tuple(read_string(stop, "stop") for stop in stops)


def read_messages(value: Any, where: str = "messages") -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{where} must be a list with at least one message", param=where)
    if len(value) > MAX_MESSAGES:
        raise ApiError(400, f"{where}: {len(value):,} messages; a conversation may have {MAX_MESSAGES:,}", param=where)
    return [read_message(message, f"{where}[{place}]") for place, message in enumerate(value)]


def read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise wrong_field(where, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong_field(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if isinstance(content, list):  # parts
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if None in parts:
            raise ApiError(400, f"{where}.content: this model reads text only", param=f"{where}.content")
        content = "".join(read_string(part, f"{where}.content", empty=True) for part in parts)
    calls = message.get("tool_calls")
    if content is None and calls:
        content = ""
    found: Message = {"role": ROLES[role], "content": read_string(content, f"{where}.content", empty=True)}
    if calls:
        found["tool_calls"] = read_calls(calls, f"{where}.tool_calls", role)
    if role == "tool":
        keys = [key for key in ("tool_call_id", "name") if message.get(key) is not None]
        found |= {key: read_string(message[key], f"{where}.{key}") for key in keys}
    reasoning = message.get("reasoning_content")
    if reasoning and role == "assistant":
        found["reasoning_content"] = read_string(reasoning, f"{where}.reasoning_content")
    return found


def read_calls(value: Any, where: str, role: str) -> list[dict[str, Any]]:
    """Read the tool calls of a message; arguments become objects, as chat templates expect them."""
    if role != "assistant" or not isinstance(value, list):
        raise ApiError(400, f"{where}: expected a list, in a message of the assistant", param=where)
    calls: list[dict[str, Any]] = []
    for place, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError(400, f"{where}[{place}]: expected a function with name and arguments", param=where)
        name = read_string(function.get("name"), f"{where}[{place}].function.name")
        text = read_string(function.get("arguments"), f"{where}[{place}].function.arguments")
        try:
            arguments = read_object(text)
        except (ValueError, RecursionError):
            raise wrong_field(
                f"{where}[{place}].function.arguments", text, "JSON text of an object, not too deeply nested"
            ) from None
        with_id = {"id": read_string(call["id"], f"{where}[{place}].id")} if call.get("id") is not None else {}
        calls.append({**with_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def read_prompts(value: Any) -> list[str | list[int]]:
    """Read `prompt`: a text, a list of token ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(is_token(part) for part in value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong_field("prompt", value, "a text, tokens, or a list of either")
    if len(value) > MAX_CHOICES:
        raise ApiError(400, f"{len(value)} prompts; one request may have {MAX_CHOICES}", param="prompt")
    prompts: list[str | list[int]] = []
    for place, prompt in enumerate(value):
        if isinstance(prompt, list) and prompt and all(is_token(part) for part in prompt):
            prompts.append(prompt)
        else:
            prompts.append(read_string(prompt, f"prompt[{place}]"))
    return prompts


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_string(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise wrong_field(where, value, "a text" if empty else "a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise ApiError(400, f"{where} contains half of a surrogate pair", param=where) from None
    return value


# Responses


@dataclass(slots=True)
class ResponseFormat:
    """Builds the JSON objects of one response, whole or in chunks, with the fields that all of them share."""

    chat: bool
    model: str
    id_length: int = 0  # of ids of tool calls; 0: as OpenAI's
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    def wrap(self, choices: list[dict[str, Any]], *, chunk: bool = False, **more: Any) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        name = f"chatcmpl-{self.name}" if self.chat else f"cmpl-{self.name}"
        start = {"id": name, "object": kind, "created": self.created, "model": self.model}
        return {**start, "choices": choices, **more}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """Return a whole response."""
        return self.wrap(choices, usage=usage)

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
        """Return the event with what is new of one choice."""
        choice = self.delta(index, text, tokens, finish, first=first, seed=seed, calls_before=calls_before)
        return event(self.wrap([choice], chunk=True))

    def last(self, usage: dict[str, int], *, show_usage: bool) -> bytes:
        """Return what ends a stream."""
        return (event(self.wrap([], chunk=True, usage=usage)) if show_usage else b"") + DONE

    def choice(
        self, index: int, text: str | MessageDelta, tokens: Sequence[TokenLogprob] | None, finish: str, seed: int
    ) -> dict[str, Any]:
        """Return one choice of a whole response; `seed`: of the ids of tool calls."""
        logprobs = self.logprobs(tokens)
        if isinstance(text, str):
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        message: dict[str, Any] = {"role": "assistant", "content": text.content, "refusal": None}
        if text.reasoning:
            message["reasoning_content"] = text.reasoning
        if text.calls:
            message["content"] = text.content or None
            message["tool_calls"] = self.calls(text, seed, 0)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def delta(
        self,
        index: int,
        text: str | MessageDelta,
        tokens: Sequence[TokenLogprob] | None,
        finish: str | None,
        *,
        first: bool = False,
        seed: int = 0,
        calls_before: int = 0,
    ) -> dict[str, Any]:
        """Return one choice of a chunk; `first`: of the stream's first event; `calls_before`: sent already."""
        logprobs = self.logprobs(tokens or None)
        if isinstance(text, str):
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text.content or first:
            delta["content"] = text.content
        if text.reasoning:
            delta["reasoning_content"] = text.reasoning
        if text.calls:
            calls = self.calls(text, seed, calls_before)
            delta["tool_calls"] = [{"index": calls_before + place, **call} for place, call in enumerate(calls)]
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def calls(self, message: MessageDelta, seed: int, before: int) -> list[dict[str, Any]]:
        """Return tool calls in OpenAI's shape. Ids depend on the completion's seed and the call's number only."""
        return [
            {
                "id": call.id or call_id(seed, before + place, self.id_length),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(message.calls)
        ]

    def logprobs(self, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        if self.chat:
            return {"content": [token.for_chat() for token in tokens], "refusal": None}
        return {
            "tokens": [token.text.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {other.text: logprob for other, logprob in reversed(token.top_logprobs)}  # the likelier of equal texts
                if token.logprob is not None
                else None
                for token in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }


@dataclass(slots=True, frozen=True)
class TokenText:
    """A token as text, which may be only part of a character, and as the bytes that it stands for."""

    text: str
    raw: bytes
    special: bool  # not part of a completion's text


@dataclass(slots=True)
class TokenLogprob:
    """A generated token with its log-probability, and the likeliest tokens at its position."""

    text: TokenText
    logprob: float | None  # None: no token comes before it
    top_logprobs: list[tuple[TokenText, float]]
    start: int  # where its text begins, in characters

    def for_chat(self) -> dict[str, Any]:
        shown = [
            {"token": text.text, "logprob": logprob, "bytes": list(text.raw)}
            for text, logprob in [(self.text, self.logprob), *self.top_logprobs]
        ]
        return {**shown[0], "top_logprobs": shown[1:]}


def call_id(seed: int, number: int, length: int) -> str:
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=12).hexdigest()
    return digest[:length] if length else f"call_{digest}"


def usage_of(prompt: int, completions: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completions, "total_tokens": prompt + completions}


def event(data: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
