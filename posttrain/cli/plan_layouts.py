"""What the devices of other roles hold, and the changes of a configuration with which it fits and a run accepts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from posttrain.algorithms import Algorithm
from posttrain.config.checks import check
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import Sample
from posttrain.engines.vllm.options import VLLM_SHARE
from posttrain.models import memory
from posttrain.models.freezing import without_freezing
from posttrain.models.loading import compute_dtype
from posttrain.train.layout_check import check_layouts
from posttrain.train.memory_plan import (
    critic_bytes,
    fitting_step,
    frozen_model,
    generates_in_8_bits,
    sharding_of,
    with_model,
)

MACHINE_DEVICES = 8  # upper bound of tensor and context parallel sizes: the devices of one machine


@dataclass(slots=True, frozen=True)
class RoleDevices:
    """The devices of a role that has its own."""

    role: str
    needed: int  # bytes on each device; 0: unknown
    limit: float  # bytes that it may have there
    note: str

    @property
    def fits(self) -> bool:
        return self.needed <= self.limit


def other_roles(config: Config, algo: Algorithm, device: torch.device, available: int) -> Iterator[RoleDevices]:
    """Yield the memory of each role that has devices of its own."""
    dtype, limit = compute_dtype(config.model, device), (1 - memory.MARGIN) * available - memory.BASE_BYTES
    for role in config.cluster.own_devices():
        found, sharding = config.cluster.of(role), sharding_of(config, role)
        if role == "rollout":
            yield rollout_devices(config, device, available)
        elif role == "critic":
            critic = memory.counted_model(without_freezing(config.model), "score", dtype)
            more = memory.gathered_bytes(critic, sharding) if sharding.devices > 1 else 0
            needed = critic_bytes(config, algo, dtype) + more
            yield RoleDevices(role, needed, limit, f"{found.devices:,} devices; plus activations")
        elif role == "reference":
            model = frozen_model(config.model, algo.reference_path() or config.model.path, dtype)
            needed = memory.model_memory(model, average=False).weights
            if sharding.devices > 1:
                needed = memory.sharded_memory(model, sharding, average=False).weights
                needed += memory.gathered_bytes(model, sharding)
            yield RoleDevices(role, needed, limit, f"{found.devices:,} devices")
        else:
            yield RoleDevices(role, 0, limit, f"{found.devices:,} devices; depends on the reward models")


def rollout_devices(config: Config, device: torch.device, available: int) -> RoleDevices:
    """Return the memory of devices that only generate; vLLM takes no more than gpu_memory_utilization."""
    assert isinstance(config, OnlineConfig)
    found, model = config.cluster.of("rollout"), config.model
    empty = frozen_model(model, model.path, compute_dtype(model, device))
    weights = memory.model_memory(empty, average=False).weights
    weights += memory.eight_bit_bytes(empty) if generates_in_8_bits(config, found.place) else 0
    number = found.devices // found.tensor_parallel
    engines = f"{number:,} engine{'s' * (number > 1)}"
    engines += f" of {found.tensor_parallel} devices" if found.tensor_parallel > 1 else ""
    share = 1 - memory.MARGIN
    if config.rollout.engine == "vllm":
        share = float(config.rollout.vllm_options.get("gpu_memory_utilization", VLLM_SHARE))
    limit = (1 - memory.ENGINE_MARGIN) * share * available - memory.BASE_BYTES
    note = f"{engines}; the remaining memory holds the KV cache"
    return RoleDevices("rollout", weights // found.tensor_parallel, limit, note)


def fitting_options(
    config: Config, algo: Algorithm, device: torch.device, largest: list[Sample], available: int
) -> tuple[list[str], bool] | None:
    """Return the options with which it fits and which a run accepts, and whether a run sets them by itself.

    Layouts are tried in the order of the time that they cost; what is trained changes last.
    """
    for weights in smaller_models(config):
        for layout in other_layouts(config, device):
            changed = with_model(replace(config, cluster=replace(config.cluster, **layout)), **weights)
            if not is_accepted(changed, algo):
                continue
            if not all(role.fits for role in other_roles(changed, algo, device, available)):
                continue
            samples = repacked(changed, algo, largest) if "context_parallel_size" in layout else largest
            step = fitting_step(changed, algo, device, samples, available)
            if step is not None:
                options = [*as_words("cluster", layout), *as_words("model", weights), *step.options(changed)]
                return options, not layout and not weights
    return None


def is_accepted(config: Config, algo: Algorithm) -> bool:
    """Whether a run would accept the configuration."""
    try:
        check(config, data=False)
        check_layouts(config, algo)
    except UsageError:
        return False
    return True


def other_layouts(config: Config, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield changes of the cluster section, beginning with none; a run may refuse some of them."""
    yield {}
    cluster, devices = config.cluster, config.cluster.of("actor").devices
    if cluster.zero_stage == 2 and devices > 1:
        yield {"zero_stage": 3}
    sizes = [size for size in range(2, devices + 1) if devices % size == 0]
    few = [size for size in sizes if size <= MACHINE_DEVICES]
    if not cluster.own_devices():
        yield from with_rollout_devices(config, devices)
        for size in reversed(sizes):  # experts that are divided among all devices take the least memory
            yield {"expert_parallel_size": size, "replicate_size": devices // size}
        yield from ({"context_parallel_size": size} for size in few)
        yield from ({"tensor_parallel_size": size} for size in few)
        yield from ({"tensor_parallel_size": size, "sequence_parallel": True} for size in few)
        for context, tensor in ((2, 2), (4, 2), (2, 4), (8, 2), (4, 4)):
            if devices % (context * tensor) == 0:
                yield {"context_parallel_size": context, "tensor_parallel_size": tensor}
    if device.type != "cpu" and "parameters" not in cluster.offload:
        yield {"offload": (*cluster.offload, "parameters")}


def with_rollout_devices(config: Config, devices: int) -> Iterator[dict[str, Any]]:
    """Yield divisions of the devices between training and generation."""
    if not isinstance(config, OnlineConfig) or devices == 1:
        return
    for apart in dict.fromkeys((max(1, devices // 4), devices // 2)):
        yield {"rollout_devices": apart}
        if config.rollout.engine == "vllm":
            sizes = [size for size in range(2, MACHINE_DEVICES + 1) if apart % size == 0]
            yield from ({"rollout_devices": apart, "rollout_tensor_parallel_size": size} for size in sizes)


def repacked(config: Config, algo: Algorithm, largest: list[Sample]) -> list[Sample]:
    """Return the largest micro-batch where other numbers of devices share one: the longest example, repeated."""
    groups = [largest[i : i + algo.group_size] for i in range(0, len(largest), algo.group_size)]
    longest = max(groups, key=lambda group: sum(map(len, group)))
    tokens = config.train.micro_batch_tokens * sharding_of(config).context
    return longest * max(1, tokens // sum(map(len, longest)))


def smaller_models(config: Config) -> Iterator[dict[str, Any]]:
    """Yield changes of the model section, from none to the one that saves the most memory."""
    yield {}
    if find_spec("peft") is None:
        return
    adapters = {} if config.model.lora_rank else {"lora_rank": 16}
    if adapters:
        yield adapters
    if not config.model.load_in_4bit:
        yield {**adapters, "load_in_4bit": True}


def as_words(section: str, values: dict[str, Any]) -> list[str]:
    """Return values as on the command line."""
    options = []
    for name, value in values.items():
        words = value if isinstance(value, tuple) else () if value is True else (str(value),)
        options.append(" ".join([f"--{section}.{name}", *words]))
    return options
