"""Samples -> packs of bounded size -> one Batch each. Packing bounds memory; it never changes the result.

Neighbours that begin with the same tokens (answers to one prompt, the two of a pair) can share the computation of that
beginning: `share` is how many tokens must be alike, 0 for never. That does not change the result either.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from posttrain.core.types import SCALARS, STREAMS, Batch, Ints, Sample, Sharing

Places = npt.NDArray[np.int64]

MOST_SHARERS = 16  # more would save little, and repeat the beginning's keys as often
ALIGNED = 16  # bytes
LEAST_SAVING = 1 / 16  # of a run's tokens: below, gathering the keys costs about what is saved


class Run(NamedTuple):
    """Neighbours samples[first:end] that have their first `prefix` tokens in common; one alone has no prefix."""

    first: int
    end: int
    prefix: int


def pack(samples: Sequence[Sample], tokens_per_pack: int, group_size: int = 1, share: int = 0) -> list[list[int]]:
    """Indices of samples, pack by pack; the `group_size` neighbours of a row stay together and in order.

    As few packs as best fit makes, longest first, and then all about as long. A row longer than the budget gets a pack
    of its own. What is shared counts once.
    """
    assert len(samples) % group_size == 0, f"{len(samples)} samples are not whole groups of {group_size}"
    rows = [range(first, first + group_size) for first in range(0, len(samples), group_size)]
    if share and group_size == 1:
        rows = [piece for run in runs(samples, share) for piece in cut(samples, run, tokens_per_pack)]
    lengths = [computed_tokens([samples[i] for i in row], share) for row in rows]
    longest_first = sorted(range(len(rows)), key=lambda r: -lengths[r])
    packs = fewest(lengths, longest_first, tokens_per_pack)
    packs = evened(lengths, longest_first, tokens_per_pack, len(packs)) or packs
    return [[i for r in sorted(members) for i in rows[r]] for members in packs]


def fewest(lengths: Sequence[int], order: Sequence[int], tokens_per_pack: int) -> list[list[int]]:
    """Each row into the pack where it leaves the least room."""
    packs: list[list[int]] = []
    room: list[int] = []
    for r in order:
        fitting = [(free, p) for p, free in enumerate(room) if free >= lengths[r]]
        if fitting:
            _, best = min(fitting)
        else:
            best = len(packs)
            packs.append([])
            room.append(max(tokens_per_pack, lengths[r]))
        packs[best].append(r)
        room[best] -= lengths[r]
    return packs


def evened(lengths: Sequence[int], order: Sequence[int], tokens_per_pack: int, count: int) -> list[list[int]]:
    """So many packs of about the same length: each row into the emptiest. Nothing where one would be too long.

    A short pack at the end would keep a device waiting for the host, and be of another length at every step.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, p) for p in range(count)]
    for r in order:
        total, p = heapq.heappop(filled)
        if total and total + lengths[r] > tokens_per_pack:
            return []
        packs[p].append(r)
        heapq.heappush(filled, (total + lengths[r], p))
    return packs


def runs(samples: Sequence[Sample], share: int) -> list[Run]:
    """Cut samples into runs of neighbours that begin alike, so that the fewest tokens are left to compute."""
    alike = [common_beginning(a.tokens, b.tokens) for a, b in pairwise(samples)]
    best = [(0, Run(0, 0, 0))]  # of the samples before each edge: the tokens saved, and the last run
    for end in range(1, len(samples) + 1):
        best.append((best[end - 1][0], Run(end - 1, end, 0)))
        total, prefix = len(samples[end - 1]), len(samples[end - 1])
        for first in range(end - 2, max(-1, end - 1 - MOST_SHARERS), -1):
            prefix = min(prefix, alike[first])
            if prefix < share:
                break
            total += len(samples[first])
            saved = best[first][0] + saving(prefix, end - first, total)
            if saved > best[end][0]:
                best[end] = (saved, Run(first, end, prefix))
    found: list[Run] = []
    edge = len(samples)
    while edge:
        found.append(best[edge][1])
        edge = found[-1].first
    return found[::-1]


def common_beginning(a: Ints, b: Ints) -> int:
    """How many tokens two sequences have in common before they differ."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter


def saving(prefix: int, members: int, total: int) -> int:
    """Tokens that a run of `total` tokens need not compute; 0 where they are too few to be worth it."""
    saved = prefix * (members - 1)
    return saved if saved >= LEAST_SAVING * total else 0


def cut(samples: Sequence[Sample], run: Run, tokens_per_pack: int) -> list[range]:
    """Pieces of a run that fit into a pack; each computes the prefix again."""
    pieces, first, total = [], run.first, 0
    for i in range(run.first, run.end):
        total += len(samples[i])
        if i > first and total - saving(run.prefix, i + 1 - first, total) > tokens_per_pack:
            pieces.append(range(first, i))
            first, total = i, len(samples[i])
    return [*pieces, range(first, run.end)]


def computed_tokens(samples: Sequence[Sample], share: int) -> int:
    """Tokens that the layers see of these samples."""
    total = sum(map(len, samples))
    if not share or len(samples) == 1:
        return total
    return total - sum(run.prefix * (run.end - run.first - 1) for run in runs(samples, share))


def collate(samples: Sequence[Sample], device: torch.device | str = "cpu", share: int = 0) -> Batch:
    """Lay samples end to end. A stream that some samples lack is left out."""
    lengths = tuple(len(sample) for sample in samples)
    mask = np.concatenate([sample.mask for sample in samples])
    streams = {
        name: put(np.concatenate([getattr(sample, name) for sample in samples]), torch.float32)
        for name in STREAMS
        if all(getattr(sample, name) is not None for sample in samples)
    }
    scalars = {name: put([getattr(sample, name) for sample in samples], torch.float32) for name in SCALARS}
    batch = Batch(
        tokens=put(np.concatenate([sample.tokens for sample in samples]), torch.long),
        positions=put(np.concatenate([np.arange(n) for n in lengths]), torch.long),
        sample_of=put(np.repeat(np.arange(len(samples)), lengths), torch.long),
        starts=put(np.cumsum((0, *lengths)), torch.int32),
        lengths=lengths,
        mask=put(mask, torch.bool),
        counted=put(np.flatnonzero(mask), torch.long),
        sharing=shared(samples, runs(samples, share)) if share else None,
        **streams,
        **scalars,
    )
    return batch if torch.device(device).type == "cpu" else moved(batch, device)


def put(array: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)


def moved(batch: Batch, device: torch.device | str) -> Batch:
    """With all its tensors on the device, in one copy that the host does not wait for."""
    owners: list[Any] = [batch] if batch.sharing is None else [batch, batch.sharing]
    tensors = [
        (owner, field.name, value)
        for owner in owners
        for field in fields(owner)
        if isinstance(value := getattr(owner, field.name), torch.Tensor)
    ]
    rooms = [-(-tensor.nbytes // ALIGNED) * ALIGNED for _, _, tensor in tensors]
    here = torch.empty(sum(rooms), dtype=torch.uint8)
    for room, (_, _, tensor) in zip(here.split(rooms), tensors, strict=True):
        room.view(tensor.dtype)[: tensor.numel()] = tensor
    there = sent(here, device)
    for room, (owner, name, tensor) in zip(there.split(rooms), tensors, strict=True):
        setattr(owner, name, room.view(tensor.dtype)[: tensor.numel()])
    return batch


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """On the device. Neither waits for the other: what the device is at work on would have to end first."""
    on_cuda = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if on_cuda else tensor).to(device, non_blocking=on_cuda)


def shared(samples: Sequence[Sample], found: list[Run]) -> Sharing | None:
    """Lay out runs: the beginning of each, then what follows it in each sample. None where nobody shares."""
    if len(found) == len(samples):
        return None
    tokens: list[Ints] = []  # of each piece, and so the two below
    positions: list[Places] = []
    keys: list[Places] = []
    place: list[Places] = []
    computed = 0

    def add(piece: Ints, before: Places) -> Places:
        """Compute a piece that sees what is `before` it; the places of both."""
        nonlocal computed
        seen = np.concatenate([before, np.arange(computed, computed + len(piece))])
        if len(piece):
            tokens.append(piece)
            positions.append(np.arange(len(before), len(seen)))
            keys.append(seen)
            computed += len(piece)
        return seen

    nothing = np.arange(0)
    for first, end, prefix in found:
        beginning = add(samples[first].tokens[:prefix], nothing)
        place += [add(sample.tokens[prefix:], beginning) for sample in samples[first:end]]
    lengths, key_lengths = (tuple(len(piece) for piece in pieces) for pieces in (tokens, keys))
    return Sharing(
        tokens=put(np.concatenate(tokens), torch.long),
        positions=put(np.concatenate(positions), torch.long),
        place=put(np.concatenate(place), torch.long),
        starts=put(np.cumsum((0, *lengths)), torch.int32),
        lengths=lengths,
        keys=put(np.concatenate(keys), torch.long),
        key_starts=put(np.cumsum((0, *key_lengths)), torch.int32),
        key_lengths=key_lengths,
    )
