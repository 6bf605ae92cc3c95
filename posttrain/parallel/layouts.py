"""The parallel layout of a model: how many ranks divide its layers, heads, tokens and experts, and what FSDP does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from posttrain.config.checks import division_problem
from posttrain.core.errors import UsageError
from posttrain.parallel.context import check_context_parallel
from posttrain.parallel.expert import check_expert_parallel
from posttrain.parallel.pipeline import check_pipeline_parallel
from posttrain.parallel.tensor import check_tensor_parallel

QUANTIZED = "model.load_in_4bit: 4-bit weights cannot be sharded over processes: cluster.devices must be 1"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How the processes of a worker pool share one model."""

    tensor_parallel: int = 1
    zero: int = 3
    """3: parameters are gathered for each layer and freed after it; 2: they stay gathered until the backward pass."""
    offload: frozenset[str] = frozenset()
    """`parameters`: parameters, gradients and Adam's state are in host memory; a layer is on the device while used."""
    always: bool = False
    """Shard even if there is only one process."""
    context_parallel: int = 1
    ulysses_degree: int = 0
    """Context ranks that exchange tokens for heads in attention, others form a ring; 0: as many as the heads allow."""
    replicate: int = 1
    """Copies of the model, each of which FSDP shards over an equal part of the ranks (HSDP)."""
    defer_reduction: bool = False
    """Gradients are reduced in the last micro-batch of a step only; until then each rank holds whole ones."""
    expert_parallel: int = 1
    """Neighbours among the FSDP ranks that each hold some whole experts (parallel/expert.py) instead of a part of every
    expert. It divides these ranks; those with the same experts add up their gradients."""
    pipeline_parallel: int = 1
    """Ranks that hold different layers (parallel/pipeline.py); each of them is divided by the other sizes."""
    virtual_stages: int = 1
    """Pipeline stages that each of them holds; with several the schedule is interleaved."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage; empty: equally many, as far as possible."""
    sequence_parallel: bool = False
    """Tensor ranks also divide the tokens between attention and MLPs, and the vocabulary (parallel/tensor.py)."""

    def __post_init__(self) -> None:
        if self.zero not in (2, 3):
            raise UsageError(f"cluster.zero_stage is {self.zero}; it must be 2 or 3")
        if self.tensor_parallel < 1:
            raise UsageError(f"cluster.tensor_parallel_size is {self.tensor_parallel}; it must be at least 1")
        if self.context_parallel < 1:
            raise UsageError(f"cluster.context_parallel_size is {self.context_parallel}; it must be at least 1")

    @property
    def ranks_per_sample(self) -> int:
        """The number of consecutive ranks that process the same samples; those of other stages do so too."""
        return self.context_parallel * self.tensor_parallel

    def expert_copies(self, ranks: int) -> int:
        """Return how many of the model's `ranks` hold the same experts, not counting tensor and pipeline ranks."""
        return ranks // self.pipeline_parallel // self.tensor_parallel // self.expert_parallel

    def is_sharded(self) -> bool:
        """Whether the model is sharded: there are several processes, or sharding is wanted on one."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return several or self.always or "parameters" in self.offload

    def without_experts(self) -> ParallelLayout:
        """Return the layout of a teacher beside the model, whose experts FSDP shards like everything else."""
        return replace(self, expert_parallel=1)

    def check_devices(self, devices: int) -> None:
        """Raise UsageError if the sizes do not divide the number of processes."""
        sizes = (
            self.tensor_parallel,
            self.context_parallel,
            self.expert_parallel,
            self.replicate,
            self.pipeline_parallel,
        )
        if problem := division_problem("this role", devices, *sizes):
            raise UsageError(problem)


def check_layout(layout: ParallelLayout, devices: int, model: Any, *, in_4bit: bool = False) -> None:
    """Raise UsageError if the model cannot be divided among the processes in this layout.

    This is the only place that decides it: `posttrain plan` asks for a model on the meta device, every run before it
    loads a model, and every process before it shards one.
    """
    layout.check_devices(devices)
    if devices == 1 and not layout.always and "parameters" not in layout.offload:
        return
    if in_4bit:
        raise UsageError(QUANTIZED)
    if layout.tensor_parallel > 1:
        check_tensor_parallel(model, layout.tensor_parallel, sequence=layout.sequence_parallel)
    if layout.context_parallel > 1:
        sizes = layout.context_parallel, layout.tensor_parallel, layout.ulysses_degree
        check_context_parallel(model.config.get_text_config(), *sizes)
    if layout.expert_parallel > 1:
        check_expert_parallel(model, layout.expert_parallel)
    if layout.pipeline_parallel > 1:
        check_pipeline_parallel(model, layout.pipeline_parallel, layout.virtual_stages, layout.layers_per_stage)
