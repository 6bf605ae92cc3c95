"""The thread that generates. The event loop submits and cancels completions and receives their tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from posttrain.core.types import Ints, Sample
from posttrain.engines.base import GenerationRequest, Generator, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.sampling import TopLogprobs
from posttrain.engines.scheduler import ActiveRequest, BatchScheduler
from posttrain.nn.forward import next_token_logprobs


@dataclass(slots=True, eq=False)
class PendingCompletion:
    """A completion that a client waits for. Only the event loop reads and writes it, except for `number`."""

    request: GenerationRequest
    sampling: Sampling
    changed: asyncio.Event  # set when it has ended, or, if streamed, when there are more tokens
    streamed: bool  # tokens are delivered as they are generated, not all at the end
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish: str = ""  # stop or length when it has ended; error when the engine failed
    sample: Sample | None = None  # as the engine returned it, when it has ended
    prompt_top: int | None = None  # log-probabilities of the prompt are wanted, with this many of the likeliest tokens
    generate: bool = True  # without it the prompt's log-probabilities are all
    prompt_logprobs: PromptLogprobs | None = None
    due: float = 0.0  # before this time of the event loop's clock, more tokens alone do not set `changed`
    number: int = -1  # in the engine's scheduler; belongs to the engine's thread


PromptLogprobs = tuple[list[float], list[TopLogprobs]]
"""Of all tokens of a prompt but the first: log-probabilities, and the likeliest tokens."""


@dataclass(slots=True)
class Update:
    """New tokens of a completion with their log-probabilities, and how it ended if it did."""

    completion: PendingCompletion
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    finish: str = ""
    sample: Sample | None = None


class CompletionThread:
    """Generates completions in a thread, which subclasses define. `submit` and `cancel` belong to the event loop."""

    has_top_logprobs = True

    def __init__(self) -> None:
        self.open: set[PendingCompletion] = set()  # submitted and not yet ended
        self.condition = threading.Condition()
        self.submitted: list[PendingCompletion] = []
        self.cancelled: list[PendingCompletion] = []
        self.closing = False
        self.updates: list[Update] = []  # state of the thread

    def start(self) -> asyncio.Future[None]:
        """Run until `close`; the future is done when the thread has ended, and carries its exception."""
        self.loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        ended = self.loop.run_in_executor(thread, self.run)
        thread.shutdown(wait=False)
        ended.add_done_callback(lambda _: self.fail_open())
        return ended

    def submit(self, completions: Iterable[PendingCompletion]) -> None:
        completions = list(completions)
        self.open.update(completions)
        with self.condition:
            self.submitted += completions
            self.condition.notify()

    def cancel(self, completions: Iterable[PendingCompletion]) -> None:
        """Stop generating these; those that have ended are left alone."""
        unwanted = [completion for completion in completions if completion in self.open]
        self.open.difference_update(unwanted)
        if unwanted:
            with self.condition:
                self.cancelled += unwanted
                self.condition.notify()

    def close(self) -> None:
        with self.condition:
            self.closing = True
            self.condition.notify()

    def fail_open(self) -> None:
        """Mark all open completions as failed, after the engine's thread has ended."""
        for completion in self.open:
            completion.finish = "error"
            completion.changed.set()
        self.open.clear()

    def deliver(self, updates: list[Update]) -> None:
        now = self.loop.time()
        for update in updates:
            completion = update.completion
            completion.tokens += update.tokens
            completion.logprobs += update.logprobs
            completion.top_logprobs += update.top_logprobs
            if update.finish:
                completion.finish, completion.sample = update.finish, update.sample
                self.open.discard(completion)
            if update.finish or now >= completion.due:
                completion.changed.set()

    # What follows runs in the thread

    def run(self) -> None:
        """Generate what is submitted, until `close`."""
        raise NotImplementedError

    def send(self) -> None:
        """Send the updates to the event loop."""
        if self.updates:
            updates, self.updates = self.updates, []
            self.loop.call_soon_threadsafe(self.deliver, updates)


class EngineThread(CompletionThread):
    """Generates the completions of many requests in one batch of the local engine, which each joins at once."""

    def __init__(self, engine: LocalEngine, *, max_length: int, max_tokens: int, max_slots: int | None = None) -> None:
        """`max_length` of prompt and completion together, `max_tokens` of a completion; `max_slots`: at a time."""
        super().__init__()
        self.engine, self.max_length, self.max_tokens, self.max_slots = engine, max_length, max_tokens, max_slots
        self.steps = 0
        self.busy_seconds = 0.0  # in which there were completions to compute
        self.running = 0  # completions in the engine's slots after the last step
        self.slots = 0
        self.reused_tokens = self.preemptions = self.draft_tokens = self.accepted_tokens = 0  # since the start
        self.by_number: dict[int, PendingCompletion] = {}  # from here on state of the engine's thread
        self.in_engine: dict[int, ActiveRequest] = {}
        self.unscored: deque[PendingCompletion] = deque()  # their prompts' log-probabilities are computed first
        self.last_scored: tuple[Ints, int, PromptLogprobs] | None = None

    def run(self) -> None:
        model = self.engine.runner.model
        was_training = model.training
        model.eval()
        try:
            self.generate()
        finally:
            model.train(was_training)
            if self.engine.frozen or self.engine.device.type == "cpu":  # a GPU keeps its graphs for the next batch
                self.engine.sleep()

    def generate(self) -> None:
        with torch.inference_mode():
            scheduler = self.engine.open_scheduler(self.max_length, self.max_tokens, self.on_token, self.max_slots)
            self.slots = scheduler.cache.slots
            while self.exchange(scheduler):
                if self.unscored:
                    self.score_prompt(scheduler)
                self.steps += scheduler.busy
                started = time.perf_counter()
                ended = scheduler.step() if scheduler.busy else {}
                self.busy_seconds += time.perf_counter() - started
                self.running = len(scheduler.active)
                self.reused_tokens, self.preemptions = scheduler.reused_tokens, scheduler.preemptions
                self.draft_tokens, self.accepted_tokens = scheduler.draft_tokens, scheduler.accepted_tokens
                self.add_ended(ended)
                self.send()

    def exchange(self, scheduler: BatchScheduler) -> bool:
        """Pass submitted and cancelled completions to the scheduler; wait if it is idle. Return False after `close`."""
        with self.condition:
            while not (self.submitted or self.cancelled or scheduler.busy or self.unscored or self.closing):
                self.condition.wait()
            submitted, self.submitted = self.submitted, []
            cancelled, self.cancelled = self.cancelled, []
        for completion in submitted:
            if completion.prompt_top is None:
                self.begin(scheduler, completion)
            else:
                self.unscored.append(completion)
        for completion in cancelled:
            if completion in self.unscored:
                self.unscored.remove(completion)
            scheduler.cancel(completion.number)
            self.by_number.pop(completion.number, None)
            self.in_engine.pop(completion.number, None)
        return not self.closing

    def begin(self, scheduler: BatchScheduler, completion: PendingCompletion) -> None:
        completion.number = scheduler.submit(completion.request, completion.sampling)
        self.by_number[completion.number] = completion

    def score_prompt(self, scheduler: BatchScheduler) -> None:
        """Compute the log-probabilities of one prompt, and let its completion begin; others go on in between."""
        completion = self.unscored.popleft()
        prompt, top = completion.request.prompt, completion.prompt_top or 0
        if self.last_scored is None or self.last_scored[0] is not prompt or self.last_scored[1] != top:
            self.last_scored = (prompt, top, next_token_logprobs(self.engine.runner, prompt, top))
        self.loop.call_soon_threadsafe(setattr, completion, "prompt_logprobs", self.last_scored[2])
        if completion.generate:
            self.begin(scheduler, completion)
        else:
            self.updates.append(Update(completion, [], [], [], "length"))

    def on_token(self, active: ActiveRequest) -> None:
        completion = self.by_number[active.index]
        self.in_engine[active.index] = active
        if completion.streamed:
            self.updates.append(Update(completion, active.tokens[-1:], active.logprobs[-1:], active.top_logprobs[-1:]))

    def add_ended(self, ended: dict[int, Sample]) -> None:
        for number, sample in ended.items():
            completion, active = self.by_number.pop(number), self.in_engine.pop(number)
            rest = ([], [], []) if completion.streamed else (active.tokens, active.logprobs, active.top_logprobs)
            self.updates.append(Update(completion, *rest, sample.finish, sample))


class GeneratorThread(CompletionThread):
    """Generates by a generator that takes whole batches: what waits is the next batch, in one call per setting."""

    has_top_logprobs = False

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def run(self) -> None:
        while self.wait():
            with self.condition:
                waiting = [completion for completion in self.submitted if completion not in self.cancelled]
                self.submitted, self.cancelled = [], []
            batches: dict[Sampling, list[PendingCompletion]] = {}
            for completion in waiting:
                batches.setdefault(completion.sampling, []).append(completion)
            for sampling, batch in batches.items():
                samples = self.generator.generate([completion.request for completion in batch], sampling)
                for completion, sample in zip(batch, samples, strict=True):
                    self.add_sample(completion, sample)
                self.send()

    def wait(self) -> bool:
        """Wait for completions; return False after `close`."""
        with self.condition:
            while not (self.submitted or self.closing):
                self.condition.wait()
            return not self.closing

    def add_sample(self, completion: PendingCompletion, sample: Sample) -> None:
        start = len(completion.request.prompt)
        assert sample.logprobs is not None, "a generator returns log-probabilities"
        tokens, logprobs = sample.tokens[start:].tolist(), sample.logprobs[start:].tolist()
        self.updates.append(Update(completion, tokens, logprobs, [], sample.finish, sample))


@runtime_checkable
class HasLocalEngine(Protocol):
    """A generator whose engine may be in this process."""

    def local_engine(self) -> LocalEngine | None:
        """Return the engine, with the weights that `generate` would use; None if there is none in this process."""


def shared_engine(generator: Generator) -> LocalEngine | None:
    """Return the engine of a generator if it can take requests while others run; None: it takes whole batches."""
    engine = generator.local_engine() if isinstance(generator, HasLocalEngine) else None
    return None if engine is None or engine.own_code is not None else engine


def completion_thread(generator: Generator, max_prompt: int, max_tokens: int) -> CompletionThread:
    """Return what generates for many conversations: the local engine, which requests join at any time, or else batches.

    `max_prompt`, `max_tokens`: longest first prompt of a conversation, and what may follow it.
    """
    engine = shared_engine(generator)
    if engine is None:
        return GeneratorThread(generator)
    # On a CPU, equal runs compute equally: a completion is computed alone, since others round it differently.
    slots = 1 if engine.device.type == "cpu" else None
    return EngineThread(engine, max_length=max_prompt + max_tokens, max_tokens=max_tokens, max_slots=slots)
