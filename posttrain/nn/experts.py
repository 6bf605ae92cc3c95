"""The experts of a mixture-of-experts layer as grouped matrix products, forward and backward.

Tokens are sorted by expert on the device, and each linear layer of all experts is one product over the sorted rows. No
shape depends on how many tokens an expert gets, so nothing waits for the host and a CUDA graph can contain it. The
weights remain the model's own parameters [E, out, in]; the router is the model's own module, so that transformers
records its logits for the load-balancing loss.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from posttrain.nn.routing import SOFTMAX_ROUTERS
from posttrain.nn.weights import MASTER

EXPERT_CLASSES = (Qwen2MoeExperts, Qwen3MoeExperts, MixtralExperts, DeepseekV2Experts, DeepseekV3Experts)
MAX_FEW_ROWS = 64  # per expert, on average; with fewer, reading the weights takes longer than the product


def is_mixture(mlp: Any) -> bool:
    """Whether the MLP of a decoder layer has a router and experts, which may be adapted or sharded."""
    return hasattr(mlp, "gate") and hasattr(mlp, "experts")


def has_plain_experts(mlp: Any) -> bool:
    """Whether this module can compute the experts: adapted, sharded and unknown ones keep their own code."""
    experts = mlp.experts
    if type(experts) not in EXPERT_CLASSES or isinstance(experts.forward, partial):
        return False
    return all(type(weight.data) is torch.Tensor for weight in (experts.gate_up_proj, experts.down_proj))


def mixture_forward(mlp: Any, x: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
    """Run the mixture-of-experts block of a layer with gradients: [T, H] -> [T, H]."""
    _, weights, chosen = mlp.gate(x)
    if has_plain_experts(mlp):
        out = ExpertsMLP.apply(x, chosen, weights, mlp.experts.gate_up_proj, mlp.experts.down_proj, kernels)
    else:
        out = mlp.experts(x, chosen, weights)
    shared = shared_experts(mlp, x)
    return out if shared is None else out + shared


def shared_experts(mlp: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return the output of the experts that all tokens use; None if there are none."""
    if hasattr(mlp, "shared_expert_gate"):  # Qwen2-MoE
        return F.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)
    return mlp.shared_experts(x) if hasattr(mlp, "shared_experts") else None  # DeepSeek


def route_tokens(router: Any, x: torch.Tensor, kernels: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the indices [T, k] of the chosen experts, without gradients."""
    if type(router) not in SOFTMAX_ROUTERS:
        return router(x)[1:]
    logits = F.linear(x, router.weight)
    dtype = torch.float32 if isinstance(router, MixtralTopKRouter) else logits.dtype  # as their own code rounds them
    return kernels.route(logits, router.top_k, renormalize=getattr(router, "norm_topk_prob", True), dtype=dtype)


def run_experts(
    experts: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, kernels: ModuleType
) -> torch.Tensor:
    """Compute the weighted sum of the chosen experts' outputs without gradients: [T, H] -> [T, H]."""
    gate_up, down, per_token = experts.gate_up_proj, experts.down_proj, chosen.shape[1]
    order, place, ends = kernels.sort_by_expert(chosen, len(down))
    if has_grouped_mm(x, down) and len(order) > MAX_FEW_ROWS * len(down):
        rows = grouped_linear(x.index_select(0, order // per_token), gate_up, ends, kernels)
        rows = grouped_linear(kernels.silu_and_mul(rows), down, ends, kernels)
    else:
        rows = kernels.expert_linear(x, gate_up, ends, order, per_token, gated=True)
        rows = kernels.expert_linear(rows, down, ends)
    return kernels.combine_rows(rows, place, weights)


class ExpertsMLP(torch.autograd.Function):
    """The weighted sum of the chosen experts' outputs; only the products of gate and up are saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # [T, H]
        chosen: torch.Tensor,  # [T, k]
        weights: torch.Tensor,  # [T, k]
        gate_up_weight: torch.Tensor,  # [E, 2 I, H]
        down_weight: torch.Tensor,  # [E, H, I]
        kernels: ModuleType,
    ) -> torch.Tensor:
        order, place, ends = kernels.sort_by_expert(chosen, len(down_weight))
        tokens = order // chosen.shape[1]
        gate_up = grouped_linear(x.index_select(0, tokens), gate_up_weight, ends, kernels)
        rows = grouped_linear(kernels.silu_and_mul(gate_up), down_weight, ends, kernels)
        ctx.save_for_backward(x, weights, gate_up, order, place, ends)
        ctx.gate_up_weight, ctx.down_weight, ctx.kernels = gate_up_weight, down_weight, kernels
        return kernels.combine_rows(rows, place, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weights, gate_up, order, place, ends = ctx.saved_tensors
        gate_up_weight, down_weight, kernels = ctx.gate_up_weight, ctx.down_weight, ctx.kernels
        tokens, row_weights = order // weights.shape[1], weights.reshape(-1).index_select(0, order)
        d_rows = gradients[0].index_select(0, tokens)
        d_active = grouped_linear(d_rows, down_weight.transpose(1, 2), ends, kernels)
        active, d_gate_up, d_row_weights = kernels.weighted_silu_and_mul_backward(d_active, gate_up, row_weights)
        del d_active
        d_down = d_gate_up_weight = None
        if ctx.needs_input_grad[4]:
            d_down = expert_gradients(down_weight, d_rows, active, ends, kernels)
        del d_rows, active
        if ctx.needs_input_grad[3]:
            d_gate_up_weight = expert_gradients(gate_up_weight, d_gate_up, x.index_select(0, tokens), ends, kernels)
        d_x = kernels.combine_rows(
            grouped_linear(d_gate_up, gate_up_weight.transpose(1, 2), ends, kernels), place, None
        )
        return d_x, None, d_row_weights[place].to(weights.dtype), d_gate_up_weight, d_down, None


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, kernels: ModuleType) -> torch.Tensor:
    """Multiply rows sorted by expert with their experts' weights: [S, in], [E, out, in] -> [S, out]."""
    if has_grouped_mm(rows, weight):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return kernels.expert_linear(rows, weight, ends)


def has_grouped_mm(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch multiplies groups of rows without waiting for the host: bfloat16 on an NVIDIA GPU."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    aligned = all(size % 8 == 0 for size in weight.shape[1:])  # the kernel reads 16 bytes at a time
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def expert_gradients(
    weight: torch.Tensor, d_out: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, kernels: ModuleType
) -> torch.Tensor | None:
    """Return the gradient of the experts' weights [E, out, in] for autograd.

    If the weight has a float32 master, the gradient is added to the master's instead, as in weights.weight_gradients.
    """
    master = getattr(weight, MASTER, None)
    if master is None:
        return kernels.expert_weight_gradients(d_out, rows, ends, None).to(weight.dtype)
    master.grad = kernels.expert_weight_gradients(d_out, rows, ends, master.grad)
    return None


__all__ = [
    "ExpertsMLP",
    "has_plain_experts",
    "is_mixture",
    "mixture_forward",
    "route_tokens",
    "run_experts",
    "shared_experts",
]
