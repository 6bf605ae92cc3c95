"""The small steps of a decoder layer in plain PyTorch, for every device; kernels.py has the same names for a GPU.

Half-precision results are rounded where the stock modules round. What ends in `_backward` takes the gradients of what
the step returned, and what the step was given.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.nn.functional as F


def kernels_for(device: torch.device) -> ModuleType:
    """Who has the steps: kernels.py on a GPU that has Triton, else this module."""
    if device.type != "cuda":
        return sys.modules[__name__]
    try:
        from posttrain.nn.kernels import triton
    except ImportError:
        return sys.modules[__name__]
    return triton


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMS norm of the sum, the sum): [n, H] each."""
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate_and_store(
    qkv: torch.Tensor,  # [n, (heads + 2 kv_heads) * d]
    cos: torch.Tensor,  # [n, d]
    sin: torch.Tensor,
    positions: torch.Tensor,  # [n]
    keys: torch.Tensor,  # [slots, capacity, kv_heads, d]
    values: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Rotate queries and keys, put keys and values into the cache; the queries: [n, heads, d]."""
    rows, (kv_heads, width) = len(qkv), keys.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    turned, value = qkv.view(rows, -1, width).split([heads + kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        query, key = turned.split([heads, kv_heads], 1)
        turned = torch.cat([rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)], 1)
    turned = turned * cos[:, None] + rotate_half(turned) * sin[:, None]
    query, key = turned.split([heads, kv_heads], 1)
    slots = torch.arange(rows, device=qkv.device)
    keys[slots, positions] = key
    values[slots, positions] = value
    return query


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def norm_backward(
    gradient: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, carried: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `total` [n, H], that of its other uses (`carried`) added, and of the weight [H]."""
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    d_total, d_weight = unit_backward(gradient.float(), wide * scale, scale, weight.float())
    if carried is not None:
        d_total = d_total + carried.float()
    return d_total.to(total.dtype), d_weight.flatten(0, -2).sum(0).to(weight.dtype)


def unit_backward(
    gradient: torch.Tensor, unit: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and, row by row, of the weight, where weight * unit was returned and unit is scale * x."""
    g = gradient * weight
    return scale * (g - unit * (g * unit).mean(-1, keepdim=True)), gradient * unit


def rotate_backward(
    d_query: torch.Tensor,  # [n, heads, d]
    d_key: torch.Tensor,  # [n, kv_heads, d]
    d_value: torch.Tensor,
    cos: torch.Tensor,  # [n, d]
    sin: torch.Tensor,
    qkv: torch.Tensor | None,  # [n, (heads + 2 kv_heads) * d], where queries and keys are normed
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of queries, keys and values before the rotation, [n, (heads + 2 kv_heads) * d], and of the norms."""
    kind, norms = d_query.dtype, (q_norm, k_norm)
    turned = [unrotated(stream.float(), cos[:, None].float(), sin[:, None].float()) for stream in (d_query, d_key)]
    d_norms: list[torch.Tensor | None] = [None, None]
    if qkv is not None:
        heads, (kv_heads, width) = d_query.shape[1], d_key.shape[1:]
        streams = qkv.view(len(qkv), -1, width).float().split([heads, kv_heads, kv_heads], 1)[:2]
        for i, (stream, norm) in enumerate(zip(streams, norms, strict=True)):
            assert norm is not None
            scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + eps)
            turned[i], d_norm = unit_backward(turned[i], stream * scale, scale, norm.float())
            d_norms[i] = d_norm.flatten(0, -2).sum(0).to(norm.dtype)
    return torch.cat([*(stream.to(kind) for stream in turned), d_value], 1).flatten(1), *d_norms


def unrotated(gradient: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return gradient * cos - rotate_half(gradient * sin)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [n, 2 I] -> [n, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated_backward(gradient: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what `gated` returned, [n, I]; the gradient of gate_up, [n, 2 I])."""
    gate, up = gate_up.float().chunk(2, -1)
    g, share = gradient.float(), gate.sigmoid()
    d_gate = g * up * share * (1 + gate * (1 - share))
    return gated(gate_up), torch.cat([d_gate, g * gate * share], -1).to(gate_up.dtype)


def pick(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probability of the target, entropy if wanted, normalizer) of each row of logits [n, V]; float32 [n] each."""
    wide = tempered(logits, temperature)
    normalizer = wide.logsumexp(-1)
    picked = wide.gather(-1, targets[:, None])[:, 0] - normalizer
    if not with_entropy:
        return picked, torch.zeros_like(picked), normalizer
    entropy = normalizer - (wide - normalizer[:, None]).exp_().mul_(wide).sum(-1)
    return picked, entropy, normalizer


def pick_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    d_picked: torch.Tensor,
    d_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of the logits [n, V], written over them."""
    logp = tempered(logits, temperature).sub_(normalizer[:, None])
    if d_entropy is None:
        gradient = logp.exp_().mul_(-d_picked[:, None])
    else:
        p = logp.exp()
        gradient = -p * (d_picked[:, None] + d_entropy[:, None] * (logp + entropy[:, None]))
    gradient.scatter_add_(-1, targets[:, None], d_picked[:, None].to(gradient.dtype))
    if temperature != 1.0:
        gradient /= temperature
    return gradient if gradient.data_ptr() == logits.data_ptr() else logits.copy_(gradient)


def tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In float32; the logits themselves, where they need no change."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def gather_backward(gradient: torch.Tensor, places: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The sum of gradient[places[first[i] : first[i + 1]]] for each i, added up in float32."""
    owner = torch.repeat_interleave(torch.arange(len(first) - 1, device=first.device), first.diff())
    total = gradient.new_zeros(len(first) - 1, *gradient.shape[1:], dtype=torch.float32)
    return total.index_add_(0, owner, gradient[places[: len(owner)]].float()).to(gradient.dtype)
