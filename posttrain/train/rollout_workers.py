"""Rollout workers on devices of their own: engines that receive the learners' weights. A lost one is replaced.

controller          RolloutWorkers: sends weights, has the queue of requests, replaces lost workers
learner processes   WeightSender: broadcasts the weights
rollout processes   RolloutWorker: receives the weights and generates
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from posttrain.cluster.base import PendingCall, Workers
from posttrain.cluster.worker_slots import ATTEMPTS, ReplaceableWorkers, WorkerSlot
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.devices import default_device
from posttrain.core.errors import PosttrainError, WorkerError
from posttrain.core.types import Floats, Sample, WeightVersion
from posttrain.engines.base import EngineSpec, GenerationRequest, OnCompletion, Sampling
from posttrain.engines.local import RequestStream
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.factory import engine_for_path
from posttrain.engines.weight_probe import OTHER_ENGINE, SAME_ENGINE, mean_difference, probe_sample
from posttrain.models import memory
from posttrain.models.loading import compute_dtype, read_config
from posttrain.models.paths import base_model_path, resolve_path
from posttrain.models.tensors import file_tensors, module_tensors
from posttrain.parallel.weight_transfer import (
    BUCKET_BYTES,
    Rendezvous,
    TensorParts,
    TransferGroup,
    TransferResult,
    WeightTransfer,
    plan_groups,
    receive_from_all,
    send_to_all,
)
from posttrain.rollout.request_queue import Part, RequestQueue, divide
from posttrain.train.learner import Learner
from posttrain.train.model_lock import ModelLock, agree_by_all_reduce

SLOTS_PER_WORKER = 512  # as the local engine has by default on an accelerator
POLL_SECONDS = 0.5  # between two looks for workers that have joined


class RolloutWorkers(ReplaceableWorkers):
    """All rollout workers as one generator with the weights of the last `update`.

    They take requests from one queue. One that is lost leaves: its requests go back to the queue, and a new worker is
    started in the background, which joins with the first update after it is ready. With in-flight updates, weights may
    be sent while another thread waits for completions.
    """

    def __init__(
        self,
        slots: Sequence[WorkerSlot],
        sender: Workers,
        rendezvous: Callable[[int], Rendezvous],
        check_samples: Callable[[Sequence[GenerationRequest], Sequence[Sample], Sampling], None] = lambda *_: None,
        *,
        slots_per_worker: int = 0,
    ) -> None:
        """`sender`: a WeightSender beside each learner; `rendezvous`: where a new group of N processes can form.

        `check_samples` raises an error for samples that no policy can have generated. `slots_per_worker`: a worker has
        at most this many requests, and takes others when it has room; 0: it takes its whole share of a batch at once,
        so that equal runs compute equally.
        """
        super().__init__(slots)
        self.sender, self.rendezvous, self.check_samples = sender, rendezvous, check_samples
        self.slots_per_worker, self.shares = slots_per_worker, len(self.slots)  # how a batch is divided
        self.batches, self.longest_prompt = 0, 0  # number of batches so far; tokens of the longest prompt of this one
        self.connected: list[WorkerSlot] = []  # the members of the transfer groups
        self.receivers = 0  # processes that receive what one sender sends
        self.version: WeightVersion = -1  # before the first update
        self.last_transfer = TransferResult(0, 0.0)
        self.returned_requests = 0  # of lost workers, to the queue, so far

    # Weights

    def update(self, version: WeightVersion) -> None:
        """Send the learners' current weights to all workers as `version`.

        Lost workers are replaced in the background; only if no worker is left, this waits for the new ones.
        """
        with self.lock:
            self.version = version
            for attempt in range(1, ATTEMPTS + 1):
                if not self.members:
                    self.start()
                for slot in self.slots:
                    slot.start_in_background(wait_until_ready)
                problem = "" if self.connected == self.members else self.connect()
                problem = problem or self.send()
                if not problem:
                    return
                if attempt == ATTEMPTS:
                    raise WorkerError(
                        f"weights did not reach the rollout workers in {ATTEMPTS} attempts: {problem}", lost=True
                    )

    @property
    def members(self) -> list[WorkerSlot]:
        """The slots that have a worker."""
        return [slot for slot in self.slots if slot.workers is not None]

    def connect(self) -> str:
        """Form new transfer groups of all workers; returns what went wrong, or an empty text."""
        parts = self.needed_parts()
        members = self.members
        if not members:
            return "all rollout workers were lost"
        sizes = [slot.workers.size if slot.workers else 1 for slot in members]
        divided = len(parts) > 1
        receivers = len(members) if divided else sum(sizes)
        first_ranks = [1 + (index if divided else sum(sizes[:index])) for index in range(len(sizes))]
        groups = plan_groups(self.sender.size, len(parts) or 1, lambda: self.rendezvous(receivers + 1))
        calls = [slot.submit("connect", groups, first) for first, slot in zip(first_ranks, members, strict=True)]
        waiting = ThreadPoolExecutor(len(calls) + 1, thread_name_prefix="connect")
        pending = [(slot, waiting.submit(joined, groups, call)) for slot, call in zip(members, calls, strict=True)]
        sending = waiting.submit(joined, groups, self.sender.submit("connect", groups, parts))
        waiting.shutdown(wait=False)
        problem = self.first_problem(pending) or next(filter(None, sending.result()), "")
        self.connected, self.receivers = [] if problem else members, receivers
        return problem

    def needed_parts(self) -> list[TensorParts]:
        """Return what each process of an engine needs of the weights; empty: all need whole tensors.

        Empties the slots of workers that are lost meanwhile.
        """
        divided = [slot for slot in self.members if slot.workers is not None and slot.workers.size > 1]
        pending = [(slot, slot.submit("needed_parts")) for slot in divided]
        found: list[list[TensorParts | None]] = []
        for slot, call in pending:
            try:
                found.append(call.result())
            except WorkerError as error:
                self.discard(slot, slot.workers, error)
        same = found and all(parts == found[0] for parts in found)
        return [parts for parts in found[0] if parts is not None] if same and None not in found[0] else []

    def send(self) -> str:
        """Send weights to all workers and check that they arrived; returns what went wrong, or an empty text."""
        members = list(self.connected)
        pending = [(slot, slot.submit("receive", self.version)) for slot in members]
        sending = self.sender.submit("send")
        problem = self.first_problem(pending)
        results: list[TransferResult] = sending.result()
        failures = filter(None, (result.failure for result in results))
        problem = problem or next(failures, "") or self.check(results[0].probe)
        if problem:
            self.connected = []
            return problem
        sent, seconds = sum(result.bytes for result in results), max(result.seconds for result in results)
        self.last_transfer = TransferResult(sent * self.receivers, seconds)
        for slot in members:
            slot.has_weights = slot.workers is not None
        return ""

    def check(self, probe: list[Floats]) -> str:
        """Check that all workers have the weights that were sent; returns what is missing, or an empty text.

        Raises if weights arrived and the log-probabilities differ: completions would not show it.
        """
        pending = [(slot, slot.submit("check", probe)) for slot in self.connected]
        problem = ""
        for slot, call in pending:
            number = self.slots.index(slot)
            try:
                version, found = call.result()[0]
            except WorkerError as error:
                self.discard(slot, slot.workers, error)
                problem = problem or str(error)
                continue
            if version != self.version:
                dropped = f"rollout worker {number} of {len(self.slots)} still has the weights of version {version}"
                problem = problem or f"{dropped}, not {self.version}"
            elif found:
                raise PosttrainError(
                    f"rollout worker {number} of {len(self.slots)}: after the update to version {self.version} its "
                    f"log-probabilities differ from the learners' {found}. Either the weights did not arrive as they "
                    "were sent, or its engine computes this model differently (--rollout.engine local computes as the "
                    "learners do)"
                )
        return problem

    def first_problem(self, pending: Sequence[tuple[WorkerSlot, PendingCall | Future[list[str]]]]) -> str:
        """Wait for all calls and empty the slots of lost workers; returns the first problem, or an empty text."""
        first = ""
        for slot, call in pending:
            try:
                problem: str = call.result()[0]
                first = first or problem
            except WorkerError as error:
                self.discard(slot, slot.workers, error)
                first = first or str(error)
        return first

    def discard(self, slot: WorkerSlot, workers: Workers | None, error: WorkerError) -> None:
        with self.lock:
            if slot.workers is workers:
                self.connected = []
            super().discard(slot, workers, error)

    def fault_metrics(self) -> dict[str, float]:
        """Return the numbers of workers lost and of requests that went back to the queue so far; empty without any."""
        if not self.lost:
            return {}
        return {"rollout_workers_lost": float(self.lost), "requests_returned": float(self.returned_requests)}

    # Generation

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        current: bool = False,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """Generate one sample per request, in order; each worker takes the next part of them when it has room."""
        with self.lock:
            if not self.ready:
                self.update(self.version)
        queue = RequestQueue(divide(requests, self.shares, self.slots_per_worker), ATTEMPTS)
        self.batches += 1
        self.longest_prompt = (
            max((len(request.prompt) for request in requests), default=0) if self.slots_per_worker else 0
        )
        threads: dict[WorkerSlot, threading.Thread] = {}
        samples: dict[int, Sample] = {}
        try:
            while len(samples) < len(requests):
                self.serve_from(queue, sampling, threads)
                finished = queue.take_finished(POLL_SECONDS)
                samples |= finished
                if on_completion is not None:
                    for index, sample in finished.items():
                        on_completion(index, sample)
        finally:
            queue.close()
            self.returned_requests += queue.returned
        return [samples[i] for i in range(len(requests))]

    @property
    def ready(self) -> list[WorkerSlot]:
        """The slots whose worker has weights."""
        return [slot for slot in self.slots if slot.workers is not None and slot.has_weights]

    def serve_from(self, queue: RequestQueue, sampling: Sampling, threads: dict[WorkerSlot, threading.Thread]) -> None:
        """Let every worker that has weights, and does not do so yet, take parts; if none is left, replace all."""
        if not self.ready and not any(thread.is_alive() for thread in threads.values()):
            with self.lock:
                self.update(self.version)
        for slot in self.ready:
            if slot not in threads or not threads[slot].is_alive():
                threads[slot] = threading.Thread(
                    target=self.serve, args=(slot, queue, sampling), name="rollout worker", daemon=True
                )
                threads[slot].start()

    def serve(self, slot: WorkerSlot, queue: RequestQueue, sampling: Sampling) -> None:
        """Let the worker of a slot generate what it takes, until nothing is left or the worker is lost."""
        workers, held, room = slot.workers, Part({}), 0
        while workers is not None:
            try:
                part = queue.take(room if held.requests else None) or Part({})
                held = Part(held.requests | part.requests, max(held.lost, part.lost))
                if not held.requests:
                    return
                finished, room = self.generate_some(workers, part.requests, held.requests, sampling, queue.next_size)
                queue.finish(finished)
                held.requests = {i: request for i, request in held.requests.items() if i not in finished}
            except WorkerError as error:
                try:
                    self.discard(slot, workers, error)
                except WorkerError as failed:
                    queue.fail(failed)
                queue.put_back(held, error)
                return
            except BaseException as error:  # raised again by the thread that reads the results
                queue.fail(error)
                if not isinstance(error, Exception):
                    raise
                return

    def generate_some(
        self,
        workers: Workers,
        new: dict[int, GenerationRequest],
        held: dict[int, GenerationRequest],
        sampling: Sampling,
        wanted: int,
    ) -> tuple[dict[int, Sample], int]:
        """Let a worker generate the requests it has, and new ones; returns finished samples, and its room for others.

        It returns when some are finished, or when it has room for `wanted` others; without slots, when all are.
        """
        indices, room = list(new), 0
        if self.slots_per_worker:
            how = (self.batches, new, sampling, self.longest_prompt, self.slots_per_worker, wanted)
            indices, samples, room = workers.submit("advance", *how).result()[0]
        else:
            samples = workers.submit("generate", list(new.values()), sampling).result()[0]
        self.check_samples([held[index] for index in indices], samples, sampling)
        return dict(zip(indices, samples, strict=True)), room


def wait_until_ready(workers: Workers) -> None:
    """Wait until a worker has loaded its model."""
    workers.call("is_ready")


# In the worker processes


def joined(groups: Sequence[TransferGroup], call: PendingCall) -> list[str]:
    """Return the results of a call of `connect`. If a process cannot join, those that wait for it fail at once."""
    try:
        problems: list[str] = call.result()
    except PosttrainError as error:
        give_up(groups, str(error))
        raise
    if problem := next(filter(None, problems), ""):
        give_up(groups, problem)
    return problems


def give_up(groups: Sequence[TransferGroup], reason: str) -> None:
    for group in groups:
        group.rendezvous.give_up(reason)


class WeightSender:
    """Runs in the learners' processes. All that share the model gather its tensors together; several of them send."""

    def __init__(self, learner: Learner, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.learner, self.bucket_bytes = learner, bucket_bytes
        self.transfers: list[WeightTransfer] = []  # one for each group of this sender
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def connect(self, groups: Sequence[TransferGroup], parts: Sequence[TensorParts]) -> str:
        """Join the groups in which this learner sends; returns why that failed, or an empty text.

        `parts`: what each process of an engine needs; empty: whole tensors.
        """
        self.transfers = []
        try:
            for group in groups:
                if group.sender == self.rank:
                    turns: dict[str, Any] = {"turn": group.turn, "turns": group.turns}
                    needed = parts[group.part] if parts else None
                    self.transfers.append(WeightTransfer(group.rendezvous, 0, parts=needed, **turns))
        except RuntimeError as error:  # a receiver is gone; the controller replaces it
            self.transfers = []
            return first_line(error)
        return ""

    @torch.no_grad()
    def send(self) -> TransferResult:
        """Send the current weights, and compute the log-probabilities of the probe with them.

        A receiver that is lost does not stop the learners.
        """
        started = time.monotonic()
        weights = iter(self.learner.weights())
        sent, failure = 0, ""
        if self.transfers:
            try:
                sent = send_to_all(self.transfers, weights, self.bucket_bytes)
                if self.learner.device.type != "cpu":
                    torch.accelerator.synchronize()
            except RuntimeError as error:
                failure = first_line(error)
                self.transfers = []  # closes the connections, so that the other receivers do not wait for the rest
        for _ in weights:  # the other processes need this one's part of each tensor
            pass
        return TransferResult(sent, time.monotonic() - started, failure, self.learner.probe_logprobs())


class RolloutWorker:
    """Runs in a worker process: an engine whose weights come from the learners.

    `generate` may run in a second thread, in parallel with the other methods; a ModelLock alternates between them.
    """

    def __init__(
        self, model: ModelConfig, engine: EngineSpec, template: str, seed: int, inflight: bool = False
    ) -> None:
        """With `inflight` new weights do not wait until completions are finished."""
        self.transfers: list[WeightTransfer] = []  # one from each sender of what this process needs
        self.divided = False  # whether it receives parts of tensors
        self.model = model
        self.version: WeightVersion = 0
        self.inflight = inflight
        self.dtype = compute_dtype(model, default_device())
        config = read_config(base_model_path(resolve_path(model.path)), "token")
        self.probe = probe_sample(config.get_text_config().vocab_size)
        self.generator: Learner | VllmEngine
        if engine.name == "local":
            self.generator = Learner(
                model, TrainConfig(), trainable=False, template=template, engine=engine, seed=seed, layout=None
            )
        else:
            # With asynchronous scheduling a step starts before the previous one is read: the weight version that a
            # token is recorded with would be wrong.
            options = ({"async_scheduling": False} if self.inflight else {}) | engine.vllm_options
            self.generator = engine_for_path(model, template, options, read_weights=False)
        self.stream: RequestStream | None = None  # of the requests in progress, if they are added one after the other
        self.batch, self.indices = 0, list[int]()  # that these belong to; their indices in it
        self.lock = ModelLock(agree_by_all_reduce()) if torch.distributed.is_initialized() else ModelLock()

    def is_ready(self) -> bool:
        """Return once the engine is loaded."""
        return True

    def needed_parts(self) -> TensorParts | None:
        """Return what this process needs of each tensor, if several hold one engine; None: whole tensors."""
        if not isinstance(self.generator, VllmEngine):
            return None
        return self.generator.needed_parts(lambda: tensor_shapes(self.model, self.dtype))

    def connect(self, groups: Sequence[TransferGroup], first_rank: int) -> str:
        """Join the groups of all senders of what this process needs; returns why that failed, or an empty text.

        `first_rank`: of this engine's processes in each group, where they have one in common.
        """
        self.transfers, own = [], rank_in_engine()
        self.divided = len({group.part for group in groups}) > 1
        rank = first_rank if self.divided else first_rank + own
        try:
            for group in groups:
                if not self.divided or group.part == own:
                    self.transfers.append(WeightTransfer(group.rendezvous, rank))
        except RuntimeError as error:  # a member is gone; the controller replaces it
            return first_line(error)
        return ""

    def receive(self, version: WeightVersion) -> str:
        """Receive the weights that the learners send now; returns why that failed, or an empty text."""
        assert self.transfers, "connect comes first"
        with self.lock.update():
            try:
                if isinstance(self.generator, Learner):
                    self.generator.set_weights(receive_from_all(self.transfers))
                else:
                    self.generator.load(receive_from_all(self.transfers), version, in_parts=self.divided)
            except RuntimeError as error:
                self.transfers = []  # closes the connections, so that the others do not wait
                self.lock.incomplete = True
                return first_line(error)
            self.version, self.lock.incomplete = version, False
        return ""

    def check(self, expected: list[Floats]) -> tuple[WeightVersion, str]:
        """Compare log-probabilities of the probe with the learners'.

        Returns the version of the weights, and the difference if it is too large.
        """
        with self.lock.update():
            found = mean_difference([self.probe], self.generator.logprobs([self.probe]), expected)
        allowed = (SAME_ENGINE if isinstance(self.generator, Learner) else OTHER_ENGINE)[self.dtype]
        return self.version, "" if found <= allowed else f"by {found:.3g} on average; {allowed:g} is allowed"

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Sample]:
        between_steps = self.between_steps if self.inflight else None
        with self.lock.generate():
            return self.generator.generate(requests, sampling, between_steps=between_steps)

    def advance(
        self,
        batch: int,
        requests: dict[int, GenerationRequest],
        sampling: Sampling,
        longest_prompt: int,
        slots: int,
        wanted: int,
    ) -> tuple[list[int], list[Sample], int]:
        """Add requests to those in progress, and generate; returns indices and samples of finished ones, and the room.

        Returns when an eighth of them is finished, or when there is room for `wanted` others. `slots`: sequences at a
        time; `longest_prompt`: tokens. Requests of an earlier batch, which was given up, are dropped.
        """
        assert isinstance(self.generator, Learner)
        engine = self.generator.generator.local_engine(current=False)
        if engine.own_code is not None:  # takes no requests while others run
            return list(requests), self.generate(list(requests.values()), sampling), slots
        finished: dict[int, Sample] = {}
        with self.lock.generate(), engine.generating():
            if self.stream is None or self.batch != batch:
                between_steps = self.between_steps if self.inflight else None
                self.stream = RequestStream(engine, longest_prompt, slots, sampling, between_steps=between_steps)
                self.batch, self.indices = batch, []
            stream = self.stream
            stream.add(list(requests.values()))
            self.indices += requests
            enough = max(1, stream.in_progress // 8)
            while stream.busy and len(finished) < enough and not 0 < wanted <= stream.room:
                finished |= {self.indices[number]: sample for number, sample in stream.step().items()}
        if not stream.busy:
            self.stream = None
        return list(finished), list(finished.values()), stream.room

    def between_steps(self) -> WeightVersion:
        """Let weight updates run; returns the version of the weights for the next decode step."""
        self.lock.let_updates_run()
        return self.version


def tensor_shapes(model: ModelConfig, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by their names in files, as `Learner.weights` yields them."""
    empty = memory.empty_model(model, "token", dtype, trainable=False)
    held = module_tensors(empty)
    return {key: tuple(t.shape) for name in held for key, t in file_tensors(empty, name, held[name].to("meta")).items()}


def rank_in_engine() -> int:
    """Return the rank among the processes that hold one engine together."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
