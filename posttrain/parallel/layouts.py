"""The parallel layout of a model: how many ranks divide its heads, tokens and experts, and what FSDP does."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from posttrain.core.errors import UsageError


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
    expert_parallel: int = 1
    """1, or the number of FSDP ranks: each holds some whole experts (parallel/expert.py) instead of a part of each."""

    def __post_init__(self) -> None:
        if self.zero not in (2, 3):
            raise UsageError(f"cluster.zero_stage is {self.zero}; it must be 2 or 3")
        if self.tensor_parallel < 1:
            raise UsageError(f"cluster.tensor_parallel_size is {self.tensor_parallel}; it must be at least 1")
        if self.context_parallel < 1:
            raise UsageError(f"cluster.context_parallel_size is {self.context_parallel}; it must be at least 1")
        if self.expert_parallel > 1 and "parameters" in self.offload:
            raise UsageError("cluster.offload has parameters, but with ep experts stay on the device. Leave out one.")

    @property
    def ranks_per_sample(self) -> int:
        """The number of ranks that process the same samples."""
        return self.context_parallel * self.tensor_parallel

    def is_sharded(self) -> bool:
        """Whether the model is sharded: there are several processes, or sharding is wanted on one."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return several or self.always or "parameters" in self.offload
