"""/v1/chat/completions, /v1/responses and /v1/completions of a model, for many clients."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from posttrain.endpoint.engine_thread import EngineThread
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.http import EventStream, Handler
from posttrain.endpoint.metrics import ServerMetrics
from posttrain.endpoint.output_text import TokenTexts
from posttrain.endpoint.protocol import read_chat, read_completion
from posttrain.endpoint.responses import CompletionResponse, pending_completions, too_slow
from posttrain.endpoint.responses_api import read_responses
from posttrain.engines.grammar import GrammarCompiler
from posttrain.inference.model import InferenceModel
from posttrain.server.prompts import Parse, PromptReader, PromptThreads

PROMPT_THREADS = 2  # so that one slow prompt does not hold up all others
METRICS = {
    "prompt_tokens_total": "Tokens of accepted prompts.",
    "generated_tokens_total": "Generated tokens, those of dropped completions included.",
    "completions_total": "Completions by how they ended; dropped: the client disconnected or the time was over.",
    "first_token_seconds": "From the request to its first token, for streams.",
    "completion_seconds": "From the request to the end of its last completion.",
    "running": "Completions that are being generated.",
    "waiting": "Completions that wait for a slot.",
    "slots": "Completions that can be generated at once.",
    "prompt_tokens_reused_total": "Tokens of prompts whose keys and values were found in the KV cache.",
    "preemptions_total": "Completions that were interrupted and computed again because the KV cache was full.",
    "draft_tokens_total": "Tokens of finished completions that speculative decoding proposed.",
    "accepted_draft_tokens_total": "Those of them that were sampled.",
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
        self.names = (name, *model.adapters)
        max_length = min(max_length, model.context or max_length)
        max_tokens = min(max_tokens, max_length - 1)
        # A tokenizer is not thread-safe: the engine's thread has a copy, this one another, each prompt thread its own.
        model.engine.tokenizer = copy.deepcopy(model.tokenizer)
        self.tokenizer: Any = copy.deepcopy(model.tokenizer)
        self.token_texts = TokenTexts(self.tokenizer)
        self.engine = EngineThread(model.engine, max_length=max_length, max_tokens=max_tokens)
        grammars = GrammarCompiler(self.tokenizer, model.encoder.vocab_size, model.stop_ids)
        self.prompts = PromptThreads(
            [
                PromptReader(model, name=name, max_tokens=max_tokens, max_length=max_length, grammars=grammars)
                for _ in range(PROMPT_THREADS)
            ]
        )
        self.routes: dict[str, Handler] = {
            "/v1/chat/completions": lambda request: self.respond(request, read_chat),
            "/v1/responses": lambda request: self.respond(request, read_responses),
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
            "prompt_tokens_reused_total": engine.reused_tokens,
            "preemptions_total": engine.preemptions,
            "draft_tokens_total": engine.draft_tokens,
            "accepted_draft_tokens_total": engine.accepted_tokens,
            "engine_steps_total": engine.steps,
        }

    async def respond(self, http_request: HttpRequest, parse: Parse) -> Response:
        started = time.monotonic()
        body = await http_request.body()
        try:
            async with asyncio.timeout(self.seconds):
                request, prompts = await self.prompts.read(body, parse)
        except TimeoutError:
            raise too_slow(self.seconds) from None
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
            raise ApiError(
                400, f"the request asks for {count} completions; this server accepts {room} at a time", param="n"
            )
        if len(self.engine.open) + count > room:
            message = f"{len(self.engine.open)} completions are waiting already; try again later"
            raise ApiError(429, message, code="queue_full")
