"""Measure one queue of requests for all rollout workers against a static split, with log-normal lengths, on a CPU.

First with workers that are processes of this machine and wait instead of computing, for as long as an engine with slots
would take: the ratio hardly depends on what else the machine does. Then with real engines, which generate with pico. In
both ways a slot that is free is filled again, with the static split from the worker's own share, with the queue from
what is left for all. `longest share` is what a static split could lose: the tokens of the share that has the most,
divided by the mean of the shares.
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
from posttrain.rollout.request_queue import divide
from posttrain.train.learner import Learner
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers, WeightSender

SECONDS = 600.0
ROUNDS = 5
PROMPTS, SAMPLES = 64, 16
ENGINE_PROMPTS, ENGINE_SLOTS = 16, 64  # of real engines; as many slots as a static share has on a CPU
SLOTS = 16  # sequences that a worker generates at a time
SIGMA = 1.0  # of the logarithm of a prompt's mean length; completions of a prompt vary by a third of it
MEDIAN_TOKENS, MAX_TOKENS = 50, 512
STEP_SECONDS, SEQUENCE_SECONDS = 1e-2, 3e-4  # of a decode step of a simulated worker, and of each sequence in it


def measure_stream() -> None:
    if GPU:
        print("stream: measures processes on a CPU", flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        compare("8 simulated workers", simulated(8, Path(name) / "simulated"))
        compare("2 engines with pico", engines(2, Path(name) / "engines"), ENGINE_PROMPTS, ENGINE_SLOTS)


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
    """Waits for as long as an engine with slots would generate: a step takes longer with more sequences."""

    def __init__(self) -> None:
        self.batch, self.left = 0, dict[int, int]()  # tokens that are left, by index of the request

    def is_ready(self) -> bool:
        return True

    def connect(self, groups: list[int], rank: int) -> str:
        return ""

    def receive(self, version: int) -> str:
        self.version = version
        return ""

    def check(self, probe: list[object]) -> tuple[int, str]:
        return self.version, ""

    def generate(self, requests: list[GenerationRequest], sampling: Sampling) -> list[Sample]:
        """Generate a whole share: slots are filled again from it."""
        waiting, active = [request.token_limit for request in reversed(requests)], list[int]()
        seconds = 0.0
        while waiting or active:
            active += [waiting.pop() for _ in range(min(len(waiting), SLOTS - len(active)))]
            steps = min(active)
            seconds += steps * step_seconds(len(active))
            active = [left - steps for left in active if left > steps]
        time.sleep(seconds)
        return [made_sample(request.group) for request in requests]

    def advance(
        self,
        batch: int,
        requests: dict[int, GenerationRequest],
        sampling: Sampling,
        longest_prompt: int,
        slots: int,
        wanted: int,
    ) -> tuple[list[int], list[Sample], int]:
        """Generate until some are finished: requests are added when there is room."""
        self.left |= {index: request.token_limit for index, request in requests.items()}
        if not 0 < wanted <= slots - len(self.left):
            steps = sorted(self.left.values())[len(self.left) // 16]
            time.sleep(steps * step_seconds(len(self.left)))
            self.left = {index: left - steps for index, left in self.left.items()}
        finished = [index for index, left in self.left.items() if left <= 0]
        for index in finished:
            del self.left[index]
        return finished, [made_sample(index // SAMPLES) for index in finished], slots - len(self.left)


def step_seconds(sequences: int) -> float:
    return STEP_SECONDS + SEQUENCE_SECONDS * sequences


def made_sample(group: int) -> Sample:
    return Sample(tokens=np.zeros(2, dtype=np.int32), mask=np.array([False, True]), group=group)


class NoWeights:
    """Sends nothing."""

    def connect(self, groups: list[object], parts: list[object]) -> str:
        return ""

    def send(self) -> TransferResult:
        return TransferResult(0, 0.0)


def simulated(count: int, folder: Path) -> tuple[Placement, RolloutWorkers]:
    cluster = OnlineClusterConfig(devices=count + 1, worker_timeout_seconds=SECONDS, rollout_devices=count)
    places = Placement(cluster, folder / "logs")
    slots = places.rollout_slots(lambda pool: pool.start("rollout", SimulatedWorker))
    return places, RolloutWorkers(slots, LocalPool().start("sender", NoWeights), lambda size: size)


def engines(count: int, folder: Path) -> tuple[Placement, RolloutWorkers]:
    """Real engines with one thread each; a learner sends them their weights."""
    cluster = OnlineClusterConfig(devices=count + 1, worker_timeout_seconds=SECONDS, rollout_devices=count)
    places, model = Placement(cluster, folder / "logs"), ModelConfig(path="pico")
    actor = places.pool("actor")
    actor.start("actor", Learner, model, TrainConfig(), trainable=False)
    sender = actor.start("sender", WeightSender, RoleRef("actor"))
    slots = places.rollout_slots(lambda pool: pool.start("rollout", RolloutWorker, model, LOCAL, "", 0))
    return places, RolloutWorkers(slots, sender, places.rendezvous)


def longest_share(requests: list[GenerationRequest], workers: int) -> float:
    """Return the tokens of the longest share of a static split, divided by the mean of the shares."""
    tokens = [sum(r.token_limit for r in part.requests.values()) for part in divide(requests, workers)]
    return max(tokens) * len(tokens) / sum(tokens)


def compare(what: str, made: tuple[Placement, RolloutWorkers], prompts: int = PROMPTS, slots: int = SLOTS) -> None:
    """Print the median ratio of the times of both ways, measured in turns."""
    places, workers = made
    seconds: dict[int, list[float]] = {0: [], slots: []}
    longest = []
    try:
        workers.update(0)
        for number in range(ROUNDS):
            requests = requests_with_lengths(number, prompts)
            longest.append(longest_share(requests, workers.shares))
            for own, taken in seconds.items():
                workers.slots_per_worker = own
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
        f"{max(a / b for a, b in zip(static, queue, strict=True)):.2f}); longest share "
        f"{statistics.median(longest):.2f} (from {min(longest):.2f} to {max(longest):.2f}); "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        flush=True,
    )
