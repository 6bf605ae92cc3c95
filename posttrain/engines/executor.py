"""Runs one model for generation: packed prompts, and decode steps over the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from posttrain.core.devices import copy_to_device
from posttrain.core.types import Sample
from posttrain.data.packing import collate
from posttrain.engines.adapter_set import AdapterSet
from posttrain.engines.decode_graphs import DecodeGraphs
from posttrain.engines.decoder import FusedDecoder
from posttrain.engines.kv_cache import KVCache, PromptPart
from posttrain.engines.slot_state import SlotState
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, kernel_shares_prefixes


class ModelExecutor:
    """A model with its KV cache, the state of its sequences and its captured decode steps."""

    def __init__(
        self,
        runner: ModelRunner,
        decoder: FusedDecoder | None,
        cache: KVCache,
        slots: SlotState,
        graphs: DecodeGraphs | None,
        adapters: AdapterSet | None = None,
        logit_rows: int = 0,
    ) -> None:
        """`logit_rows`: most of a step, if more than slots.

        `decoder`: None for a model that runs its own code; `graphs`: None where decode steps are not captured.

        `adapters`: those that sequences may have.
        """
        self.runner, self.decoder, self.cache, self.slots, self.graphs = runner, decoder, cache, slots, graphs
        self.device, self.adapters, self.logit_rows = cache.device, adapters, max(cache.slots, logit_rows)
        self.bucketed = self.device.type == "cuda"
        self.captured_logits: torch.Tensor | None = None  # [rows, V]: output of captured steps that do not sample

    def reset(self, max_tokens: int, penalized_vocabulary: int | None) -> None:
        """Free all slots and blocks; see SlotState.reset."""
        self.slots.reset(max_tokens, penalized_vocabulary)
        self.cache.reset()

    def step_size(self, count: int) -> int:
        """Return how many slots a step computes for `count` sequences; few sizes, since each needs a CUDA graph."""
        return bucket_size(count) if self.bucketed else count

    def prefill(self, parts: Sequence[PromptPart]) -> torch.Tensor:
        """Run packed prompts and fill the cache; returns the last hidden state of each sequence: [n, H].

        Parts that continue a prompt also attend to what the cache holds of it.
        """
        samples = [Sample(tokens=part.tokens, mask=np.zeros(len(part.tokens), dtype=np.bool_)) for part in parts]
        batch = collate(samples, self.device)
        last = batch.starts[1:].long() - 1
        packing = None
        if any(part.begin for part in parts):
            begins, lengths = [part.begin for part in parts], [len(part.tokens) for part in parts]
            before = torch.from_numpy(np.repeat(begins, lengths))
            batch.positions = batch.positions + copy_to_device(before, self.device)
            packing = self.packing_after(begins, lengths)
        self.cache.begin_prefill(parts, packing)
        if self.adapters is not None:
            of_tokens = np.repeat([part.adapter for part in parts], [len(part.tokens) for part in parts])
            self.adapters.begin(copy_to_device(torch.from_numpy(of_tokens), self.device))
        if self.decoder is not None:
            packing = packing or attention.packing_for(batch, varlen_kernel=self.runner.varlen_kernel)
            hidden = self.decoder.prefill(batch, packing, self.cache, last)
        else:
            hidden = self.runner.run_layers(batch, cache=self.cache).last_hidden_state[0][last]
        if self.adapters is not None:
            self.adapters.end()
        copies = [len(part.sequences) for part in parts]
        repeats = copy_to_device(torch.tensor(copies), self.device)
        return hidden.repeat_interleave(repeats, 0, output_size=sum(copies))

    def packing_after(self, begins: Sequence[int], lengths: Sequence[int]) -> attention.Packing:
        """Return the layout of parts that continue prompts."""
        dtype = next(self.runner.model.parameters()).dtype
        varlen_kernel = self.runner.varlen_kernel and aligns_queries(dtype, self.device)
        return attention.packing_after_prefixes(begins, lengths, self.device, varlen_kernel=varlen_kernel)

    def decode(self, count: int, longest: int, drafted: int = 0) -> torch.Tensor:
        """Run the last token of the first `count` slots; returns the logits of the next: [count, V].

        `longest`: no sequence has more positions, drafts included. `drafted`: how many tokens of each slot's draft are
        run as well; the logits are then [count * (1 + drafted), V], slot by slot.
        """
        per_slot = 1 + drafted
        positions = self.slots.positions(count)
        if drafted:
            positions = positions[:, None] + torch.arange(per_slot, device=self.device)
            # No sequence keeps anything at the last position, so rows beyond the end of a draft may write there.
            positions = positions.clamp(max=self.cache.capacity - 1).view(-1)
        self.cache.begin_decode(positions, longest, per_slot)
        tokens = self.slots.inputs(count, drafted)
        if self.adapters is not None:
            adapter = self.slots.adapter[:count]
            self.adapters.begin(adapter.repeat_interleave(per_slot) if drafted else adapter)
        if self.decoder is not None:
            hidden = self.decoder.decode(tokens, positions, self.cache)
        else:
            layers = getattr(self.runner.model, self.runner.model.base_model_prefix)
            out = layers(input_ids=tokens[None], position_ids=positions[None], use_cache=False, cache=self.cache)
            hidden = out.last_hidden_state[0]
        if self.adapters is not None:
            self.adapters.end()
        return self.logits(hidden)

    def decode_captured(self, count: int, drafted: int = 0) -> torch.Tensor:
        """Run `decode` as a CUDA graph that leaves the logits in a fixed tensor."""
        assert self.graphs is not None
        step = (count, None, drafted)
        self.graphs.run(step, lambda: self.store_logits(self.decode(count, self.cache.capacity, drafted)))
        assert self.captured_logits is not None
        return self.captured_logits[: count * (1 + drafted)]

    def store_logits(self, logits: torch.Tensor) -> None:
        if self.captured_logits is None:
            self.captured_logits = logits.new_zeros(self.logit_rows, logits.shape[1])
        self.captured_logits[: len(logits)] = logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.runner.logits(hidden) if self.decoder is None else self.decoder.logits(hidden)

    def move(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Move sequences whose completions have at most `longest` tokens to other slots."""
        self.cache.move(sources, targets)
        rows = copy_to_device(torch.tensor([list(sources), list(targets)]), self.device)
        self.slots.move(rows[0], rows[1], longest)


@cache
def aligns_queries(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the varlen kernel aligns fewer queries than keys with the last keys."""
    with torch.inference_mode(False):
        return kernel_shares_prefixes(dtype, device)


def bucket_size(count: int) -> int:
    """Round up to 1, 8, 32, 64, 128, 192, 256, 384, 512, 768 ...; up to 64 a step costs what reading weights costs."""
    if count <= 64:
        return next(size for size in (1, 8, 32, 64) if count <= size)
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if size >= 256 and count <= size * 3 // 4 else size
