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
from posttrain.nn import attention, latent_attention
from posttrain.nn.experts import has_plain_experts, is_mixture, route_tokens, run_experts
from posttrain.nn.kernels.reference import FP8
from posttrain.nn.latent_attention import is_latent
from posttrain.nn.layers import head_norms, input_projections, sliding_window_of, supports_fused_layers
from posttrain.nn.lora import Adapter, JoinedAdapters, adapted_linear, adapter_of, base_linear, join_adapters
from posttrain.nn.products import can_quantize
from posttrain.nn.routing import LAYER, NOT_RECORDED
from posttrain.nn.weights import is_plain_linear, join_storage

Attend = Callable[["GroupedAttention | LatentAttention", torch.Tensor, Any], torch.Tensor]
"""(a layer's attention, normed hidden states, position embeddings) -> [n, heads, d_value]."""

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


class GroupedAttention:
    """Attention with heads for keys and values that several query heads share; without its output projection."""

    def __init__(self, layer: Any, index: int, kernels: ModuleType) -> None:
        self.own, self.index, self.kernels = layer.self_attn, index, kernels
        self.qkv = FusedLinear(input_projections(layer), kernels)
        self.linears = [self.qkv]
        self.norms, self.window = head_norms(layer), sliding_window_of(layer)
        self.shape = (self.own.config.num_key_value_heads, self.own.head_dim)  # of one token's keys, and values

    def prefill(self, x: torch.Tensor, angles: Any, packing: attention.Packing, cache: KVCache) -> torch.Tensor:
        """Attend from packed prompts, whose keys and values are stored."""
        qkv, places = self.qkv(x), torch.arange(len(x), device=x.device)
        cos, sin = (angle[0] for angle in angles)
        keys, values = (qkv.new_empty(len(qkv), 1, *self.shape) for _ in range(2))
        query = self.kernels.rotate_and_store(qkv, cos, sin, places, keys, values, *self.norms)
        query, key, value = (stream.transpose(0, 1)[None] for stream in (query, keys[:, 0], values[:, 0]))
        options = {"packing": packing, "cache": cache, "scaling": self.own.scaling, "sliding_window": self.window}
        return attention.packed_attention(self.own, query, key, value, None, **options)[0][0]

    def decode(self, x: torch.Tensor, angles: Any, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Attend from one or a few tokens per slot to all earlier ones."""
        qkv = self.qkv(x)
        cos, sin = (angle[0] for angle in angles)
        streams = cache.layer(self.index, self.shape, self.shape, qkv)
        exponents = cache.exponents.get(self.index)
        query = self.kernels.rotate_and_store(qkv, cos, sin, cache.places, *streams, *self.norms, exponents)
        how = (self.own.scaling, self.window)
        if self.kernels is reference:
            return cache.attend_reference(self.index, query, *how)
        return self.kernels.attend(query, *streams, cache.row_table, positions, cache.longest, *how, exponents)


class LatentAttention:
    """Latent attention (nn/latent_attention.py), whose KV cache holds latents; without its output projection."""

    def __init__(self, layer: Any, index: int, kernels: ModuleType) -> None:
        self.own, self.index, self.kernels = layer.self_attn, index, kernels
        self.input = FusedLinear(input_projections(layer), kernels)
        self.query = None if self.own.q_a_proj is None else FusedLinear([self.own.q_b_proj], kernels)
        self.linears = [linear for linear in (self.input, self.query) if linear is not None]

    @staticmethod
    def supports(own: Any) -> bool:
        """Whether keys and values are plain products of latents, as a decode step needs them."""
        return is_plain_linear(own.kv_b_proj) and not hasattr(own.kv_b_proj, STACKED)

    def streams(self, x: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return both parts of the queries, [n, heads, nope] and [n, heads, rope], and latents [n, rank + rope]."""
        own, pairs = self.own, latent_attention.angles_of(angles)
        query, latent, key_rot = latent_attention.split_inputs(own, self.input(x))
        if self.query is not None:
            query = self.query(self.norm(query, own.q_a_layernorm))
        plain, rotated = latent_attention.split_queries(own, query, pairs)
        key_rot = latent_attention.rotate(own, key_rot[:, None], pairs)[:, 0]
        return plain, rotated, torch.cat([self.norm(latent, own.kv_a_layernorm), key_rot], 1)

    def norm(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        return self.kernels.add_norm(x, None, norm.weight, norm.variance_epsilon)[0]

    def prefill(self, x: torch.Tensor, angles: Any, packing: attention.Packing, cache: KVCache) -> torch.Tensor:
        """Attend from packed prompts, whose latents are stored, with the keys and values of all heads."""
        own = self.own
        plain, rotated, latents = self.streams(x, angles)
        latents, packing = cache.store_latents(self.index, latents, own.kv_lora_rank, packing)
        latent, key_rot = latents.split([own.kv_lora_rank, own.qk_rope_head_dim], 1)
        streams = torch.cat([plain, rotated], 2), *latent_attention.keys_and_values(own, own.kv_b_proj(latent), key_rot)
        query, key, value = (stream.transpose(0, 1)[None] for stream in streams)
        options = {"packing": packing, "scaling": own.scaling}
        return attention.packed_attention(own, query, key, value, None, **options)[0][0]

    def decode(self, x: torch.Tensor, angles: Any, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Attend from one or a few tokens per slot to the latents of all earlier ones."""
        own = self.own
        plain, rotated, latents = self.streams(x, angles)
        stored = cache.latents(self.index, latents.shape[1], own.kv_lora_rank, latents)
        stored.view(-1, latents.shape[1]).index_copy_(0, cache.places, latents)
        weight = own.kv_b_proj.weight.view(-1, own.qk_nope_head_dim + own.v_head_dim, own.kv_lora_rank)  # [heads, ...]
        of_keys, of_values = weight.split([own.qk_nope_head_dim, own.v_head_dim], 1)
        query = torch.bmm(plain.transpose(0, 1), of_keys).transpose(0, 1)  # [n, heads, rank]
        table = cache.row_table
        attended = self.kernels.attend_latents(query, rotated, stored, table, positions, cache.longest, own.scaling)
        return torch.bmm(attended.transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1)


@dataclass(slots=True, eq=False)
class DecoderLayer:
    """One decoder layer with fused linear layers."""

    module: Any
    attention: GroupedAttention | LatentAttention
    out: FusedLinear
    mlp: DenseMLP | MixtureMLP


class FusedDecoder:
    """Runs the layers for whole prompts, or for one or a few tokens per slot."""

    def __init__(self, model: Any, kernels: ModuleType, adapters: AdapterSet | None = None) -> None:
        self.adapters = adapters
        self.body = getattr(model, model.base_model_prefix)
        self.kernels = kernels
        self.head = FusedLinear([model.get_output_embeddings()], kernels)
        self.layers = [self.fuse(index, layer) for index, layer in enumerate(self.body.layers)]
        per_layer = [(*layer.attention.linears, layer.out, *layer.mlp.linears) for layer in self.layers]
        self.linears = [*chain.from_iterable(per_layer), self.head]

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether this class should run the model: on a CPU a mixture of experts gains nothing over its own code."""
        if not supports_fused_layers(model):
            return False
        layers = getattr(model, model.base_model_prefix).layers
        if not all(LatentAttention.supports(layer.self_attn) for layer in layers if is_latent(layer)):
            return False
        return next(model.parameters()).is_cuda or not any(is_mixture(layer.mlp) for layer in layers)

    @property
    def can_capture(self) -> bool:
        """Whether a decode step can be a CUDA graph: the own code of adapted experts waits for the host."""
        return all(layer.mlp.captured for layer in self.layers)

    def fuse(self, index: int, layer: Any) -> DecoderLayer:
        return DecoderLayer(
            module=layer,
            attention=(LatentAttention if is_latent(layer) else GroupedAttention)(layer, index, self.kernels),
            out=FusedLinear([layer.self_attn.o_proj], self.kernels),
            mlp=(MixtureMLP if is_mixture(layer.mlp) else DenseMLP)(layer.mlp, self.kernels),
        )

    def prefill(
        self, batch: MicroBatch, packing: attention.Packing, cache: KVCache, wanted: torch.Tensor
    ) -> torch.Tensor:
        """Run packed prompts; returns the hidden states after the last norm at the wanted tokens: [n, H]."""

        def attend(own: GroupedAttention | LatentAttention, x: torch.Tensor, angles: Any) -> torch.Tensor:
            return own.prefill(x, angles, packing, cache)

        return self.run_layers(batch.tokens, batch.positions, attend, cache, wanted)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Run the tokens of a step, see KVCache.begin_decode; returns the hidden states after the last norm: [n, H]."""

        def attend(own: GroupedAttention | LatentAttention, x: torch.Tensor, angles: Any) -> torch.Tensor:
            return own.decode(x, angles, positions, cache)

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
        angles = self.body.rotary_emb(x, positions[None])
        total = torch.zeros_like(x)  # the first layer then uses the same compiled kernel as the others
        for layer in self.layers:
            norm, next_norm = layer.module.input_layernorm, layer.module.post_attention_layernorm
            normed, total = kernels.add_norm(x, total, norm.weight, norm.variance_epsilon)
            heads = attend(layer.attention, normed, angles)
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
