"""Shards of tensors: this process's shard, the full tensor of which it is one, and which part of it that is.

A parameter is divided first among tensor ranks, and each of those parts among data ranks (FSDP). Ranks may also divide
each of several blocks of a dimension: of the joined matrices of gate and up, tensor rank i has part i of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Range = tuple[int, int]
"""First index and end."""


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard, in the same memory; a plain tensor is its own shard."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def placement_of(parameter: torch.Tensor, ranks: str) -> Placement:
    """Return how the ranks of a mesh dimension divide a parameter; Replicate: they do not."""
    if not isinstance(parameter, DTensor):
        return Replicate()
    names = parameter.device_mesh.mesh_dim_names or ()
    return parameter.placements[names.index(ranks)] if ranks in names else Replicate()


def divided_dim(parameter: torch.Tensor, ranks: str) -> tuple[int, int] | None:
    """Return the dimension that these ranks divide, and its number of blocks; None: each holds all that it could."""
    placement = placement_of(parameter, ranks)
    if isinstance(placement, Replicate):
        return None
    dim: int = placement.dim  # type: ignore[attr-defined]
    tensor = placement_of(parameter, "tensor")
    if ranks == "data" and not isinstance(tensor, Replicate) and tensor.dim == dim:  # type: ignore[attr-defined]
        return dim, 1  # the blocks that FSDP notes are the parts of the tensor ranks
    return dim, getattr(placement, "split_factor", 1)


def is_tensor_sharded(parameter: torch.Tensor) -> bool:
    """Whether tensor ranks hold different parts of the parameter."""
    return divided_dim(parameter, "tensor") is not None


def divide(
    parameter: torch.nn.Parameter,
    mesh: DeviceMesh,
    divisions: Sequence[tuple[int, int] | None],
    device: torch.device,
) -> torch.nn.Parameter:
    """Return a parameter of which this process keeps its shard only.

    `divisions`: for each dimension of the mesh, the parameter's dimension that its ranks divide, and the number of its
    blocks, each of which they divide.
    """
    part, placements = parameter.detach(), []
    for index, division in enumerate(divisions):
        placements.append(Replicate() if division is None else placement_in_blocks(*division))
        if division is not None:
            dim, blocks = division
            ranges = divided([(0, part.shape[dim])], mesh.size(index), mesh.get_local_rank(index), blocks)
            part = torch.cat([part.narrow(dim, first, end - first) for first, end in ranges], dim)
    part = part.clone() if part.is_meta else part.to(device, copy=True)
    whole = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)


def placement_in_blocks(dim: int, blocks: int) -> Placement:
    return Shard(dim) if blocks == 1 else _StridedShard(dim, split_factor=blocks)


@torch.no_grad()
def full_tensor(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor from shards that are divided as `like` is; all ranks must call it together."""
    if not isinstance(like, DTensor) or shard.ndim != like.ndim:  # the latter: Adam's step count, replicated
        return shard
    mesh, full = like.device_mesh, shard.to(torch.device(like.device_mesh.device_type))
    names = mesh.mesh_dim_names or ()
    for name in ("data", "tensor"):  # the last division is undone first
        division = divided_dim(like, name)
        if division is None:
            continue
        dim, blocks = division
        ranks, shape = mesh.size(names.index(name)), list(full.shape)
        shape[dim] = like.shape[dim]
        tensor = divided_dim(like, "tensor")
        if name == "data" and tensor is not None and tensor[0] == dim:
            first, end = chunk_bounds((0, shape[dim]), mesh.size(names.index("tensor")), mesh.get_local_rank("tensor"))
            shape[dim] = end - first  # of the last tensor rank it may be smaller
        stride = torch.empty(shape, device="meta").stride()
        sharded = DTensor.from_local(
            full, mesh[name], [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        full = sharded.full_tensor()
        if blocks > 1:  # the ranks' parts follow each other; those of a block belong together
            full = full.unflatten(dim, (ranks, blocks, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return full


def shard_ranges(parameter: torch.Tensor) -> list[list[Range]]:
    """Return which part of the full tensor this process holds: of each dimension, the ranges that follow each other."""
    ranges = [[(0, size)] for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        for name in ("tensor", "data"):
            if (division := divided_dim(parameter, name)) is not None:
                dim, blocks = division
                size, rank = mesh.size(names.index(name)), mesh.get_local_rank(name)
                ranges[dim] = divided(ranges[dim], size, rank, blocks)
    return ranges


def shard_slices(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Return `shard_ranges` of a parameter that is not divided in blocks."""
    found = shard_ranges(parameter)
    assert all(len(ranges) == 1 for ranges in found), "divided in blocks: use read_shard"
    return tuple(slice(*ranges[0]) for ranges in found)


def read_shard(parameter: torch.Tensor, read: Callable[[tuple[slice, ...]], torch.Tensor]) -> torch.Tensor:
    """Return this process's shard of a tensor of which `read` returns slices."""

    def joined(known: tuple[slice, ...], rest: list[list[Range]]) -> torch.Tensor:
        if not rest:
            return read(known)
        parts = [joined((*known, slice(*part)), rest[1:]) for part in rest[0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, len(known))

    return joined((), shard_ranges(parameter))


def divided(ranges: list[Range], count: int, index: int, blocks: int) -> list[Range]:
    """Return the ranges of one of `count` chunks of what the given ranges hold, or of each block of it."""
    if blocks > 1:
        ((first, end),) = ranges
        size = (end - first) // blocks
        return [chunk_bounds((first + size * i, first + size * (i + 1)), count, index) for i in range(blocks)]
    start, stop = chunk_bounds((0, sum(end - first for first, end in ranges)), count, index)
    found, before = [], 0
    for first, end in ranges:
        part = first + max(0, start - before), min(end, first + stop - before)
        if part[0] < part[1]:
            found.append(part)
        before += end - first
    return found or [(ranges[-1][1], ranges[-1][1])]


def chunk_bounds(bounds: Range, count: int, index: int) -> Range:
    """Return the bounds of one chunk as torch.chunk cuts: of the same size but for the last; some may be empty."""
    first, end = bounds
    size = -(-(end - first) // count)
    return min(first + size * index, end), min(first + size * (index + 1), end)


__all__ = ["divide", "full_tensor", "is_tensor_sharded", "local_shard", "read_shard", "shard_ranges", "shard_slices"]
