"""Multi-head latent attention (MLA) of DeepSeek-V2 and V3, shared by fused layers and by the engine's decoder.

    c   = norm(x W_c)           the latent vector of a token, [rank]
    k_r = rotate(x W_r)         rotated part of its keys, the same for all heads, [rope]
    k_h = [c W_kh, k_r]         keys and values of head h
    v_h = c W_vh

Training and prefill compute keys and values of all heads. A decode step does not, since q . (c W_kh) = (q W_kh') . c:
it attends with the queries q W_kh' to latents, and multiplies the result by W_vh. So the KV cache holds [c, k_r] per
token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2DecoderLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

LATENT_FAMILIES = (DeepseekV2DecoderLayer, DeepseekV3DecoderLayer)
LATENT_TYPES = ("deepseek_v2", "deepseek_v3")  # their config.model_type


def is_latent(layer: Any) -> bool:
    """Whether a decoder layer has latent attention."""
    return isinstance(layer, LATENT_FAMILIES)


def input_projections(own: Any) -> list[Any]:
    """Return the linear layers that read the layer's input: of queries, or of their own latents; of [c, k_r]."""
    return [own.q_proj if own.q_a_proj is None else own.q_a_proj, own.kv_a_proj_with_mqa]


def has_joinable_inputs(own: Any) -> bool:
    """Whether both input projections have a bias, or neither: else they cannot be computed as one layer."""
    return len({linear.bias is not None for linear in input_projections(own) if hasattr(linear, "bias")}) < 2


def split_inputs(own: Any, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the input projections' outputs [T, ...] into queries (or their latents), c before its norm, k_r."""
    widths = own.kv_lora_rank, own.qk_rope_head_dim
    query, latent, key_rot = joined.split([joined.shape[1] - sum(widths), *widths], 1)
    return query.contiguous(), latent.contiguous(), key_rot


def angles_of(position_embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), [T, rope / 2] each: of DeepSeek-V2 from complex numbers, of V3 from two equal halves."""
    if torch.is_tensor(position_embeddings):
        return position_embeddings[0].real, position_embeddings[0].imag
    cos, sin = (angle[0, :, : angle.shape[-1] // 2] for angle in position_embeddings)
    return cos, sin


def rotate(own: Any, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the pairs of [T, heads, rope]. The result holds their first elements, then their second ones.

    Queries and keys are permuted alike, so their products do not depend on the order.
    """
    interleaved = getattr(own.config, "rope_interleave", True)  # of V2 always
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = (angle[:, None] for angle in angles)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def split_queries(
    own: Any, query: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split [T, heads * d] into the parts of queries that are not rotated and those that are, which this rotates."""
    plain, rotated = query.view(len(query), -1, own.qk_head_dim).split([own.qk_nope_head_dim, own.qk_rope_head_dim], 2)
    return plain, rotate(own, rotated, angles)


def keys_and_values(own: Any, expanded: torch.Tensor, key_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [T, heads, d] and values [T, heads, d_value] from c [W_kh, W_vh] of all heads, and rotated k_r."""
    heads = expanded.view(len(expanded), -1, own.qk_nope_head_dim + own.v_head_dim)
    plain, values = heads.split([own.qk_nope_head_dim, own.v_head_dim], 2)
    return torch.cat([plain, key_rot[:, None].expand(-1, plain.shape[1], -1)], 2), values


__all__ = [
    "LATENT_FAMILIES",
    "LATENT_TYPES",
    "angles_of",
    "has_joinable_inputs",
    "input_projections",
    "is_latent",
    "keys_and_values",
    "rotate",
    "split_inputs",
    "split_queries",
]
