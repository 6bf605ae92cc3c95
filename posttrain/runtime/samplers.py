"""Rollout workers on devices of their own: engines that get the learners' weights; a lost one is replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from posttrain.config import ModelConfig, UpdateConfig
from posttrain.engines.base import Request, Sampling
from posttrain.errors import WorkerError
from posttrain.learner import Learner
from posttrain.runtime.base import Pending, Pool, Workers, cut
from posttrain.runtime.transfer import Meeting, Moved, Transfer
from posttrain.types import Sample

ATTEMPTS = 3  # to bring weights over, each with new workers in place of those that were lost

log = logging.getLogger("posttrain")


class Sampler:
    """In a rollout worker: an engine whose weights come from the learners."""

    def __init__(self, model: ModelConfig, engine: Sequence[str], template: str, seed: int) -> None:
        self.transfer: Transfer | None = None
        self.learner: Learner | None = None
        self.engine: Any = None
        if engine[0] == "local":
            self.learner = Learner(model, UpdateConfig(), trainable=False, template=template, seed=seed, layout=None)
        else:
            self.engine = vllm_engine(model, engine[1:], template)

    def connect(self, meeting: Meeting, rank: int) -> str:
        """Meet the sender and the others; why it could not be done, or nothing."""
        try:
            self.transfer = Transfer(meeting, rank + own_rank())
        except RuntimeError as error:  # one of them is gone: the controller replaces it
            return first_line(error)
        return ""

    def receive(self, version: int) -> str:
        """The weights that the learners send now; why not all came, or nothing."""
        assert self.transfer is not None, "connect comes first"
        try:
            if self.learner is not None:
                self.learner.accept(self.transfer.receive())
            else:
                self.engine.load(self.transfer.receive(), version)
        except RuntimeError as error:
            self.transfer = None  # hangs up, so that the others do not wait
            return first_line(error)
        return ""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample]:
        return (self.learner or self.engine).generate(requests, sampling)  # type: ignore[no-any-return]


def vllm_engine(model: ModelConfig, options: Sequence[str], template: str) -> Any:
    """With the learners' type of numbers, so that both compute the same."""
    from posttrain.data.templates import apply_template
    from posttrain.engines import vllm
    from posttrain.learner import default_device
    from posttrain.models.load import compute_dtype, load_tokenizer, read_config, resolve_path

    tokenizer = load_tokenizer(model)
    apply_template(tokenizer, template)
    config = read_config(resolve_path(model.path), "token")
    return vllm.VllmEngine(config, tokenizer, options, dtype=compute_dtype(model, default_device()))


def own_rank() -> int:
    """Among the processes that hold one engine together."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Seat:
    """A rollout worker's place; who sits there may change."""

    def __init__(self, make: Callable[[], Pool], start: Callable[[Pool], Workers]) -> None:
        self.make, self.begin = make, start
        self.pool: Pool | None = None
        self.workers: Workers | None = None

    def fill(self) -> None:
        if self.workers is None:
            self.pool = self.make()
            self.workers = self.begin(self.pool)

    def empty(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = self.workers = None

    def submit(self, method: str, *args: Any) -> Pending:
        assert self.workers is not None, "nobody sits here"
        return self.workers.submit(method, *args)


class Samplers:
    """All rollout workers as one: `generate` with the weights of the last `refresh_sampler`.

    A request decides its answer by its own seed, so one that a lost worker was given is asked again of another, and
    gives the same answer.
    """

    def __init__(self, seats: Sequence[Seat], sender: Workers, meet: Callable[[int], Meeting]) -> None:
        """`sender`: transfer.Sender beside each learner; `meet`: where a new group of so many can form."""
        self.seats, self.sender, self.meet = list(seats), sender, meet
        self.connected = False
        self.version = -1
        self.moved = Moved(0, 0.0)  # by the last refresh
        self.fill()

    def fill(self) -> None:
        """Somebody on every seat; starting an engine takes long, so they start at once."""
        with ThreadPoolExecutor(len(self.seats), thread_name_prefix="seats") as starting:
            for done in [starting.submit(seat.fill) for seat in self.seats]:
                done.result()

    # Weights

    def refresh_sampler(self) -> None:
        """Bring the learners' weights of now to all rollout workers; lost ones are replaced first."""
        for attempt in range(1, ATTEMPTS + 1):
            if not all(seat.workers is not None for seat in self.seats):
                self.connected = False
                self.fill()
            trouble = "" if self.connected else self.connect()
            trouble = trouble or self.send()
            if not trouble:
                return
            if attempt == ATTEMPTS:
                raise WorkerError(
                    f"weights did not reach the rollout workers in {ATTEMPTS} attempts: {trouble}", lost=True
                )

    def connect(self) -> str:
        """Form a new group; what went wrong, or nothing."""
        sizes = [seat.workers.size if seat.workers else 1 for seat in self.seats]
        meeting = self.meet(sum(sizes) + 1)
        firsts = [1 + sum(sizes[:place]) for place in range(len(sizes))]
        pending = [
            (seat, seat.submit("connect", meeting, first)) for first, seat in zip(firsts, self.seats, strict=True)
        ]
        refused = self.sender.submit("connect", meeting)
        trouble = self.lost(pending) or next(filter(None, refused.result()), "")
        self.connected = not trouble
        return trouble

    def send(self) -> str:
        self.version += 1
        pending = [(seat, seat.submit("receive", self.version)) for seat in self.seats]
        sending = self.sender.submit("send")
        trouble = self.lost(pending)
        moved: Moved = sending.result()[0]
        self.connected = self.connected and not trouble and not moved.failure
        if not trouble and not moved.failure:
            self.moved = Moved(moved.bytes * len(self.seats), moved.seconds)
        return trouble or moved.failure

    def lost(self, pending: Sequence[tuple[Seat, Pending]]) -> str:
        """Wait for all; seats whose worker is lost are emptied. What trouble there was, or nothing."""
        first = ""
        for seat, call in pending:
            try:
                trouble: str = call.result()[0]
                first = first or trouble
            except WorkerError as error:
                first = first or str(error)
                self.replace(seat, error)
        return first

    def replace(self, seat: Seat, error: WorkerError) -> None:
        log.warning("%s", error)
        log.warning("another rollout worker takes its place; what it was asked is asked again")
        seat.empty()
        self.connected = False

    # Answers

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, current: bool = False) -> list[Sample]:
        answers: dict[int, Sample] = {}
        open_requests = list(range(len(requests)))
        for _ in range(ATTEMPTS):
            there = [seat for seat in self.seats if seat.workers is not None]
            if not there:
                self.refresh_sampler()
                there = self.seats
            shards = cut(open_requests, len(there))
            calls = [
                (seat, shard, seat.submit("generate", [requests[i] for i in shard], sampling))
                for seat, shard in zip(there, shards, strict=True)
                if shard
            ]
            for seat, shard, call in calls:
                try:
                    answers |= dict(zip(shard, call.result()[0], strict=True))
                except WorkerError as error:
                    if not error.lost:
                        raise
                    self.replace(seat, error)
            open_requests = [i for i in open_requests if i not in answers]
            if not open_requests:
                return [answers[i] for i in range(len(requests))]
        raise WorkerError(f"rollout workers were lost {ATTEMPTS} times in a row while they generated", lost=True)

    def close(self) -> None:
        for seat in self.seats:
            seat.empty()
