"""Samples -> packs of bounded size -> one Batch each. Packing bounds memory; it never changes the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.types import SCALARS, STREAMS, Batch, Sample


def pack(samples: Sequence[Sample], tokens_per_pack: int, group_size: int = 1) -> list[list[int]]:
    """Indices of samples, pack by pack; the `group_size` neighbours of a row stay together and in order.

    Best fit, longest first. A row longer than the budget gets a pack of its own.
    """
    assert len(samples) % group_size == 0, f"{len(samples)} samples are not whole groups of {group_size}"
    rows = [range(first, first + group_size) for first in range(0, len(samples), group_size)]
    lengths = [sum(len(samples[i]) for i in row) for row in rows]
    packs: list[list[int]] = []
    room: list[int] = []
    for r in sorted(range(len(rows)), key=lambda r: -lengths[r]):
        fitting = [(free, p) for p, free in enumerate(room) if free >= lengths[r]]
        if fitting:
            _, best = min(fitting)
        else:
            best = len(packs)
            packs.append([])
            room.append(max(tokens_per_pack, lengths[r]))
        packs[best].append(r)
        room[best] -= lengths[r]
    return [[i for r in sorted(members) for i in rows[r]] for members in packs]


def collate(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Lay samples end to end. A stream that some samples lack is left out."""
    lengths = tuple(len(sample) for sample in samples)
    mask = np.concatenate([sample.mask for sample in samples])

    def put(array: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)
        if torch.device(device).type == "cpu":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    streams = {
        name: put(np.concatenate([getattr(sample, name) for sample in samples]), torch.float32)
        for name in STREAMS
        if all(getattr(sample, name) is not None for sample in samples)
    }
    scalars = {name: put([getattr(sample, name) for sample in samples], torch.float32) for name in SCALARS}
    return Batch(
        tokens=put(np.concatenate([sample.tokens for sample in samples]), torch.long),
        positions=put(np.concatenate([np.arange(n) for n in lengths]), torch.long),
        sample_of=put(np.repeat(np.arange(len(samples)), lengths), torch.long),
        starts=put(np.cumsum((0, *lengths)), torch.int32),
        lengths=lengths,
        mask=put(mask, torch.bool),
        counted=put(np.flatnonzero(mask), torch.long),
        **streams,
        **scalars,
    )
