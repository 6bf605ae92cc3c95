"""Keys and values of the sequences under way, a slot each, and which code attends to them."""

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
    """Where the small steps of decoding come from: as those of a layer, see nn/kernels/reference.py."""
    if layer_kernels.kernels_for(device) is layer_kernels:
        return reference
    from posttrain.engines.kernels import triton

    return triton


class SlotCache:
    """For each layer [slots, capacity, kv_heads, d]. A step runs one token in each of the first slots."""

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self.slots, self.capacity, self.device = slots, capacity, device
        self.decoding = False
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.source = self.slot = self.place = self.positions = torch.empty(0, dtype=torch.long, device=device)
        self.longest = 0
        self.bags: dict[
            tuple[int | None, int, int], reference.Bags
        ] = {}  # of this step, by window and numbers of heads

    def layer(
        self, index: int, key: Sequence[int], value: Sequence[int], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; `key` and `value` are (heads, d) of one token."""
        if index not in self.layers:
            self.layers[index] = (self.room(key, like), self.room(value, like))
        return self.layers[index]

    def room(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        if not self.head_by_head(like):
            return like.new_zeros(self.slots, self.capacity, *shape)
        heads, width = shape
        return like.new_zeros(self.slots, heads, self.capacity, width).transpose(1, 2)

    def begin_prefill(self, lengths: Sequence[int], sharing: Sequence[Sequence[int]]) -> None:
        """The next pass runs prompts of these lengths end to end, each for the slots that share it."""
        self.decoding = False
        many = [len(slots) for slots in sharing]
        length = np.repeat(lengths, many)  # of each slot
        first = np.repeat(np.cumsum(lengths) - lengths, many)  # token of the pass
        place = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        source, slot = np.repeat(first, length) + place, np.repeat(np.concatenate(sharing), length)
        table = torch.from_numpy(np.stack([source, slot, place]))
        self.source, self.slot, self.place = copy_to_device(table, self.device)

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Remember a pack's keys and values: [1, kv_heads, T, d]."""
        streams = [stream[0].transpose(0, 1) for stream in (key, value)]
        rooms = self.layer(layer, streams[0].shape[1:], streams[1].shape[1:], key)
        for room, stream in zip(rooms, streams, strict=True):
            room[self.slot, self.place] = stream.index_select(0, self.source)

    def begin_step(self, positions: torch.Tensor, longest: int) -> None:
        """The next pass runs one token in each of the first slots, at these positions."""
        self.decoding = True
        self.positions, self.longest = positions, longest
        self.bags.clear()

    def attend_plainly(
        self,
        query: torch.Tensor,  # [n, heads, d]
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """As plain.attend; what layers have in common is found out once a step."""
        if not self.head_by_head(query):
            return reference.attend(query, keys, values, self.positions, self.longest, scaling, window)
        kind = (window, query.shape[1], values.shape[2])
        if kind not in self.bags:
            parts = reference.parts_of(self.positions, self.longest, window, query.dtype)
            self.bags[kind] = reference.Bags(parts, query.shape[1], values)
        return self.bags[kind].attend(query, keys, values, scaling)

    def head_by_head(self, like: torch.Tensor) -> bool:
        """Whether what belongs to one head lies side by side in memory: where it is read one head at a time."""
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
        """What stock modules call through nn/attention.py: [1, n, heads, d_value]."""
        keys, values = self.layer(layer, key.shape[1::2], value.shape[1::2], key)
        q, rows = query[0].transpose(0, 1).contiguous(), torch.arange(len(self.positions), device=self.device)
        keys[rows, self.positions] = key[0].transpose(0, 1)
        values[rows, self.positions] = value[0].transpose(0, 1)
        if softcap is None and sinks is None:
            return self.attend_plainly(q, keys, values, scaling, sliding_window)[None]
        mask = reference.visible(self.positions, self.longest, sliding_window)[:, None, None]
        k, v = (stream[: len(q), : self.longest].transpose(1, 2) for stream in (keys, values))
        grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
        return plain_attention(grouped, k, v, mask, scaling, softcap, sinks).reshape(1, *q.shape[:2], v.shape[3])

    def widen(self, capacity: int) -> None:
        """More positions for every slot. Addresses change, so no graph may know them."""
        before, self.capacity = self.capacity, capacity
        olds, self.layers = self.layers, {}
        for index, (keys, values) in olds.items():
            rooms = self.layer(index, keys.shape[2:], values.shape[2:], keys)
            for room, old in zip(rooms, (keys, values), strict=True):
                room[:, :before] = old

    def move(self, sources: torch.Tensor, targets: torch.Tensor, longest: int) -> None:
        """Sequences of at most so many positions change their slots."""
        for rooms in self.layers.values():
            for room in rooms:
                used = room[:, :longest]
                used.index_copy_(0, targets, used.index_select(0, sources))


def bytes_per_position(config: Any, dtype: torch.dtype) -> int:
    """Memory of one token's keys and values in all layers, roughly."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize
