"""Runs one model for generation: packed prompts, and decode steps over the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.core.devices import copy_to_device
from posttrain.core.types import Ints, Sample
from posttrain.data.packing import collate
from posttrain.engines.decode_graphs import DecodeGraphs
from posttrain.engines.decoder import FusedDecoder
from posttrain.engines.kv_cache import KVCache
from posttrain.engines.slot_state import SlotState
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner

SharedPrompt = tuple[Ints, list[int]]
"""A prompt, and the slots that share it."""


class ModelExecutor:
    """A model with its KV cache, the state of its sequences and its captured decode steps."""

    def __init__(
        self,
        runner: ModelRunner,
        decoder: FusedDecoder | None,
        cache: KVCache,
        slots: SlotState,
        graphs: DecodeGraphs | None,
    ) -> None:
        """`decoder`: None for a model that runs its own code; `graphs`: None where decode steps are not captured."""
        self.runner, self.decoder, self.cache, self.slots, self.graphs = runner, decoder, cache, slots, graphs
        self.device = cache.device
        self.bucketed = self.device.type == "cuda"
        self.captured_logits: torch.Tensor | None = None  # [slots, V]: output of captured steps that do not sample

    def step_size(self, count: int) -> int:
        """Number of slots that a step computes for `count` sequences: a graph has one size, so there are few sizes."""
        return bucket_size(count) if self.bucketed else count

    def prefill(self, prompts: Sequence[SharedPrompt]) -> torch.Tensor:
        """Run packed prompts and fill the cache; returns the last hidden state of each slot: [n, H]."""
        samples = [Sample(tokens=prompt, mask=np.zeros(len(prompt), dtype=np.bool_)) for prompt, _ in prompts]
        batch = collate(samples, self.device)
        self.cache.begin_prefill(batch.lengths, [slots for _, slots in prompts])
        last = batch.starts[1:].long() - 1
        if self.decoder is not None:
            packing = attention.packing_for(batch, varlen_kernel=self.runner.varlen_kernel)
            hidden = self.decoder.prefill(batch, packing, self.cache, last)
        else:
            hidden = self.runner.run_layers(batch, cache=self.cache).last_hidden_state[0][last]
        copies = [len(slots) for _, slots in prompts]
        repeats = copy_to_device(torch.tensor(copies), self.device)
        return hidden.repeat_interleave(repeats, 0, output_size=sum(copies))

    def decode(self, count: int, longest: int) -> torch.Tensor:
        """Run the last token of the first `count` slots; returns the logits of the next: [count, V].

        `longest`: no sequence has more positions.
        """
        positions = self.slots.positions(count)
        self.cache.begin_step(positions, longest)
        tokens = self.slots.last_token[:count]
        if self.decoder is not None:
            return self.logits(self.decoder.decode(tokens, positions, self.cache))
        layers = getattr(self.runner.model, self.runner.model.base_model_prefix)
        out = layers(input_ids=tokens[None], position_ids=positions[None], use_cache=False, cache=self.cache)
        return self.logits(out.last_hidden_state[0])

    def decode_captured(self, count: int) -> torch.Tensor:
        """As `decode`, as a CUDA graph that leaves the logits in a fixed tensor."""
        assert self.graphs is not None
        self.graphs.run((count, None), lambda: self.keep_logits(self.decode(count, self.cache.capacity)))
        assert self.captured_logits is not None
        return self.captured_logits[:count]

    def keep_logits(self, logits: torch.Tensor) -> None:
        if self.captured_logits is None:
            self.captured_logits = logits.new_zeros(self.cache.slots, logits.shape[1])
        self.captured_logits[: len(logits)] = logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.runner.logits(hidden) if self.decoder is None else self.decoder.logits(hidden)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, longest: int) -> None:
        """Move sequences of at most `longest` positions to other slots."""
        self.cache.move(sources, targets, longest)
        self.slots.move(sources, targets)


def bucket_size(count: int) -> int:
    """Round up to 1, 8, 32, 64, 128, 192, 256, 384, 512, 768 ...; up to 64 a step costs what reading weights costs."""
    if count <= 64:
        return next(size for size in (1, 8, 32, 64) if count <= size)
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if size >= 256 and count <= size * 3 // 4 else size
