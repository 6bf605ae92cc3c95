"""Collectives under the names of every torch, and the time that a process spends in communication, by its profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

COLLECTIVES = ("nccl", "gloo:", "hccl", "xccl")  # how the names of kernels and operations begin
MICROSECONDS = 1e-6


def all_gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate the parts of all ranks of a group, which have equal shapes, along dimension 0."""
    found = part.new_empty(dist.get_world_size(group) * len(part), *part.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its older name
    gather(found, part.contiguous(), group=group)
    return found


def reduce_scatter(whole: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Add up tensors of all ranks of a group and return this rank's part along dimension 0."""
    found = whole.new_empty(len(whole) // dist.get_world_size(group), *whole.shape[1:])
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(found, whole.contiguous(), group=group)
    return found


class CommunicationMeter:
    """Measures the block after `request`. Waiting for a slower rank is part of the time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.requested = device, False
        self.seconds: float | None = None  # of the last block that was measured

    def request(self) -> None:
        self.requested, self.seconds = True, 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the block, if that was requested; several blocks add up until `take`."""
        if not self.requested:
            yield
            return
        host = {torch.profiler.ProfilerActivity.CPU}
        kinds = (torch.profiler.supported_activities() - host if self.device.type != "cpu" else None) or host
        with torch.profiler.profile(activities=kinds) as profile:
            yield
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events() or ()
            if event.name.lower().startswith(COLLECTIVES)
        ]
        self.seconds = (self.seconds or 0.0) + MICROSECONDS * covered(spans)

    def take(self) -> float | None:
        """Return the seconds measured since the last call; None if nothing was requested."""
        found, self.seconds, self.requested = self.seconds, None, False
        return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that spans cover; where several overlap, it counts once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
