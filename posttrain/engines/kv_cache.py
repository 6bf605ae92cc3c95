"""The KV cache of the local engine: one slot per active sequence, and the attention over it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from posttrain.core.devices import copy_to_device
from posttrain.engines.kernels import reference
from posttrain.nn.attention import plain_attention
from posttrain.nn.kernels import reference as layer_kernels


def decode_kernels_for(device: torch.device) -> ModuleType:
    """The kernels of a decode step for a device: Triton where nn/kernels uses it, else plain PyTorch."""
    if layer_kernels.kernels_for(device) is layer_kernels:
        return reference
    from posttrain.engines.kernels import triton

    return triton


def round_length(length: int, device: torch.device) -> int:
    """Round up to one of few lengths, so that the next call can use the same cache."""
    step = 64 if device.type == "cpu" else 256
    return -(-length // step) * step


class KVCache:
    """Keys and values of each layer: [slots, capacity, kv_heads, d]. A decode step runs one token per slot."""

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        """`capacity`: positions of each slot."""
        self.slots, self.capacity, self.device = slots, capacity, device
        self.decoding = False
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Of a prefill: token of the pass -> slot and position that it is written to.
        self.source = self.slot = self.position = torch.empty(0, dtype=torch.long, device=device)
        # Of a decode step: position of each row's token, and the length of the longest sequence.
        self.positions, self.longest = torch.empty(0, dtype=torch.long, device=device), 0
        # Of a decode step, by window and numbers of heads: layers share them.
        self.bag_attention: dict[tuple[int | None, int, int], reference.EmbeddingBagAttention] = {}

    def layer(
        self, index: int, key: Sequence[int], value: Sequence[int], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; `key` and `value` are the shapes (heads, d) of one token."""
        if index not in self.layers:
            self.layers[index] = (self.allocate(key, like), self.allocate(value, like))
        return self.layers[index]

    def allocate(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        if not self.stored_by_head(like):
            return like.new_zeros(self.slots, self.capacity, *shape)
        heads, width = shape
        return like.new_zeros(self.slots, heads, self.capacity, width).transpose(1, 2)

    def begin_prefill(self, lengths: Sequence[int], sharing: Sequence[Sequence[int]]) -> None:
        """The next pass runs prompts of these lengths, packed; prompt i belongs to the slots `sharing[i]`."""
        self.decoding = False
        copies = [len(slots) for slots in sharing]
        length = np.repeat(lengths, copies)  # of each slot
        first = np.repeat(np.cumsum(lengths) - lengths, copies)  # token of the pass
        position = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        source, slot = np.repeat(first, length) + position, np.repeat(np.concatenate(sharing), length)
        table = torch.from_numpy(np.stack([source, slot, position]))
        self.source, self.slot, self.position = copy_to_device(table, self.device)

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values of a prefill: [1, kv_heads, T, d]."""
        streams = [stream[0].transpose(0, 1) for stream in (key, value)]
        stored = self.layer(layer, streams[0].shape[1:], streams[1].shape[1:], key)
        for target, stream in zip(stored, streams, strict=True):
            target[self.slot, self.position] = stream.index_select(0, self.source)

    def begin_step(self, positions: torch.Tensor, longest: int) -> None:
        """The next pass runs one token in each of the first slots, at these positions."""
        self.decoding = True
        self.positions, self.longest = positions, longest
        self.bag_attention.clear()

    def attend_reference(
        self,
        query: torch.Tensor,  # [n, heads, d]
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """As reference.attend; what layers have in common is computed once per step."""
        if not self.stored_by_head(query):
            return reference.attend(query, keys, values, self.positions, self.longest, scaling, window)
        kind = (window, query.shape[1], values.shape[2])
        if kind not in self.bag_attention:
            blocks = reference.row_blocks(self.positions, self.longest, window, query.dtype)
            self.bag_attention[kind] = reference.EmbeddingBagAttention(blocks, query.shape[1], values)
        return self.bag_attention[kind].attend(query, keys, values, scaling)

    def stored_by_head(self, like: torch.Tensor) -> bool:
        """Whether the values of a head are contiguous: EmbeddingBagAttention, in float32 on a CPU, reads by head."""
        return self.device.type == "cpu" and like.dtype == torch.float32

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
        """Attention of a decode step for stock modules, through nn/attention.py: [1, n, heads, d_value]."""
        keys, values = self.layer(layer, key.shape[1::2], value.shape[1::2], key)
        q, rows = query[0].transpose(0, 1).contiguous(), torch.arange(len(self.positions), device=self.device)
        keys[rows, self.positions] = key[0].transpose(0, 1)
        values[rows, self.positions] = value[0].transpose(0, 1)
        if softcap is None and sinks is None:
            return self.attend_reference(q, keys, values, scaling, sliding_window)[None]
        mask = reference.visible_mask(self.positions, self.longest, sliding_window)[:, None, None]
        k, v = (stream[: len(q), : self.longest].transpose(1, 2) for stream in (keys, values))
        grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
        return plain_attention(grouped, k, v, mask, scaling, softcap, sinks).reshape(1, *q.shape[:2], v.shape[3])

    def grow(self, capacity: int) -> None:
        """Give every slot more positions. Addresses change, so no CUDA graph may refer to them."""
        before, self.capacity = self.capacity, capacity
        old_layers, self.layers = self.layers, {}
        for index, (keys, values) in old_layers.items():
            stored = self.layer(index, keys.shape[2:], values.shape[2:], keys)
            for target, old in zip(stored, (keys, values), strict=True):
                target[:, :before] = old

    def move(self, sources: torch.Tensor, targets: torch.Tensor, longest: int) -> None:
        """Move sequences of at most `longest` positions to other slots."""
        for stored in self.layers.values():
            for stream in stored:
                used = stream[:, :longest]
                used.index_copy_(0, targets, used.index_select(0, sources))


def bytes_per_position(config: Any, dtype: torch.dtype) -> int:
    """Estimate the memory of one token's keys and values in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize
