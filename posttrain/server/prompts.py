"""Turns a request's body into token ids, in a few threads. Tokenizers are not thread-safe, so each has its own."""

from __future__ import annotations

import asyncio
import copy
import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.errors import PosttrainError, UsageError, tokenizer_errors
from posttrain.core.types import Ints
from posttrain.data.encoding.conversation import encode_conversation
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.encoding.tool_formats import message_grammar, without_dropped_reasoning
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.messages import MessageFormat
from posttrain.endpoint.protocol import CompletionRequest
from posttrain.endpoint.request_fields import parse_body
from posttrain.engines.grammar import GrammarCompiler
from posttrain.inference.model import InferenceModel

FORGET_AFTER = 10_000  # conversations after which the encoder's cache of message shapes is dropped

Parse = Callable[[dict[str, Any]], CompletionRequest]
Prompts = tuple[CompletionRequest, list[Ints]]


class PromptReader:
    """Reads and checks one body after another."""

    def __init__(
        self,
        model: InferenceModel,
        *,
        name: str,
        max_tokens: int,
        max_length: int,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`max_tokens` of a completion, `max_length` of prompt and completion together; `grammars`: may be shared."""
        self.name, self.max_tokens, self.max_length = name, max_tokens, max_length
        self.adapters = model.adapters
        self.stop_ids, self.vocabulary = model.stop_ids, model.encoder.vocab_size
        self.tokenizer: Any = copy.deepcopy(model.tokenizer)
        self.encoder = Encoder(self.tokenizer, model.encoder.config, "prompt", self.vocabulary)
        self.conversations = 0
        self.grammars = grammars or GrammarCompiler(self.tokenizer, self.vocabulary, self.stop_ids)
        self.format = MessageFormat(self.tokenizer, self.stop_ids, name)

    def read(self, raw: bytes, parse: Parse) -> Prompts:
        """Return the request and its prompts as tokens; raise ApiError if it is not valid."""
        body = parse_body(raw)
        asked = body.get("model")
        if asked is not None and asked not in (self.name, *self.adapters):
            names = ", ".join((self.name, *self.adapters))
            message = f"unknown model {json.dumps(asked)[:80]}; this server has {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        request = parse(body)
        request.adapter = "" if asked in (None, self.name) else asked
        if request.adapter and request.prompt_logprobs is not None:
            message = f"prompt_logprobs are those of {self.name}, not of its adapters"
            raise ApiError(400, message, param="prompt_logprobs")
        if request.adapter and request.echo and request.logprobs:
            message = f"echo with logprobs: log-probabilities of prompts are those of {self.name}, not of its adapters"
            raise ApiError(400, message, param="echo")
        try:
            prompts = [self.conversation(request)] if request.chat else [self.tokens(p) for p in request.prompts]
        except PosttrainError as error:
            raise ApiError(400, str(error), param="messages" if request.chat else "prompt") from None
        if request.chat:
            self.plan_message(request, prompts[0])
        limit = min(self.limit(len(prompt), request) for prompt in prompts)
        stop_ids = () if request.ignore_eos else self.stop_ids
        request.sampling = replace(request.sampling, max_tokens=limit, stop_ids=stop_ids)
        return request, prompts

    def conversation(self, request: CompletionRequest) -> Ints:
        self.conversations += 1
        if self.conversations % FORGET_AFTER == 0:
            self.encoder = Encoder(self.tokenizer, self.encoder.config, "prompt", self.vocabulary)
        messages = without_dropped_reasoning(request.messages, self.tokenizer.chat_template)
        tools = self.format.tools_of(request)
        return encode_conversation(self.encoder, messages, self.name, tools).tokens

    def plan_message(self, request: CompletionRequest, prompt: Ints) -> None:
        """Set how the completion is read as a message, and the grammar that it must follow, if any."""
        self.format.set_parsing(request, prompt)
        tools, schema = request.output.tools, request.output.schema
        free = tools is not None and tools.choice == "auto"
        if schema is None and (tools is None or (free and not tools.strict)):
            return
        grammar = message_grammar(
            request.parsing.tools,
            tools.callable_tools() if tools else (),
            literal=self.literal,
            schema=schema if tools is None or free else None,
            text=free and schema is None,
            several=request.parsing.several,
            in_reasoning=request.parsing.in_reasoning,
        )
        try:
            request.constraint = self.grammars.compile(grammar)
        except UsageError as error:
            where = "response_format" if schema is not None else "tools"
            raise ApiError(400, f"{where}: {error}", param=where) from None

    def literal(self, text: str) -> str:
        """Write a text in a grammar: as a token if it is a special one, as a string otherwise."""
        special = self.format.special
        return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)

    def tokens(self, prompt: str | list[int]) -> Ints:
        """Encode a text; control tokens in it count as such, since clients of this API apply the chat template."""
        with tokenizer_errors("prompt"):
            ids = self.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "the tokenizer has no tokens for the prompt", param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise ApiError(400, f"prompt: tokens must be from 0 to {self.vocabulary - 1}", param="prompt")
        return np.array(ids, dtype=np.int32)

    def limit(self, length: int, request: CompletionRequest) -> int:
        """Return how many tokens the completion may have after a prompt of `length` tokens."""
        asked = request.sampling.max_tokens if request.generate else 0
        where = "messages" if request.chat else "prompt"
        code = "context_length_exceeded"
        if length >= self.max_length:
            message = f"the prompt has {length} tokens; prompt and completion may have {self.max_length} together"
            raise ApiError(400, message, param=where, code=code)
        if asked > self.max_tokens:
            raise ApiError(400, f"max_tokens is {asked}; this server allows {self.max_tokens}", param="max_tokens")
        if asked and length + asked > self.max_length:
            message = f"{length} tokens of the prompt and max_tokens {asked} are more than {self.max_length} together"
            raise ApiError(400, message, param="max_tokens", code=code)
        return asked or min(self.max_tokens, self.max_length - length)


class PromptThreads:
    """Runs one thread per reader. A body whose client has disconnected is skipped."""

    def __init__(self, readers: Sequence[PromptReader]) -> None:
        self.bodies: queue.SimpleQueue[tuple[Future[Prompts], bytes, Parse] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self.work, args=(reader,), name=f"prompts-{number}", daemon=True)
            for number, reader in enumerate(readers)
        ]
        for thread in self.threads:
            thread.start()

    async def read(self, raw: bytes, parse: Parse) -> Prompts:
        """Read a body in a thread; if the caller is cancelled while it is queued, it is not read."""
        future: Future[Prompts] = Future()
        self.bodies.put((future, raw, parse))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads after what they are reading; does not wait for them."""
        for _ in self.threads:
            self.bodies.put(None)

    def work(self, reader: PromptReader) -> None:
        while (job := self.bodies.get()) is not None:
            future, raw, parse = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(reader.read(raw, parse))
            except BaseException as error:
                future.set_exception(error)  # for the request that waits
                if not isinstance(error, Exception):
                    raise
