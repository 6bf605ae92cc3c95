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
from posttrain.engines.adapter_set import STACKED, AdapterSet, JoinedStacks
from posttrain.engines.kernels import reference
from posttrain.engines.kv_cache import KVCache
from posttrain.nn import attention
from posttrain.nn.experts import has_plain_experts, is_mixture, route_tokens, run_experts
from posttrain.nn.kernels.reference import FP8
from posttrain.nn.layers import head_norms, sliding_window_of, supports_fused_layers
from posttrain.nn.lora import Adapter, JoinedAdapters, adapted_linear, adapter_of, base_linear, join_adapters
from posttrain.nn.products import can_quantize
from posttrain.nn.routing import LAYER, NOT_RECORDED
from posttrain.nn.weights import join_storage

Attend = Callable[[int, "DecoderLayer", torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""(layer index, layer, packed queries, keys and values, (cos, sin)) -> [n, heads, d]."""

KeepExperts = Callable[[Any, torch.Tensor], None]
"""Called with a router and the experts [T, k] that it chose."""

TYPICAL_ROWS = 64  # of a decode step on a CPU
QUANTIZED_ROWS = 4096  # of a weight at a time


class FusedLinear:
    """Linear layers of one input, computed as one. Their weights are joined in storage and remain the modules' own.

    Adapters are computed together as well on an accelerator, where launching their many small kernels would take longer
    than the layers themselves.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], kernels: ModuleType) -> None:
        self.modules, self.kernels = modules, kernels
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.packed: torch.Tensor | None = None
        self.quantized: tuple[torch.Tensor, torch.Tensor] | None = None  # 8-bit weight, scale of each row
        self.adapters: list[Adapter | None] = []
        self.joined_adapters: JoinedAdapters | None = None
        self.stacks: JoinedStacks | None = None  # if the engine has a set of adapters
        linears: list[Any] = [linear for linear in map(base_linear, modules) if linear is not None]
        self.sizes = [linear.out_features for linear in linears]
        if len(linears) < len(modules) or len({linear.bias is not None for linear in linears}) > 1:
            return  # quantized layers and adapters of other kinds run their own code
        adapters = [adapter_of(module) for module in modules]
        if any(adapters) and not fuses_adapters(linears[0].weight.device):
            return
        stacks = [getattr(module, STACKED, None) for module in modules]
        if any(stacks):
            self.stacks = JoinedStacks(stacks, self.sizes)
        if any(adapters):
            self.adapters = adapters
            if JoinedAdapters.supports(modules):
                self.joined_adapters = JoinedAdapters(modules, kernels)
            else:
                join_adapters(modules)
        self.weight = join_storage([linear.weight for linear in linears])
        self.bias = join_storage([linear.bias for linear in linears]) if linears[0].bias is not None else None

    def __call__(self, x: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        """Return the outputs of the layers, concatenated; `gated`: silu(gate) * up of the two layers."""
        if self.joined_adapters is not None:
            return self.joined_adapters(x, None if self.quantized is None else self.project(x), gated=gated)
        out = self.project(x)
        if self.stacks is not None:
            return self.stacks.add(x, out, gated=gated)
        return self.kernels.silu_and_mul(out) if gated else out

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layers without the adapters that are added to their outputs."""
        if self.quantized is not None:
            return self.kernels.quantized_linear(x, *self.quantized, self.bias)
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], None)
        if self.weight is not None and self.adapters:
            return adapted_linear(x, self.weight, self.bias, self.adapters, self.sizes)[0]
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        parts = [module(x) for module in self.modules]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def pack(self) -> None:
        """Keep a copy of the weight in oneDNN's memory layout."""
        if self.weight is not None and not self.adapters:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, TYPICAL_ROWS)

    def quantize(self) -> None:
        """Compute with an 8-bit copy of the current weight; a copy that exists is overwritten where it is."""
        if self.weight is None or not can_quantize(self.weight) or (self.adapters and self.joined_adapters is None):
            return
        if self.quantized is None:
            scale = self.weight.new_empty(len(self.weight), 1, dtype=torch.float32)
            self.quantized = torch.empty_like(self.weight, dtype=FP8), scale
        for start in range(0, len(self.weight), QUANTIZED_ROWS):
            rows = slice(start, start + QUANTIZED_ROWS)
            for target, value in zip(self.quantized, self.kernels.quantize_rows(self.weight[rows]), strict=True):
                target[rows] = value

    def unpack(self) -> None:
        self.packed = self.quantized = None


def fuses_adapters(device: torch.device) -> bool:
    return device.type != "cpu"


class DenseMLP:
    """The gated MLP of a layer."""

    captured = True  # whether a CUDA graph can contain it

    def __init__(self, mlp: Any, kernels: ModuleType) -> None:
        self.gate_up = FusedLinear([mlp.gate_proj, mlp.up_proj], kernels)
        self.down = FusedLinear([mlp.down_proj], kernels)
        self.linears = [self.gate_up, self.down]

    def __call__(self, x: torch.Tensor, keep: KeepExperts | None = None) -> torch.Tensor:
        return self.down(self.gate_up(x, gated=True))


class MixtureMLP:
    """The router and the experts of a layer; experts that all tokens use are a dense MLP."""

    def __init__(self, mlp: Any, kernels: ModuleType) -> None:
        self.mlp, self.kernels = mlp, kernels
        self.captured = has_plain_experts(mlp)
        gate = getattr(mlp, "shared_expert_gate", None)
        self.shared_gate = None if gate is None else FusedLinear([gate], kernels)
        shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
        self.shared = None if shared is None else DenseMLP(shared, kernels)
        self.linears = [] if self.shared is None else self.shared.linears

    def __call__(self, x: torch.Tensor, keep: KeepExperts | None = None) -> torch.Tensor:
        """`keep` is called with the chosen experts."""
        kernels = self.kernels
        weights, chosen = route_tokens(self.mlp.gate, x, kernels)
        if keep is not None:
            keep(self.mlp.gate, chosen)
        if self.captured:
            out = run_experts(self.mlp.experts, x, chosen, weights, kernels)
        else:  # adapted experts
            out = self.mlp.experts(x, chosen, weights)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)


@dataclass(slots=True, eq=False)
class DecoderLayer:
    """One decoder layer with fused linear layers."""

    module: Any
    qkv: FusedLinear
    out: FusedLinear
    mlp: DenseMLP | MixtureMLP
    norms: tuple[torch.Tensor | None, torch.Tensor | None, float]  # weights for queries and keys, epsilon
    window: int | None
    kv_shape: tuple[int, int]


class FusedDecoder:
    """Runs the layers for whole prompts, or for one or a few tokens per slot."""

    def __init__(self, model: Any, kernels: ModuleType, adapters: AdapterSet | None = None) -> None:
        self.adapters = adapters
        self.body = getattr(model, model.base_model_prefix)
        self.kernels = kernels
        self.head = FusedLinear([model.get_output_embeddings()], kernels)
        self.layers = [self.fuse(layer) for layer in self.body.layers]
        per_layer = [(layer.qkv, layer.out, *layer.mlp.linears) for layer in self.layers]
        self.linears = [*chain.from_iterable(per_layer), self.head]

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether this class should run the model: on a CPU a mixture of experts gains nothing over its own code."""
        if not supports_fused_layers(model):
            return False
        layers = getattr(model, model.base_model_prefix).layers
        return next(model.parameters()).is_cuda or not any(is_mixture(layer.mlp) for layer in layers)

    @property
    def can_capture(self) -> bool:
        """Whether a decode step can be a CUDA graph: the own code of adapted experts waits for the host."""
        return all(layer.mlp.captured for layer in self.layers)

    def fuse(self, layer: Any) -> DecoderLayer:
        own = layer.self_attn
        return DecoderLayer(
            module=layer,
            qkv=FusedLinear([own.q_proj, own.k_proj, own.v_proj], self.kernels),
            out=FusedLinear([own.o_proj], self.kernels),
            mlp=(MixtureMLP if is_mixture(layer.mlp) else DenseMLP)(layer.mlp, self.kernels),
            norms=head_norms(layer),
            window=sliding_window_of(layer),
            kv_shape=(own.config.num_key_value_heads, own.head_dim),
        )

    def prefill(
        self, batch: MicroBatch, packing: attention.Packing, cache: KVCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run packed prompts; returns the hidden states after the last norm at the wanted tokens: [n, H]."""
        places = torch.arange(len(batch.tokens), device=batch.tokens.device)

        def attend(
            index: int, layer: DecoderLayer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
        ) -> torch.Tensor:
            keys, values = (qkv.new_empty(len(qkv), 1, *layer.kv_shape) for _ in range(2))
            query = self.kernels.rotate_and_store(qkv, *angles, places, keys, values, *layer.norms)
            query, key, value = (stream.transpose(0, 1)[None] for stream in (query, keys[:, 0], values[:, 0]))
            own = layer.module.self_attn
            options = {"packing": packing, "cache": cache, "scaling": own.scaling, "sliding_window": layer.window}
            return attention.packed_attention(own, query, key, value, None, **options)[0][0]

        return self.run_layers(batch.tokens, batch.positions, attend, cache, wanted)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Run the tokens of a step, see KVCache.begin_decode; returns the hidden states after the last norm: [n, H]."""

        def attend(
            index: int, layer: DecoderLayer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
        ) -> torch.Tensor:
            keys, values = cache.layer(index, layer.kv_shape, layer.kv_shape, qkv)
            query = self.kernels.rotate_and_store(qkv, *angles, cache.places, keys, values, *layer.norms)
            scaling = layer.module.self_attn.scaling
            if self.kernels is reference:
                return cache.attend_reference(query, keys, values, scaling, layer.window)
            table, longest = cache.row_table, cache.longest
            return self.kernels.attend(query, keys, values, table, positions, longest, scaling, layer.window)

        return self.run_layers(tokens, positions, attend, cache)

    def run_layers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        cache: KVCache,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers with the given attention; after the last attention only the wanted tokens are computed."""

        def store_experts(router: Any, chosen: torch.Tensor) -> None:
            if len(chosen) < len(tokens):  # of the last layer of a prefill
                assert wanted is not None
                chosen = chosen.new_full((len(tokens), chosen.shape[1]), NOT_RECORDED).index_copy(0, wanted, chosen)
            cache.store_experts(getattr(router, LAYER), chosen)

        keep = store_experts if cache.experts is not None else None
        kernels, adapters = self.kernels, self.adapters
        x = self.body.embed_tokens(tokens)
        cos, sin = (angle[0] for angle in self.body.rotary_emb(x, positions[None]))
        total = torch.zeros_like(x)  # the first layer then uses the same compiled kernel as the others
        for index, layer in enumerate(self.layers):
            norm, next_norm = layer.module.input_layernorm, layer.module.post_attention_layernorm
            normed, total = kernels.add_norm(x, total, norm.weight, norm.variance_epsilon)
            heads = attend(index, layer, layer.qkv(normed), (cos, sin))
            if wanted is not None and layer is self.layers[-1]:
                heads, total = heads[wanted], total[wanted]
                if adapters is not None:
                    adapters.select(wanted)
            x = layer.out(heads.flatten(1))
            normed, total = kernels.add_norm(x, total, next_norm.weight, next_norm.variance_epsilon)
            x = layer.mlp(normed, keep)
        return kernels.add_norm(x, total, self.body.norm.weight, self.body.norm.variance_epsilon)[0]

    def quantize(self) -> None:
        """Compute the layers with 8-bit copies of their current weights; experts and the head keep theirs."""
        for linear in self.linears:
            if linear is not self.head:
                linear.quantize()

    def pack(self) -> None:
        """Copy all current weights into a layout that is faster on a CPU; needed again whenever weights change."""
        for linear in self.linears:
            linear.pack()

    @property
    def quantized(self) -> bool:
        return any(linear.quantized is not None for linear in self.linears)

    @property
    def packed(self) -> bool:
        return any(linear.packed is not None for linear in self.linears)

    def unpack(self) -> None:
        """Free the copies; the weights themselves are used again."""
        for linear in self.linears:
            linear.unpack()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [n, V] in the weights' dtype; these families do not scale the output of their head."""
        return self.head(hidden)
