"""From a request's body to token ids, in a few threads: each has a tokenizer of its own, which is not thread-safe."""

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

from posttrain.core.errors import PosttrainError
from posttrain.core.types import Ints
from posttrain.data.encoding.encoder import Encoder
from posttrain.inference.model import InferenceModel, encode_conversation
from posttrain.server.errors import ApiError
from posttrain.server.protocol import CompletionRequest, read_json

FORGET_AFTER = 10_000  # conversations, whose shapes the encoder remembers until then

Parse = Callable[[dict[str, Any]], CompletionRequest]
Prompts = tuple[CompletionRequest, list[Ints]]


class PromptReader:
    """Reads and checks one body after another."""

    def __init__(self, model: InferenceModel, *, name: str, max_tokens: int, max_length: int) -> None:
        """`max_tokens` of a completion, `max_length` of prompt and completion together."""
        self.name, self.max_tokens, self.max_length = name, max_tokens, max_length
        self.stop_ids, self.vocabulary = model.stop_ids, model.encoder.vocab_size
        self.tokenizer: Any = copy.deepcopy(model.tokenizer)
        self.encoder = Encoder(self.tokenizer, model.encoder.config, "prompt", self.vocabulary)
        self.conversations = 0

    def read(self, raw: bytes, parse: Parse) -> Prompts:
        """The request and its prompts as tokens; ApiError if something is wrong with it."""
        body = read_json(raw)
        asked = body.get("model")
        if asked is not None and asked != self.name:
            message = f"there is no model {json.dumps(asked)[:80]} here; there is {self.name}"
            raise ApiError(404, message, param="model", code="model_not_found")
        request = parse(body)
        try:
            prompts = [self.conversation(request)] if request.chat else [self.tokens(p) for p in request.prompts]
        except PosttrainError as error:
            raise ApiError(400, str(error), param="messages" if request.chat else "prompt") from None
        limit = min(self.limit(len(prompt), request) for prompt in prompts)
        stop_ids = () if request.ignore_eos else self.stop_ids
        request.sampling = replace(request.sampling, max_tokens=limit, stop_ids=stop_ids)
        return request, prompts

    def conversation(self, request: CompletionRequest) -> Ints:
        self.conversations += 1
        if self.conversations % FORGET_AFTER == 0:
            self.encoder = Encoder(self.tokenizer, self.encoder.config, "prompt", self.vocabulary)
        return encode_conversation(self.encoder, request.messages, self.name).tokens

    def tokens(self, prompt: str | list[int]) -> Ints:
        """Tokens of a text in which control tokens are control tokens: who sends a text has applied a template."""
        ids = self.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, "the tokenizer has no tokens for the prompt", param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise ApiError(400, f"prompt: tokens must be from 0 to {self.vocabulary - 1}", param="prompt")
        return np.array(ids, dtype=np.int32)

    def limit(self, length: int, request: CompletionRequest) -> int:
        """Tokens that the completion may have; it must fit, together with its prompt of this length."""
        asked = request.sampling.max_tokens
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
    """One thread per reader. A body whose client has gone is skipped; the process can end while a body is read."""

    def __init__(self, readers: Sequence[PromptReader]) -> None:
        self.bodies: queue.SimpleQueue[tuple[Future[Prompts], bytes, Parse] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self.work, args=(reader,), name=f"prompts-{number}", daemon=True)
            for number, reader in enumerate(readers)
        ]
        for thread in self.threads:
            thread.start()

    async def read(self, raw: bytes, parse: Parse) -> Prompts:
        """Cancelled, it leaves a body that is still queued unread."""
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
