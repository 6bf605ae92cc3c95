"""Rollout workers on devices of their own: engines that get the learners' weights; a lost one is replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.cluster.base import PendingCall, Workers, split_evenly
from posttrain.cluster.worker_slots import WorkerSlot
from posttrain.config.sections import INFLIGHT, ModelConfig, UpdateConfig
from posttrain.core.devices import default_device
from posttrain.core.errors import PosttrainError, WorkerError
from posttrain.core.types import Floats, Sample
from posttrain.data.encoding.templates import apply_template
from posttrain.engines.base import GenerationRequest, OnCompletion, Sampling
from posttrain.engines.weight_probe import OTHER_ENGINE, SAME_ENGINE, difference, probe
from posttrain.models.loading import compute_dtype, load_tokenizer, read_config, resolve_path
from posttrain.parallel.weight_transfer import Rendezvous, Transfer, TransferResult
from posttrain.train.learner import Learner

ATTEMPTS = 3  # to bring weights over, each with new workers in place of those that were lost

log = logging.getLogger("posttrain")


class RolloutWorker:
    """In a rollout worker: an engine whose weights come from the learners.

    `generate` may run in a thread beside the other methods; the model is used by one of them at a time.
    """

    def __init__(self, model: ModelConfig, engine: Sequence[str], template: str, seed: int) -> None:
        """`engine`: see rollout.engine. With `inflight` among it new weights do not wait for answers to end."""
        self.transfer: Transfer | None = None
        self.version = 0  # of the weights
        self.inflight = INFLIGHT in engine
        options = [option for option in engine[1:] if option != INFLIGHT]
        self.dtype = compute_dtype(model, default_device())
        self.probe = probe(read_config(resolve_path(model.path), "token").get_text_config().vocab_size)
        self.learner: Learner | None = None
        self.engine: Any = None
        if engine[0] == "local":
            self.learner = Learner(model, UpdateConfig(), trainable=False, template=template, seed=seed, layout=None)
        else:
            # A step that is begun before the one before is looked at would mix up which weights drew a token.
            options = ["async_scheduling=false", *options] if self.inflight else options
            self.engine = vllm_engine(model, options, template)
        self.turns = ModelLock(agreement()) if torch.distributed.is_initialized() else ModelLock()

    def connect(self, meeting: Rendezvous, rank: int) -> str:
        """Meet the sender and the others; why it could not be done, or nothing."""
        try:
            self.transfer = Transfer(meeting, rank + own_rank())
        except RuntimeError as error:  # one of them is gone: the controller replaces it
            return first_line(error)
        return ""

    def receive(self, version: int) -> str:
        """The weights that the learners send now; why not all came, or nothing."""
        assert self.transfer is not None, "connect comes first"
        with self.turns.visit():
            try:
                if self.learner is not None:
                    self.learner.accept(self.transfer.receive())
                else:
                    self.engine.load(self.transfer.receive(), version)
            except RuntimeError as error:
                self.transfer = None  # hangs up, so that the others do not wait
                self.turns.closed = True
                return first_line(error)
            self.version, self.turns.closed = version, False
        return ""

    def check(self, expected: list[Floats]) -> str:
        """How its log-probabilities of the probe differ from those of the learners, which are given; or nothing."""
        with self.turns.visit():
            speaker: Any = self.learner or self.engine
            found = difference([self.probe], speaker.logprobs([self.probe]), expected)
        allowed = (SAME_ENGINE if self.learner is not None else OTHER_ENGINE)[self.dtype]
        return "" if found <= allowed else f"by {found:.3g} on average; {allowed:g} is allowed"

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Sample]:
        speaker: Any = self.learner or self.engine
        with self.turns.hold():
            found: list[Sample] = speaker.generate(
                requests, sampling, between_steps=self.pause if self.inflight else None
            )
            return found

    def pause(self) -> int:
        """BetweenSteps two steps; the version of the weights that the next one is made with."""
        self.turns.pause()
        return self.version


class WeightSender:
    """Beside a learner in its process; all processes that hold the model send together, the first of them really."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.transfer: Transfer | None = None
        self.first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    def connect(self, meeting: Rendezvous) -> str:
        """Meet the receivers; why it could not be done, or nothing."""
        self.transfer = None
        if self.first:
            try:
                self.transfer = Transfer(meeting, 0)
            except RuntimeError as error:  # a receiver is gone: the controller replaces it
                return str(error).splitlines()[0]
        return ""

    @torch.no_grad()
    def send(self) -> TransferResult:
        """The weights of now, and what the learners make of a few tokens with them.

        A receiver that is lost does not stop the learners.
        """
        began = time.monotonic()
        weights = iter(self.learner.weights())
        moved, failure = 0, ""
        if self.first:
            assert self.transfer is not None, "connect comes first"
            try:
                moved = self.transfer.send(weights)
                if self.learner.device.type == "cuda":
                    torch.cuda.synchronize()
            except RuntimeError as error:
                failure = str(error).splitlines()[0]
                self.transfer = None  # hangs up, so that the other receivers do not wait for the rest
        for _ in weights:  # the others wait for this process's part in each tensor
            pass
        return TransferResult(moved, time.monotonic() - began, failure, self.learner.probed())

    def abort(self) -> None:
        if self.transfer is not None:
            self.transfer.abort()


class ModelLock:
    """A model that one thread uses at a time. Who generates has it for long, and lets visitors in between two steps.

    Visits are counted, and made by one thread. Processes that hold a model together must stop at the same step: they
    agree on how many visits there are to be before the next one.
    """

    def __init__(self, agree: Callable[[int], int] = lambda number: number) -> None:
        """`agree`: the largest of the numbers that these processes give, each in its turn."""
        self.agree = agree
        self.change = threading.Condition()
        self.generating = False
        self.begun = self.ended = self.agreed = 0  # visits; those up to `agreed` may come while somebody generates
        self.closed = False  # an update ended halfway: the next visit must come before the next step

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self.change:
            self.generating = True  # who comes from now on waits to be let in
        try:
            self.pause()
            yield
        finally:
            with self.change:
                self.generating = False
                self.change.notify_all()

    def pause(self) -> None:
        """Visitors come first; at once where there are none."""
        while True:
            with self.change:
                missing = self.closed and self.begun == self.ended
                wanted = self.begun + missing
            number = self.agree(wanted)
            if number == self.agreed:
                return
            with self.change:
                self.agreed = number
                self.change.notify_all()
                self.change.wait_for(lambda: self.ended >= self.agreed)

    @contextmanager
    def visit(self) -> Iterator[None]:
        with self.change:
            self.begun += 1
            self.change.wait_for(lambda: not self.generating or self.begun <= self.agreed)
        try:
            yield
        finally:
            with self.change:
                self.ended += 1
                self.change.notify_all()


def agreement() -> Callable[[int], int]:
    """The largest of the numbers that all processes of the default group give."""
    group = torch.distributed.new_group(backend="gloo")  # of its own: others are at work in the default one

    def agree(number: int) -> int:
        largest = torch.tensor(number)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        return int(largest)

    return agree


def vllm_engine(model: ModelConfig, options: Sequence[str], template: str) -> Any:
    """With the learners' type of numbers, so that both compute the same."""
    from posttrain.engines.vllm import engine as vllm

    tokenizer = load_tokenizer(model)
    apply_template(tokenizer, template)
    config = read_config(resolve_path(model.path), "token")
    return vllm.VllmEngine(config, tokenizer, options, dtype=compute_dtype(model, default_device()))


def own_rank() -> int:
    """Among the processes that hold one engine together."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class RolloutWorkers:
    """All rollout workers as one: `generate` with the weights of the last `update`.

    A request decides its answer by its own seed, so one that a lost worker was given is asked again of another, and
    gives the same answer. Weights may be brought while another thread waits for answers, if the workers are `inflight`.
    """

    def __init__(self, slots: Sequence[WorkerSlot], sender: Workers, meet: Callable[[int], Rendezvous]) -> None:
        """`sender`: transfer.WeightSender beside each learner; `meet`: where a new group of so many can form."""
        self.slots, self.sender, self.rendezvous = list(slots), sender, meet
        self.connected = False
        self.version = -1
        self.moved = TransferResult(0, 0.0)  # by the last update
        self.changing = threading.RLock()  # held while weights change, or who sits where
        self.fill()

    def fill(self) -> None:
        """Somebody on every slot; starting an engine takes long, so they start at once."""
        with ThreadPoolExecutor(len(self.slots), thread_name_prefix="slots") as starting:
            for done in [starting.submit(slot.fill) for slot in self.slots]:
                done.result()

    # Weights

    def refresh_sampler(self) -> None:
        """Bring the learners' weights of now to all rollout workers, as the next version."""
        self.update(self.version + 1)

    def update(self, version: int) -> None:
        """The same with the version that samples are to bear; workers that were lost are replaced first."""
        with self.changing:
            self.version = version
            for attempt in range(1, ATTEMPTS + 1):
                if not all(slot.workers is not None for slot in self.slots):
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
        sizes = [slot.workers.size if slot.workers else 1 for slot in self.slots]
        meeting = self.rendezvous(sum(sizes) + 1)
        firsts = [1 + sum(sizes[:place]) for place in range(len(sizes))]
        pending = [
            (slot, slot.submit("connect", meeting, first)) for first, slot in zip(firsts, self.slots, strict=True)
        ]
        refused = self.sender.submit("connect", meeting)
        trouble = self.lost(pending) or next(filter(None, refused.result()), "")
        self.connected = not trouble
        return trouble

    def send(self) -> str:
        """Weights for all, and a look at whether they arrived; what went wrong on the way, or nothing."""
        pending = [(slot, slot.submit("receive", self.version)) for slot in self.slots]
        sending = self.sender.submit("send")
        trouble = self.lost(pending)
        moved: TransferResult = sending.result()[0]
        trouble = trouble or moved.failure or self.check(moved.probe)
        self.connected = self.connected and not trouble
        if not trouble:
            self.moved = TransferResult(moved.bytes * len(self.slots), moved.seconds)
        return trouble

    def check(self, probe: list[Floats]) -> str:
        """See that all have the weights that were sent: an error if not, since answers would not show it."""
        pending = [(slot, slot.submit("check", probe)) for slot in self.slots]
        trouble = ""
        for place, (slot, call) in enumerate(pending):
            try:
                found: str = call.result()[0]
            except WorkerError as error:
                trouble = trouble or str(error)
                self.replace(slot, slot.workers, error)
                continue
            if found:
                raise PosttrainError(
                    f"rollout worker {place} of {len(self.slots)}: after the update to version {self.version} its "
                    f"log-probabilities differ from the learners' {found}. Either the weights did not arrive as they "
                    "were sent, or its engine computes this model differently (--rollout.engine local: as the learners)"
                )
        return trouble

    def lost(self, pending: Sequence[tuple[WorkerSlot, PendingCall]]) -> str:
        """Wait for all; slots whose worker is lost are emptied. What trouble there was, or nothing."""
        first = ""
        for slot, call in pending:
            try:
                trouble: str = call.result()[0]
                first = first or trouble
            except WorkerError as error:
                first = first or str(error)
                self.replace(slot, slot.workers, error)
        return first

    def replace(self, slot: WorkerSlot, who: Workers | None, error: WorkerError) -> None:
        """Unless another thread has done it already."""
        with self.changing:
            if slot.workers is not who:
                return
            log.warning("%s", error)
            log.warning("another rollout worker takes its place; what it was asked is asked again")
            slot.empty()
            self.connected = False

    # Answers

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        current: bool = False,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        answers: dict[int, Sample] = {}
        open_requests = list(range(len(requests)))
        for _ in range(ATTEMPTS):
            calls = self.ask(requests, open_requests, sampling)
            for slot, who, shard, call in calls:
                try:
                    found = dict(zip(shard, call.result()[0], strict=True))
                    answers |= found
                    if on_completion is not None:
                        for index, sample in found.items():
                            on_completion(index, sample)
                except WorkerError as error:
                    if not error.lost:
                        raise
                    self.replace(slot, who, error)
            open_requests = [i for i in open_requests if i not in answers]
            if not open_requests:
                return [answers[i] for i in range(len(requests))]
        raise WorkerError(f"rollout workers were lost {ATTEMPTS} times in a row while they generated", lost=True)

    def ask(self, requests: Sequence[GenerationRequest], wanted: list[int], sampling: Sampling) -> list[Asked]:
        """Give those that are wanted to the workers that are there, a part each."""
        with self.changing:
            there = [slot for slot in self.slots if slot.workers is not None]
            if not there:
                self.update(self.version)
                there = self.slots
            shards = split_evenly(wanted, len(there))
            return [
                (slot, slot.workers, shard, slot.submit("generate", [requests[i] for i in shard], sampling))
                for slot, shard in zip(there, shards, strict=True)
                if shard
            ]

    def close(self) -> None:
        for slot in self.slots:
            slot.empty()


Asked = tuple[WorkerSlot, Workers | None, list[int], PendingCall]
"""Who sits there, the requests it was given, and its call."""
