"""/v1/chat/completions and /v1/completions: from a request to completions of the engine, and back to JSON or events."""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from posttrain.core.types import Ints
from posttrain.engines.base import GenerationRequest, seed_for
from posttrain.inference.model import InferenceModel
from posttrain.server.app import EventStream, Handler
from posttrain.server.engine_thread import EngineThread, PendingCompletion
from posttrain.server.errors import ApiError
from posttrain.server.metrics import ServerMetrics
from posttrain.server.output_text import OutputText, TokenTexts
from posttrain.server.prompts import Parse, PromptReader, PromptThreads
from posttrain.server.protocol import (
    DONE,
    CompletionRequest,
    ResponseFormat,
    TokenLogprob,
    event,
    read_chat,
    read_completion,
    usage_of,
)

PROMPT_THREADS = 2  # so that one slow prompt does not hold up all others
# Seconds between two events of a stream, and events per second of all streams: nobody reads faster, and each event
# takes time from the engine.
STREAM_SECONDS = (0.05, 0.25)
STREAM_EVENTS = 500
METRICS = {
    "prompt_tokens_total": "Tokens of accepted prompts.",
    "generated_tokens_total": "Generated tokens, those of dropped completions included.",
    "completions_total": "Completions by how they ended; dropped: the client disconnected or the time was over.",
    "first_token_seconds": "From the request to its first token, for streams.",
    "completion_seconds": "From the request to the end of its last completion.",
    "running": "Completions that are being generated.",
    "waiting": "Completions that wait for a slot.",
    "slots": "Completions that can be generated at once.",
    "engine_steps_total": "Steps of the engine: a prompt is computed, or one token of every running completion.",
}


class CompletionService:
    """Serves one model to many clients."""

    def __init__(
        self,
        model: InferenceModel,
        *,
        name: str,
        max_tokens: int,
        max_length: int,
        queue: int,
        seconds: float,
        metrics: ServerMetrics,
    ) -> None:
        """`max_tokens` of a completion, `max_length` of prompt and completion; `queue`: completions that may wait."""
        self.model, self.name, self.queue, self.seconds, self.metrics = model, name, queue, seconds, metrics
        max_length = min(max_length, model.context or max_length)
        max_tokens = min(max_tokens, max_length - 1)
        # A tokenizer is not thread-safe: the engine's thread has a copy, this one another, each prompt thread its own.
        model.engine.tokenizer = copy.deepcopy(model.tokenizer)
        self.tokenizer: Any = copy.deepcopy(model.tokenizer)
        self.token_texts = TokenTexts(self.tokenizer)
        self.engine = EngineThread(model.engine, max_length=max_length, max_tokens=max_tokens)
        self.prompts = PromptThreads(
            [
                PromptReader(model, name=name, max_tokens=max_tokens, max_length=max_length)
                for _ in range(PROMPT_THREADS)
            ]
        )
        self.routes: dict[str, Handler] = {
            "/v1/chat/completions": lambda request: self.respond(request, read_chat),
            "/v1/completions": lambda request: self.respond(request, read_completion),
        }

    def start(self) -> asyncio.Future[None]:
        self.model.learner.model.eval()
        return self.engine.start()

    def close(self) -> None:
        self.engine.close()
        self.prompts.close()

    def gauges(self) -> dict[str, float]:
        engine = self.engine
        return {
            "running": engine.running,
            "waiting": max(0, len(engine.open) - engine.running),
            "slots": engine.slots,
            "engine_steps_total": engine.steps,
        }

    def event_interval(self) -> float:
        """Seconds from one event of a stream to the next."""
        shortest, longest = STREAM_SECONDS
        return max(shortest, min(longest, len(self.engine.open) / STREAM_EVENTS))

    async def respond(self, http_request: HttpRequest, parse: Parse) -> Response:
        started = time.monotonic()
        body = await http_request.body()
        try:
            async with asyncio.timeout(self.seconds):
                request, prompts = await self.prompts.read(body, parse)
        except TimeoutError:
            raise self.too_slow() from None
        self.check_queue(len(prompts) * request.n)
        completions = pending_completions(request, prompts)
        prompt_tokens = sum(map(len, prompts))
        self.metrics.count("prompt_tokens_total", prompt_tokens)
        active = CompletionResponse(self, request, completions, prompt_tokens, started)
        self.engine.submit(completions)
        if request.stream:
            return EventStream(active.events(), active.close)
        return Response(json.dumps(await active.whole(), ensure_ascii=False), media_type="application/json")

    def check_queue(self, count: int) -> None:
        room = (self.engine.slots or self.model.engine.max_slots) + self.queue
        if count > room:
            raise ApiError(400, f"{count} completions at once; this server has room for {room}", param="n")
        if len(self.engine.open) + count > room:
            message = f"{len(self.engine.open)} completions are waiting already; try again later"
            raise ApiError(429, message, code="queue_full")

    def too_slow(self) -> ApiError:
        return ApiError(504, f"the request took longer than {self.seconds:g} s, the server's limit", code="timeout")


def pending_completions(request: CompletionRequest, prompts: Sequence[Ints]) -> list[PendingCompletion]:
    changed = asyncio.Event()
    seed = secrets.randbits(63) if request.seed is None else request.seed
    return [
        PendingCompletion(
            GenerationRequest(prompt=prompt, seed=seed_for(seed, place, k), top_logprobs=request.top_logprobs),
            request.sampling,
            changed,
            streamed=request.stream,
        )
        for place, prompt in enumerate(prompts)
        for k in range(request.n)
    ]


class CompletionResponse:
    """The response to one request, whole or as a stream, while its completions are generated."""

    def __init__(
        self,
        service: CompletionService,
        request: CompletionRequest,
        completions: list[PendingCompletion],
        prompt_tokens: int,
        started: float,
    ) -> None:
        self.service, self.request, self.completions = service, request, completions
        self.prompt_tokens, self.started = prompt_tokens, started
        self.format = ResponseFormat(request.chat, service.name)
        self.changed = completions[0].changed
        self.closed = self.expired = False
        left = started + service.seconds - time.monotonic()
        self.timer = asyncio.get_running_loop().call_later(left, self.expire)
        token_texts = service.token_texts if request.logprobs else None
        self.outputs = [
            OutputText(service.tokenizer, c.sampling.stop_texts, c.sampling.stop_ids, token_texts) for c in completions
        ]

    async def wait(self) -> None:
        """Wait until there is something new."""
        await self.changed.wait()
        self.changed.clear()
        if self.expired:
            raise self.service.too_slow()
        if any(completion.finish == "error" for completion in self.completions):
            raise ApiError(500, "the engine has failed; the server's log has the details")

    def expire(self) -> None:
        self.expired = True
        self.changed.set()

    async def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        try:
            while not all(completion.finish for completion in self.completions):
                await self.wait()
        finally:
            self.close()
        choices = []
        for index, (completion, output) in enumerate(zip(self.completions, self.outputs, strict=True)):
            text, logprobs = output.add(completion.tokens, completion.logprobs, completion.top_logprobs)
            rest, last = output.finish()
            shown = logprobs + last if self.request.logprobs else None
            choices.append(self.format.choice(index, text + rest, shown, finish_of(completion, output)))
        return self.format.wrap(choices, usage=self.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Parts of all completions as they are generated; several tokens in one, where the model is fast."""
        sent = [0] * len(self.completions)  # tokens of each
        ended = [False] * len(self.completions)
        try:
            yield b"".join(self.chunk(index, "", [], None, first=True) for index in range(len(self.completions)))
            while not all(ended):
                await self.wait()
                if not any(sent):
                    self.service.metrics.observe("first_token_seconds", time.monotonic() - self.started)
                chunks: list[bytes] = []
                for index, completion in enumerate(self.completions):
                    if not ended[index]:
                        sent[index], ended[index] = self.add_chunks(index, completion, sent[index], chunks)
                if chunks:
                    yield b"".join(chunks)
            if self.request.usage:
                yield event(self.format.wrap([], chunk=True, usage=self.usage()))
            yield DONE
        except ApiError as error:  # too late for another status
            yield event(error.body())
        finally:
            self.close()

    def add_chunks(self, index: int, completion: PendingCompletion, sent: int, chunks: list[bytes]) -> tuple[int, bool]:
        """Append what is new of one completion; return (tokens sent so far, whether it has ended)."""
        output, count = self.outputs[index], len(completion.tokens)
        new = slice(sent, count)
        text, logprobs = output.add(completion.tokens[new], completion.logprobs[new], completion.top_logprobs[new])
        completion.due = asyncio.get_running_loop().time() + self.service.event_interval()
        if text or logprobs:
            chunks.append(self.chunk(index, text, logprobs, None))
        ended = bool(completion.finish) or output.stopped
        if ended:
            if not completion.finish:  # a stop text is complete before the engine has noticed
                completion.finish = "stop"
                self.service.engine.cancel([completion])
            rest, last = output.finish()
            chunks.append(self.chunk(index, rest, last, finish_of(completion, output)))
        return count, ended

    def chunk(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: str | None, *, first: bool = False
    ) -> bytes:
        choice = self.format.delta(index, text, logprobs if self.request.logprobs else None, finish, first)
        return event(self.format.wrap([choice], chunk=True))

    def usage(self) -> dict[str, int]:
        return usage_of(self.prompt_tokens, sum(len(completion.tokens) for completion in self.completions))

    def close(self) -> None:
        """Stop what is not finished, because the client has gone or the time is over, and count the rest."""
        if self.closed:
            return
        self.closed = True
        self.timer.cancel()
        metrics = self.service.metrics
        self.service.engine.cancel(self.completions)
        metrics.observe("completion_seconds", time.monotonic() - self.started)
        metrics.count("generated_tokens_total", sum(len(completion.tokens) for completion in self.completions))
        for completion in self.completions:
            metrics.count("completions_total", finish=completion.finish or "dropped")


def finish_of(completion: PendingCompletion, output: OutputText) -> str:
    return "stop" if output.stopped else completion.finish
