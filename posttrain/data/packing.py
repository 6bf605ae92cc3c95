"""Pack samples into micro-batches of bounded size and lay each out as one MicroBatch.

Packing bounds memory and never changes the result. Neighbouring samples that begin with the same tokens (completions
of one prompt, the two sides of a pair) can share the computation of that prefix, which does not change the result
either: prefixes of at least `min_shared_prefix` tokens are shared; 0 switches sharing off.
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

from posttrain.core.devices import copy_to_device
from posttrain.core.types import SCALARS, STREAMS, Experts, Ints, MicroBatch, PrefixSharing, Sample

Indices = npt.NDArray[np.int64]

MAX_PREFIX_GROUP = 16  # larger groups save little more, and attention reads the prefix's keys once per member
ALIGNMENT = 16  # bytes
MIN_SAVED_FRACTION = 1 / 16  # of a group's tokens; below it, gathering the keys costs about as much as is saved


class PrefixGroup(NamedTuple):
    """Neighbours samples[first:end] whose first `prefix` tokens are equal; a single sample has prefix 0."""

    first: int
    end: int
    prefix: int


def pack_into_micro_batches(
    samples: Sequence[Sample], max_tokens: int, group_size: int = 1, min_shared_prefix: int = 0
) -> list[list[int]]:
    """Return the indices of the samples in each micro-batch of at most `max_tokens` tokens.

    The `group_size` neighbours of a group stay together and in order. The number of micro-batches is that of best fit,
    longest first; their lengths are then balanced. A group longer than `max_tokens` gets a micro-batch of its own.
    Tokens of a shared prefix count once.
    """
    assert len(samples) % group_size == 0, f"{len(samples)} samples are not whole groups of {group_size}"
    units = [range(first, first + group_size) for first in range(0, len(samples), group_size)]
    if min_shared_prefix and group_size == 1:
        groups = find_prefix_groups(samples, min_shared_prefix)
        units = [part for group in groups for part in split_prefix_group(samples, group, max_tokens)]
    lengths = [computed_tokens([samples[i] for i in unit], min_shared_prefix) for unit in units]
    longest_first = sorted(range(len(units)), key=lambda u: -lengths[u])
    bins = pack_best_fit(lengths, longest_first, max_tokens)
    bins = pack_balanced(lengths, longest_first, max_tokens, len(bins)) or bins
    return [[i for u in sorted(members) for i in units[u]] for members in bins]


def pack_padded(samples: Sequence[Sample], max_tokens: int, group_size: int = 1) -> list[list[int]]:
    """Return the indices of micro-batches whose samples, padded to the longest, have at most `max_tokens` tokens.

    For models that do not run packed. Groups stay together; one that is larger gets a micro-batch of its own.
    """
    assert len(samples) % group_size == 0, f"{len(samples)} samples are not whole groups of {group_size}"
    units = [range(first, first + group_size) for first in range(0, len(samples), group_size)]
    widths = [max(len(samples[i]) for i in unit) for unit in units]
    found: list[list[int]] = []
    width = 0
    for unit in sorted(range(len(units)), key=lambda u: -widths[u]):  # so that neighbours have similar lengths
        if not found or (len(found[-1]) + group_size) * width > max_tokens:
            found.append([])
            width = widths[unit]
        found[-1] += units[unit]
    return [sorted(members) for members in found]


def pack_best_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each item into the bin where it leaves the least free space; open a bin where it fits into none."""
    bins: list[list[int]] = []
    free: list[int] = []
    for item in order:
        fitting = [(space, number) for number, space in enumerate(free) if space >= lengths[item]]
        if fitting:
            _, best = min(fitting)
        else:
            best = len(bins)
            bins.append([])
            free.append(max(max_tokens, lengths[item]))
        bins[best].append(item)
        free[best] -= lengths[item]
    return bins


def pack_balanced(lengths: Sequence[int], order: Sequence[int], max_tokens: int, count: int) -> list[list[int]]:
    """Put each item into the emptiest of `count` bins; return [] if one would exceed `max_tokens`.

    A short micro-batch at the end would leave the device waiting for the host, and have another length at every step.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for item in order:
        total, number = heapq.heappop(filled)
        if total and total + lengths[item] > max_tokens:
            return []
        bins[number].append(item)
        heapq.heappush(filled, (total + lengths[item], number))
    return bins


def find_prefix_groups(samples: Sequence[Sample], min_shared_prefix: int) -> list[PrefixGroup]:
    """Divide samples into groups of neighbours with a common prefix so that the fewest tokens remain to compute."""
    common = [common_prefix_length(a.tokens, b.tokens) for a, b in pairwise(samples)]
    # best[i], for the first i samples: the number of tokens saved, and the last group.
    best = [(0, PrefixGroup(0, 0, 0))]
    for end in range(1, len(samples) + 1):
        best.append((best[end - 1][0], PrefixGroup(end - 1, end, 0)))
        total, prefix = len(samples[end - 1]), len(samples[end - 1])
        for first in range(end - 2, max(-1, end - 1 - MAX_PREFIX_GROUP), -1):
            prefix = min(prefix, common[first])
            if prefix < min_shared_prefix:
                break
            total += len(samples[first])
            saved = best[first][0] + saved_tokens(prefix, end - first, total)
            if saved > best[end][0]:
                best[end] = (saved, PrefixGroup(first, end, prefix))
    groups: list[PrefixGroup] = []
    end = len(samples)
    while end:
        groups.append(best[end][1])
        end = groups[-1].first
    return groups[::-1]


def common_prefix_length(a: Ints, b: Ints) -> int:
    """Return how many tokens two sequences have in common before they differ."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter


def saved_tokens(prefix: int, members: int, total: int) -> int:
    """Return how many of a group's `total` tokens need not be computed; 0 if too few to be worth it."""
    saved = prefix * (members - 1)
    return saved if saved >= MIN_SAVED_FRACTION * total else 0


def split_prefix_group(samples: Sequence[Sample], group: PrefixGroup, max_tokens: int) -> list[range]:
    """Split a group into parts of at most `max_tokens` tokens; each part computes the prefix again."""
    parts, first, total = [], group.first, 0
    for i in range(group.first, group.end):
        total += len(samples[i])
        if i > first and total - saved_tokens(group.prefix, i + 1 - first, total) > max_tokens:
            parts.append(range(first, i))
            first, total = i, len(samples[i])
    return [*parts, range(first, group.end)]


def computed_tokens(samples: Sequence[Sample], min_shared_prefix: int) -> int:
    """Return how many tokens the layers compute for these samples."""
    total = sum(map(len, samples))
    if not min_shared_prefix or len(samples) == 1:
        return total
    groups = find_prefix_groups(samples, min_shared_prefix)
    return total - sum(group.prefix * (group.end - group.first - 1) for group in groups)


def collate(samples: Sequence[Sample], device: torch.device | str = "cpu", min_shared_prefix: int = 0) -> MicroBatch:
    """Lay samples end to end in one MicroBatch. A stream that some samples lack is left out."""
    lengths = tuple(len(sample) for sample in samples)
    mask = np.concatenate([sample.mask for sample in samples])
    streams = {
        name: to_tensor(np.concatenate([getattr(sample, name) for sample in samples]), torch.float32)
        for name in STREAMS
        if all(getattr(sample, name) is not None for sample in samples)
    }
    scalars = {name: to_tensor([getattr(sample, name) for sample in samples], torch.float32) for name in SCALARS}

    def listed(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        lists = [getattr(sample, name) for sample in samples]
        return None if any(each is None for each in lists) else to_tensor(np.concatenate(lists), dtype)

    sharing = share_prefixes(samples, find_prefix_groups(samples, min_shared_prefix)) if min_shared_prefix else None
    batch = MicroBatch(
        tokens=to_tensor(np.concatenate([sample.tokens for sample in samples]), torch.long),
        positions=to_tensor(np.concatenate([np.arange(n) for n in lengths]), torch.long),
        sample_of=to_tensor(np.repeat(np.arange(len(samples)), lengths), torch.long),
        starts=to_tensor(np.cumsum((0, *lengths)), torch.int32),
        lengths=lengths,
        mask=to_tensor(mask, torch.bool),
        counted=to_tensor(np.flatnonzero(mask), torch.long),
        sharing=sharing,
        experts=recorded_experts(samples, sharing),
        teacher_ids=listed("teacher_ids", torch.long),
        teacher_logprobs=listed("teacher_logprobs", torch.float32),
        **streams,
        **scalars,
    )
    return batch if torch.device(device).type == "cpu" else move_batch(batch, device)


def recorded_experts(samples: Sequence[Sample], sharing: PrefixSharing | None) -> torch.Tensor | None:
    """Return the recorded experts of the tokens that the layers compute; -1 for those of samples without a record."""
    shape = next((sample.experts.shape[1:] for sample in samples if sample.experts is not None), None)
    if shape is None:
        return None
    experts = np.concatenate([sample_experts(sample, shape) for sample in samples])
    if sharing is None:
        return to_tensor(experts, torch.int16)
    place = sharing.place.numpy()
    computed = np.full((len(sharing.tokens), *shape), -1, dtype=np.int16)
    for one in reversed(range(len(experts))):  # of tokens that samples share, the first that has a record
        if experts[one, 0, 0] >= 0 or computed[place[one], 0, 0] < 0:
            computed[place[one]] = experts[one]
    return to_tensor(computed, torch.int16)


def sample_experts(sample: Sample, shape: tuple[int, ...]) -> Experts:
    return np.full((len(sample), *shape), -1, dtype=np.int16) if sample.experts is None else sample.experts


def to_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)


def move_batch(batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """Move all tensors of a batch to the device in one asynchronous copy."""
    owners: list[Any] = [batch] if batch.sharing is None else [batch, batch.sharing]
    tensors = [
        (owner, field.name, value)
        for owner in owners
        for field in fields(owner)
        if isinstance(value := getattr(owner, field.name), torch.Tensor)
    ]
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, _, tensor in tensors]
    on_host = torch.empty(sum(sizes), dtype=torch.uint8)
    for buffer, (_, _, tensor) in zip(on_host.split(sizes), tensors, strict=True):
        buffer.view(tensor.dtype)[: tensor.numel()] = tensor.reshape(-1)
    on_device = copy_to_device(on_host, device)
    for buffer, (owner, name, tensor) in zip(on_device.split(sizes), tensors, strict=True):
        setattr(owner, name, buffer.view(tensor.dtype)[: tensor.numel()].view(tensor.shape))
    return batch


def share_prefixes(samples: Sequence[Sample], groups: list[PrefixGroup]) -> PrefixSharing | None:
    """Lay out each group's prefix once, followed by the rest of each member; None if no group has two members."""
    if len(groups) == len(samples):
        return None
    tokens: list[Ints] = []  # of each piece, like the two lists below
    positions: list[Indices] = []
    keys: list[Indices] = []
    place: list[Indices] = []
    computed = 0

    def add_piece(piece: Ints, before: Indices) -> Indices:
        """Append a piece whose tokens attend to those at `before`; return the places of both."""
        nonlocal computed
        visible = np.concatenate([before, np.arange(computed, computed + len(piece))])
        if len(piece):
            tokens.append(piece)
            positions.append(np.arange(len(before), len(visible)))
            keys.append(visible)
            computed += len(piece)
        return visible

    nothing = np.arange(0)
    for first, end, prefix in groups:
        shared = add_piece(samples[first].tokens[:prefix], nothing)
        place += [add_piece(sample.tokens[prefix:], shared) for sample in samples[first:end]]
    lengths, key_lengths = (tuple(len(piece) for piece in pieces) for pieces in (tokens, keys))
    return PrefixSharing(
        tokens=to_tensor(np.concatenate(tokens), torch.long),
        positions=to_tensor(np.concatenate(positions), torch.long),
        place=to_tensor(np.concatenate(place), torch.long),
        starts=to_tensor(np.cumsum((0, *lengths)), torch.int32),
        lengths=lengths,
        keys=to_tensor(np.concatenate(keys), torch.long),
        key_starts=to_tensor(np.cumsum((0, *key_lengths)), torch.int32),
        key_lengths=key_lengths,
    )
