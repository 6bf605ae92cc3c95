"""The passes of generation through the models that most people train, with few and fat steps.

The families of nn/layers.py are walked here, on the trainer's own weights. Every other model runs its own code (see
local.py).
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
from posttrain.engines.kv_cache import SlotCache
from posttrain.nn import attention
from posttrain.nn.layers import head_norms, join_storage, supports_fused_layers, window_of

Attend = Callable[[int, "Layer", torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""(layer's index, layer, queries and keys and values, cos and sin) -> [n, heads, d]."""

TYPICAL_ROWS = 64  # of a step on a CPU


class Joined:
    """Linear maps of one input, computed as one: their weights are laid end to end, and stay the modules' own."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.modules = modules
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        linears: list[Any] = [module for module in modules if type(module) is torch.nn.Linear]
        biased = [linear.bias is not None for linear in linears]
        if len(linears) == len(modules) and len(set(biased)) == 1:  # adapters and quantized maps keep their own code
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
        """Keep a copy of the weight in the order in which oneDNN reads it."""
        if self.weight is not None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, TYPICAL_ROWS)

    def unpack(self) -> None:
        self.packed = None


@dataclass(slots=True, eq=False)
class Layer:
    """The parts of one decoder layer."""

    module: Any
    qkv: Joined
    out: Joined
    gate_up: Joined
    down: Joined
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float]  # of queries and keys, and their epsilon
    window: int | None
    kv_shape: tuple[int, int]


class FusedDecoder:
    """Walks the layers, for whole prompts or for one token a slot."""

    def __init__(self, model: Any, steps: ModuleType) -> None:
        self.body = getattr(model, model.base_model_prefix)
        self.head = Joined([model.get_output_embeddings()])
        self.steps = steps
        self.layers = [self.parts(layer) for layer in self.body.layers]
        of_layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self.layers]
        self.maps = [*chain.from_iterable(of_layers), self.head]

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether the model has the shape that is walked here."""
        return supports_fused_layers(model)

    def parts(self, layer: Any) -> Layer:
        own, mlp = layer.self_attn, layer.mlp
        return Layer(
            module=layer,
            qkv=Joined([own.q_proj, own.k_proj, own.v_proj]),
            out=Joined([own.o_proj]),
            gate_up=Joined([mlp.gate_proj, mlp.up_proj]),
            down=Joined([mlp.down_proj]),
            norms=head_norms(layer),
            window=window_of(layer),
            kv_shape=(own.config.num_key_value_heads, own.head_dim),
        )

    def prefill(
        self, batch: MicroBatch, packing: attention.Packing, cache: SlotCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run whole prompts, packed; the hidden states behind the last norm at the wanted places: [n, H]."""
        alone = torch.zeros_like(batch.positions)  # each token's key and value go into a row of its own

        def attend(
            index: int, layer: Layer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
        ) -> torch.Tensor:
            keys, values = (qkv.new_empty(len(qkv), 1, *layer.kv_shape) for _ in range(2))
            query = self.steps.rotate_and_store(qkv, *angles, alone, keys, values, *layer.norms)
            query, key, value = (stream.transpose(0, 1)[None] for stream in (query, keys[:, 0], values[:, 0]))
            own = layer.module.self_attn
            how = {"packing": packing, "cache": cache, "scaling": own.scaling, "sliding_window": layer.window}
            return attention.packed_attention(own, query, key, value, None, **how)[0][0]

        return self.walk(batch.tokens, batch.positions, attend, wanted)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Run one token in each of the first slots; the hidden states behind the last norm: [n, H]."""

        def attend(
            index: int, layer: Layer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
        ) -> torch.Tensor:
            keys, values = cache.layer(index, layer.kv_shape, layer.kv_shape, qkv)
            query = self.steps.rotate_and_store(qkv, *angles, positions, keys, values, *layer.norms)
            scaling = layer.module.self_attn.scaling
            if self.steps is reference:
                return cache.attend_plainly(query, keys, values, scaling, layer.window)
            return self.steps.attend(query, keys, values, positions, cache.longest, scaling, layer.window)

        return self.walk(tokens, positions, attend)

    def walk(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All layers, whatever attention does; behind the last attention only the wanted places are computed."""
        steps = self.steps
        x = self.body.embed_tokens(tokens)
        cos, sin = (angle[0] for angle in self.body.rotary_emb(x, positions[None]))
        total = torch.zeros_like(x)  # so that one kernel serves all layers: each one takes time to build
        for index, layer in enumerate(self.layers):
            norm, next_norm = layer.module.input_layernorm, layer.module.post_attention_layernorm
            normed, total = steps.add_norm(x, total, norm.weight, norm.variance_epsilon)
            heads = attend(index, layer, layer.qkv(normed), (cos, sin))
            if wanted is not None and layer is self.layers[-1]:
                heads, total = heads[wanted], total[wanted]
            x = layer.out(heads.flatten(1))
            normed, total = steps.add_norm(x, total, next_norm.weight, next_norm.variance_epsilon)
            x = layer.down(steps.gated(layer.gate_up(normed)))
        return steps.add_norm(x, total, self.body.norm.weight, self.body.norm.variance_epsilon)[0]

    def pack(self) -> None:
        """Copy all weights, as they are now, for quicker products on a CPU. Who changes them must pack again."""
        for joined in self.maps:
            joined.pack()

    @property
    def packed(self) -> bool:
        return any(joined.packed is not None for joined in self.maps)

    def unpack(self) -> None:
        """Give that memory back; products take the weights themselves again."""
        for joined in self.maps:
            joined.unpack()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V] in the weights' own precision: these families put no scaling behind their head."""
        return self.head(hidden)
