"""Describes a model as llama.cpp knows it: which families it has, their metadata, and how their tensors differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from posttrain.core.errors import UsageError

SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What llama.cpp assumes of a model type."""

    architecture: str
    activations: tuple[str, ...] = SILU
    biases: tuple[str, ...] = ()
    """Projections that may have a bias."""
    permuted: bool = False
    """The rows of query and key are stored in pairs, as the rotary embedding uses them."""
    norm_offset: bool = False
    """The weights of norms are stored with one added."""
    window_every: int = 0
    """All layers but every n-th have a sliding window; 0: there is no window."""
    scale_exception: int = 0
    """Number of layers of the one model whose attention is scaled by hidden size / heads."""


ATTENTION = ("q_proj", "k_proj", "v_proj")
FAMILIES = {
    "llama": GgufFamily("llama", permuted=True, biases=(*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj")),
    "mistral": GgufFamily("llama", permuted=True),
    "qwen2": GgufFamily("qwen2", biases=ATTENTION),
    "qwen3": GgufFamily("qwen3"),
    "gemma2": GgufFamily("gemma2", GELU, norm_offset=True, window_every=2, scale_exception=46),
    "gemma3_text": GgufFamily("gemma3", GELU, norm_offset=True, window_every=6, scale_exception=62),
}


def family_of(config: PreTrainedConfig) -> GgufFamily:
    """Return what llama.cpp assumes of the model; UsageError if it has no such model."""
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"GGUF: models of type {config.model_type} are not supported; known are {', '.join(FAMILIES)}. "
            "Export as hf, and convert that with llama.cpp's convert_hf_to_gguf.py if it supports the model."
        )
    family = FAMILIES[config.model_type]
    check_model(config, family)
    return family


def check_model(config: Any, family: GgufFamily) -> None:
    """Raise UsageError for a setting of the model that a GGUF file cannot express."""
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in family.activations:
        raise unsupported(config, "activation", activation)
    if family.window_every:
        expected = [
            "full_attention" if (layer + 1) % family.window_every == 0 else "sliding_attention"
            for layer in range(config.num_hidden_layers)
        ]
        if list(config.layer_types) != expected:
            raise unsupported(config, "layer_types", "another order of layers with and without a window")
        exception = config.num_hidden_layers == family.scale_exception
        scale = config.hidden_size // config.num_attention_heads if exception else head_size(config)
        if config.query_pre_attn_scalar != scale:
            raise unsupported(config, "query_pre_attn_scalar", config.query_pre_attn_scalar)
    for name, rope in rope_settings(config).items():
        kind = rope.get("rope_type", "default")
        if kind not in ("default", "linear", *(("llama3",) if family.permuted else ())):
            raise unsupported(config, "rope_type", kind)
        if name == "sliding_attention" and (kind != "default" or rope.get("rope_theta") != 10_000):
            raise unsupported(config, "rope_theta of layers with a window", rope.get("rope_theta"))
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise unsupported(config, "partial_rotary_factor", rope["partial_rotary_factor"])


def unsupported(config: Any, name: str, value: Any) -> UsageError:
    return UsageError(f"GGUF: {config.model_type} with {name} {value!r} is not supported by llama.cpp. Export as hf.")


def rope_settings(config: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of the rotary embedding by kind of layer; most models have one kind."""
    rope = config.rope_parameters
    return rope if "full_attention" in rope else {"full_attention": rope}


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def context_length(config: Any, family: GgufFamily) -> int:
    """Return the longest context; where llama.cpp has no window, not more than the model's window."""
    window = getattr(config, "sliding_window", None)
    if family.window_every or not window or not getattr(config, "use_sliding_window", True):
        return int(config.max_position_embeddings)
    return int(min(config.max_position_embeddings, window))


def metadata(config: Any, family: GgufFamily) -> dict[str, int | float | str]:
    """Return the model's keys of a GGUF file, without the name of the architecture in front of them."""
    rope = rope_settings(config)["full_attention"]
    found: dict[str, int | float | str] = {
        "context_length": context_length(config, family),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_size(config),
        "attention.value_length": head_size(config),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_size(config),
        "vocab_size": config.vocab_size,
    }
    if rope.get("rope_type") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if family.window_every:
        found["attention.sliding_window"] = config.sliding_window
    for name, key in (("attn_logit_softcapping", "attn_logit_softcapping"), ("final_logit_softcapping",) * 2):
        if getattr(config, name, None):
            found[key] = float(getattr(config, name))
    return found


def stored_tensor(config: Any, family: GgufFamily, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the model as llama.cpp wants it."""
    layer, _, kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    if name.endswith(".bias") and kind not in family.biases:
        raise unsupported(config, "a bias in", f"{layer}.{kind}")
    if family.norm_offset and name.endswith("norm.weight"):
        return tensor.float() + 1
    if family.permuted and kind in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if kind == "q_proj" else config.num_key_value_heads
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def frequency_factors(config: Any) -> torch.Tensor | None:
    """Return what Llama 3 divides the rotary frequencies by, [head size / 2]; None for other embeddings."""
    rope = rope_settings(config)["full_attention"]
    if rope.get("rope_type") != "llama3":
        return None
    size = head_size(config)
    wavelengths = 2 * math.pi * float(rope["rope_theta"]) ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    low, high, factor = float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), float(rope["factor"])
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = smooth.clamp(0, 1)  # 0: long waves, divided by the factor; 1: short ones, unchanged
    return 1 / ((1 - smooth) / factor + smooth)
