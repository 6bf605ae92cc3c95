"""Decoder layers of the most common model families with fused kernels, forward and backward.

Llama, Qwen2, Qwen3 and Mistral have the same structure: RMS norms, rotary queries and keys, grouped heads, a gated MLP;
Qwen2-MoE, Qwen3-MoE and Mixtral have experts instead of some or all MLPs (experts.py), DeepSeek-V2 and V3 also latent
attention (latent_attention.py).
On an accelerator their layers run the code here instead of their own, on the same weights: linear layers with the same
input are one matrix product, the operations between the products are one kernel each, and what is cheap to recompute
is not saved for the backward pass. Every other model runs its own code. `forward.verify_against_stock` compares the two
before any training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from posttrain.core.errors import UsageError
from posttrain.nn import attention, latent_attention
from posttrain.nn.experts import is_mixture, mixture_forward
from posttrain.nn.kernels.reference import kernels_for
from posttrain.nn.latent_attention import LATENT_FAMILIES, is_latent
from posttrain.nn.lora import adapter_of, base_linear, join_adapters, project_adapted
from posttrain.nn.products import FP8_MULTIPLE, FULL, Fp8Products, Products, can_quantize, has_fp8
from posttrain.nn.weights import is_plain_linear, join_storage, joined_view, weight_gradients
from posttrain.parallel.pipeline import SkippedLayer
from posttrain.parallel.tensor_group import IN_BLOCKS

DENSE_FAMILIES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
MIXTURES = (MixtralDecoderLayer, Qwen2MoeDecoderLayer, Qwen3MoeDecoderLayer)
FAMILIES = (*DENSE_FAMILIES, *MIXTURES, *LATENT_FAMILIES)
PRODUCTS = "training_products"
"""Attribute of a decoder layer: how its linear layers are computed while the model trains; products.FULL without it."""
log = logging.getLogger("posttrain")


def supports_fused_layers(model: Any) -> bool:
    """Whether the model has the structure that this module implements."""
    layers = own_layers(model)
    if not layers or not all(any(own in type(layer).__mro__[:3] for own in FAMILIES) for layer in layers):
        return False  # FSDP adds two classes in front of a layer's own
    if not all(latent_attention.has_joinable_inputs(layer.self_attn) for layer in layers if is_latent(layer)):
        return False
    if any(hasattr(layer, IN_BLOCKS) for layer in layers):
        return False
    config = model.config
    fixed_rope = config.rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope")
    jitter = getattr(config, "router_jitter_noise", 0.0)  # of Mixtral, while it trains
    return fixed_rope and config.hidden_act in ("silu", "swish") and not jitter


def own_layers(model: Any) -> list[Any]:
    """Return the decoder layers, of a pipeline stage its own; none if the model has no list of them."""
    layers = getattr(getattr(model, model.base_model_prefix), "layers", ())
    return [layer for layer in layers if not isinstance(layer, SkippedLayer)]


def sliding_window_of(layer: Any) -> int | None:
    """Return the sliding window of the layer's attention; None: all earlier tokens."""
    if isinstance(layer, Qwen2DecoderLayer | Qwen3DecoderLayer | Qwen3MoeDecoderLayer):
        return layer.self_attn.sliding_window
    if isinstance(layer, Qwen2MoeDecoderLayer):  # only layers with a window have the attribute
        return getattr(layer.self_attn, "sliding_window", None)
    if isinstance(layer, MistralDecoderLayer | MixtralDecoderLayer):
        return layer.self_attn.config.sliding_window
    return None


def head_norms(layer: Any) -> tuple[torch.nn.Parameter | None, torch.nn.Parameter | None, float]:
    """Return the weights of the norms of queries and keys (None if there are none), and their epsilon."""
    if not isinstance(layer, Qwen3DecoderLayer | Qwen3MoeDecoderLayer):
        return None, None, 0.0
    own = layer.self_attn
    return own.q_norm.weight, own.k_norm.weight, own.q_norm.variance_epsilon


def use_fused_layers(model: Any, kernels: ModuleType | None = None, *, join_weights: bool = True) -> bool:
    """Replace the layers' forward methods by fused ones, if the model is supported and its device has kernels.

    `kernels` overrides the choice. `join_weights`: lay out the weights of linear layers with the same input as one
    matrix; sharded weights are never joined.
    """
    if not supports_fused_layers(model) or (kernels is None and not attention.supports_varlen_kernel(model)):
        if next(model.parameters()).device.type == "cuda":
            warn_unsupported(type(model).__name__)
        return False
    kernels = kernels or kernels_for(next(model.parameters()).device)
    for layer in own_layers(model):
        own, mlps = layer.self_attn, dense_mlps(layer)
        alone = [*latent_projections(layer), own.o_proj, *(mlp.down_proj for mlp in mlps)]
        for modules in (input_projections(layer), *map(gate_up_projections, mlps), *([module] for module in alone)):
            linears = [base_linear(module) for module in modules]
            if join_weights and all(linear is not None for linear in linears):
                join_storage([linear.weight for linear in linears])
                if linears[0].bias is not None:
                    join_storage([linear.bias for linear in linears])
                join_adapters(modules)
        if not isinstance(layer.forward, partial):
            layer.forward = partial(fused_forward, layer, layer.forward, kernels)
    return True


def use_fp8_products(model: Any) -> None:
    """Compute the linear layers of all decoder layers in 8 bits from now on; raise UsageError if that is impossible.

    The head and the gradients of weights keep their precision, see nn/products.py.
    """
    name, parameter = type(model).__name__, next(model.parameters())
    decoder_layers = own_layers(model) if supports_fused_layers(model) else []
    if not decoder_layers or not isinstance(decoder_layers[0].forward, partial):
        raise UsageError(f"train.fp8: {name} has no fused layers on this device; fp8 needs them. Leave it out.")
    if not has_fp8(parameter.device):
        raise UsageError("train.fp8 needs a GPU with fp8 (compute capability 8.9 or newer).")
    if parameter.device.type == "cuda" and parameter.dtype != torch.bfloat16:
        raise UsageError("train.fp8 needs a model in bfloat16: set --model.dtype bfloat16.")
    for layer in decoder_layers:
        if is_mixture(layer.mlp):
            raise UsageError(f"train.fp8: the experts of {name} have no products in 8 bits. Leave it out.")
        alone = [*latent_projections(layer), layer.self_attn.o_proj, layer.mlp.down_proj]
        for linear in (*input_projections(layer), *gate_up_projections(layer.mlp), *alone):
            if not is_plain_linear(linear) or not can_quantize(linear.weight):
                raise UsageError(
                    f"train.fp8: layers of {name} have adapters, or sizes that are not multiples of {FP8_MULTIPLE}. "
                    "Leave it out."
                )
        setattr(layer, PRODUCTS, Fp8Products(kernels_for(parameter.device)))


@cache
def warn_unsupported(name: str) -> None:
    log.warning(
        "%s has no fused layers: it is trained with its own code, which is slower but gives the same numbers.", name
    )


def input_projections(layer: Any) -> list[Any]:
    """Return the linear layers of the attention that read the layer's input, which are computed as one."""
    own = layer.self_attn
    return latent_attention.input_projections(own) if is_latent(layer) else [own.q_proj, own.k_proj, own.v_proj]


def latent_projections(layer: Any) -> list[Any]:
    """Return the linear layers of latent attention that read latent vectors; none in other layers."""
    if not is_latent(layer):
        return []
    own = layer.self_attn
    return [own.kv_b_proj] if own.q_a_proj is None else [own.q_b_proj, own.kv_b_proj]


def gate_up_projections(mlp: Any) -> list[Any]:
    return [mlp.gate_proj, mlp.up_proj]


def dense_mlps(layer: Any) -> list[Any]:
    """Return the MLPs of a layer that are not experts: none in a mixture of experts, whose shared ones stay as is."""
    return [] if is_mixture(layer.mlp) else [layer.mlp]


def fused_forward(
    layer: Any,
    stock: Any,
    kernels: ModuleType,
    hidden_states: torch.Tensor,
    *args: Any,
    packing: attention.Packing | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Run one decoder layer over a micro-batch: [1, T, H] -> [1, T, H]."""
    if packing is None or args or "cache" in kwargs:
        return stock(hidden_states, *args, **({"packing": packing} if packing else {}), **kwargs)
    own, norm, next_norm = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
    x = hidden_states.squeeze(0)  # not [0], whose gradient is a copy
    products: Products = getattr(layer, PRODUCTS, FULL)
    joined, x = norm_and_project(kernels, x, None, norm, input_projections(layer), products)
    streams = (latent_streams if is_latent(layer) else grouped_streams)(
        layer, joined, kwargs["position_embeddings"], kernels, products
    )
    query, key, value = (stream.transpose(0, 1)[None] for stream in streams)
    options = {"packing": packing, "scaling": own.scaling, "sliding_window": sliding_window_of(layer)}
    attended = attention.packed_attention(own, query, key, value, None, **options)[0].squeeze(0).flatten(1)
    mixed = run_linear(own.o_proj, attended, products)
    if is_mixture(layer.mlp):
        normed, x = AddNorm.apply(mixed, x, next_norm.weight, next_norm.variance_epsilon, kernels)
        return (x + mixture_forward(layer.mlp, normed, kernels))[None]
    gate_up, x = norm_and_project(kernels, mixed, x, next_norm, gate_up_projections(layer.mlp), products)
    down = layer.mlp.down_proj
    if is_plain_linear(down) and down.bias is None:
        return (x + SiluMulLinear.apply(gate_up, down.weight, kernels, products))[None]
    return (x + run_linear(down, SiluMul.apply(gate_up, kernels), products))[None]


def grouped_streams(
    layer: Any, joined: torch.Tensor, position_embeddings: Any, kernels: ModuleType, products: Products
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [T, h, d], keys and values [T, k, d] from their joined projections."""
    own, config = layer.self_attn, layer.self_attn.config
    cos, sin = (angle[0] for angle in position_embeddings)
    q_norm, k_norm, eps = head_norms(layer)
    total_heads = config.num_attention_heads + 2 * config.num_key_value_heads
    all_heads = joined.shape[1] // own.head_dim
    heads = all_heads * config.num_attention_heads // total_heads  # query heads of this tensor rank
    return RotaryQKV.apply(joined, cos, sin, q_norm, k_norm, eps, own.head_dim, heads, kernels)


def latent_streams(
    layer: Any, joined: torch.Tensor, position_embeddings: Any, kernels: ModuleType, products: Products
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys [T, h, d] and values [T, h, d_value] of latent attention."""
    own, angles = layer.self_attn, latent_attention.angles_of(position_embeddings)
    query, latent, key_rot = latent_attention.split_inputs(own, joined)
    if own.q_a_proj is not None:
        query, _ = norm_and_project(kernels, query, None, own.q_a_layernorm, [own.q_b_proj], products)
    expanded, _ = norm_and_project(kernels, latent, None, own.kv_a_layernorm, [own.kv_b_proj], products)
    queries = torch.cat(latent_attention.split_queries(own, query, angles), 2)
    rotated = latent_attention.rotate(own, key_rot[:, None], angles)[:, 0]
    return queries, *latent_attention.keys_and_values(own, expanded, rotated)


def run_linear(module: Any, x: torch.Tensor, products: Products) -> torch.Tensor:
    """Run one linear layer, which may have an adapter."""
    if is_plain_linear(module) and module.bias is None:
        return MasterLinear.apply(x, module.weight, products)
    linear = base_linear(module)
    if linear is None or adapter_of(module) is None:
        return module(x)
    return project_adapted(x, [module], linear.weight, linear.bias)


def norm_and_project(
    kernels: ModuleType,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Any,
    modules: Sequence[Any],
    products: Products,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm the sum of x and residual; returns the modules' outputs for it, concatenated, and the sum."""
    linears = [linear for linear in map(base_linear, modules) if linear is not None]
    weights = [linear.weight for linear in linears] if len(linears) == len(modules) else []
    joined = joined_view(weights)
    biases = [linear.bias for linear in linears if linear.bias is not None] if weights else []
    bias = joined_view(biases)
    if joined is None or (biases and bias is None):
        normed, total = AddNorm.apply(x, residual, norm.weight, norm.variance_epsilon, kernels)
        return torch.cat([module(normed) for module in modules], -1), total
    if any(adapter_of(module) is not None for module in modules):
        normed, total = AddNorm.apply(x, residual, norm.weight, norm.variance_epsilon, kernels)
        return project_adapted(normed, modules, joined, bias), total
    options = (norm.variance_epsilon, kernels, joined, bias, len(weights), products)
    return NormLinear.apply(x, residual, norm.weight, options, *weights, *biases)


# Fused operations with their gradients


class NormLinear(torch.autograd.Function):
    """Residual sum, RMS norm and joined linear layers; only the sum is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        options: tuple[float, ModuleType, torch.Tensor, torch.Tensor | None, int, Products],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, kernels, weight, bias, _, products = options
        normed, total = kernels.add_norm(x, residual, norm, eps)
        ctx.save_for_backward(total, norm)
        ctx.options, ctx.parameters = options, parameters
        return products.output(normed, weight, bias), total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        d_out, d_total = gradients
        total, norm = ctx.saved_tensors
        eps, kernels, weight, bias, maps, products = ctx.options
        grads: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        if any(ctx.needs_input_grad[4:]):
            normed = kernels.add_norm(total, None, norm, eps)[0]
            grads[:maps] = weight_gradients(ctx.parameters[:maps], d_out, normed)
            if bias is not None:
                grads[maps:] = d_out.sum(0).split([len(parameter) for parameter in ctx.parameters[maps:]])
        d_total, d_norm = kernels.norm_backward(products.input_gradient(d_out, weight), total, norm, eps, d_total)
        return d_total, d_total if ctx.needs_input_grad[1] else None, d_norm, None, *grads


class AddNorm(torch.autograd.Function):
    """(RMS norm of the residual sum, the sum)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, kernels: ModuleType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = kernels.add_norm(x, residual, norm, eps)
        ctx.save_for_backward(total, norm)
        ctx.options = (eps, kernels)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total, norm = ctx.saved_tensors
        eps, kernels = ctx.options
        d_total, d_norm = kernels.norm_backward(gradients[0], total, norm, eps, gradients[1])
        return d_total, d_total if ctx.needs_input_grad[1] else None, d_norm, None, None


class RotaryQKV(torch.autograd.Function):
    """Joined [T, (h + 2 k) d] -> normed and rotated queries [T, h, d] and keys [T, k, d]; values [T, k, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        width: int,
        heads: int,
        kernels: ModuleType,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv_heads = (qkv.shape[1] // width - heads) // 2
        keys, values = (qkv.new_empty(len(qkv), 1, kv_heads, width) for _ in range(2))
        places = torch.arange(len(qkv), device=qkv.device)
        query = kernels.rotate_and_store(qkv, cos, sin, places, keys, values, q_norm, k_norm, eps)
        ctx.save_for_backward(cos, sin, *(() if q_norm is None else (qkv, q_norm, k_norm)))
        ctx.options = (eps, kernels)
        return query, keys[:, 0], values[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        cos, sin, *normed = ctx.saved_tensors
        eps, kernels = ctx.options
        d_qkv, d_q_norm, d_k_norm = kernels.rotate_backward(*gradients, cos, sin, *(normed or (None,) * 3), eps)
        return d_qkv, None, None, d_q_norm, d_k_norm, None, None, None, None


class SiluMulLinear(torch.autograd.Function):
    """silu(gate) * up and the linear layer after it; the product is recomputed, not saved."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, weight: torch.Tensor, kernels: ModuleType, products: Products
    ) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.weight, ctx.kernels, ctx.products = weight, kernels, products
        return products.output(kernels.silu_and_mul(gate_up), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_out,) = gradients
        d_product = ctx.products.input_gradient(d_out, ctx.weight)
        out, d_gate_up = ctx.kernels.silu_and_mul_backward(d_product, *ctx.saved_tensors)
        grads = weight_gradients([ctx.weight], d_out, out) if ctx.needs_input_grad[1] else [None]
        return d_gate_up, *grads, None, None


class MasterLinear(torch.autograd.Function):
    """A linear layer whose weight gradient is added to the float32 master directly."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, products: Products) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.products = weight, products
        return products.output(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_out,) = gradients
        grads = weight_gradients([ctx.weight], d_out, *ctx.saved_tensors) if ctx.needs_input_grad[1] else [None]
        return ctx.products.input_gradient(d_out, ctx.weight), *grads, None


class SiluMul(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return kernels.silu_and_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.kernels.silu_and_mul_backward(gradients[0], *ctx.saved_tensors)[1], None


__all__ = ["supports_fused_layers", "use_fp8_products", "use_fused_layers"]
