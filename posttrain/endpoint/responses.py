"""From a request to completions of the engine, and from their tokens to a response: JSON or server-sent events."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from posttrain.core.types import Ints
from posttrain.data.encoding.tool_formats import MessageDelta
from posttrain.endpoint.engine_thread import CompletionThread, PendingCompletion
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.metrics import ServerMetrics
from posttrain.endpoint.output_text import OutputText, TokenTexts
from posttrain.endpoint.protocol import CompletionRequest, ResponseFormat, TokenLogprob, event, usage_of
from posttrain.endpoint.responses_api import ResponsesFormat
from posttrain.engines.base import GenerationRequest, seed_for
from posttrain.engines.grammar import GrammarConstraint

# Events of a stream are sent no faster than people read, since each takes time from the engine.
STREAM_SECONDS = (0.05, 0.25)  # shortest and longest time between two events of a stream
STREAM_EVENTS = 500  # events per second of all streams together, above which the time grows


class CompletionServer(Protocol):
    """What a response needs of the service that makes it."""

    name: str  # of the model
    seconds: float  # that a request may take
    tokenizer: Any  # of the event loop's thread
    token_texts: TokenTexts
    metrics: ServerMetrics

    @property
    def engine(self) -> CompletionThread: ...


def too_slow(seconds: float) -> ApiError:
    return ApiError(504, f"the request took longer than {seconds:g} s, the server's limit", code="timeout")


def event_interval(streams: int) -> float:
    """Return the seconds from one event of a stream to the next."""
    shortest, longest = STREAM_SECONDS
    return max(shortest, min(longest, streams / STREAM_EVENTS))


def pending_completions(request: CompletionRequest, prompts: Sequence[Ints]) -> list[PendingCompletion]:
    changed = asyncio.Event()
    seed = secrets.randbits(63) if request.seed is None else request.seed
    sampling = replace(request.sampling, stop_texts=(*request.sampling.stop_texts, *request.end_texts))
    return [
        PendingCompletion(
            GenerationRequest(
                prompt=prompt,
                seed=seed_for(seed, place, k),
                top_logprobs=request.top_logprobs,
                adapter=request.adapter,
                reuse_prefix=True,
                constraint=None if request.constraint is None else request.constraint.copy(),
            ),
            sampling,
            changed,
            streamed=request.stream,
            prompt_top=request.top_logprobs if request.echo and request.logprobs else request.prompt_logprobs,
            generate=request.generate,
        )
        for place, prompt in enumerate(prompts)
        for k in range(request.n)
    ]


def response_format(request: CompletionRequest, model: str) -> ResponseFormat:
    """Return what builds the response to a request, in the API that the request is of."""
    length = request.parsing.tools.id_length if request.parsing.tools else 0
    if request.responses is not None:
        return ResponsesFormat(model, length, request.responses)
    return ResponseFormat(request.chat, model, length)


class CompletionResponse:
    """The response to one request, whole or as a stream, while its completions are generated."""

    def __init__(
        self,
        service: CompletionServer,
        request: CompletionRequest,
        completions: list[PendingCompletion],
        prompt_tokens: int,
        started: float,
    ) -> None:
        self.service, self.request, self.completions = service, request, completions
        self.prompt_tokens, self.started = prompt_tokens, started
        self.format = response_format(request, request.adapter or service.name)
        self.changed = completions[0].changed
        self.closed = self.expired = False
        left = started + service.seconds - time.monotonic()
        self.timer = asyncio.get_running_loop().call_later(left, self.expire)
        self.outputs = [ChoiceOutput(service, request, completion) for completion in completions]

    async def wait(self) -> None:
        """Wait until there is something new."""
        await self.changed.wait()
        self.changed.clear()
        if self.expired:
            raise too_slow(self.service.seconds)
        if any(completion.finish == "error" for completion in self.completions):
            raise ApiError(500, "the engine has failed; the server's log has the details")

    def expire(self) -> None:
        self.expired = True
        self.changed.set()

    async def whole(self) -> dict[str, Any]:
        """Wait for all completions and return the response as one JSON object."""
        try:
            while not all(completion.finish for completion in self.completions):
                await self.wait()
        finally:
            self.close()
        choices = []
        for index, output in enumerate(self.outputs):
            text, logprobs = output.whole()
            shown = logprobs if self.request.logprobs else None
            choices.append(self.format.choice(index, text, shown, output.finish_reason, output.seed))
            if self.request.prompt_logprobs is not None:
                choices[-1]["prompt_logprobs"] = output.prompt_logprobs()
        await self.completed()
        return self.format.whole(choices, self.usage())

    async def completed(self) -> None:
        """Is called when all completions have ended, before the client receives their ends."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield parts of all completions as they are generated; a part has several tokens if the model is fast."""
        sent = [0] * len(self.completions)  # tokens of each
        ended = [False] * len(self.completions)
        try:
            start = MessageDelta() if self.request.chat else ""
            yield b"".join(self.chunk(index, start, [], None, first=True) for index in range(len(self.completions)))
            while not all(ended):
                await self.wait()
                if not any(sent):
                    self.service.metrics.observe("first_token_seconds", time.monotonic() - self.started)
                chunks: list[bytes] = []
                for index, completion in enumerate(self.completions):
                    if not ended[index]:
                        sent[index], ended[index] = self.add_chunks(index, completion, sent[index], chunks)
                if all(ended):
                    await self.completed()
                if chunks:
                    yield b"".join(chunks)
            yield self.format.last(self.usage(), show_usage=self.request.usage)
        except ApiError as error:  # too late for another status
            yield event(error.body())
        finally:
            self.close()

    def add_chunks(self, index: int, completion: PendingCompletion, sent: int, chunks: list[bytes]) -> tuple[int, bool]:
        """Append what is new of one completion; return (tokens sent so far, whether it has ended)."""
        output, count = self.outputs[index], len(completion.tokens)
        if completion.prompt_top is not None and completion.prompt_logprobs is None:
            return sent, False  # its prompt comes first
        new = slice(sent, count)
        text, logprobs = output.add(new)
        completion.due = asyncio.get_running_loop().time() + event_interval(len(self.service.engine.open))
        if text or logprobs:
            chunks.append(self.chunk(index, text, logprobs, None))
        ended = bool(completion.finish) or output.stopped
        if ended:
            if not completion.finish:  # a stop text is complete before the engine has noticed
                completion.finish = "stop"
                self.service.engine.cancel([completion])
            rest, last = output.finish()
            chunks.append(self.chunk(index, rest, last, output.finish_reason))
        return count, ended

    def chunk(
        self,
        index: int,
        text: str | MessageDelta,
        logprobs: Sequence[TokenLogprob],
        finish: str | None,
        *,
        first: bool = False,
    ) -> bytes:
        output = self.outputs[index]
        before = output.calls - (len(text.calls) if isinstance(text, MessageDelta) else 0)
        shown = logprobs if self.request.logprobs else None
        return self.format.chunk(index, text, shown, finish, first=first, seed=output.seed, calls_before=before)

    def usage(self) -> dict[str, int]:
        return usage_of(self.prompt_tokens, sum(len(completion.tokens) for completion in self.completions))

    def close(self) -> None:
        """Cancel what is not finished, because the client disconnected or the time is over, and count the metrics."""
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


class ChoiceOutput:
    """One completion as a client reads it: a message, or the text of /v1/completions, with log-probabilities."""

    def __init__(self, service: CompletionServer, request: CompletionRequest, completion: PendingCompletion) -> None:
        self.service, self.request, self.completion = service, request, completion
        self.seed = completion.request.seed
        self.text = self.output_text(request.sampling.stop_texts, request.sampling.stop_ids)
        self.parser = request.parsing.parser() if request.chat else None
        self.message = MessageDelta()  # so far
        self.offset = 0  # characters of the prompt, if the text begins with it
        self.echoed = not request.echo

    def output_text(self, stop_texts: Sequence[str], stop_ids: Sequence[int]) -> OutputText:
        token_texts = self.service.token_texts if self.request.logprobs else None
        return OutputText(self.service.tokenizer, stop_texts, stop_ids, token_texts, self.request.parsing.marks)

    @property
    def calls(self) -> int:
        """The number of tool calls so far."""
        return len(self.message.calls)

    @property
    def stopped(self) -> bool:
        """Whether a stop text is complete."""
        return self.text.stopped

    @property
    def finish_reason(self) -> str:
        finish = "stop" if self.stopped else self.completion.finish
        return "tool_calls" if self.calls and finish == "stop" else finish

    def add(self, new: slice) -> tuple[str | MessageDelta, list[TokenLogprob]]:
        """Return the text or message parts that are certain with these new tokens, and the tokens of the text."""
        completion = self.completion
        text, tokens = self.text.add(completion.tokens[new], completion.logprobs[new], completion.top_logprobs[new])
        if not self.echoed:
            return self.with_prompt(text, tokens)
        return self.parsed(text), self.shifted(tokens)

    def finish(self) -> tuple[str | MessageDelta, list[TokenLogprob]]:
        """Return the rest; raises ApiError if the grammar was not kept."""
        constraint = self.completion.request.constraint
        if isinstance(constraint, GrammarConstraint) and constraint.error:
            where = "tools" if self.request.output.schema is None else "response_format"
            raise ApiError(400, f"{where}: the grammar could not be followed: {constraint.error}", param=where)
        text, tokens = self.text.finish()
        tokens = [*tokens, *self.stop_token()]
        delta = self.parsed(text)
        if self.parser is not None and isinstance(delta, MessageDelta):
            rest = self.parser.finish()
            self.message += rest
            delta = delta + rest
        return delta, self.shifted(tokens)

    def stop_token(self) -> list[TokenLogprob]:
        """Return the stop token at the end of the completion, if the prompt is echoed with log-probabilities.

        It has no text. Clients such as lm-eval count one token after the prompt, of the kind that it may be.
        """
        completion, last = self.completion, self.completion.tokens[-1:]
        if not (self.request.echo and self.request.logprobs and last and last[0] in self.request.sampling.stop_ids):
            return []
        pairs = completion.top_logprobs[-1] if completion.top_logprobs else []
        others = [(self.service.token_texts.of(other), logprob) for other, logprob in pairs]
        text = replace(self.service.token_texts.of(last[0]), text="")
        return [TokenLogprob(text, completion.logprobs[-1], others, self.text.decoded)]

    def whole(self) -> tuple[str | MessageDelta, list[TokenLogprob]]:
        (text, tokens), (rest, last) = self.add(slice(None)), self.finish()
        if isinstance(text, str) or isinstance(rest, str):
            return str(text) + str(rest), tokens + last
        return text + rest, tokens + last

    def parsed(self, text: str) -> str | MessageDelta:
        if self.parser is None:
            return text
        delta = self.parser.add(text)
        self.message += delta
        return delta

    def shifted(self, tokens: list[TokenLogprob]) -> list[TokenLogprob]:
        for token in tokens:
            token.start += self.offset
        return tokens

    def prompt_logprobs(self) -> list[dict[str, dict[str, float]] | None]:
        """Return log-probabilities by token id at each place of the prompt, as vLLM does; none at the first."""
        prompt = self.completion.request.prompt.tolist()
        logprobs, likeliest = self.completion.prompt_logprobs or ([], [])
        found: list[dict[str, dict[str, float]] | None] = [None]
        for token, own, others in zip(prompt[1:], logprobs, likeliest, strict=True):
            found.append({str(t): {"logprob": value} for t, value in [(token, own), *others]})
        return found

    def with_prompt(self, text: str, tokens: list[TokenLogprob]) -> tuple[str, list[TokenLogprob]]:
        """Put the prompt before the text; special tokens in it have log-probabilities and no text."""
        self.echoed = True
        prompt = self.completion.request.prompt.tolist()
        logprobs, likeliest = self.completion.prompt_logprobs or ([], [])
        echo = self.output_text((), ())
        shown, prompt_tokens = echo.add(prompt, [None, *logprobs], [[], *likeliest])
        rest, last = echo.finish()
        self.offset = len(shown + rest)
        return shown + rest + text, prompt_tokens + last + self.shifted(tokens)
