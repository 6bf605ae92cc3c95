"""Shards of tensors: this process's shard, the full tensor of which it is one, and which part of it that is.

A parameter is divided first among tensor ranks, and each of those parts among data ranks (FSDP).
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from posttrain.parallel.tensor import tensor_shard_dim


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard, in the same memory; a plain tensor is its own shard."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def full_tensor(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor from shards that are divided as `like` is; all ranks must call it together."""
    if not isinstance(like, DTensor) or shard.ndim != like.ndim:  # the latter: Adam's step count, replicated
        return shard
    mesh, full = like.device_mesh, shard.to(torch.device(like.device_mesh.device_type))
    names = mesh.mesh_dim_names or ()
    for name in ("data", "tensor"):  # the last division is undone first
        placement = like.placements[names.index(name)] if name in names else Replicate()
        if isinstance(placement, Replicate):
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        shape = list(full.shape)
        shape[dim] = like.shape[dim]
        if name == "data" and dim == tensor_shard_dim(like):
            shape[dim] //= mesh.size(names.index("tensor"))
        stride = torch.empty(shape, device="meta").stride()
        sharded = DTensor.from_local(
            full, mesh[name], [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        full = sharded.full_tensor()
    return full


def shard_slices(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Return which part of the full tensor this process holds: of the tensor rank's part, the data rank's."""
    bounds = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        for name in ("tensor", "data"):
            if name in names:
                placement = parameter.placements[names.index(name)]
                if not isinstance(placement, Replicate):
                    dim: int = placement.dim  # type: ignore[attr-defined]
                    bounds[dim] = chunk_bounds(bounds[dim], mesh.size(names.index(name)), mesh.get_local_rank(name))
    return tuple(slice(first, end) for first, end in bounds)


def chunk_bounds(bounds: tuple[int, int], count: int, index: int) -> tuple[int, int]:
    """Return the bounds of one chunk as torch.chunk cuts: of the same size but for the last; some may be empty."""
    first, end = bounds
    size = -(-(end - first) // count)
    return min(first + size * index, end), min(first + size * (index + 1), end)


__all__ = ["full_tensor", "local_shard", "shard_slices"]
