"""`posttrain plan --search`: the layouts and divisions of devices among roles with the shortest steps that fit."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from posttrain.algorithms import ALGORITHMS, Algorithm
from posttrain.cli.plan_layouts import as_words, is_accepted, other_roles
from posttrain.cli.plan_training import Target, format_seconds, format_size, parameter_counts
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.core.logging import quiet_libraries
from posttrain.core.types import Sample
from posttrain.models import memory
from posttrain.models.loading import compute_dtype
from posttrain.models.tokenizers import load_tokenizer
from posttrain.train.layout_check import check_layouts
from posttrain.train.memory_plan import estimate_memory, fitting_step, sharding_of, vocabulary_of, without_cache
from posttrain.train.run_data import load_data
from posttrain.train.step_time import Machines
from posttrain.train.time_plan import TRAINED_BYTES, Lengths, PhaseTimes, estimate_time, model_work, step_lengths

SHOWN = 3
ROLLOUT_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the devices, for engines of their own
LARGEST_SIZE = 8  # of tensor and context parallelism
ENGINE_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(slots=True, frozen=True)
class Found:
    """A configuration that fits and that a run accepts."""

    config: Config
    options: list[str]
    times: PhaseTimes
    needed: float  # bytes on a device of the policy


@dataclass(slots=True, frozen=True)
class LayoutSearch:
    """What is fixed while layouts are compared."""

    config: Config
    algo: Algorithm
    target: Target
    lengths: Lengths
    longest: int  # tokens of the longest sample

    @property
    def machines(self) -> Machines:
        assert self.target.rates is not None
        return Machines(self.target.rates, self.target.devices_per_machine)

    def time(self, config: Config) -> PhaseTimes:
        return estimate_time(config, self.algo, self.target.device, self.machines, self.lengths, self.target.available)

    def best(self) -> tuple[list[Found], int]:
        """Return the layouts with the shortest steps, and how many were compared.

        Layouts are examined in the order of the time of their largest micro-batches without recomputation, which
        is the shortest they can have; the search ends where that exceeds the times found.
        """
        order = [
            (self.time(self.with_cluster(changes)).seconds, n, changes) for n, changes in enumerate(self.layouts())
        ]
        compared = len(order)
        heapq.heapify(order)
        found: list[Found] = []
        while order:
            bound, _, changes = heapq.heappop(order)
            if len(found) >= SHOWN and bound >= found[SHOWN - 1].times.seconds:
                break
            if (fitting := self.fitting(changes)) is not None:
                found = shortest([*found, fitting])
        return found, compared

    def with_cluster(self, changes: dict[str, Any]) -> Config:
        return replace(self.config, cluster=replace(self.config.cluster, **changes))

    def layouts(self) -> Iterator[dict[str, Any]]:
        """Yield changes of the cluster section; a run may refuse some of them."""
        for division in self.divisions():
            for offload in self.offloads():
                learners = self.with_cluster(division).cluster.of("actor").devices
                yield from ({**division, **offload, **sizes} for sizes in self.sizes(learners, bool(offload)))

    def divisions(self) -> Iterator[dict[str, Any]]:
        """Yield numbers of devices for generation, with the sizes of engines."""
        config, devices = self.config, self.config.cluster.devices
        if not isinstance(config, OnlineConfig) or devices == 1:
            yield {}
            return
        vllm = config.rollout.engine == "vllm"
        yield {"rollout_devices": 0, "rollout_tensor_parallel_size": 1}
        for apart in sorted({max(1, round(share * devices)) for share in ROLLOUT_SHARES}):
            if devices - apart - sum(config.cluster.own_devices().values()) + config.cluster.rollout_devices < 1:
                continue
            for size in ENGINE_SIZES if vllm else (1,):
                if apart % size == 0:
                    yield {"rollout_devices": apart, "rollout_tensor_parallel_size": size}

    def offloads(self) -> Iterator[dict[str, Any]]:
        yield {}
        if self.target.device.type != "cpu" and "parameters" not in self.config.cluster.offload:
            yield {"offload": (*self.config.cluster.offload, "parameters")}

    def sizes(self, learners: int, offloaded: bool) -> Iterator[dict[str, Any]]:
        """Yield sizes of all axes whose product divides the learners' devices and whose states may fit."""
        work = model_work(self.config, self.config.model.path, self.algo.head, self.target.device)
        experts = (False, True) if work.expert_weights else (False,)
        learners //= self.config.cluster.pipeline_parallel_size  # which stays as it is configured
        for tensor in powers(LARGEST_SIZE, learners):
            for context in powers(LARGEST_SIZE, learners // tensor):
                ranks = learners // tensor // context
                for replicate in divisors(ranks):
                    shard = learners // tensor // replicate
                    held = work.trained / self.config.cluster.pipeline_parallel_size / (tensor * shard)
                    states = TRAINED_BYTES / 2 * held  # at least: moments may leave
                    if states > self.target.available and not offloaded:
                        continue
                    for divided in experts:
                        for zero in (3, 2) if learners > 1 else (3,):
                            yield {
                                "tensor_parallel_size": tensor,
                                "context_parallel_size": context,
                                "replicate_size": replicate,
                                "expert_parallel_size": shard if divided else 1,
                                "zero_stage": zero,
                            }

    def fitting(self, changes: dict[str, Any]) -> Found | None:
        """Return the layout with the fastest step that fits; None if a run would refuse it, or nothing fits."""
        config, device, available = self.with_cluster(changes), self.target.device, self.target.available
        if not is_accepted(config, self.algo):
            return None
        if not all(role.fits for role in other_roles(config, self.algo, device, available)):
            return None
        largest = self.largest(config)
        step = fitting_step(config, self.algo, device, largest, available)
        if step is None:
            return None
        applied = step.applied(config)
        words = [*as_words("cluster", self.changed(changes)), *step.options(config)]
        needs = without_cache(estimate_memory(applied, self.algo, device, self.largest(applied), available))
        return Found(applied, words, self.time(applied), needs.with_overhead)

    def changed(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Leave out what the configuration has already."""
        cluster = self.config.cluster
        return {name: value for name, value in changes.items() if getattr(cluster, name) != value}

    def largest(self, config: Config) -> list[Sample]:
        """Return the largest micro-batch: samples of the greatest length."""
        sample = Sample(tokens=np.zeros(self.longest, dtype=np.int32), mask=np.arange(self.longest) > 0)
        tokens = config.train.micro_batch_tokens * sharding_of(config).context
        groups = max(1, tokens // (self.longest * self.algo.group_size))
        return [sample] * (groups * self.algo.group_size)


def shortest(found: list[Found]) -> list[Found]:
    """Return the shortest steps, of layouts that differ only in zero_stage the faster or smaller."""
    best: dict[tuple[Any, ...], Found] = {}
    for each in sorted(found, key=lambda each: (each.times.seconds, each.needed)):
        best.setdefault(astuple(replace(each.config.cluster, zero_stage=3)), each)
    return list(best.values())[:SHOWN]


def powers(limit: int, divides: int) -> list[int]:
    """Return the powers of two up to a limit that divide a number."""
    return [size for size in (1, 2, 4, 8, 16, 32) if size <= limit and divides % size == 0]


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def search_layouts(verb: str, config: Config, target: Target) -> int:
    """Print the layouts with the shortest steps, each with what bounds it; 1 if none fits."""
    quiet_libraries()
    if target.rates is None:
        raise UsageError(
            f"plan --search compares times, but the rates of {target.name} are not known. "
            "Name the device: --device h100"
        )
    algo = ALGORITHMS[verb](config.algo)
    with memory.keep_estimates():
        check_layouts(replace(config, cluster=type(config.cluster)()), algo)
        model = memory.counted_model(config.model, algo.head, compute_dtype(config.model, target.device))
        data = None
        if config.data.train:
            data = load_data(config, algo, load_tokenizer(config.model), vocabulary_of(model))
        lengths = step_lengths(config, algo, data, target.completion_tokens)
        longest = config.data.max_length if data is None else int(data.train.examples.lengths().max())
        if data is not None and isinstance(config, OnlineConfig):
            longest += config.rollout.max_tokens
        print(f"{verb} of {config.model.path}: {parameter_counts(memory.model_memory(model, average=False))}")
        found, compared = LayoutSearch(config, algo, target, lengths, longest).best()
    print_found(found, compared, config, target, lengths)
    return 0 if found else 1


def print_found(found: list[Found], compared: int, config: Config, target: Target, lengths: Lengths) -> None:
    devices, size = config.cluster.devices, format_size(target.available)
    on = f"{devices:,} device{'s' * (devices > 1)} of {size}"
    if not found:
        print(
            f"None of {compared:,} layouts fits {on}. "
            "Use a smaller model, adapters (--model.lora_rank) or more devices."
        )
        return
    print(f"{compared:,} layouts compared for {on}; a step has {lengths.tokens:,.0f} tokens. The shortest steps:\n")
    for number, each in enumerate(found, 1):
        print(f"{number}. {format_seconds(each.times.seconds)} per step:  {' '.join(each.options) or 'as configured'}")
        phases = ", ".join(f"{name} {format_seconds(part.seconds)}" for name, part in each.times.phases.items())
        rate = lengths.tokens / each.times.seconds / devices
        print(f"   {phases}; {rate:,.0f} tokens/s per device; {format_size(each.needed)} on a device of the policy")
        print(f"   bounded by {each.times.bound()}\n")
