"""Context parallelism: the context ranks of a data rank divide the tokens of each micro-batch among themselves.

Everything that works token by token (embeddings, norms, linear layers, heads) processes this rank's slice of the
tokens. Attention needs whole samples. Before it the ranks exchange tokens for heads, so that each has all tokens of
some heads, and after it they exchange back (DeepSpeed-Ulysses, arXiv:2309.14509). More ranks than can divide the heads
form a ring of such groups (parallel/ring.py; both together: arXiv:2405.07719): a group has the tokens of its place in
the ring, and keys and values of other places are received. Context rank = place in the ring * ranks that exchange heads
+ rank among these. A rank sends what it computed at its tokens to all ranks, and every rank computes the whole loss. In
the backward pass each takes the gradient at the tokens that it owns, so that FSDP's sum over ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from posttrain.core.errors import UsageError
from posttrain.parallel.communication import all_gather
from posttrain.parallel.ring import Ring, RingPlan


@dataclass(slots=True, eq=False)
class OwnedPositions:
    """Which of n given token positions this rank owns."""

    mine: torch.Tensor  # [m] indices into the given positions; if it owns none, the single index n
    local: torch.Tensor  # [m] the same positions as indices into this rank's slice
    counts: list[int]  # number of positions that each rank owns
    order: torch.Tensor  # [n] brings the ranks' values, concatenated by rank, into the order of the given positions


@dataclass(slots=True, eq=False)
class HeadExchange:
    """Ranks that exchange tokens for heads around attention, and this rank's number among them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def from_group(cls, group: dist.ProcessGroup) -> HeadExchange:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def to_heads(self, stream: torch.Tensor) -> torch.Tensor:
        """Exchange tokens for heads (all-to-all): [1, heads, width, d] -> [1, heads / size, width * size, d]."""
        if self.size == 1:
            return stream
        _, heads, width, depth = stream.shape
        found = AllToAll.apply(stream.reshape(self.size, heads // self.size, width, depth), self.group)
        return found.transpose(0, 1).reshape(1, heads // self.size, self.size * width, depth)

    def to_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        """Exchange heads for tokens (all-to-all): [1, width * size, heads / size, d] -> [1, width, heads, d]."""
        if self.size == 1:
            return stream
        _, tokens, heads, depth = stream.shape
        found = AllToAll.apply(stream.reshape(self.size, tokens // self.size, heads, depth), self.group)
        return found.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, depth)

    def local_heads(self, stream: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's part of a tensor with one entry per head."""
        return None if stream is None else stream.chunk(self.size)[self.rank]


@dataclass(slots=True, eq=False)
class ContextGroup:
    """The ranks that divide the tokens of a micro-batch, and this rank's number among them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    heads: HeadExchange
    ring: Ring | None = None  # None: all ranks exchange heads

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup, heads: HeadExchange | None = None, ring: Ring | None = None
    ) -> ContextGroup:
        """Return the group; without a ring all of its ranks exchange heads."""
        return cls(
            group, dist.get_rank(group), dist.get_world_size(group), heads or HeadExchange.from_group(group), ring
        )

    # Slices of the tokens

    def slice_width(self, tokens: int, multiple_of: int) -> int:
        """Return the number of tokens of a slice, of a row that may be padded to a multiple of `multiple_of`.

        It follows from the number of tokens alone: a student and its teacher are sliced alike.
        """
        width = -(-tokens // multiple_of) * multiple_of
        width = -(-width // self.size)
        return width if self.ring is None else width + width % 2  # a place in the ring has two chunks

    def slice_tokens(self, stream: torch.Tensor, tokens: int, multiple_of: int) -> torch.Tensor:
        """Return this rank's slice of a stream of `tokens` tokens, which may be padded."""
        width = self.slice_width(tokens, multiple_of)
        row = F.pad(stream, (0, width * self.size - len(stream)))
        if self.ring is None:
            return row[self.rank * width : (self.rank + 1) * width]
        chunks = row.view(2 * self.ring.size, -1)
        place = torch.cat([chunks[self.ring.rank], chunks[-1 - self.ring.rank]])
        return place[self.heads.rank * width : (self.heads.rank + 1) * width]

    def find(self, positions: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank that owns each position of the row, and the position's index in that rank's slice."""
        if self.ring is None:
            return positions // width, positions % width
        half = width * self.heads.size // 2
        chunk, size = positions // half, self.ring.size
        second = chunk >= size
        place = torch.where(second, 2 * size - 1 - chunk, chunk)
        index = positions % half + second * half
        return place * self.heads.size + index // width, index % width

    def ring_plan(self, lengths: Sequence[int], width: int) -> RingPlan | None:
        """Return what the ranks of the ring compute and send for samples of these lengths; None without a ring."""
        if self.ring is None:
            return None
        starts = (0, *accumulate(lengths))
        return RingPlan(self.ring.rank, self.ring.size, width * self.heads.size // 2, starts)

    def gather_tokens(self, part: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather [width, ...] of each rank into [T, ...] on all ranks."""
        owned = self.owned_positions(torch.arange(tokens, device=part.device), len(part))
        return self.gather_values(part[owned.local], owned)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on every rank."""
        return SumOverRanks.apply(part, self)

    # Values at given positions

    def owned_positions(self, positions: torch.Tensor, width: int) -> OwnedPositions:
        """Find which of the `positions` [n] this rank owns; `width` is the number of tokens in a slice."""
        owner, index = self.find(positions, width)
        mine = (owner == self.rank).nonzero()[:, 0]
        counts = torch.bincount(owner, minlength=self.size).tolist()
        if not len(mine):  # compute at one dummy position, so that all ranks run the same operations
            mine = torch.full((1,), len(positions), device=positions.device)
        return OwnedPositions(mine, F.pad(index, (0, 1))[mine], counts, owner.argsort(stable=True).argsort())

    def gather_values(self, values: torch.Tensor, owned: OwnedPositions) -> torch.Tensor:
        """Gather [m, ...] at the positions that each rank owns into [n, ...] at all of them, on all ranks."""
        return GatherValues.apply(values[: owned.counts[self.rank]], owned, self)

    # Attention

    def attend(
        self,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tokens: int,
    ) -> torch.Tensor:
        """Attend with this rank's heads and all tokens, or those of its place in the ring.

        [1, heads, width, d] -> [1, width, heads, d_value]. `tokens`: in the whole row, without its padding.
        """
        repeats = max(1, self.heads.size // key.shape[1])
        if repeats > 1:
            key, value = (stream.repeat_interleave(repeats, 1) for stream in (key, value))
        everything = self.heads.size * query.shape[2]
        used = tokens if self.ring is None else everything
        out = attend(*(self.heads.to_heads(stream)[:, :, :used] for stream in (query, key, value)))
        return self.heads.to_tokens(F.pad(out, (0, 0, 0, 0, 0, everything - used)))


def ulysses_degrees(heads: int, keys: int, size: int) -> list[int]:
    """Return how many of `size` context ranks may exchange heads, ascending; the others form a ring.

    `heads`, `keys`: attention heads and key-value heads of a tensor rank.
    """
    return [
        degree
        for degree in range(1, size + 1)
        if not (size % degree or heads % degree or (keys % degree and degree % keys))
    ]


def choose_ulysses_degree(configs: Iterable[Any], size: int, tensor_parallel: int) -> int:
    """Return the most context ranks that can exchange heads of all these models, whose tokens are sliced alike."""
    allowed = [set(ulysses_degrees(*head_counts(config, tensor_parallel), size)) for config in configs]
    return max(set.intersection(*allowed))


def head_counts(config: Any, tensor_parallel: int) -> tuple[int, int]:
    """Return the attention heads and key-value heads of a tensor rank."""
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads // tensor_parallel, keys // tensor_parallel


def check_context_parallel(config: Any, size: int, tensor_parallel: int, ulysses: int = 0) -> None:
    """Raise UsageError if `ulysses` ranks cannot divide the heads, or if rotary angles depend on other tokens."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise UsageError(
            f"cluster.context_parallel_size is {size}, but the rotary embedding of this {config.model_type} "
            "model (rope_type dynamic or longrope) depends on the longest position of a pass, and a context rank "
            "knows only its own tokens. Set it to 1 for this role."
        )
    allowed = ulysses_degrees(*head_counts(config, tensor_parallel), size)
    if ulysses and ulysses not in allowed:
        heads, keys = head_counts(config, 1)
        each = f", divided among {tensor_parallel} tensor ranks" * (tensor_parallel > 1)
        raise UsageError(
            f"cluster.ulysses_degree is {ulysses}, but it must divide cluster.context_parallel_size {size} and the "
            f"heads of this {config.model_type} model, which has {heads} attention heads and {keys} key-value heads"
            f"{each}. Set it to {' or '.join(map(str, allowed))}, or to 0."
        )


class AllToAll(torch.autograd.Function):
    """[size, ...]: part i is sent to rank i, and part i of the result is received from rank i."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, parts.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return AllToAll.apply(gradients[0], ctx.group), None


class GatherValues(torch.autograd.Function):
    """All-gathers the values at owned positions. A rank's gradient is that of its own copy, at its own positions."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, owned: OwnedPositions, group: ContextGroup) -> torch.Tensor:
        ctx.owned, ctx.count = owned, owned.counts[group.rank]
        most = max(1, *owned.counts)
        padded = values.new_zeros(most, *values.shape[1:])
        padded[: len(values)] = values
        found = all_gather(padded, group.group).split(most)
        parts = [part[:count] for part, count in zip(found, owned.counts, strict=True)]
        return torch.cat(parts)[owned.order]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][ctx.owned.mine[: ctx.count]], None, None


class SumOverRanks(torch.autograd.Function):
    """All-reduces a sum. Each rank's term gets the gradient of the sum: every rank computes the whole loss."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


__all__ = [
    "ContextGroup",
    "HeadExchange",
    "OwnedPositions",
    "check_context_parallel",
    "choose_ulysses_degree",
    "ulysses_degrees",
]
