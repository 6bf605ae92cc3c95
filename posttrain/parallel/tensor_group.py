"""The tensor ranks of a data rank, and what they exchange: tokens, sums of partial results, parts of the vocabulary.

Every tensor rank computes the whole loss. So a tensor that all ranks hold has the same, full gradient on each; a tensor
from which each rank computes its own part of something has a partial gradient, to be summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from posttrain.parallel.communication import all_gather, reduce_scatter

IN_BLOCKS = "divided_in_blocks"
"""Attribute of a decoder layer that runs its own code because parallel/tensor.py has divided its blocks."""
GATHERED_FROM = "gathered_from"
"""Attribute of gathered tokens: this rank's part and a GatheredAgain, for GatheredLinear."""


@dataclass(slots=True, eq=False)
class TensorGroup:
    """The ranks that divide the heads and matrices of a model, and this rank's number among them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    sequence: bool = False
    """Whether they also divide the tokens between the blocks, and the vocabulary (cluster.sequence_parallel)."""
    divides_tokens: bool = False
    """Whether the tokens are divided in the pass that runs; the model's own code runs on all of them."""

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, *, sequence: bool) -> TensorGroup:
        return cls(group, dist.get_rank(group), dist.get_world_size(group), sequence)

    @contextmanager
    def dividing(self, divides: bool) -> Iterator[None]:
        """Divide the tokens in the block, or not; layers that are recomputed later note it again."""
        self.divides_tokens = divides
        try:
            yield
        finally:
            self.divides_tokens = False

    # Blocks: attention and MLPs, in which each rank sees all tokens and computes a term of the result

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of a block, [1, T, H], from the output of the norm before it; its gradient is partial."""
        if not self.divides_tokens:
            return PartialGradient.apply(hidden, self)
        whole = GatherTokens.apply(hidden, self)
        setattr(whole, GATHERED_FROM, (hidden.detach(), GatheredAgain(self)))
        return whole

    def leave(self, term: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' terms: all of it, or this rank's tokens."""
        return SumTokens.apply(term, self) if self.divides_tokens else SumTerms.apply(term, self)

    def own_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a stream [T, ...]."""
        return stream.chunk(self.size)[self.rank]

    def all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather hidden states [1, T / size, H] into [1, T, H], of which every rank computes the whole loss."""
        return GatherCopies.apply(hidden.squeeze(0), self)[None]

    # Values that all ranks hold

    def partial(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value that is used by parts from here on: its partial gradients are summed."""
        return PartialGradient.apply(value, self)

    def share_of_gradient(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value inside a block whose full gradient all ranks compute: each takes an equal part of it."""
        return ScaledGradient.apply(value, 1 / self.size)

    def joined_columns(self, part: torch.Tensor, columns: int) -> torch.Tensor:
        """Gather the columns of all ranks into [n, columns], of which every rank computes the whole loss.

        The last rank may have fewer than the others.
        """
        width = -(-columns // self.size)
        padded = F.pad(part, (0, width - part.shape[1]))
        return GatherCopies.apply(padded.t(), self).t()[:, :columns]

    def logsumexp(self, parts: torch.Tensor) -> torch.Tensor:
        """Return log(sum(exp)) of one value per rank, which each rank then uses with its part: [n] -> [n]."""
        return self.partial(GatherCopies.apply(parts[None], self).logsumexp(0))

    def total(self, term: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' terms."""
        return SumTerms.apply(term, self)

    def stacked(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the values [...] of all ranks into [size, ...], without gradients."""
        return all_gather(values[None], self.group)

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Add up the values of all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values


class GatherTokens(torch.autograd.Function):
    """All-gathers the tokens [1, T / size, H]; the gradients of the ranks, which are partial, are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return all_gather(part.squeeze(0), ranks.group)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return reduce_scatter(gradients[0].squeeze(0), ctx.ranks.group)[None], None


class SumTokens(torch.autograd.Function):
    """Reduce-scatters terms [1, T, H] by tokens; the gradients of the parts are all-gathered."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return reduce_scatter(term.squeeze(0), ranks.group)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return all_gather(gradients[0].squeeze(0), ctx.ranks.group)[None], None


@dataclass(slots=True, eq=False)
class GatheredAgain:
    """Tokens that the backward pass of a block gathers again, once for all linear layers that read them."""

    ranks: TensorGroup
    waiting: int = 0  # linear layers whose backward pass needs them
    tokens: torch.Tensor | None = None

    def take(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tokens [T, H], of which this rank has saved a part; the last layer that needs them frees them."""
        found = all_gather(part.squeeze(0), self.ranks.group) if self.tokens is None else self.tokens
        self.waiting -= 1
        self.tokens = found if self.waiting else None
        return found


class GatheredLinear(torch.autograd.Function):
    """A linear layer of gathered tokens, of which this rank's part is saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        part: torch.Tensor,
        again: GatheredAgain,
    ) -> torch.Tensor:
        trains = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, part if trains else None)
        ctx.again = again
        again.waiting += trains
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight, part = ctx.saved_tensors
        d_out = gradients[0].flatten(0, -2)
        d_x = (d_out @ weight).view(*gradients[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        d_weight = d_out.t() @ ctx.again.take(part) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, d_out.sum(0) if ctx.needs_input_grad[2] else None, None, None


class PartialGradient(torch.autograd.Function):
    """Returns its input; the gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.ranks.sum_(gradients[0].clone(memory_format=torch.contiguous_format)), None


class SumTerms(torch.autograd.Function):
    """All-reduces terms; each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
        return ranks.sum_(term.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class GatherCopies(torch.autograd.Function):
    """All-gathers [n, ...] into [size * n, ...]; a rank's gradient is its part of that of its own copy."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: TensorGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return all_gather(part, ranks.group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.ranks.own_tokens(gradients[0]), None


class ScaledGradient(torch.autograd.Function):
    """Returns its input and scales the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


__all__ = ["GATHERED_FROM", "IN_BLOCKS", "GatheredLinear", "TensorGroup"]
