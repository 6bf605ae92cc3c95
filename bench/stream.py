"""Measure one queue of requests for all rollout workers against a static split, with log-normal lengths, on a CPU.

The workers are processes of this machine. Simulated ones wait instead of computing, for as long as an engine with the
given cost per token would take, so that the ratio does not depend on what else the machine does. Real ones generate
with pico and have one core each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.common import GPU
from posttrain.cluster.local import LocalPool
from posttrain.cluster.placement import Placement
from posttrain.cluster.worker_host import RoleRef
from posttrain.config.sections import ModelConfig, OnlineClusterConfig, TrainConfig
from posttrain.core.types import Sample
from posttrain.engines.base import LOCAL, GenerationRequest, Sampling
from posttrain.parallel.weight_transfer import TransferResult
from posttrain.train.learner import Learner
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers, WeightSender

SECONDS = 600.0
ROUNDS = 3
PROMPTS, SAMPLES = 64, 8
SIGMA = 1.0  # of the logarithm of a prompt's mean length; completions of a prompt vary by a third of it
MEDIAN_TOKENS, MAX_TOKENS = 64, 512
TOKEN_SECONDS = 1e-3  # of a simulated worker
PICO = ModelConfig(path="pico")


def measure_stream() -> None:
    if GPU:
        print("stream: measures processes on a CPU", flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        for count in (4, 8):
            compare(f"{count} simulated workers", simulated(count, Path(name) / str(count)))
        compare("2 workers with pico", real(2, Path(name) / "real"), prompts=16)


def requests_with_lengths(round_number: int, prompts: int) -> list[GenerationRequest]:
    """Return requests whose completions have log-normal lengths, equal ones for both ways."""
    rng = np.random.default_rng(round_number)
    means = rng.normal(np.log(MEDIAN_TOKENS), SIGMA, prompts)
    found = []
    for group, mean in enumerate(means):
        lengths = np.exp(rng.normal(mean, SIGMA / 3, SAMPLES)).clip(1, MAX_TOKENS).astype(int)
        prompt = rng.integers(10, 200, 16).astype(np.int32)
        found += [
            GenerationRequest(prompt=prompt, group=group, seed=int(length), token_limit=int(length))
            for length in lengths
        ]
    return found


class SimulatedWorker:
    """Waits for as long as its tokens take."""

    def is_ready(self) -> bool:
        return True

    def connect(self, rendezvous: int, rank: int) -> str:
        return ""

    def receive(self, version: int) -> str:
        self.version = version
        return ""

    def check(self, probe: list[object]) -> tuple[int, str]:
        return self.version, ""

    def generate(self, requests: list[GenerationRequest], sampling: Sampling) -> list[Sample]:
        time.sleep(TOKEN_SECONDS * sum(request.token_limit for request in requests))
        mask = np.array([False, True])
        return [Sample(tokens=np.zeros(2, dtype=np.int32), mask=mask, group=request.group) for request in requests]


class NoWeights:
    """Sends nothing."""

    def connect(self, rendezvous: int) -> str:
        return ""

    def send(self) -> TransferResult:
        return TransferResult(0, 0.0)


def simulated(count: int, folder: Path) -> tuple[Placement, RolloutWorkers]:
    cluster = OnlineClusterConfig(devices=count + 1, worker_timeout_seconds=SECONDS, rollout_devices=count)
    places = Placement(cluster, folder / "logs")
    slots = places.rollout_slots(lambda pool: pool.start("rollout", SimulatedWorker))
    return places, RolloutWorkers(slots, LocalPool().start("sender", NoWeights), lambda size: size)


def real(count: int, folder: Path) -> tuple[Placement, RolloutWorkers]:
    cluster = OnlineClusterConfig(devices=count + 1, worker_timeout_seconds=SECONDS, rollout_devices=count)
    places = Placement(cluster, folder / "logs")
    actor = places.pool("actor")
    actor.start("actor", Learner, PICO, TrainConfig(), trainable=False)
    sender = actor.start("sender", WeightSender, RoleRef("actor"))
    slots = places.rollout_slots(lambda pool: pool.start("rollout", RolloutWorker, PICO, LOCAL, "", 0))
    return places, RolloutWorkers(slots, sender, places.rendezvous)


def compare(what: str, made: tuple[Placement, RolloutWorkers], prompts: int = PROMPTS) -> None:
    """Print the median ratio of the times of both ways, measured in turns."""
    places, workers = made
    seconds: dict[bool, list[float]] = {True: [], False: []}
    try:
        workers.update(0)
        for number in range(ROUNDS):
            requests = requests_with_lengths(number, prompts)
            for evenly, taken in seconds.items():
                workers.evenly = evenly
                began = time.perf_counter()
                workers.generate(requests, Sampling(max_tokens=MAX_TOKENS))
                taken.append(time.perf_counter() - began)
    finally:
        places.close()
    static, queue = seconds.values()
    ratio = statistics.median(a / b for a, b in zip(static, queue, strict=True))
    print(
        f"stream: {what}, {prompts} prompts x {SAMPLES}, log-normal lengths (median {MEDIAN_TOKENS}): static split "
        f"{statistics.median(static):.2f} s, queue {statistics.median(queue):.2f} s, ratio {ratio:.2f} "
        f"(from {min(a / b for a, b in zip(static, queue, strict=True)):.2f} to "
        f"{max(a / b for a, b in zip(static, queue, strict=True)):.2f}); load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores",
        flush=True,
    )
