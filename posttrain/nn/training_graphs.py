"""Runs the decoder layers of a training step as CUDA graphs, for models whose kernels finish before the host can launch
the next ones.

A graph reads and writes tensors at fixed addresses, so micro-batches are padded to a small number of shapes: tokens by
dummy samples, the number of samples by empty ones. One graph runs the forward pass and one the backward pass; the
latter adds gradients to the masters' gradient tensors, which keep their addresses (see Optimizer.restore_gradients).
The head and the loss between the two run eagerly. Without a GPU the same code runs without being captured.
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
from posttrain.core.host import UNCOUNTED_DEVICE_MEMORY
from posttrain.core.types import MicroBatch
from posttrain.nn import attention
from posttrain.nn.kernels import reference
from posttrain.nn.kernels.reference import kernels_for
from posttrain.nn.layers import supports_fused_layers
from posttrain.nn.weights import MASTER

MIN_REPEATS = 2  # micro-batches of a shape before a graph is captured for it
MAX_GRAPHS = 24
COARSE_BITS = 2  # rounding for sizes whose padding costs almost nothing: empty samples, the length of the longest one
MAX_PADDING_RATIO = 1.07  # an existing graph is used for micro-batches down to its size divided by this
MAX_WORK = 1e13  # parameters times tokens of a micro-batch: above, the kernels take longer than their launches
SPARE_MEMORY = 3  # this many times a pass's activations must be free: graphs keep their memory between passes
CAPTURE_LOCK = threading.Lock()  # one capture at a time per process: torch uses one stream for all of them
log = logging.getLogger("posttrain")


@dataclass(slots=True, frozen=True)
class GraphShape:
    """The shape that micro-batches are padded to for one pair of graphs.

    A piece is a sample, or the prefix or the rest of one where samples share their prefix (types.PrefixSharing).
    """

    tokens: int
    pieces: int
    max_length: int  # of a piece
    keys: int = 0  # 0: no samples share a prefix
    max_keys: int = 0  # of one piece

    @classmethod
    def from_batch(cls, batch: MicroBatch) -> GraphShape:
        """Return the shape that a micro-batch is rounded up to."""
        row, sharing = batch.sharing or batch, batch.sharing
        used = sum(row.lengths)
        tokens, max_length = round_up(used, 256), round_up(max(row.lengths), 64, COARSE_BITS)
        pieces = round_up(len(row.lengths) + padding_samples(tokens - used, max_length), 16, COARSE_BITS)
        if sharing is None:
            return cls(tokens, pieces, max_length)
        keys = round_up(sum(sharing.key_lengths) + tokens - used, 256)
        return cls(
            tokens, pieces, max_length, keys, max(max_length, round_up(max(sharing.key_lengths), 64, COARSE_BITS))
        )

    def holds(self, batch: MicroBatch) -> bool:
        """Whether the micro-batch fits, together with the padding that fills the remaining tokens."""
        row, sharing = batch.sharing or batch, batch.sharing
        spare = self.tokens - sum(row.lengths)
        if spare < 0 or max(row.lengths) > self.max_length:
            return False
        if len(row.lengths) + padding_samples(spare, self.max_length) > self.pieces:
            return False
        if sharing is None or not self.keys:
            return sharing is None and not self.keys
        return sum(sharing.key_lengths) + spare <= self.keys and max(sharing.key_lengths) <= self.max_keys

    @property
    def size(self) -> int:
        """Tokens and gathered keys, which the cost of a pass grows with."""
        return self.tokens + self.keys


def padding_samples(tokens: int, max_length: int) -> int:
    """Return the number of dummy samples that hold this many tokens of padding; at least one, which may be empty."""
    return max(1, -(-tokens // max_length))


def round_up(size: int, multiple: int, bits: int = 4) -> int:
    """Round up to a multiple of 2^-bits (1/16) of the next power of two, and at least of `multiple`."""
    step = max(multiple, 1 << max(0, (size - 1).bit_length() - bits))
    return -(-size // step) * step


class TrainingGraph:
    """The fixed tensors of one shape and the two CUDA graphs, forward and backward, that use them."""

    def __init__(self, model: Any, shape: GraphShape) -> None:
        self.shape = shape
        self.body = getattr(model, model.base_model_prefix)
        weight = model.get_input_embeddings().weight
        device = weight.device

        def ints(size: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens, self.positions = ints(shape.tokens), ints(shape.tokens)
        self.packing = attention.Packing(ints(shape.pieces + 1, torch.int32), shape.max_length, padded=True)
        if shape.keys:
            self.packing.keys, self.packing.key_starts = ints(shape.keys), ints(shape.pieces + 1, torch.int32)
            self.packing.max_keys = shape.max_keys
            self.packing.key_uses = (ints(shape.keys), ints(shape.tokens + 1))
        self.d_hidden = torch.zeros(shape.tokens, weight.shape[1], dtype=weight.dtype, device=device)
        self.hidden: torch.Tensor | None = None
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.memory_bytes = 0  # reserved for the two graphs

    # What the graphs contain

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
        """Capture both graphs; OutOfMemoryError if too little memory is free."""
        self.d_hidden.zero_()  # the warm-up passes add zero to the gradients
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            before = torch.cuda.memory_allocated()
            self.forward()
            activations = torch.cuda.memory_allocated() - before
            self.backward()
        current.wait_stream(side)
        with CAPTURE_LOCK:
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < SPARE_MEMORY * activations:
                raise torch.OutOfMemoryError(f"the activations of a pass take {activations / 2**30:.1f} GiB")
            before = torch.cuda.memory_reserved()
            forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            try:  # thread_local: another thread may be generating
                with torch.cuda.graph(forward, pool=pool, capture_error_mode="thread_local"):
                    self.forward()
                with torch.cuda.graph(backward, pool=pool, capture_error_mode="thread_local"):
                    self.backward()
            finally:
                torch.cuda.set_stream(current)  # a failed capture leaves its own stream set
        self.graphs = forward, backward
        self.memory_bytes = torch.cuda.memory_reserved() - before

    # One micro-batch

    def fill(self, batch: MicroBatch) -> None:
        """Copy a micro-batch into the fixed tensors and pad it."""
        row, sharing = batch.sharing or batch, batch.sharing
        used, pieces, shape = len(row.tokens), len(row.lengths), self.shape
        for fixed, values in ((self.tokens, row.tokens), (self.positions, row.positions)):
            fixed[:used] = values
            fixed[used:] = 0
        # Padding: dummy samples of at most the maximum length, then empty ones.
        ends = [*range(used + shape.max_length, shape.tokens, shape.max_length), shape.tokens]
        ends += [shape.tokens] * (shape.pieces - pieces - len(ends))
        tail = copy_to_device(torch.tensor(ends, dtype=torch.int32), row.starts.device)
        self.packing.starts[: pieces + 1] = row.starts
        self.packing.starts[pieces + 1 :] = tail
        if sharing is None:
            return
        packing = self.packing
        assert packing.keys is not None and packing.key_starts is not None and packing.key_uses is not None
        own = torch.arange(used, shape.tokens, device=sharing.keys.device)
        keys = torch.cat([sharing.keys, own.to(sharing.keys.dtype)])
        places, first = attention.index_uses(keys, shape.tokens)
        packing.keys[: len(keys)] = keys
        packing.keys[len(keys) :] = 0  # never attended to, and their gradients are not read
        packing.key_starts[: pieces + 1] = sharing.key_starts
        packing.key_starts[pieces + 1 :] = tail + (len(sharing.keys) - used)
        packing.key_uses[0][: len(keys)] = places
        packing.key_uses[1][:] = first

    def run(self, number: int) -> None:
        """Run the forward (0) or the backward pass (1)."""
        if self.graphs is not None:
            self.graphs[number].replay()
        else:
            (self.forward, self.backward)[number]()


class TrainingGraphs:
    """The captured graphs of a model, by shape.

    They share one memory pool: the backward pass of a micro-batch must run before the next forward pass.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.on_gpu = next(model.parameters()).device.type == "cuda"
        self.anchor = torch.zeros((), requires_grad=True)  # gives GraphReplay an input that needs a gradient
        self.seen: Counter[GraphShape] = Counter()
        self.by_shape: dict[GraphShape, TrainingGraph] = {}
        self.full = False  # capture no more graphs
        self.too_large = math.inf  # the smallest size for which memory did not suffice
        self.addresses: tuple[int, ...] = ()
        self.number = 0  # of the current forward pass
        self.clear()
        ALIVE.add(self)

    @classmethod
    def from_model(cls, model: Any, tokens: int) -> TrainingGraphs | None:
        """Return None if graphs cannot be captured, or would not help with micro-batches of `tokens` tokens."""
        parameters = list(model.parameters())
        fused = supports_fused_layers(model) and attention.supports_varlen_kernel(model)
        stores_all = not model.is_gradient_checkpointing
        all_trained = all(p.requires_grad and hasattr(p, MASTER) for p in parameters)  # no adapters, nothing frozen
        launch_bound = sum(p.numel() for p in parameters) * tokens <= MAX_WORK
        has_kernels = fused and stores_all and kernels_for(parameters[0].device) is not reference
        return cls(model) if has_kernels and all_trained and launch_bound else None

    @property
    def alive(self) -> bool:
        """Whether there are graphs, or some may still be captured."""
        return bool(self.by_shape) or not self.full

    def last_hidden_state(self, batch: MicroBatch) -> torch.Tensor | None:
        """Return the last hidden states [U, H]; None if there is no graph for this micro-batch."""
        graph = self.graph_for(batch)
        if graph is None:
            return None
        graph.fill(batch)
        return GraphReplay.apply(self.anchor, self, graph, len((batch.sharing or batch).tokens))

    def clear(self) -> None:
        """Drop all graphs and their memory pool."""
        self.by_shape, self.full = {}, False
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    def graph_for(self, batch: MicroBatch) -> TrainingGraph | None:
        """Return the graphs to use for a micro-batch; captures new ones once its shape has come up often enough."""
        addresses = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        if addresses != self.addresses:
            self.clear()
            self.addresses, self.too_large = addresses, math.inf
        wanted = GraphShape.from_batch(batch)
        largest = MAX_PADDING_RATIO * wanted.size
        fitting = [shape for shape in self.by_shape if shape.size <= largest and shape.holds(batch)]
        if fitting:
            return self.by_shape[min(fitting, key=lambda shape: shape.size)]
        self.seen[wanted] += 1
        if self.full or wanted.size >= self.too_large or self.seen[wanted] < MIN_REPEATS:
            return None
        larger = bool(self.by_shape) and wanted.size > max(shape.size for shape in self.by_shape)
        if larger:
            self.clear()  # their pool is too small for it; recaptured later, the smaller ones fit into the new pool
        graph = TrainingGraph(self.model, wanted)
        graph.fill(batch)
        if self.on_gpu:
            try:
                graph.capture(self.pool)
            except RuntimeError as error:  # too little memory, or a kernel that cannot be captured
                log.info("training continues without further CUDA graphs: same numbers, slower (%s)", error)
                if larger and isinstance(error, torch.OutOfMemoryError):
                    self.too_large = wanted.size  # the smaller ones are captured again
                else:
                    self.full = True
                for parameter in self.model.parameters():
                    parameter.grad = None  # memory that the failed capture never wrote
                return None
        self.by_shape[wanted] = graph
        self.full = len(self.by_shape) == MAX_GRAPHS
        return graph


ALIVE: WeakSet[TrainingGraphs] = WeakSet()


def graph_memory_bytes() -> int:
    """Return the bytes that graphs hold between passes, which torch does not count as allocated."""
    return sum(graph.memory_bytes for graphs in ALIVE for graph in graphs.by_shape.values())


UNCOUNTED_DEVICE_MEMORY.append(graph_memory_bytes)


class GraphReplay(torch.autograd.Function):
    """Hidden states of a micro-batch. The backward graph adds the weights' gradients itself; autograd gets none."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, graphs: TrainingGraphs, graph: TrainingGraph, used: int
    ) -> torch.Tensor:
        graphs.number += 1
        ctx.graphs, ctx.graph, ctx.used, ctx.number = graphs, graph, used, graphs.number
        graph.run(0)
        assert graph.hidden is not None
        return graph.hidden.detach()[:used]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        assert ctx.number == ctx.graphs.number, "a second forward pass ran before the backward pass of the first"
        graph: TrainingGraph = ctx.graph
        graph.d_hidden[: ctx.used] = gradients[0]
        graph.d_hidden[ctx.used :] = 0
        graph.run(1)
        return None, None, None, None


__all__ = ["TrainingGraphs", "graph_memory_bytes"]
