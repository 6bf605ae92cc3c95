"""Context parallelism: the context ranks of a data rank divide the tokens of each pack among themselves.

All that works token by token (embeddings, norms, maps, heads) sees this rank's slice of the row. Attention needs whole
samples: before it the ranks exchange tokens for heads, so that each has all tokens of some heads, and after it back
(DeepSpeed-Ulysses, arXiv:2309.14509). What is computed at a token its owner sends to all, and every rank computes the
whole loss. On the way back each takes the gradient at the tokens that it owns, so that the sum over ranks, which is
FSDP's, is the gradient.
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
class Own:
    """Which of some places of a row are this rank's."""

    mine: torch.Tensor  # [m] numbers of the places; where there are none, one behind the last
    local: torch.Tensor  # [m] where these are in this rank's slice
    counts: list[int]  # places of each rank
    order: torch.Tensor  # [places] brings the ranks' places, one rank after the other, into the order of the row


@dataclass(slots=True, eq=False)
class Context:
    """The ranks that divide packs, and this one's part in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Context:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def check(self, config: Any, tensor_parallel: int) -> None:
        """UsageError where there are no heads for all ranks, or where a slice does not tell how to rotate it."""
        ropes = getattr(config, "rope_parameters", None) or {}
        kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
        if kinds & {"dynamic", "longrope"}:
            raise UsageError(
                f"cluster.layout: cp={self.size}: how this {config.model_type} model rotates its heads depends on the "
                "longest position of a pass (rope_type dynamic or longrope), which context ranks do not know of each "
                "other. Leave cp out, or say cp=1 for its role."
            )
        heads = config.num_attention_heads // tensor_parallel
        keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) // tensor_parallel
        if heads % self.size or (keys % self.size and self.size % keys):
            each = f" of each of {tensor_parallel} tensor ranks" * (tensor_parallel > 1)
            raise UsageError(
                f"cluster.layout: cp={self.size} does not divide the {heads} attention heads{each} (and {keys} heads "
                f"of keys) of this {config.model_type} model, which context ranks take in turn. Take another cp, or "
                "cp=1 for its role."
            )

    # A row of tokens

    def slice(self, row: torch.Tensor, tokens: int, whole: int) -> torch.Tensor:
        """This rank's part of a row of so many tokens, which may already be padded to a multiple of `whole`.

        The width follows from the number of tokens alone: a student and its teacher cut at the same places.
        """
        width = -(-tokens // whole) * whole
        width = -(-width // self.size)
        return F.pad(row, (0, width * self.size - len(row)))[self.rank * width : (self.rank + 1) * width]

    def whole(self, part: torch.Tensor, tokens: int) -> torch.Tensor:
        """[width, ...] of each rank -> [T, ...] on all."""
        own = self.own(torch.arange(tokens, device=part.device), len(part))
        return self.everywhere(part[own.local], own)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Of all ranks, on all."""
        return Summed.apply(part, self)

    # What is computed at some places

    def own(self, places: torch.Tensor, width: int) -> Own:
        """`places` [n] of a row whose slices have so many tokens."""
        owner = places // width
        mine = (owner == self.rank).nonzero()[:, 0]
        counts = torch.bincount(owner, minlength=self.size).tolist()
        if not len(mine):  # something is computed nevertheless, so that all ranks do the same
            mine = torch.full((1,), len(places), device=places.device)
        local = (F.pad(places, (0, 1))[mine] - self.rank * width).clamp(0, width - 1)
        return Own(mine, local, counts, owner.argsort(stable=True).argsort())

    def everywhere(self, values: torch.Tensor, own: Own) -> torch.Tensor:
        """[m, ...] at this rank's places -> [places, ...] on all ranks."""
        return Sent.apply(values[: own.counts[self.rank]], own, self)

    # Attention

    def attend(
        self,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tokens: int,
    ) -> torch.Tensor:
        """By heads: [1, heads, width, d] -> [1, width, heads, d_value]; `attend` gets all tokens of some heads."""
        repeats = max(1, self.size // key.shape[1])
        if repeats > 1:
            key, value = (stream.repeat_interleave(repeats, 1) for stream in (key, value))
        streams = [self.to_heads(stream)[:, :, :tokens] for stream in (query, key, value)]
        out = attend(*streams)
        return self.to_tokens(F.pad(out, (0, 0, 0, 0, 0, self.size * query.shape[2] - tokens)))

    def to_heads(self, stream: torch.Tensor) -> torch.Tensor:
        """[1, heads, width, d] -> [1, heads / size, width * size, d]."""
        _, heads, width, depth = stream.shape
        found = Exchanged.apply(stream.reshape(self.size, heads // self.size, width, depth), self)
        return found.transpose(0, 1).reshape(1, heads // self.size, self.size * width, depth)

    def to_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        """[1, width * size, heads / size, d] -> [1, width, heads, d]."""
        _, tokens, heads, depth = stream.shape
        found = Exchanged.apply(stream.reshape(self.size, tokens // self.size, heads, depth), self)
        return found.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, depth)

    def my_heads(self, stream: torch.Tensor | None) -> torch.Tensor | None:
        """Of something that each head has one of."""
        return None if stream is None else stream.chunk(self.size)[self.rank]


class Exchanged(torch.autograd.Function):
    """[size, ...]: part i goes to rank i, and what comes from rank i is part i of the result."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, parts.contiguous(), group=context.group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return Exchanged.apply(gradients[0], ctx.context), None


class Sent(torch.autograd.Function):
    """What each rank computed at its places, on all ranks. A rank's gradient is that of its own copy, at its places."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, own: Own, context: Context) -> torch.Tensor:
        ctx.own, ctx.count = own, own.counts[context.rank]
        most = max(1, *own.counts)
        padded = values.new_zeros(most, *values.shape[1:])
        padded[: len(values)] = values
        found = values.new_empty(context.size * most, *values.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its older name
        gather(found, padded, group=context.group)
        parts = [part[:count] for part, count in zip(found.split(most), own.counts, strict=True)]
        return torch.cat(parts)[own.order]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][ctx.own.mine[: ctx.count]], None, None


class Summed(torch.autograd.Function):
    """The sum of all ranks' numbers, each of which has the sum's gradient: every rank computes the whole loss."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, context: Context) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=context.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


__all__ = ["Context", "Own"]
