"""Ring attention: ranks that divide the tokens of a row send each other keys and values instead of exchanging heads.

A row of packed samples is cut into 2 R chunks for R ranks, and rank r holds the chunks r and 2 R - 1 - r (zig-zag), so
that in a causal sample as long as the row every rank has the same number of query-key pairs. Chunk a attends to a chunk
b before it only where one sample reaches from b to a, and that is the first sample in a and the last one in b: a
rectangle of queries and keys. In step s a rank receives keys and values from the rank s before it, while it computes
with those of step s - 1; of these only what its samples reach is sent. Each block of the attention gives an output and
the log-sum-exp of its scores, by which blocks are combined (online softmax; arXiv:2310.01889). The backward pass sends
keys and values again, computes each block from the final output and log-sum-exp, and returns the gradients to the
ranks that hold the keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

Range = tuple[int, int]


@dataclass(slots=True, eq=False)
class Cut:
    """Which keys the queries of a block attend to: those of piece i of the queries to piece i of the keys.

    Queries are aligned with the last keys, as in the flash kernel: of `a` queries and `b` keys, query i sees the keys
    j with i + b - a - left <= j, and if causal j <= i + b - a.
    """

    query_starts: tuple[int, ...]
    key_starts: tuple[int, ...]
    causal: bool
    left: int | None = None
    tensors: tuple[torch.Tensor, torch.Tensor] | None = None  # the starts on a device, once they were asked for

    def starts(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the starts as int32 tensors on the device."""
        if self.tensors is None:
            queries, keys = (
                torch.tensor(starts, dtype=torch.int32).to(device) for starts in (self.query_starts, self.key_starts)
            )
            self.tensors = queries, keys
        return self.tensors

    def lengths(self) -> tuple[int, int]:
        """Return the largest numbers of queries and of keys of a piece."""
        queries, keys = (max(b - a for a, b in pairwise(starts)) for starts in (self.query_starts, self.key_starts))
        return queries, keys


class BlockKernel(Protocol):
    """Computes blocks of attention; nn/attention_blocks.py has one in plain PyTorch and one for CUDA."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [queries, heads, d_value] and the log-sum-exp [heads, queries], in float32."""

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        cut: Cut,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v; `out` and `lse` are those over all blocks."""


@dataclass(slots=True, frozen=True)
class Block:
    """Queries of a rank that attend to keys of one rank."""

    queries: Range  # in the rank's own tokens
    keys: Range  # in the keys at hand: the rank's own, or those that it received
    cut: Cut


@dataclass(slots=True, eq=False)
class RingPlan:
    """Which blocks each rank computes, and which keys it needs from which; from the lengths of the samples alone."""

    rank: int
    size: int
    half: int  # tokens in a chunk; a rank has two
    starts: tuple[int, ...]  # of the samples in the row, and the end of the last
    found: dict[Any, list[Block]] = field(default_factory=dict)

    def chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank

    def own_blocks(self, window: int | None) -> list[Block]:
        """Return the blocks of a rank's queries with its own keys: the first has all queries, by chunk and sample."""
        key = (window, 0)
        if key not in self.found:
            bounds = [0]
            for place, chunk in enumerate(self.chunks(self.rank)):
                first = chunk * self.half
                inside = (start - first for start in self.starts if first < start < first + self.half)
                bounds += [place * self.half + start for start in inside] + [(place + 1) * self.half]
            pieces = Cut(tuple(bounds), tuple(bounds), True, None if window is None else window - 1)
            whole = Block((0, bounds[-1]), (0, bounds[-1]), pieces)
            self.found[key] = [whole, *self.rectangles(self.rank, self.rank, window)]
        return self.found[key]

    def received_blocks(self, step: int, window: int | None) -> list[Block]:
        """Return the blocks with the keys that this rank receives in a step."""
        key = (window, step)
        if key not in self.found:
            source = (self.rank - step) % self.size
            offsets, total = [], 0
            sent = self.sent_keys(self.rank, source, window)
            for first, end in sent:
                offsets.append((first, end, total - first))
                total += end - first
            blocks = []
            for block in self.rectangles(self.rank, source, window):
                shift = next(shift for first, end, shift in offsets if first <= block.keys[0] < end)
                blocks.append(Block(block.queries, (block.keys[0] + shift, block.keys[1] + shift), block.cut))
            self.found[key] = blocks
        return self.found[key]

    def sent_keys(self, rank: int, source: int, window: int | None) -> list[Range]:
        """Return the ranges of the tokens of `source` whose keys and values `rank` needs."""
        needed: dict[bool, Range] = {}
        for block in self.rectangles(rank, source, window):
            second = block.keys[0] >= self.half
            first, end = needed.get(second, block.keys)
            needed[second] = min(first, block.keys[0]), max(end, block.keys[1])
        return [needed[second] for second in sorted(needed)]

    def rectangles(self, rank: int, source: int, window: int | None) -> list[Block]:
        """Return the blocks of a rank's queries with earlier chunks of `source`, in both ranks' own tokens."""
        blocks = []
        for query_place, query_chunk in enumerate(self.chunks(rank)):
            for key_place, key_chunk in enumerate(self.chunks(source)):
                if key_chunk < query_chunk and (found := self.rectangle(query_chunk, key_chunk, window)):
                    (q0, q1), (k0, k1), left = found
                    to_query = (query_place - query_chunk) * self.half
                    to_key = (key_place - key_chunk) * self.half
                    cut = Cut((0, q1 - q0), (0, k1 - k0), False, left)
                    blocks.append(Block((q0 + to_query, q1 + to_query), (k0 + to_key, k1 + to_key), cut))
        return blocks

    def rectangle(self, query_chunk: int, key_chunk: int, window: int | None) -> tuple[Range, Range, int | None] | None:
        """Return queries, keys (positions in the row) and window of the sample that reaches from chunk to chunk."""
        border, end_of_keys = query_chunk * self.half, (key_chunk + 1) * self.half
        place = bisect_left(self.starts, border)  # the sample that contains the border begins one before
        if not 0 < place < len(self.starts) or self.starts[place] == border or self.starts[place - 1] >= end_of_keys:
            return None
        q0, q1 = border, min(self.starts[place], border + self.half)
        k0, k1 = max(self.starts[place - 1], key_chunk * self.half), end_of_keys
        if window is None:
            return (q0, q1), (k0, k1), None
        k0, q1 = max(k0, q0 - window + 1), min(q1, k1 + window - 1)  # a query at i sees keys from i - window + 1
        if k0 >= k1 or q0 >= q1:
            return None
        sees_all = q1 - 1 - window + 1 <= k0
        return (q0, q1), (k0, k1), None if sees_all else k1 - q1 + window - 1

    def pairs(self) -> list[int]:
        """Return the number of query-key pairs that each rank computes."""
        found = []
        for rank in range(self.size):
            other = RingPlan(rank, self.size, self.half, self.starts)
            pieces = [b - a for a, b in pairwise(other.own_blocks(None)[0].cut.query_starts)]
            total = sum(length * (length + 1) // 2 for length in pieces)
            for source in range(self.size):
                for block in self.rectangles(rank, source, None):
                    total += (block.queries[1] - block.queries[0]) * (block.keys[1] - block.keys[0])
            found.append(total)
        return found


@dataclass(slots=True, eq=False)
class Ring:
    """The ranks of a ring, and this rank's number among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, device: torch.device) -> Ring:
        dist.all_reduce(torch.zeros((), device=device), group=group)  # NCCL connects all ranks in a group's first call
        return cls(group, dist.get_rank(group), dist.get_world_size(group))


@dataclass(slots=True, eq=False)
class Transfer:
    """A tensor on its way to one rank, and one on its way from another."""

    works: list[Any]
    sent: torch.Tensor  # stays until it has been sent
    received: torch.Tensor

    @classmethod
    def begin(
        cls, ring: Ring, sent: tuple[torch.Tensor, int], received: tuple[torch.Tensor, int], tag: int
    ) -> Transfer:
        """Begin it; both are given with the rank at the other end. Empty tensors are not sent."""
        operations = [
            dist.P2POp(operation, tensor, group=ring.group, group_peer=peer, tag=tag)
            for operation, (tensor, peer) in ((dist.isend, sent), (dist.irecv, received))
            if tensor.numel()
        ]
        return cls(dist.batch_isend_irecv(operations) if operations else [], sent[0], received[0])

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


class RingPass:
    """One forward or backward pass: receives the keys and values of other ranks, and returns their gradients."""

    def __init__(self, ring: Ring, plan: RingPlan, k: torch.Tensor, v: torch.Tensor, window: int | None) -> None:
        self.ring, self.plan, self.window = ring, plan, window
        self.keys_and_values, self.width = torch.cat([k, v], -1), k.shape[-1]
        self.pending = self.request(1)
        self.returning: list[tuple[Transfer, list[Range]]] = []

    def receive(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that this step brings, and begin to receive those of the next one."""
        found = self.pending.wait()
        if step + 1 < self.ring.size:
            self.pending = self.request(step + 1)
        return found[..., : self.width], found[..., self.width :]

    def request(self, step: int) -> Transfer:
        rank, size, own = self.ring.rank, self.ring.size, self.keys_and_values
        to, source = (rank + step) % size, (rank - step) % size
        sent = take(own, self.plan.sent_keys(to, rank, self.window))
        expected = self.plan.sent_keys(rank, source, self.window)
        return Transfer.begin(self.ring, (sent, to), (empty_for(own, expected), source), step)

    def return_gradients(self, step: int, gradients: torch.Tensor) -> None:
        """Send the gradients of the keys and values of a step to their rank; receive those of this rank's own."""
        rank, size, own = self.ring.rank, self.ring.size, self.keys_and_values
        to, source = (rank - step) % size, (rank + step) % size
        expected = self.plan.sent_keys(source, rank, self.window)
        sent, found = gradients.to(own.dtype), empty_for(own, expected)
        self.returning.append((Transfer.begin(self.ring, (sent, to), (found, source), size + step), expected))

    def add_returned(self, total: torch.Tensor) -> None:
        """Add the gradients that other ranks computed for this rank's keys and values, in the order of the steps."""
        for transfer, ranges in self.returning:
            found = transfer.wait().split([end - first for first, end in ranges])
            for (first, end), part in zip(ranges, found, strict=True):
                total[first:end] += part


def empty_for(stream: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    return stream.new_empty(sum(end - first for first, end in ranges), *stream.shape[1:])


def take(stream: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """Return the given ranges of the first dimension, one after the other."""
    return torch.cat([stream[first:end] for first, end in ranges]) if ranges else stream[:0]


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries [n, heads, d] to the keys [n, key heads, d] and values of all ranks of a ring.

    Returns the output [n, heads, d_value] and the log-sum-exp of the scores [heads, n].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring: Ring,
        plan: RingPlan,
        window: int | None,
        kernel: BlockKernel,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        exchange = RingPass(ring, plan, k, v, window)
        whole, *others = plan.own_blocks(window)
        out, lse = kernel.forward(q, k, v, whole.cut)
        out, lse = out.float(), lse.float()
        for block in others:
            combine(out, lse, block, kernel, q, k, v)
        for step in range(1, ring.size):
            keys, values = exchange.receive(step)
            for block in plan.received_blocks(step, window):
                combine(out, lse, block, kernel, q, keys, values)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = (ring, plan, window, kernel)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        ring, plan, window, kernel = ctx.how
        d_out, d_lse = gradients
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        exchange = RingPass(ring, plan, k, v, window)
        d_q = torch.zeros_like(q, dtype=torch.float32)
        d_own = torch.zeros_like(exchange.keys_and_values, dtype=torch.float32)

        def add(blocks: Sequence[Block], keys: torch.Tensor, values: torch.Tensor, total: torch.Tensor) -> None:
            for block in blocks:
                (q0, q1), (k0, k1) = block.queries, block.keys
                part = None if d_lse is None else d_lse[:, q0:q1]
                of_queries = q[q0:q1], keys[k0:k1].contiguous(), values[k0:k1].contiguous()
                found = kernel.backward(d_out[q0:q1], *of_queries, out[q0:q1], lse[:, q0:q1], part, block.cut)
                d_q[q0:q1] += found[0]
                total[k0:k1, :, : k.shape[-1]] += found[1]
                total[k0:k1, :, k.shape[-1] :] += found[2]

        add(plan.own_blocks(window), k, v, d_own)
        for step in range(1, ring.size):
            keys, values = exchange.receive(step)
            total = d_own.new_zeros(len(keys), *d_own.shape[1:])
            add(plan.received_blocks(step, window), keys, values, total)
            exchange.return_gradients(step, total)
        exchange.add_returned(d_own)
        d_k, d_v = d_own[..., : k.shape[-1]].to(k.dtype), d_own[..., k.shape[-1] :].to(v.dtype)
        return d_q.to(q.dtype), d_k, d_v, None, None, None, None


def combine(
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
    kernel: BlockKernel,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Compute a block and combine it with what its queries have found so far, in place."""
    (q0, q1), (k0, k1) = block.queries, block.keys
    more, more_lse = kernel.forward(q[q0:q1], keys[k0:k1].contiguous(), values[k0:k1].contiguous(), block.cut)
    before = lse[:, q0:q1]
    total = torch.logaddexp(before, more_lse)
    out[q0:q1] *= (before - total).exp().T[..., None]
    out[q0:q1] += more.float() * (more_lse - total).exp().T[..., None]
    before.copy_(total)


__all__ = ["Block", "BlockKernel", "Cut", "Ring", "RingAttention", "RingPlan"]
