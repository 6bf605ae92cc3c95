"""Context parallelism: the context ranks of a data rank divide the tokens of each micro-batch among themselves.

Everything that works token by token (embeddings, norms, linear layers, heads) processes this rank's slice of the
tokens. Attention needs whole samples: before it the ranks exchange tokens for heads, so that each has all tokens of
some heads, and after it they exchange back (DeepSpeed-Ulysses, arXiv:2309.14509). A rank sends what it computed at its
tokens to all ranks, and every rank computes the whole loss. In the backward pass each rank takes the gradient at the
tokens that it owns, so that FSDP's sum over ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from posttrain.core.errors import UsageError


@dataclass(slots=True, eq=False)
class OwnedPositions:
    """Which of n given token positions this rank owns."""

    mine: torch.Tensor  # [m] indices into the given positions; if it owns none, the single index n
    local: torch.Tensor  # [m] the same positions as indices into this rank's slice
    counts: list[int]  # number of positions that each rank owns
    order: torch.Tensor  # [n] brings the ranks' values, concatenated by rank, into the order of the given positions


@dataclass(slots=True, eq=False)
class ContextGroup:
    """The ranks that divide the tokens of a micro-batch, and this rank's number among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def from_group(cls, group: dist.ProcessGroup) -> ContextGroup:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    # Slices of the tokens

    def slice_tokens(self, stream: torch.Tensor, tokens: int, multiple_of: int) -> torch.Tensor:
        """Return this rank's slice of a stream of `tokens` tokens, which may be padded to a multiple of `multiple_of`.

        The slice's width follows from the number of tokens alone: a student and its teacher are sliced alike.
        """
        width = -(-tokens // multiple_of) * multiple_of
        width = -(-width // self.size)
        return F.pad(stream, (0, width * self.size - len(stream)))[self.rank * width : (self.rank + 1) * width]

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
        owner = positions // width
        mine = (owner == self.rank).nonzero()[:, 0]
        counts = torch.bincount(owner, minlength=self.size).tolist()
        if not len(mine):  # compute at one dummy position, so that all ranks run the same operations
            mine = torch.full((1,), len(positions), device=positions.device)
        local = (F.pad(positions, (0, 1))[mine] - self.rank * width).clamp(0, width - 1)
        return OwnedPositions(mine, local, counts, owner.argsort(stable=True).argsort())

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
        """Attend with all tokens of this rank's heads: [1, heads, width, d] -> [1, width, heads, d_value]."""
        repeats = max(1, self.size // key.shape[1])
        if repeats > 1:
            key, value = (stream.repeat_interleave(repeats, 1) for stream in (key, value))
        streams = [self.to_heads(stream)[:, :, :tokens] for stream in (query, key, value)]
        out = attend(*streams)
        return self.to_tokens(F.pad(out, (0, 0, 0, 0, 0, self.size * query.shape[2] - tokens)))

    def to_heads(self, stream: torch.Tensor) -> torch.Tensor:
        """Exchange tokens for heads (all-to-all): [1, heads, width, d] -> [1, heads / size, width * size, d]."""
        _, heads, width, depth = stream.shape
        found = AllToAll.apply(stream.reshape(self.size, heads // self.size, width, depth), self)
        return found.transpose(0, 1).reshape(1, heads // self.size, self.size * width, depth)

    def to_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        """Exchange heads for tokens (all-to-all): [1, width * size, heads / size, d] -> [1, width, heads, d]."""
        _, tokens, heads, depth = stream.shape
        found = AllToAll.apply(stream.reshape(self.size, tokens // self.size, heads, depth), self)
        return found.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, depth)

    def local_heads(self, stream: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's part of a tensor with one entry per head."""
        return None if stream is None else stream.chunk(self.size)[self.rank]


def check_context_parallel(config: Any, size: int, tensor_parallel: int) -> None:
    """Raise UsageError if `size` ranks cannot divide the heads, or if rotary angles depend on other ranks' tokens."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise UsageError(
            f"cluster.context_parallel_size is {size}, but the rotary embedding of this {config.model_type} "
            "model (rope_type dynamic or longrope) depends on the longest position of a pass, and a context rank "
            "knows only its own tokens. Set it to 1 for this role."
        )
    heads = config.num_attention_heads // tensor_parallel
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // tensor_parallel
    if heads % size or (keys % size and size % keys):
        each = f" of each of {tensor_parallel} tensor ranks" * (tensor_parallel > 1)
        raise UsageError(
            f"cluster.context_parallel_size is {size}, but context ranks divide the heads in attention, and "
            f"this {config.model_type} model has {heads} attention heads{each} and {keys} key-value heads. Choose "
            "a size that divides them, or 1 for this role."
        )


class AllToAll(torch.autograd.Function):
    """[size, ...]: part i is sent to rank i, and part i of the result is received from rank i."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        ctx.group = group
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, parts.contiguous(), group=group.group)
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
        found = values.new_empty(group.size * most, *values.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its older name
        gather(found, padded, group=group.group)
        parts = [part[:count] for part, count in zip(found.split(most), owned.counts, strict=True)]
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


__all__ = ["ContextGroup", "OwnedPositions", "check_context_parallel"]
