"""Generators for a file of prompts: this process, or workers with a whole model each; local engine or vLLM."""

from __future__ import annotations

import gc
import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Protocol

import torch

from posttrain.cluster import worker
from posttrain.cluster.placement import Placement
from posttrain.cluster.worker_slots import ReplaceableWorkers, SlotCall
from posttrain.config.checks import launched_size
from posttrain.config.sections import ClusterConfig, DataConfig, ModelConfig, OnlineClusterConfig
from posttrain.core import accelerators
from posttrain.core.errors import UsageError
from posttrain.core.types import Sample
from posttrain.engines.base import EngineSpec, GenerationRequest, Generator, Sampling
from posttrain.engines.beam_search import BeamEngine
from posttrain.engines.vllm import environment
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.factory import engine_for_path
from posttrain.inference.model import InferenceModel

DEPTH = 2  # batches that are sent to a worker ahead, so that it never waits for the next
BATCH_SECONDS = 24 * 3600.0  # timeout of a batch; a worker that has exited is noticed at once
TENSOR_PARALLEL = "tensor_parallel_size"
RESOURCES = {"gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"}
RESOURCES |= {TENSOR_PARALLEL, "enforce_eager", "block_size"}
"""vLLM's options that completions do not depend on."""


class BatchGenerator(Protocol):
    """Generates for batches of requests."""

    def generate_batches(
        self, batches: Iterable[list[GenerationRequest]], sampling: Sampling
    ) -> Iterator[list[Sample]]:
        """Yield the samples of each batch, in order."""


@contextmanager
def open_generator(
    model: ModelConfig, template: str, engine: EngineSpec, cluster: ClusterConfig, logs: Path
) -> Iterator[BatchGenerator]:
    """Open a generator in this process or on workers; `logs`: directory of the workers' logs, kept if one was lost."""
    if cluster.devices == 1 and not cluster.ray_address and engine.name == "local":
        local = InProcessGenerator(local_engine(model, template, engine))
        try:
            yield local
        finally:
            local.close()
        return
    release()
    divided = tensor_parallel(engine)
    devices = OnlineClusterConfig(
        devices=cluster.devices,
        ray_address=cluster.ray_address,
        worker_timeout_seconds=max(BATCH_SECONDS, cluster.worker_timeout_seconds),
        rollout_devices=cluster.devices,
        rollout_tensor_parallel_size=divided,
    )
    placement = Placement(devices, logs)
    placement.launched = None  # each process that a launcher started may have workers of its own
    try:
        slots = placement.rollout_slots(lambda pool: pool.start("generate", GenerationWorker, model, template, engine))
        placement.rendezvous_store()  # built once, before several threads need it
        generators = WorkerGenerators(slots)
        yield generators
        if not generators.lost:
            shutil.rmtree(logs, ignore_errors=True)
    finally:
        placement.close()


def check_workers(model: ModelConfig, engine: EngineSpec, cluster: ClusterConfig, sampling: Sampling) -> None:
    """Raise UsageError for settings that cannot work together, before anything is loaded."""
    if worker.is_worker:
        raise UsageError(
            "a worker process imported the script that it was started from, and that script generates when imported. "
            'Put the call of posttrain under `if __name__ == "__main__":`'
        )
    if engine.name == "vllm" and engine.num_beams:
        raise UsageError("num_beams is set, but only the local engine has beam search; use --engine local")
    if engine.num_beams < 0 or engine.num_beams == 1:
        raise UsageError(f"num_beams is {engine.num_beams}; it must be at least 2, or 0 for sampling.")
    if engine.speculative_tokens and (engine.name == "vllm" or engine.num_beams):
        raise UsageError(
            "speculative_tokens is of the local engine when it samples; leave it out with num_beams, and with vLLM set "
            "speculative_config in vllm_options."
        )
    if engine.name == "local" and engine.vllm_options:
        raise UsageError("vllm_options is set, but engine is local. Remove it, or set --engine vllm.")
    if cluster.devices < 1:
        raise UsageError(f"devices is {cluster.devices}; it must be at least 1.")
    if cluster.devices > 1 and launched_size() > 1:
        raise UsageError(
            f"torchrun or srun started {launched_size()} processes, but this command starts those of --devices itself: "
            "call it once, or give each process its own --window_index and --devices 1."
        )
    if engine.name == "vllm":
        environment.prepare_environment()
        if model.load_in_4bit:
            raise UsageError("load_in_4bit: vLLM would compute with other weights; use --engine local")
        if cluster.devices % tensor_parallel(engine):
            raise UsageError(
                f"engine vllm: {TENSOR_PARALLEL} is {tensor_parallel(engine)}, which does not divide the "
                f"{cluster.devices} devices"
            )


def tensor_parallel(engine: EngineSpec) -> int:
    """Return the number of devices that hold one model together."""
    value = str(engine.vllm_options.get(TENSOR_PARALLEL, 1)) if engine.name == "vllm" else "1"
    if not value.isdigit() or not int(value):
        raise UsageError(f"engine vllm: {TENSOR_PARALLEL} is {value}; it must be a whole number of at least 1")
    return int(value)


def engine_settings(engine: EngineSpec) -> dict[str, str]:
    """Return the engine settings that completions depend on; nothing for the local engine."""
    if engine.name == "local":
        return {"engine": f"local beams={engine.num_beams}"} if engine.num_beams else {}
    options = {name.replace("-", "_"): value for name, value in engine.vllm_options.items()}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return {"engine": " ".join(["vllm", *sorted(f"{n}={text}" for n, text in texts.items() if n not in RESOURCES)])}


class InProcessGenerator:
    """Generates in this process."""

    def __init__(self, engine: Generator) -> None:
        self.engine = engine

    def generate_batches(
        self, batches: Iterable[list[GenerationRequest]], sampling: Sampling
    ) -> Iterator[list[Sample]]:
        for requests in batches:
            yield self.engine.generate(requests, sampling)

    def close(self) -> None:
        if isinstance(self.engine, VllmEngine):
            self.engine.close()
        del self.engine
        release()


def release() -> None:
    """Free device memory that this process no longer needs, before others use the device."""
    gc.collect()
    if accelerators.is_in_use():
        torch.accelerator.empty_cache()


class GenerationWorker:
    """Runs in a worker process: an engine with a whole model."""

    def __init__(self, model: ModelConfig, template: str, engine: EngineSpec) -> None:
        if engine.name == "local":
            self.engine = local_engine(model, template, engine)
        else:
            self.engine = engine_for_path(model, template, engine.vllm_options, read_weights=True)

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Sample]:
        return self.engine.generate(requests, sampling)


def local_engine(model: ModelConfig, template: str, engine: EngineSpec) -> Generator:
    served = InferenceModel(model, DataConfig(chat_template=template), engine=engine)
    if beams := engine.num_beams:
        return BeamEngine(served.learner.runner, served.tokenizer, beams, served.learner.logprobs)
    return served.engine


class WorkerGenerators(ReplaceableWorkers):
    """Workers that take whole batches in turn, so that completions do not depend on the number of workers."""

    def generate_batches(
        self, batches: Iterable[list[GenerationRequest]], sampling: Sampling
    ) -> Iterator[list[Sample]]:
        calls: deque[SlotCall] = deque()
        for slot, requests in zip(cycle(self.slots), batches):  # the cycle has no end
            calls.append(SlotCall(slot, "generate", (requests, sampling)))
            if len(calls) == DEPTH * len(self.slots):
                yield self.result(calls.popleft())
        while calls:
            yield self.result(calls.popleft())
