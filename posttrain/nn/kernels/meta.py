"""The functions of kernels/reference.py for the meta device: they return tensors of the sizes that kernels allocate.

models/memory.py counts with them.
"""

from __future__ import annotations

from typing import Any

import torch


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x if residual is None else torch.empty_like(x)


def norm_backward(
    gradient: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, carried: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(total), torch.empty_like(weight)


def rotate_and_store(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, *rest: Any
) -> torch.Tensor:
    kv_heads, width = keys.shape[2:]
    return qkv.new_empty(len(qkv), qkv.shape[1] // width - 2 * kv_heads, width)


def rotate_backward(
    d_query: torch.Tensor,
    d_key: torch.Tensor,
    d_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    width = d_query[0].numel() + d_key[0].numel() + d_value[0].numel()
    norms = (None if norm is None else torch.empty_like(norm) for norm in (q_norm, k_norm))
    return d_query.new_empty(len(d_query), width), *norms  # type: ignore[return-value]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


def silu_and_mul_backward(gradient: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(gradient), torch.empty_like(gate_up)


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = len(logits)
    return tuple(logits.new_empty(rows, dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def target_logprobs_backward(logits: torch.Tensor, *known: Any) -> torch.Tensor:
    return logits


def divergence(logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(logits.new_empty(len(logits), dtype=torch.float32) for _ in range(4))  # type: ignore[return-value]


def divergence_backward(logits: torch.Tensor, *known: Any) -> torch.Tensor:
    return logits


def sort_by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    place = torch.empty_like(chosen)
    return place.view(-1), place, chosen.new_empty(experts, dtype=torch.int32)


def expert_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(len(rows), weight.shape[1])


def expert_weight_gradients(
    d_out: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, total: torch.Tensor | None
) -> torch.Tensor:
    if total is not None:
        return total
    return rows.new_empty(len(ends), d_out.shape[1], rows.shape[1], dtype=torch.float32)


def combine_rows(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return rows.new_empty(len(place), rows.shape[1])


def weighted_silu_and_mul_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(gradient), torch.empty_like(gate_up), gradient.new_empty(len(gradient), dtype=torch.float32)
