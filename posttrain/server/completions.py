"""/v1/chat/completions and /v1/completions: from a body to tickets of the scheduler, and back to JSON or events."""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.errors import PosttrainError
from posttrain.core.types import Ints
from posttrain.data.encoding.encoder import Encoder
from posttrain.engines.base import GenerationRequest, seed_for
from posttrain.inference.model import ServedModel
from posttrain.server.engine_thread import Scheduler, Ticket
from posttrain.server.http import Call, Handler, Refusal, Reply
from posttrain.server.metrics import Metrics
from posttrain.server.output_text import Speller, Wording
from posttrain.server.protocol import (
    DONE,
    Entry,
    Envelope,
    Wanted,
    event,
    read_chat,
    read_completion,
    read_json,
    usage_of,
)

# Between two events of a stream, and events of all streams: nobody reads faster, and each one interrupts the engine.
STREAM_SECONDS = (0.05, 0.25)
STREAM_EVENTS = 500  # a second
REMEMBERED = 10_000  # conversations, until what the encoder remembers of their shapes is forgotten
METRICS = {
    "prompt_tokens_total": "Tokens of prompts that were taken.",
    "generated_tokens_total": "Tokens of answers, those of dropped ones included.",
    "answers_total": "Answers by how they ended; dropped: the client hung up or time was up.",
    "first_token_seconds": "From the request to its first token, for streams.",
    "answer_seconds": "From the request to its last answer.",
    "running": "Answers that are being made.",
    "waiting": "Answers that wait for a slot.",
    "slots": "Answers that can be made at once.",
    "engine_steps_total": "Steps of the engine: prompts let in, or a token for each answer under way.",
}


class Completions:
    """Serves one model to many."""

    def __init__(
        self,
        model: ServedModel,
        *,
        name: str,
        max_tokens: int,
        max_length: int,
        queue: int,
        seconds: float,
        metrics: Metrics,
    ) -> None:
        """`max_tokens` of an answer, `max_length` of prompt and answer; `queue`: answers that may wait."""
        self.model, self.name, self.queue, self.seconds, self.metrics = model, name, queue, seconds, metrics
        self.max_length = min(max_length, model.context or max_length)
        self.max_tokens = min(max_tokens, self.max_length - 1)
        # A tokenizer is not made for several threads: one for the engine's, one for the encoder's, one for ours.
        model.engine.tokenizer = copy.deepcopy(model.tokenizer)
        self.tokenizer: Any = copy.deepcopy(model.tokenizer)
        self.speller = Speller(self.tokenizer)
        self.scheduler = Scheduler(model.engine, longest=self.max_length, answer=self.max_tokens)
        self.encoding = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self.encoded = 0
        self.routes: dict[str, Handler] = {
            "/v1/chat/completions": lambda call: self.answer(call, read_chat),
            "/v1/completions": lambda call: self.answer(call, read_completion),
        }

    def start(self) -> asyncio.Future[None]:
        self.model.learner.model.eval()
        return self.scheduler.start()

    def close(self) -> None:
        self.scheduler.close()
        self.encoding.shutdown(wait=False, cancel_futures=True)

    def gauges(self) -> dict[str, float]:
        scheduler = self.scheduler
        waiting = max(0, len(scheduler.open) - scheduler.running)
        return {
            "running": scheduler.running,
            "waiting": waiting,
            "slots": scheduler.slots,
            "engine_steps_total": scheduler.steps,
        }

    def pause(self) -> float:
        """Seconds from one event of a stream to the next."""
        shortest, longest = STREAM_SECONDS
        return max(shortest, min(longest, len(self.scheduler.open) / STREAM_EVENTS))

    async def answer(self, call: Call, read: Callable[[dict[str, Any]], Wanted]) -> Reply:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        wanted, prompts = await loop.run_in_executor(self.encoding, self.understand, call.body, read)
        self.check_queue(len(prompts) * wanted.n)
        tickets = self.tickets(wanted, prompts)
        self.metrics.count("prompt_tokens_total", sum(map(len, prompts)))
        envelope = Envelope(wanted.chat, self.name)
        work = Work(self, wanted, envelope, tickets, sum(map(len, prompts)), started)
        self.scheduler.submit(tickets)
        if wanted.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return Reply(content_type="text/event-stream; charset=utf-8", headers=headers, events=work.events())
        return Reply(json.dumps(await work.whole(), ensure_ascii=False).encode())

    def check_queue(self, count: int) -> None:
        room = (self.scheduler.slots or self.model.engine.most) + self.queue
        if count > room:
            raise Refusal(400, f"{count} answers at once; this server has room for {room}", param="n")
        if len(self.scheduler.open) + count > room:
            raise Refusal(429, f"{len(self.scheduler.open)} answers wait already; try again later", code="queue_full")

    # In the encoder's thread

    def understand(self, raw: bytes, read: Callable[[dict[str, Any]], Wanted]) -> tuple[Wanted, list[Ints]]:
        """What is asked, and the prompts as tokens."""
        body = read_json(raw)
        asked = body.get("model")
        if asked is not None and asked != self.name:
            shown = json.dumps(asked)[:80]
            raise Refusal(
                404, f"there is no model {shown} here; there is {self.name}", param="model", code="model_not_found"
            )
        wanted = read(body)
        try:
            prompts = [self.conversation(wanted)] if wanted.chat else [self.tokens(p) for p in wanted.prompts]
        except PosttrainError as error:
            raise Refusal(400, str(error), param="messages" if wanted.chat else "prompt") from None
        limit = min(self.limit(len(prompt), wanted) for prompt in prompts)
        stop_ids = () if wanted.ignore_eos else self.model.stop_ids
        wanted.sampling = replace(wanted.sampling, max_tokens=limit, stop_ids=stop_ids)
        return wanted, prompts

    def conversation(self, wanted: Wanted) -> Ints:
        self.encoded += 1
        if self.encoded % REMEMBERED == 0:
            old = self.model.encoder
            self.model.encoder = Encoder(old.tokenizer, old.config, "prompt", old.vocab_size)
        return self.model.encode(wanted.messages).tokens

    def tokens(self, prompt: str | list[int]) -> Ints:
        """Of a text, in which control tokens are control tokens: who sends one has applied a template."""
        vocabulary = self.model.learner.runner.vocabulary_size
        ids = self.model.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise Refusal(400, "the tokenizer has no tokens for the prompt", param="prompt")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise Refusal(400, f"prompt: tokens must be from 0 to {vocabulary - 1}", param="prompt")
        return np.array(ids, dtype=np.int32)

    def limit(self, length: int, wanted: Wanted) -> int:
        """Tokens that the answer may have; it must fit, with its prompt."""
        asked = wanted.sampling.max_tokens
        where = "messages" if wanted.chat else "prompt"
        code = "context_length_exceeded"
        if length >= self.max_length:
            message = f"the prompt has {length} tokens; prompt and answer may have {self.max_length} together"
            raise Refusal(400, message, param=where, code=code)
        if asked > self.max_tokens:
            raise Refusal(400, f"max_tokens is {asked}; this server allows {self.max_tokens}", param="max_tokens")
        if asked and length + asked > self.max_length:
            message = f"{length} tokens of the prompt and max_tokens {asked} are more than {self.max_length} together"
            raise Refusal(400, message, param="max_tokens", code=code)
        return asked or min(self.max_tokens, self.max_length - length)

    def tickets(self, wanted: Wanted, prompts: Sequence[Ints]) -> list[Ticket]:
        changed = asyncio.Event()
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        return [
            Ticket(
                GenerationRequest(prompt=prompt, seed=seed_for(seed, place, k), top_logprobs=wanted.likeliest),
                wanted.sampling,
                changed,
                streamed=wanted.stream,
            )
            for place, prompt in enumerate(prompts)
            for k in range(wanted.n)
        ]


class Work:
    """The answers to one request."""

    def __init__(
        self,
        service: Completions,
        wanted: Wanted,
        envelope: Envelope,
        tickets: list[Ticket],
        asked: int,
        started: float,
    ) -> None:
        self.service, self.wanted, self.envelope, self.tickets = service, wanted, envelope, tickets
        self.asked, self.started = asked, started
        self.end = started + service.seconds
        self.changed = tickets[0].changed
        speller = service.speller if wanted.logprobs else None
        self.wordings = [
            Wording(service.tokenizer, t.sampling.stop_texts, t.sampling.stop_ids, speller) for t in tickets
        ]

    async def wait(self) -> None:
        """Until there is something new."""
        try:
            async with asyncio.timeout(self.end - time.monotonic()):
                await self.changed.wait()
        except TimeoutError:
            message = f"it took longer than the {self.service.seconds:g} s that a request may take"
            raise Refusal(504, message, code="timeout") from None
        self.changed.clear()
        if any(ticket.finish == "error" for ticket in self.tickets):
            raise Refusal(500, "the engine has failed; the server's log says why")

    async def whole(self) -> dict[str, Any]:
        try:
            while not all(ticket.finish for ticket in self.tickets):
                await self.wait()
        finally:
            self.over()
        choices = []
        for index, (ticket, wording) in enumerate(zip(self.tickets, self.wordings, strict=True)):
            text, entries = wording.add(ticket.tokens, ticket.logprobs, ticket.likeliest)
            rest, last = wording.finish()
            told = entries + last if self.wanted.logprobs else None
            choices.append(self.envelope.choice(index, text + rest, told, self.finish_of(ticket, wording)))
        return self.envelope.wrap(choices, usage=self.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Pieces of all answers as they come; several tokens in one, where the model is fast."""
        told = [0] * len(self.tickets)  # tokens of each
        ended = [False] * len(self.tickets)
        try:
            yield b"".join(self.piece(index, "", [], None, first=True) for index in range(len(self.tickets)))
            while not all(ended):
                await self.wait()
                if not any(told):
                    self.service.metrics.observe("first_token_seconds", time.monotonic() - self.started)
                pieces: list[bytes] = []
                for index, ticket in enumerate(self.tickets):
                    if not ended[index]:
                        told[index], ended[index] = self.go_on(index, ticket, told[index], pieces)
                if pieces:
                    yield b"".join(pieces)
            if self.wanted.usage:
                yield event(self.envelope.wrap([], chunk=True, usage=self.usage()))
            yield DONE
        except Refusal as refusal:  # too late for another status
            yield event(refusal.body())
        finally:
            self.over()

    def go_on(self, index: int, ticket: Ticket, told: int, pieces: list[bytes]) -> tuple[int, bool]:
        """Add what is new of one answer; (tokens told, whether it is over)."""
        wording, many = self.wordings[index], len(ticket.tokens)
        new = slice(told, many)
        text, entries = wording.add(ticket.tokens[new], ticket.logprobs[new], ticket.likeliest[new])
        ticket.due = asyncio.get_running_loop().time() + self.service.pause()
        if text or entries:
            pieces.append(self.piece(index, text, entries, None))
        over = bool(ticket.finish) or wording.stopped
        if over:
            if not ticket.finish:  # the text says stop before the engine does
                ticket.finish = "stop"
                self.service.scheduler.cancel([ticket])
            rest, last = wording.finish()
            pieces.append(self.piece(index, rest, last, self.finish_of(ticket, wording)))
        return many, over

    def piece(
        self, index: int, text: str, entries: Sequence[Entry], finish: str | None, *, first: bool = False
    ) -> bytes:
        choice = self.envelope.delta(index, text, entries if self.wanted.logprobs else None, finish, first)
        return event(self.envelope.wrap([choice], chunk=True))

    def finish_of(self, ticket: Ticket, wording: Wording) -> str:
        return "stop" if wording.stopped else ticket.finish

    def usage(self) -> dict[str, int]:
        return usage_of(self.asked, sum(len(ticket.tokens) for ticket in self.tickets))

    def over(self) -> None:
        """Also when the client has gone: nobody waits for what is left."""
        service = self.service
        service.scheduler.cancel(self.tickets)
        service.metrics.observe("answer_seconds", time.monotonic() - self.started)
        service.metrics.count("generated_tokens_total", sum(len(ticket.tokens) for ticket in self.tickets))
        for ticket in self.tickets:
            service.metrics.count("answers_total", finish=ticket.finish or "dropped")
