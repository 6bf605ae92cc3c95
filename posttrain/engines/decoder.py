"""Prefill and decode steps of common model families with fused kernels, on the trainer's own weights.

The families are those of nn/layers.py. Every other model runs its own code, see executor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.core.types import MicroBatch
from posttrain.engines.kernels import reference
from posttrain.engines.kv_cache import KVCache
from posttrain.nn import attention
from posttrain.nn.layers import head_norms, join_storage, supports_fused_layers, window_of

Attend = Callable[[int, "DecoderLayer", torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""(layer index, layer, packed queries, keys and values, (cos, sin)) -> [n, heads, d]."""

TYPICAL_ROWS = 64  # of a decode step on a CPU


class FusedLinear:
    """Linear layers of one input, computed as one. Their weights are joined in storage and remain the modules' own."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.modules = modules
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        linears: list[Any] = [module for module in modules if type(module) is torch.nn.Linear]
        biased = [linear.bias is not None for linear in linears]
        if len(linears) == len(modules) and len(set(biased)) == 1:  # adapters and quantized layers run their own code
            self.weight = join_storage([linear.weight for linear in linears])
            self.bias = join_storage([linear.bias for linear in linears]) if biased[0] else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], None)
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        parts = [module(x) for module in self.modules]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def pack(self) -> None:
        """Keep a copy of the weight in oneDNN's memory layout."""
        if self.weight is not None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, TYPICAL_ROWS)

    def unpack(self) -> None:
        self.packed = None


@dataclass(slots=True, eq=False)
class DecoderLayer:
    """One decoder layer with fused linear layers."""

    module: Any
    qkv: FusedLinear
    out: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float]  # weights for queries and keys, epsilon
    window: int | None
    kv_shape: tuple[int, int]


class FusedDecoder:
    """Runs the layers for whole prompts, or for one token per slot."""

    def __init__(self, model: Any, kernels: ModuleType) -> None:
        self.body = getattr(model, model.base_model_prefix)
        self.head = FusedLinear([model.get_output_embeddings()])
        self.kernels = kernels
        self.layers = [self.fuse(layer) for layer in self.body.layers]
        per_layer = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self.layers]
        self.linears = [*chain.from_iterable(per_layer), self.head]

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether this class can run the model."""
        return supports_fused_layers(model)

    def fuse(self, layer: Any) -> DecoderLayer:
        own, mlp = layer.self_attn, layer.mlp
        return DecoderLayer(
            module=layer,
            qkv=FusedLinear([own.q_proj, own.k_proj, own.v_proj]),
            out=FusedLinear([own.o_proj]),
            gate_up=FusedLinear([mlp.gate_proj, mlp.up_proj]),
            down=FusedLinear([mlp.down_proj]),
            norms=head_norms(layer),
            window=window_of(layer),
            kv_shape=(own.config.num_key_value_heads, own.head_dim),
        )

    def prefill(
        self, batch: MicroBatch, packing: attention.Packing, cache: KVCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run packed prompts; returns the hidden states after the last norm at the wanted tokens: [n, H]."""
        zeros = torch.zeros_like(batch.positions)  # keys and values of each token are written to a row of their own

        def attend(
            index: int, layer: DecoderLayer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
        ) -> torch.Tensor:
            keys, values = (qkv.new_empty(len(qkv), 1, *layer.kv_shape) for _ in range(2))
            query = self.kernels.rotate_and_store(qkv, *angles, zeros, keys, values, *layer.norms)
            query, key, value = (stream.transpose(0, 1)[None] for stream in (query, keys[:, 0], values[:, 0]))
            own = layer.module.self_attn
            options = {"packing": packing, "cache": cache, "scaling": own.scaling, "sliding_window": layer.window}
            return attention.packed_attention(own, query, key, value, None, **options)[0][0]

        return self.run_layers(batch.tokens, batch.positions, attend, wanted)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Run one token in each of the first slots; returns the hidden states after the last norm: [n, H]."""

        def attend(
            index: int, layer: DecoderLayer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
        ) -> torch.Tensor:
            keys, values = cache.layer(index, layer.kv_shape, layer.kv_shape, qkv)
            query = self.kernels.rotate_and_store(qkv, *angles, positions, keys, values, *layer.norms)
            scaling = layer.module.self_attn.scaling
            if self.kernels is reference:
                return cache.attend_reference(query, keys, values, scaling, layer.window)
            return self.kernels.attend(query, keys, values, positions, cache.longest, scaling, layer.window)

        return self.run_layers(tokens, positions, attend)

    def run_layers(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run all layers with the given attention; after the last attention only the wanted tokens are computed."""
        kernels = self.kernels
        x = self.body.embed_tokens(tokens)
        cos, sin = (angle[0] for angle in self.body.rotary_emb(x, positions[None]))
        total = torch.zeros_like(x)  # the first layer then uses the same compiled kernel as the others
        for index, layer in enumerate(self.layers):
            norm, next_norm = layer.module.input_layernorm, layer.module.post_attention_layernorm
            normed, total = kernels.add_norm(x, total, norm.weight, norm.variance_epsilon)
            heads = attend(index, layer, layer.qkv(normed), (cos, sin))
            if wanted is not None and layer is self.layers[-1]:
                heads, total = heads[wanted], total[wanted]
            x = layer.out(heads.flatten(1))
            normed, total = kernels.add_norm(x, total, next_norm.weight, next_norm.variance_epsilon)
            x = layer.down(kernels.silu_and_mul(layer.gate_up(normed)))
        return kernels.add_norm(x, total, self.body.norm.weight, self.body.norm.variance_epsilon)[0]

    def pack(self) -> None:
        """Copy all current weights into a layout that is faster on a CPU; needed again whenever weights change."""
        for linear in self.linears:
            linear.pack()

    @property
    def packed(self) -> bool:
        return any(linear.packed is not None for linear in self.linears)

    def unpack(self) -> None:
        """Free the copies; the weights themselves are used again."""
        for linear in self.linears:
            linear.unpack()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V] in the weights' dtype: these families do not scale the output of their head."""
        return self.head(hidden)
