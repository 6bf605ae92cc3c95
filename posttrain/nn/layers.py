"""Decoder layers of the most common model families with fused kernels, forward and backward.

Llama, Qwen2, Qwen3 and Mistral have the same structure: RMS norms, rotary queries and keys, grouped heads, a gated MLP.
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
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from posttrain.nn import attention
from posttrain.nn.kernels.reference import kernels_for

FAMILIES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
log = logging.getLogger("posttrain")
MASTER = "float32_master"
"""Attribute of a half-precision weight: the float32 tensor that the optimizer updates; its `grad` accumulates."""


def supports_fused_layers(model: Any) -> bool:
    """Whether the model has the structure that this module implements."""
    layers = getattr(getattr(model, model.base_model_prefix), "layers", None)
    if layers is None or not all(any(own in type(layer).__mro__[:3] for own in FAMILIES) for layer in layers):
        return False  # FSDP adds two classes in front of a layer's own
    config = model.config
    fixed_rope = config.rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope")
    return fixed_rope and config.hidden_act in ("silu", "swish")


def window_of(layer: Any) -> int | None:
    """The sliding window of the layer's attention; None: all earlier tokens."""
    if isinstance(layer, Qwen2DecoderLayer | Qwen3DecoderLayer):
        return layer.self_attn.sliding_window
    return layer.self_attn.config.sliding_window if isinstance(layer, MistralDecoderLayer) else None


def head_norms(layer: Any) -> tuple[torch.nn.Parameter | None, torch.nn.Parameter | None, float]:
    """The weights of the norms of queries and keys (None if there are none), and their epsilon."""
    if not isinstance(layer, Qwen3DecoderLayer):
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
    for layer in getattr(model, model.base_model_prefix).layers:
        for modules in (qkv_projections(layer), gate_up_projections(layer)):
            if join_weights and all(is_plain_linear(module) for module in modules):
                join_storage([module.weight for module in modules])
                if modules[0].bias is not None:
                    join_storage([module.bias for module in modules])
        if not isinstance(layer.forward, partial):
            layer.forward = partial(fused_forward, layer, layer.forward, kernels)
    return True


@cache
def warn_unsupported(name: str) -> None:
    log.warning(
        "%s has no fused layers: it is trained with its own code, which is slower but gives the same numbers.", name
    )


def qkv_projections(layer: Any) -> list[Any]:
    own = layer.self_attn
    return [own.q_proj, own.k_proj, own.v_proj]


def gate_up_projections(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def is_plain_linear(module: Any) -> bool:
    """Whether a module is a plain linear layer: adapted, quantized and sharded ones keep their own code."""
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


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
    cos, sin = (angle[0] for angle in kwargs["position_embeddings"])
    qkv, x = norm_and_project(kernels, x, None, norm, qkv_projections(layer))
    q_norm, k_norm, eps = head_norms(layer)
    config, all_heads = own.config, qkv.shape[1] // own.head_dim
    total_heads = config.num_attention_heads + 2 * config.num_key_value_heads
    heads = all_heads * config.num_attention_heads // total_heads  # query heads of this tensor rank
    streams = RotaryQKV.apply(qkv, cos, sin, q_norm, k_norm, eps, own.head_dim, heads, kernels)
    query, key, value = (stream.transpose(0, 1)[None] for stream in streams)
    options = {"packing": packing, "scaling": own.scaling, "sliding_window": window_of(layer)}
    attended = attention.packed_attention(own, query, key, value, None, **options)[0].squeeze(0).flatten(1)
    out = own.o_proj
    mixed = MasterLinear.apply(attended, out.weight) if is_plain_linear(out) and out.bias is None else out(attended)
    gate_up, x = norm_and_project(kernels, mixed, x, next_norm, gate_up_projections(layer))
    down = layer.mlp.down_proj
    if is_plain_linear(down) and down.bias is None:
        return (x + SiluMulLinear.apply(gate_up, down.weight, kernels))[None]
    return (x + down(SiluMul.apply(gate_up, kernels)))[None]


def norm_and_project(
    kernels: ModuleType, x: torch.Tensor, residual: torch.Tensor | None, norm: Any, modules: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm the sum of x and residual; returns the modules' outputs for it, concatenated, and the sum."""
    weights = [module.weight for module in modules] if all(is_plain_linear(module) for module in modules) else []
    joined = joined_view(weights)
    biases = [module.bias for module in modules if module.bias is not None] if weights else []
    bias = joined_view(biases)
    if joined is None or (biases and bias is None):
        normed, total = AddNorm.apply(x, residual, norm.weight, norm.variance_epsilon, kernels)
        return torch.cat([module(normed) for module in modules], -1), total
    options = (norm.variance_epsilon, kernels, joined, bias, len(weights))
    return NormLinear.apply(x, residual, norm.weight, options, *weights, *biases)


# Weights that are adjacent in memory


def joined_view(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view that covers all parameters (joined along dimension 0), or None if they are not adjacent in memory."""
    if not parameters:
        return None
    first = parameters[0].detach()
    ends = [parameter.storage_offset() + parameter.numel() for parameter in parameters]
    adjacent = [parameter.storage_offset() for parameter in parameters[1:]] == ends[:-1]
    same_storage = len({parameter.untyped_storage()._cdata for parameter in parameters}) == 1
    if not (adjacent and same_storage and all(parameter.is_contiguous() for parameter in parameters)):
        return None
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def join_storage(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Move parameters into adjacent memory if they are not there; returns the view of `joined_view`."""
    found = joined_view(parameters)
    if found is not None:
        return found
    with torch.inference_mode(False), torch.no_grad():  # these weights will be trained
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
    return joined


# Fused operations with their gradients


class NormLinear(torch.autograd.Function):
    """Residual sum, RMS norm and joined linear layers; only the sum is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        options: tuple[float, ModuleType, torch.Tensor, torch.Tensor | None, int],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, kernels, weight, bias, _ = options
        normed, total = kernels.add_norm(x, residual, norm, eps)
        ctx.save_for_backward(total, norm)
        ctx.options, ctx.parameters = options, parameters
        return F.linear(normed, weight, bias), total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        d_out, d_total = gradients
        total, norm = ctx.saved_tensors
        eps, kernels, weight, bias, maps = ctx.options
        grads: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        if any(ctx.needs_input_grad[4:]):
            normed = kernels.add_norm(total, None, norm, eps)[0]
            grads[:maps] = weight_gradients(ctx.parameters[:maps], d_out, normed)
            if bias is not None:
                grads[maps:] = d_out.sum(0).split([len(parameter) for parameter in ctx.parameters[maps:]])
        d_total, d_norm = kernels.norm_backward(d_out @ weight, total, norm, eps, d_total)
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
        alone = torch.zeros(len(qkv), dtype=torch.int32, device=qkv.device)  # each token has a cache slot of its own
        query = kernels.rotate_and_store(qkv, cos, sin, alone, keys, values, q_norm, k_norm, eps)
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
    def forward(ctx: Any, gate_up: torch.Tensor, weight: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.weight, ctx.kernels = weight, kernels
        return kernels.silu_and_mul(gate_up) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_out,) = gradients
        out, d_gate_up = ctx.kernels.silu_and_mul_backward(d_out @ ctx.weight, *ctx.saved_tensors)
        return d_gate_up, *(weight_gradients([ctx.weight], d_out, out) if ctx.needs_input_grad[1] else [None]), None


class MasterLinear(torch.autograd.Function):
    """A linear layer whose weight gradient is added to the float32 master directly."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_out,) = gradients
        grads = weight_gradients([ctx.weight], d_out, *ctx.saved_tensors) if ctx.needs_input_grad[1] else [None]
        return d_out @ ctx.weight, *grads


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


# Gradients of weights


def weight_gradients(
    parameters: Sequence[torch.Tensor], d_out: torch.Tensor, x: torch.Tensor
) -> list[torch.Tensor | None]:
    """The weight gradients of linear layers of x that were computed as one, for autograd.

    If the weights have float32 masters (see Optimizer), the gradients are added to the masters' instead, by the matrix
    product itself: no rounding to half precision, and no extra pass over the weights. Autograd then gets None.
    """
    sizes = [len(parameter) for parameter in parameters]
    masters = [getattr(parameter, MASTER) for parameter in parameters if hasattr(parameter, MASTER)]
    if len(masters) < len(parameters):
        return list((d_out.t() @ x).split(sizes))
    grads = [master.grad for master in masters]
    joined = None if any(grad is None for grad in grads) else joined_view(grads)
    if joined is not None:
        add_product(joined, d_out.t(), x)
        return [None] * len(sizes)
    parts = add_product(None, d_out.t(), x).split(sizes)
    for master, grad, part in zip(masters, grads, parts, strict=True):
        master.grad = part if grad is None else grad.add_(part)
    return [None] * len(sizes)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a @ b in place, accumulated in float32: rounding every sum to half precision would lose too much."""
    if a.is_meta:  # which has no product of two types
        return a.new_empty(len(a), b.shape[1], dtype=torch.float32) if total is None else total
    if a.device.type == "cpu":
        return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


__all__ = ["MASTER", "join_storage", "supports_fused_layers", "use_fused_layers"]
