"""Measure the cost of many processes: sending samples, the calls of a step, weights from training to rollout layout.

On a CPU: processes of this machine over gloo, a model of 135M parameters. On a GPU: a sharded learner of 7B parameters
updates its copy of the weights for generation on the device.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.common import GPU, SHAPES, Shape, saved_model
from posttrain.cluster.placement import Placement
from posttrain.cluster.worker_host import RoleRef
from posttrain.config.sections import ModelConfig, OnlineClusterConfig, TrainConfig
from posttrain.core.types import ForwardRequest, Objective, Sample
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers, WeightSender

SECONDS = 600.0
ROUNDS = 5
SMOL = Shape(576, 30, 9, 3, 1536, 49_152, True, 64)  # SmolLM2-135M


def measure_scale() -> None:
    if GPU:
        move_on_the_device()
        return
    with tempfile.TemporaryDirectory() as name:
        transport(Path(name))
        for workers in (1, 2, 4):
            overhead(workers, Path(name))
        move_between_processes(Path(name))


def samples_of(rows: int, tokens: int, streams: int = 1) -> list[Sample]:
    """Return samples as reinforcement learning sends them to the learners."""
    rng = np.random.default_rng(0)
    names = ("logprobs", "advantages", "ref_logprobs")[:streams]
    return [
        Sample(
            tokens=rng.integers(0, 50_000, tokens).astype(np.int32),
            mask=np.arange(tokens) > 0,
            **{stream: rng.random(tokens).astype(np.float32) for stream in names},
        )
        for _ in range(rows)
    ]


class Idle:
    """A learner that does nothing, so that only the controller's work is measured."""

    def forward_backward(self, samples: list[Sample], *_: object) -> dict[str, tuple[float, None]]:
        return {"loss": (float(len(samples)), None)}

    def logprobs(self, samples: list[Sample], **_: object) -> list[np.ndarray]:
        return [np.zeros(len(sample), dtype=np.float32) for sample in samples]

    def step(self, _: float) -> dict[str, float]:
        return {"grad_norm": 1.0}


def no_loss(*_: object) -> None:
    return None


def timed(work) -> float:
    """Return the median seconds of some rounds after a warm-up round."""
    work()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def transport(folder: Path) -> None:
    places = Placement(
        OnlineClusterConfig(devices=2, worker_timeout_seconds=SECONDS, critic_devices=1), folder / "logs"
    )
    try:
        workers = places.pool("critic").start("critic", Idle)
        samples = samples_of(1024, 4096, 3)
        size = sum(array.nbytes for s in samples for array in (s.tokens, s.mask, s.logprobs, s.advantages))
        seconds = timed(lambda: workers.scatter("forward_backward", [samples]))
        print(f"scale: 1,024 samples x 4,096 tokens ({size / 1e6:.0f} MB) to a worker: {seconds:.3f} s", flush=True)
    finally:
        places.close()


def overhead(count: int, folder: Path) -> None:
    """Make the calls of one step: log-probabilities of 512 x 384 tokens, gradients, the optimizer."""
    cluster = OnlineClusterConfig(devices=count + 1, worker_timeout_seconds=SECONDS, critic_devices=1)
    places = Placement(cluster, folder / "logs")
    try:
        group = LearnerGroup(places.pool("actor").start("actor", Idle))
        samples = samples_of(512, 384)
        objective = Objective(request=ForwardRequest(), loss=no_loss, unit="token")

        def step() -> None:
            group.logprobs(samples)
            group.forward_backward(samples, objective, 1, 1)
            group.step(1e-6)

        print(f"scale: calls of a step, {count} workers, 512 x 384 tokens: {1000 * timed(step):.1f} ms", flush=True)
    finally:
        places.close()


def move_between_processes(folder: Path) -> None:
    """Send weights from 2 FSDP ranks to a rollout worker."""
    with saved_model(SMOL) as path:
        move(ModelConfig(path=path), folder)


def move(model: ModelConfig, folder: Path) -> None:
    places = Placement(
        OnlineClusterConfig(devices=3, worker_timeout_seconds=SECONDS, rollout_devices=1), folder / "logs"
    )
    try:
        actor = places.pool("actor")
        actor.start("actor", Learner, model, TrainConfig(), trainable=False)
        sender = actor.start("sender", WeightSender, RoleRef("actor"))
        slots = places.rollout_slots(lambda pool: pool.start("rollout", RolloutWorker, model, ("local",), "", 0))
        workers = RolloutWorkers(slots, sender, places.rendezvous)
        for version in range(3):
            workers.update(version)
            moved = workers.last_transfer
            print(
                f"scale: 135M, 2 FSDP ranks -> a rollout worker: {moved.bytes / 1e6:.0f} MB in {moved.seconds:.2f} s",
                flush=True,
            )
    finally:
        places.close()


def move_on_the_device() -> None:
    with saved_model(SHAPES["7b"]) as path:
        options = {"trainable": False, "sampler_copy": True, "layout": ParallelLayout(always=True)}
        learner = Learner(ModelConfig(path=path), TrainConfig(), **options)
        for version in range(ROUNDS):
            learner.generator.weights_changed()  # as a step of the optimizer does
            torch.cuda.synchronize()
            began = time.perf_counter()
            learner.update_generator(version)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            print(f"scale: 7B, float32 shards -> bfloat16 copy on one device: {seconds:.3f} s", flush=True)
