"""The paged KV cache of the local engine: blocks of positions, a table of each slot's blocks, attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from posttrain.core.devices import copy_to_device
from posttrain.core.types import Ints
from posttrain.engines.block_pool import UNUSED_BLOCK, BlockPool
from posttrain.engines.kernels import reference
from posttrain.nn.attention import Packing, plain_attention
from posttrain.nn.kernels import reference as layer_kernels
from posttrain.nn.latent_attention import LATENT_TYPES
from posttrain.nn.routing import Choice

BLOCK_SIZE = 64  # positions; a multiple of the keys that one iteration of the GPU's attention kernel reads


def decode_kernels_for(device: torch.device) -> ModuleType:
    """Return the kernels of a decode step for a device: Triton where nn/kernels uses it, else plain PyTorch."""
    if layer_kernels.kernels_for(device) is layer_kernels:
        return reference
    from posttrain.engines.kernels import triton

    return triton


def round_length(length: int, device: torch.device) -> int:
    """Round up to one of few lengths, so that the next call can use the same cache."""
    step = 64 if device.type == "cpu" else 256
    return -(-length // step) * step


@dataclass(slots=True)
class PromptPart:
    """Tokens of a prompt that are computed in one pass, and where their keys and values are stored."""

    tokens: Ints
    sequences: Sequence[Sequence[int]]  # the blocks of each sequence that has this prompt; they share all full blocks
    begin: int = 0  # position of the first token; the keys and values before it are in the cache
    adapter: int = 0  # number of the sequences' adapter; 0: none


class KVCache:
    """Keys and values of each layer: [blocks, block size, kv_heads, d]. A decode step runs one token per slot.

    Position p of a slot is position p % size of block table[slot, p // size]. The scheduler allocates blocks from
    `pool` and assigns them to slots; `upload_table` copies the changed rows of the table to the device.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        device: torch.device,
        blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        *,
        rounded: bool = False,
    ) -> None:
        """`capacity`: most positions of a slot; `blocks`: of all slots together, by default what they could need.

        `rounded`: store 8-bit floats. All passes then attend to what is stored, also those that have just computed it.
        """
        self.slots, self.device, self.block_size, self.rounded = slots, device, block_size, rounded
        columns = -(-capacity // block_size)
        self.capacity = columns * block_size
        self.pool = BlockPool(slots * columns if blocks is None else blocks, block_size)
        self.host_table = np.full((slots, columns), UNUSED_BLOCK, dtype=np.int32)
        self.table = torch.full((slots, columns), UNUSED_BLOCK, dtype=torch.int32, device=device)  # read by CUDA graphs
        self.changed_slots: set[int] = set()  # whose rows on the device are out of date
        self.decoding = False
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.exponents: dict[int, layer_kernels.Exponents] = {}  # by layer, of 8-bit floats
        # Of a prefill: token of the pass -> block and position in it that it is written to.
        self.source = self.block = self.offset = torch.empty(0, dtype=torch.long, device=device)
        # Of a prefill that continues a prompt: block and offset of all positions so far, and the layout of the pass.
        self.prefix: tuple[torch.Tensor, torch.Tensor, Packing] | None = None
        # Of a decode step: position of each row's token, its index among all positions of the cache, the blocks of its
        # slot, longest sequence.
        self.positions = self.places = torch.empty(0, dtype=torch.long, device=device)
        self.row_table = self.table
        self.longest = 0
        # Of a decode step, by window and numbers of heads: layers share them.
        self.bag_attention: dict[tuple[int | None, int, int], reference.EmbeddingBagAttention] = {}
        self.experts: torch.Tensor | None = None  # [positions of all blocks, mixture layers, k] int16, if recorded

    def reset(self) -> None:
        """Free all blocks and slots."""
        self.pool.reset()
        self.host_table.fill(UNUSED_BLOCK)
        self.table.fill_(UNUSED_BLOCK)
        self.changed_slots.clear()

    # Tables

    def assign(self, slot: int, blocks: Sequence[int]) -> None:
        """Set the blocks of a slot; none: it is free."""
        self.host_table[slot, : len(blocks)] = blocks
        self.host_table[slot, len(blocks) :] = UNUSED_BLOCK
        self.changed_slots.add(slot)

    def upload_table(self) -> None:
        """Copy the changed rows to the device, after all work that was launched with the old ones."""
        if not self.changed_slots:
            return
        rows = sorted(self.changed_slots)
        update = np.concatenate([np.array(rows, dtype=np.int32)[:, None], self.host_table[rows]], 1)
        on_device = copy_to_device(torch.from_numpy(update), self.device)
        self.table[on_device[:, 0].long()] = on_device[:, 1:]
        self.changed_slots.clear()

    # Storage

    def layer(
        self, index: int, key: Sequence[int], value: Sequence[int], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer; `key` and `value` are the shapes (heads, d) of one token."""
        if index not in self.layers:
            self.layers[index] = (self.allocate(key, like), self.allocate(value, like))
            if self.rounded:
                shapes = ((self.pool.count + 1, self.block_size, heads) for heads, _ in (key, value))
                of_keys, of_values = (lazy_zeros(shape, torch.int8, self.device) for shape in shapes)
                self.exponents[index] = (of_keys, of_values)
        return self.layers[index]

    def latents(self, index: int, width: int, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Return the latents of a layer with latent attention, [blocks, block size, 1, width].

        They are its keys, and their first `rank` numbers its values.
        """
        assert not self.rounded, "the local engine refuses fp8 for models with latent attention"
        if index not in self.layers:
            shape = (self.pool.count + 1, self.block_size, 1, width)
            stored = lazy_zeros(shape, like.dtype, self.device)
            self.layers[index] = (stored, stored[..., :rank])
        return self.layers[index][0]

    def allocate(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Allocate zeros, since a masked key counts 0 times what is stored; on a CPU memory is used when written."""
        heads, width = shape
        blocks = self.pool.count + 1
        if self.rounded:
            return lazy_zeros((blocks, self.block_size, heads, width), torch.uint8, self.device).view(layer_kernels.FP8)
        if not self.stored_by_head(like):
            return lazy_zeros((blocks, self.block_size, heads, width), like.dtype, self.device)
        return lazy_zeros((blocks, heads, self.block_size, width), like.dtype, self.device).transpose(1, 2)

    def stored_by_head(self, like: torch.Tensor) -> bool:
        """Whether the values of a head are contiguous: EmbeddingBagAttention, in float32 on a CPU, reads by head."""
        return self.device.type == "cpu" and like.dtype == torch.float32 and not self.rounded

    # Experts

    def record_experts(self, layers: int, per_token: int) -> None:
        """Keep, with the keys of each position, the experts that a mixture of experts chose for it."""
        shape = ((self.pool.count + 1) * self.block_size, layers, per_token)
        self.experts = lazy_zeros(shape, torch.int16, self.device)

    def store_experts(self, layer: int, chosen: torch.Tensor) -> None:
        """Store the experts [T, k] of a pass; `layer` counts mixture layers."""
        if self.experts is None:
            return
        places, chosen = self.places, chosen.to(torch.int16)
        if not self.decoding:
            places, chosen = self.block * self.block_size + self.offset, chosen.index_select(0, self.source)
        self.experts[:, layer].index_copy_(0, places, chosen)

    def route(self, layer: int, router: Any, logits: torch.Tensor, choice: Choice) -> Choice:
        """Record what a router of the model's own code chose; see nn/routing.py."""
        self.store_experts(layer, choice[1])
        return choice

    # Prefill

    def begin_prefill(self, parts: Sequence[PromptPart], packing: Packing | None = None) -> None:
        """Prepare for a pass over packed prompts; `packing`: their layout, if some continue what the cache holds."""
        self.decoding, self.prefix = False, None
        sources, places, first = [], [], 0
        for part in parts:
            position = np.arange(part.begin, part.begin + len(part.tokens))
            written = self.places_of(part.sequences[0], position)
            sources.append(position - part.begin + first)
            places.append(written)
            for blocks in part.sequences[1:]:
                own = self.places_of(blocks, position)
                differs = own != written  # shared blocks are written once
                sources.append((position - part.begin + first)[differs])
                places.append(own[differs])
            first += len(part.tokens)
        table = torch.from_numpy(np.stack([np.concatenate(sources), np.concatenate(places)]))
        self.source, written_to = copy_to_device(table, self.device)
        self.block, self.offset = written_to // self.block_size, written_to % self.block_size
        if packing is not None:
            ends = [part.begin + len(part.tokens) for part in parts]
            everything = [
                self.places_of(part.sequences[0], np.arange(end)) for part, end in zip(parts, ends, strict=True)
            ]
            read = copy_to_device(torch.from_numpy(np.concatenate(everything)), self.device)
            self.prefix = (read // self.block_size, read % self.block_size, packing)

    def places_of(self, blocks: Sequence[int], position: np.ndarray) -> np.ndarray:
        """Return the index of each position among all positions of the cache."""
        size = self.block_size
        return np.asarray(blocks, dtype=np.int64)[position // size] * size + position % size

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, packing: Packing | None
    ) -> tuple[torch.Tensor, torch.Tensor, Packing | None]:
        """Store keys and values of a prefill, [1, kv_heads, T, d]; returns those to attend to, and their layout."""
        streams = [stream[0].transpose(0, 1) for stream in (key, value)]
        stored = self.layer(layer, streams[0].shape[1:], streams[1].shape[1:], key)
        exponents = self.exponents.get(layer)
        written = [stream.index_select(0, self.source) for stream in streams]
        layer_kernels.write_vectors(stored, written, self.block, self.offset, exponents)
        if self.prefix is not None:
            block, offset, packing = self.prefix
            streams = self.read(layer, block, offset, key.dtype)
        elif exponents is not None:
            rounded = map(layer_kernels.round_vectors, streams)
            streams = [layer_kernels.restore_vectors(*pair, key.dtype) for pair in rounded]
        else:
            return key, value, packing
        key, value = (stream.transpose(0, 1)[None] for stream in streams)
        return key, value, packing

    def read(self, layer: int, block: torch.Tensor, offset: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the keys and values at some positions: [n, kv_heads, d] each."""
        if layer not in self.exponents:
            return [stream[block, offset] for stream in self.layers[layer]]
        pairs = zip(self.layers[layer], self.exponents[layer], strict=True)
        found = [(stream.view(torch.uint8)[block, offset].view(stream.dtype), e[block, offset]) for stream, e in pairs]
        return [layer_kernels.restore_vectors(*pair, dtype) for pair in found]

    def store_latents(
        self, layer: int, latents: torch.Tensor, rank: int, packing: Packing
    ) -> tuple[torch.Tensor, Packing]:
        """Store the latents [T, width] of a prefill; returns those to attend to, and their layout, as `store` does."""
        stored = self.latents(layer, latents.shape[1], rank, latents)
        stored[self.block, self.offset, 0] = latents.index_select(0, self.source)
        if self.prefix is None:
            return latents, packing
        block, offset, packing = self.prefix
        return stored[block, offset, 0], packing

    # Decode steps

    def begin_decode(self, positions: torch.Tensor, longest: int, per_slot: int = 1) -> None:
        """Prepare for a pass over `per_slot` tokens in each of the first slots, at these positions, slot by slot.

        Each token is a row of its own. Its keys and values are stored before any row attends, so that a row also
        attends to the tokens before it in the same pass.
        """
        self.decoding = True
        self.positions, self.longest = positions, longest
        self.row_table = self.table[: len(positions) // per_slot]
        if per_slot > 1:
            self.row_table = self.row_table.repeat_interleave(per_slot, 0)
        column = (positions // self.block_size)[:, None]
        block = self.row_table.gather(1, column)[:, 0].long()
        self.places = block * self.block_size + positions % self.block_size
        self.bag_attention.clear()

    def attend_reference(
        self,
        layer: int,
        query: torch.Tensor,  # [n, heads, d]
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Attend as reference.attend does; what layers have in common is computed once per step."""
        table, (keys, values) = self.row_table, self.layers[layer]
        if not self.stored_by_head(query):
            how = (self.positions, self.longest, scaling, window, self.exponents.get(layer))
            return reference.attend(query, keys, values, table, *how)
        kind = (window, query.shape[1], values.shape[2])
        if kind not in self.bag_attention:
            blocks = reference.row_blocks(self.positions, self.longest, window, query.dtype)
            self.bag_attention[kind] = reference.EmbeddingBagAttention(blocks, query.shape[1], values, table)
        return self.bag_attention[kind].attend(query, keys, values, scaling)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, n, d]
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend in a decode step of a model's own code, through nn/attention.py: [1, n, heads, d_value]."""
        stored, new = self.layer(layer, key.shape[1::2], value.shape[1::2], key), (key[0], value[0])
        exponents = self.exponents.get(layer)
        q = query[0].transpose(0, 1).contiguous()
        block, offset = self.places // self.block_size, self.places % self.block_size
        layer_kernels.write_vectors(stored, [stream.transpose(0, 1) for stream in new], block, offset, exponents)
        if softcap is None and sinks is None:
            return self.attend_reference(layer, q, scaling, sliding_window)[None]
        mask = reference.visible_mask(self.positions, self.longest, sliding_window)[:, None, None]
        k, v = reference.gather_streams(stored, self.row_table, self.longest, exponents, q.dtype)
        grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
        return plain_attention(grouped, k, v, mask, scaling, softcap, sinks).reshape(1, *q.shape[:2], v.shape[3])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move sequences to other slots, which takes over their blocks."""
        for source, target in zip(sources, targets, strict=True):
            self.assign(target, self.host_table[source])
            self.assign(source, ())


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU the system provides memory page by page as it is written."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    buffer = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(buffer).view(dtype).view(*shape)


def keeps_latents(config: Any, device: torch.device) -> bool:
    """Whether the engine's cache of a model without adapters holds latents: engines/decoder.py runs it on a GPU."""
    return device.type == "cuda" and config.model_type in LATENT_TYPES


def bytes_per_position(config: Any, dtype: torch.dtype, *, latents: bool, rounded: bool = False) -> int:
    """Estimate the memory of one token in all layers: of its keys and values, or of latents where there are some.

    `rounded`: they are 8-bit floats, with one exponent of 8 bits per vector.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    both = 2 * heads * width
    if getattr(config, "kv_lora_rank", None) and latents:
        both = config.kv_lora_rank + config.qk_rope_head_dim
    elif getattr(config, "kv_lora_rank", None) and getattr(config, "v_head_dim", None):  # of each head
        both = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    if rounded:
        return config.num_hidden_layers * (both + 2 * heads)
    return config.num_hidden_layers * both * dtype.itemsize
