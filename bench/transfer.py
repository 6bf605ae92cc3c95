"""Measure how long new weights take from learners to an engine of several processes, over links of limited bandwidth.

All processes are on this machine. Each has a simulated link of its own: what it sends or receives takes at least its
bytes divided by the bandwidth, during which the process may compute (gather the next tensors). The learners, the
groups, the buckets and the check of versions are those of a run; the engine only receives.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import GPU, Shape, saved_model
from posttrain.cluster.placement import Placement
from posttrain.cluster.worker_host import RoleRef
from posttrain.config.sections import ModelConfig, OnlineClusterConfig, TrainConfig
from posttrain.parallel import weight_transfer
from posttrain.parallel.weight_transfer import TensorParts, WeightTransfer, receive_from_all
from posttrain.train.learner import Learner
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers, WeightSender, rank_in_engine, tensor_shapes

SECONDS = 600.0
ROUNDS = 3
SHAPE = Shape(512, 8, 8, 8, 1408, 8192, True, 64)  # 30M parameters
BANDWIDTH = 40e6  # bytes per second of a link, in each direction
BUCKET = 8 * 2**20
ENGINE = 2  # processes that hold the engine together


def measure_transfer() -> None:
    if GPU:
        print("transfer: measures processes on a CPU", flush=True)
        return
    with tempfile.TemporaryDirectory() as name, saved_model(SHAPE) as path:
        for learners, senders, parts in ((1, 1, False), (2, 1, False), (2, 2, False), (1, 1, True), (2, 2, True)):
            measure(ModelConfig(path=path), learners, senders, parts, Path(name) / f"{learners}-{senders}-{parts}")


class Link:
    """The simulated link of this process: sends and receives one after the other, each direction by itself."""

    def __init__(self) -> None:
        self.free, self.lock = 0.0, threading.Lock()

    def reserve(self, size: int) -> float:
        """Return when `size` bytes that start now have passed."""
        with self.lock:
            self.free = max(time.monotonic(), self.free) + size / BANDWIDTH
            return self.free


@dataclass
class LimitedWork:
    """A broadcast that takes as long as the link needs."""

    work: Any
    link: Link
    size: int
    until: float = 0.0  # of a sender, whose bytes start at once

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, (self.until or self.link.reserve(self.size)) - time.monotonic()))


def limit_link(*, sends: bool) -> None:
    """Let all broadcasts of this process pass its link."""
    link, start = Link(), WeightTransfer.start_broadcast

    def start_broadcast(self: WeightTransfer, tensor: torch.Tensor) -> LimitedWork:
        return LimitedWork(start(self, tensor), link, tensor.nbytes, link.reserve(tensor.nbytes) if sends else 0.0)

    WeightTransfer.start_broadcast = start_broadcast  # type: ignore[method-assign]


class LimitedSender(WeightSender):
    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, BUCKET)
        limit_link(sends=True)


class Receiver(RolloutWorker):
    """Receives the weights of an engine, and forgets them."""

    def __init__(self, model: ModelConfig, parts: bool) -> None:
        self.shapes = tensor_shapes(model, torch.float32) if parts else {}
        self.transfers, self.divided, self.version = [], False, -1
        limit_link(sends=False)

    def needed_parts(self) -> TensorParts | None:
        """Return this process's rows of each matrix."""
        rank = rank_in_engine()
        return {
            name: ((size[0] * rank // ENGINE, size[0] * (rank + 1) // ENGINE), *((0, other) for other in size[1:]))
            for name, size in self.shapes.items()
        } or None

    def receive(self, version: int) -> str:
        for _ in receive_from_all(self.transfers):
            pass
        self.version = version
        return ""

    def check(self, expected: list[Any]) -> tuple[int, str]:
        return self.version, ""


def measure(model: ModelConfig, learners: int, senders: int, parts: bool, folder: Path) -> None:
    """Print the median seconds of a transfer."""
    cluster = OnlineClusterConfig(
        devices=learners + ENGINE,
        worker_timeout_seconds=SECONDS,
        rollout_devices=ENGINE,
        rollout_tensor_parallel_size=ENGINE,
    )
    places = Placement(cluster, folder)
    groups, weight_transfer.MAX_GROUPS = weight_transfer.MAX_GROUPS, 1 if senders == 1 else 8
    try:
        actor = places.pool("actor")
        actor.start("actor", Learner, model, TrainConfig(), trainable=False)
        sender = actor.start("sender", LimitedSender, RoleRef("actor"))
        slots = places.rollout_slots(lambda pool: pool.start("rollout", Receiver, model, parts))
        workers, taken = RolloutWorkers(slots, sender, places.rendezvous), list[float]()
        for version in range(ROUNDS + 1):
            workers.update(version)
            taken.append(workers.last_transfer.seconds)
        received = workers.last_transfer.bytes / ENGINE
    finally:
        weight_transfer.MAX_GROUPS = groups
        places.close()
    print(
        f"transfer: {learners} learner{'s' * (learners > 1)}, {senders} of them send{'s' * (senders == 1)} "
        f"{'parts' if parts else 'whole tensors'}, to an engine of {ENGINE} processes: "
        f"{statistics.median(taken[1:]):.2f} s (from {min(taken[1:]):.2f} to {max(taken[1:]):.2f}); "
        f"{received / 1e6:.0f} MB to each process, links of {BANDWIDTH / 1e6:.0f} MB/s: at least "
        f"{received / BANDWIDTH:.2f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        flush=True,
    )
