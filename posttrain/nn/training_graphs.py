"""Training passes through the layers as CUDA graphs, for models whose kernels run faster than a host launches them.

A graph reads and writes fixed tensors, so packs are padded to few sizes: tokens by samples that are nobody's, samples
by empty ones. One graph goes forward and one backward, and adds gradients where the masters' always lie (see
Optimizer.begin). The head and the loss between the two run as they are. Without a GPU the same work is done unrecorded.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from posttrain.core.devices import copy_to_device
from posttrain.core.types import Batch
from posttrain.nn import attention
from posttrain.nn.kernels import reference
from posttrain.nn.kernels.reference import steps_for
from posttrain.nn.layers import MASTER, knows

LEAST_OFTEN = 2  # packs of a size, before it is worth a graph
MOST_GRAPHS = 24
COARSELY = 2  # where padding costs next to nothing: samples that are empty, lengths that nobody has
MOST_WASTE = 1.07  # times the size of a pack, for using a graph that is there already
MOST_WORK = 1e13  # parameters times tokens of a pack: above, a device needs longer for it than a host
SPARE_MEMORY = 3  # times what a pass keeps must be free: graphs do not give it back between passes
CAPTURING = threading.Lock()  # one capture at a time in a process: torch has one stream for all of them
log = logging.getLogger("posttrain")


@dataclass(slots=True, frozen=True)
class Room:
    """What a pack is padded to."""

    tokens: int
    pieces: int
    longest: int
    keys: int = 0  # 0: nobody shares a beginning
    most_keys: int = 0

    @classmethod
    def of(cls, batch: Batch) -> Room:
        row, sharing = batch.sharing or batch, batch.sharing
        used = sum(row.lengths)
        tokens, longest = stepped(used, 256), stepped(max(row.lengths), 64, COARSELY)
        pieces = stepped(len(row.lengths) + padding_pieces(tokens - used, longest), 16, COARSELY)
        if sharing is None:
            return cls(tokens, pieces, longest)
        keys = stepped(sum(sharing.key_lengths) + tokens - used, 256)
        return cls(tokens, pieces, longest, keys, max(longest, stepped(max(sharing.key_lengths), 64, COARSELY)))

    def holds(self, batch: Batch) -> bool:
        """Whether the pack fits in, with the padding that fills the rest."""
        row, sharing = batch.sharing or batch, batch.sharing
        spare = self.tokens - sum(row.lengths)
        if spare < 0 or max(row.lengths) > self.longest:
            return False
        if len(row.lengths) + padding_pieces(spare, self.longest) > self.pieces:
            return False
        if sharing is None or not self.keys:
            return sharing is None and not self.keys
        return sum(sharing.key_lengths) + spare <= self.keys and max(sharing.key_lengths) <= self.most_keys

    @property
    def size(self) -> int:
        """What it costs."""
        return self.tokens + self.keys


def padding_pieces(tokens: int, longest: int) -> int:
    """Samples that so many tokens of padding are; where there is nothing to pad, one that is empty."""
    return max(1, -(-tokens // longest))


def stepped(size: int, least: int, finely: int = 4) -> int:
    """Rounded up to a sixteenth of the next power of two (2^-finely), at least to a multiple of `least`."""
    step = max(least, 1 << max(0, (size - 1).bit_length() - finely))
    return -(-size // step) * step


class Pass:
    """Tensors that stay where they are, and the two graphs that use them."""

    def __init__(self, model: Any, room: Room) -> None:
        self.room = room
        self.body = getattr(model, model.base_model_prefix)
        weight = model.get_input_embeddings().weight
        device = weight.device

        def ints(size: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens, self.positions = ints(room.tokens), ints(room.tokens)
        self.packing = attention.Packing(ints(room.pieces + 1, torch.int32), room.longest, padded=True)
        if room.keys:
            self.packing.keys, self.packing.key_starts = ints(room.keys), ints(room.pieces + 1, torch.int32)
            self.packing.most_keys = room.most_keys
            self.packing.seen = (ints(room.keys), ints(room.tokens + 1))
        self.d_hidden = torch.zeros(room.tokens, weight.shape[1], dtype=weight.dtype, device=device)
        self.hidden: torch.Tensor | None = None
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.held = 0  # bytes of memory that the graphs took

    # What the graphs do

    def forward(self) -> None:
        with torch.enable_grad():
            hidden = self.body.embed_tokens(self.tokens[None])
            angles = self.body.rotary_emb(hidden, position_ids=self.positions[None])
            for layer in self.body.layers:
                hidden = layer(hidden, position_embeddings=angles, packing=self.packing)
            self.hidden = self.body.norm(hidden).squeeze(0)

    def backward(self) -> None:
        assert self.hidden is not None
        torch.autograd.backward(self.hidden, self.d_hidden)
        self.hidden = self.hidden.detach()

    def capture(self, pool: Any) -> None:
        """OutOfMemoryError: where there is too little for it."""
        self.d_hidden.zero_()  # what is tried out here adds nothing
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            before = torch.cuda.memory_allocated()
            self.forward()
            kept = torch.cuda.memory_allocated() - before
            self.backward()
        here.wait_stream(aside)
        with CAPTURING:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < SPARE_MEMORY * kept:
                raise torch.OutOfMemoryError(f"a pass keeps {kept / 2**30:.1f} GiB")
            before = torch.cuda.memory_reserved()
            there, back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            try:  # thread_local: answers may be under way
                with torch.cuda.graph(there, pool=pool, capture_error_mode="thread_local"):
                    self.forward()
                with torch.cuda.graph(back, pool=pool, capture_error_mode="thread_local"):
                    self.backward()
            finally:
                torch.cuda.set_stream(here)  # a capture that broke leaves its own behind
        self.graphs = there, back
        self.held = torch.cuda.memory_reserved() - before

    # A pack

    def fill(self, batch: Batch) -> None:
        row, sharing = batch.sharing or batch, batch.sharing
        used, pieces, room = len(row.tokens), len(row.lengths), self.room
        for mine, theirs in ((self.tokens, row.tokens), (self.positions, row.positions)):
            mine[:used] = theirs
            mine[used:] = 0
        # Padding: samples of at most the longest length, and then empty ones.
        ends = [*range(used + room.longest, room.tokens, room.longest), room.tokens]
        ends += [room.tokens] * (room.pieces - pieces - len(ends))
        tail = copy_to_device(torch.tensor(ends, dtype=torch.int32), row.starts.device)
        self.packing.starts[: pieces + 1] = row.starts
        self.packing.starts[pieces + 1 :] = tail
        if sharing is None:
            return
        packing = self.packing
        assert packing.keys is not None and packing.key_starts is not None and packing.seen is not None
        own = torch.arange(used, room.tokens, device=sharing.keys.device)
        keys = torch.cat([sharing.keys, own.to(sharing.keys.dtype)])
        places, first = attention.where_each_is(keys, room.tokens)
        packing.keys[: len(keys)] = keys
        packing.keys[len(keys) :] = 0  # nobody looks there, and nobody asks for their gradients
        packing.key_starts[: pieces + 1] = sharing.key_starts
        packing.key_starts[pieces + 1 :] = tail + (len(sharing.keys) - used)
        packing.seen[0][: len(keys)] = places
        packing.seen[1][:] = first

    def run(self, number: int) -> None:
        if self.graphs is not None:
            self.graphs[number].replay()
        else:
            (self.forward, self.backward)[number]()


class Passes:
    """Passes by size. They share their memory, so one must have gone back before the next goes forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.on_gpu = next(model.parameters()).device.type == "cuda"
        self.anchor = torch.zeros((), requires_grad=True)  # for autograd, which else sees nothing to differentiate
        self.seen: Counter[Room] = Counter()
        self.passes: dict[Room, Pass] = {}
        self.full = False  # no more graphs
        self.too_large = math.inf  # the size for which memory did not suffice
        self.addresses: tuple[int, ...] = ()
        self.number = 0  # of the pass that is under way
        self.forget()
        ALIVE.add(self)

    @classmethod
    def of(cls, model: Any, tokens: int) -> Passes | None:
        """None where a graph cannot be captured, or is not worth it for packs of so many tokens."""
        parameters = list(model.parameters())
        fused = knows(model) and attention.has_ragged_kernel(model) and not model.is_gradient_checkpointing
        whole = all(p.requires_grad and hasattr(p, MASTER) for p in parameters)  # no adapters, nothing frozen
        worth = sum(p.numel() for p in parameters) * tokens <= MOST_WORK
        kernels = fused and steps_for(parameters[0].device) is not reference
        return cls(model) if kernels and whole and worth else None

    @property
    def alive(self) -> bool:
        """Whether there are graphs, or may be."""
        return bool(self.passes) or not self.full

    def hidden(self, batch: Batch) -> torch.Tensor | None:
        """Last hidden states [U, H], or None: there is no graph for such a pack."""
        one = self.pass_for(batch)
        if one is None:
            return None
        one.fill(batch)
        return Replayed.apply(self.anchor, self, one, len((batch.sharing or batch).tokens))

    def forget(self) -> None:
        self.passes, self.full = {}, False
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    def pass_for(self, batch: Batch) -> Pass | None:
        addresses = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        if addresses != self.addresses:
            self.forget()
            self.addresses, self.too_large = addresses, math.inf
        wanted = Room.of(batch)
        fitting = [room for room in self.passes if room.size <= MOST_WASTE * wanted.size and room.holds(batch)]
        if fitting:
            return self.passes[min(fitting, key=lambda room: room.size)]
        self.seen[wanted] += 1
        if self.full or wanted.size >= self.too_large or self.seen[wanted] < LEAST_OFTEN:
            return None
        larger = bool(self.passes) and wanted.size > max(room.size for room in self.passes)
        if larger:
            self.forget()  # their memory is too small for it; later they find room in its
        one = Pass(self.model, wanted)
        one.fill(batch)
        if self.on_gpu:
            try:
                one.capture(self.pool)
            except RuntimeError as error:  # too little memory, or a kernel that cannot be captured
                log.info("no more training passes become CUDA graphs: the same numbers, more slowly (%s)", error)
                if larger and isinstance(error, torch.OutOfMemoryError):
                    self.too_large = wanted.size  # the smaller ones come again
                else:
                    self.full = True
                for parameter in self.model.parameters():
                    parameter.grad = None  # memory that a broken capture never wrote
                return None
        self.passes[wanted] = one
        self.full = len(self.passes) == MOST_GRAPHS
        return one


ALIVE: WeakSet[Passes] = WeakSet()


def memory_held() -> int:
    """Bytes that graphs hold between passes, and torch does not count as allocated."""
    return sum(one.held for passes in ALIVE for one in passes.passes.values())


class Replayed(torch.autograd.Function):
    """Hidden states of a pack. The weights' gradients are added on the way back; there is nothing left for autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, passes: Passes, one: Pass, used: int) -> torch.Tensor:
        passes.number += 1
        ctx.passes, ctx.one, ctx.used, ctx.number = passes, one, used, passes.number
        one.run(0)
        assert one.hidden is not None
        return one.hidden.detach()[:used]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        assert ctx.number == ctx.passes.number, "another pack went forward before this one went back"
        one: Pass = ctx.one
        one.d_hidden[: ctx.used] = gradients[0]
        one.d_hidden[ctx.used :] = 0
        one.run(1)
        return None, None, None, None


__all__ = ["Passes", "memory_held"]
