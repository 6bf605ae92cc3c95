"""Table of model families: how Hugging Face names and fuses the parameters of a model. A new family is one entry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.errors import UsageError

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Maps names of modules to the parameters that their tensors hold.

    {"self_attn.q_proj": "q"} is one parameter; {"self_attn.qkv_proj": "q k v"} are three, stacked; with the word
    `grouped` before them they are interleaved by key-value head.
    """

    types: tuple[str, ...]  # model_type in config.json
    layer: dict[str, str]  # modules that every layer has
    dense: dict[str, str]  # the feed-forward modules of a layer without experts
    biased: Callable[[Config], str] = lambda config: ""  # parameters that have a bias
    experts: dict[str, str] = field(default_factory=dict)  # the feed-forward modules of a layer with experts
    mtp: dict[str, str] = field(default_factory=dict)  # further modules of a multi-token-prediction layer
    prefix: str = "model."  # of all names but the head's
    layers: str = "layers."  # prefix of a layer's number
    embed: str = "embed_tokens"
    embedding_norm: str = ""
    norm: str = "norm"
    head: str = "lm_head"
    positions: str = ""
    transposed: bool = False  # GPT-2 stores its matrices as (in, out)
    stock: bool = True  # transformers implements the model


NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
ATTENTION = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o"}
QK_NORMS = {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
DENSE = {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
LLAMA = NORMS | ATTENTION
FUSED = NORMS | {"self_attn.qkv_proj": "q k v", "self_attn.o_proj": "o"}
FUSED_DENSE = {"mlp.gate_up_proj": "gate up", "mlp.down_proj": "down"}
MLP_EXPERTS = {
    "mlp.gate": "router",
    "mlp.experts.{e}.gate_proj": "expert.{e}.gate",
    "mlp.experts.{e}.up_proj": "expert.{e}.up",
    "mlp.experts.{e}.down_proj": "expert.{e}.down",
}
MIXTRAL_EXPERTS = {
    "block_sparse_moe.gate": "router",
    "block_sparse_moe.experts.{e}.w1": "expert.{e}.gate",
    "block_sparse_moe.experts.{e}.w3": "expert.{e}.up",
    "block_sparse_moe.experts.{e}.w2": "expert.{e}.down",
}
QK_LAYERNORMS = {"self_attn.query_layernorm": "q_norm", "self_attn.key_layernorm": "k_norm"}
HUNYUAN_EXPERTS = {
    "mlp.gate.wg": "router",
    **{module: spec for module, spec in MLP_EXPERTS.items() if "{e}" in module},
    "mlp.shared_mlp.gate_proj": "shared.gate",
    "mlp.shared_mlp.up_proj": "shared.up",
    "mlp.shared_mlp.down_proj": "shared.down",
}
DEEPSEEK = NORMS | {
    "self_attn.q_proj": "q",  # models that do not compress queries
    "self_attn.q_a_proj": "q_down",
    "self_attn.q_a_layernorm": "q_rank_norm",
    "self_attn.q_b_proj": "q_up",
    "self_attn.kv_a_proj_with_mqa": "kv_down",
    "self_attn.kv_a_layernorm": "kv_rank_norm",
    "self_attn.kv_b_proj": "kv_up",
    "self_attn.o_proj": "o",
}
SHARED = {
    "mlp.gate.e_score_correction_bias": "router_bias",
    "mlp.shared_experts.gate_proj": "shared.gate",
    "mlp.shared_experts.up_proj": "shared.up",
    "mlp.shared_experts.down_proj": "shared.down",
}
MTP = {
    "enorm": "embed_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "join",
    "shared_head.norm": "predictor_norm",
}
MTP_COPIES = {"embed_tokens": "embed", "shared_head.head": "head"}  # copies of the model's own embedding and head
CHATGLM = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attention.query_key_value": "q k v",
    "self_attention.dense": "o",
}


def biased_if(key: str, parameters: str, default: bool = False) -> Callable[[Config], str]:
    """Return a function that names these parameters as biased if the configuration sets `key`."""
    return lambda config: parameters if config.get(key, default) else ""


def llama_biases(config: Config) -> str:
    return " ".join((biased_if("attention_bias", "q k v o")(config), biased_if("mlp_bias", "gate up down")(config)))


def phimoe_biases(config: Config) -> str:
    layer = f"input_norm mlp_norm final_norm {biased_if('attention_bias', 'q k v o')(config)}"
    return f"{layer} {biased_if('lm_head_bias', 'head')(config)}"


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(("llama",), LLAMA, DENSE, llama_biases),
    "qwen2": ModelFamily(("qwen2",), LLAMA, DENSE, lambda config: "q k v"),
    "qwen3": ModelFamily(("qwen3",), LLAMA | QK_NORMS, DENSE, biased_if("attention_bias", "q k v o")),
    "qwen3_moe": ModelFamily(
        ("qwen3_moe",), LLAMA | QK_NORMS, DENSE, biased_if("attention_bias", "q k v o"), MLP_EXPERTS
    ),
    "qwen2_moe": ModelFamily(
        ("qwen2_moe",),
        LLAMA,
        DENSE,
        biased_if("qkv_bias", "q k v", default=True),
        MLP_EXPERTS
        | {
            "mlp.shared_expert_gate": "shared_gate",
            "mlp.shared_expert.gate_proj": "shared.gate",
            "mlp.shared_expert.up_proj": "shared.up",
            "mlp.shared_expert.down_proj": "shared.down",
        },
    ),
    "mistral": ModelFamily(("mistral",), LLAMA, DENSE),
    "mixtral": ModelFamily(("mixtral",), LLAMA, DENSE, experts=MIXTRAL_EXPERTS),
    "phimoe": ModelFamily(("phimoe",), LLAMA, DENSE, phimoe_biases, MIXTRAL_EXPERTS),
    "deepseek": ModelFamily(("deepseek_v2", "deepseek_v3"), DEEPSEEK, DENSE, experts=MLP_EXPERTS | SHARED, mtp=MTP),
    "minicpm": ModelFamily(
        ("minicpm",),
        LLAMA,
        DENSE,
        biased_if("attention_bias", "q k v o"),
        {name.replace("block_sparse_moe", "mlp"): spec for name, spec in MIXTRAL_EXPERTS.items()},  # MiniCPM-MoE
        stock=False,
    ),
    "minicpm3": ModelFamily(("minicpm3",), DEEPSEEK, DENSE, biased_if("attention_bias", "q_down kv_down o")),
    "hunyuan": ModelFamily(
        ("hunyuan_v1_dense",),
        LLAMA | QK_LAYERNORMS,
        DENSE,
        biased_if("attention_bias", "q k v o"),
    ),
    "hunyuan_moe": ModelFamily(
        ("hunyuan_v1_moe",), LLAMA | QK_LAYERNORMS, DENSE, biased_if("attention_bias", "q k v o"), HUNYUAN_EXPERTS
    ),
    "hunyuan_moe_remote": ModelFamily(  # HunYuan-Large and A13B as Tencent's own code saves them
        ("hunyuan",),
        LLAMA | QK_LAYERNORMS,
        DENSE,
        biased_if("attention_bias", "q k v o"),
        HUNYUAN_EXPERTS,
        stock=False,
    ),
    "qwen": ModelFamily(
        ("qwen",),
        {"ln_1": "input_norm", "ln_2": "mlp_norm", "attn.c_attn": "q k v", "attn.c_proj": "o"},
        {"mlp.w2": "gate", "mlp.w1": "up", "mlp.c_proj": "down"},
        lambda config: "q k v" if config.get("no_bias", True) else "q k v o gate up down",
        prefix="transformer.",
        layers="h.",
        embed="wte",
        norm="ln_f",
        stock=False,
    ),
    "gemma": ModelFamily(("gemma",), LLAMA, DENSE, biased_if("attention_bias", "q k v o")),
    "gemma2": ModelFamily(
        ("gemma2",),
        ATTENTION
        | {
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "attention_out_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_out_norm",
        },
        DENSE,
        biased_if("attention_bias", "q k v o"),
    ),
    "phi3": ModelFamily(("phi3",), FUSED, FUSED_DENSE),
    "glm": ModelFamily(("glm",), LLAMA, FUSED_DENSE, biased_if("attention_bias", "q k v")),
    "glm4": ModelFamily(
        ("glm4",),
        LLAMA | {"post_self_attn_layernorm": "attention_out_norm", "post_mlp_layernorm": "mlp_out_norm"},
        FUSED_DENSE,
        biased_if("attention_bias", "q k v"),
    ),
    "gpt2": ModelFamily(
        ("gpt2",),
        {"ln_1": "input_norm", "ln_2": "mlp_norm", "attn.c_attn": "q k v", "attn.c_proj": "o"},
        {"mlp.c_fc": "up", "mlp.c_proj": "down"},
        lambda config: "input_norm mlp_norm final_norm q k v o up down",
        prefix="transformer.",
        layers="h.",
        embed="wte",
        norm="ln_f",
        positions="wpe",
        transposed=True,
    ),
    "bloom": ModelFamily(
        ("bloom",),
        CHATGLM | {"self_attention.query_key_value": "grouped q k v"},
        {"mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"},
        lambda config: "input_norm mlp_norm final_norm q k v o up down",
        prefix="transformer.",
        layers="h.",
        embed="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        norm="ln_f",
    ),
    "internlm2": ModelFamily(
        ("internlm2",),
        {
            "attention_norm": "input_norm",
            "ffn_norm": "mlp_norm",
            "attention.wqkv": "grouped q k v",
            "attention.wo": "o",
        },
        {"feed_forward.w1": "gate", "feed_forward.w3": "up", "feed_forward.w2": "down"},
        biased_if("bias", "q k v o"),
        embed="tok_embeddings",
        head="output",
        stock=False,
    ),
    "baichuan": ModelFamily(
        ("baichuan",), NORMS | {"self_attn.W_pack": "q k v", "self_attn.o_proj": "o"}, DENSE, stock=False
    ),
    "chatglm": ModelFamily(
        ("chatglm",),
        CHATGLM,
        {"mlp.dense_h_to_4h": "gate up", "mlp.dense_4h_to_h": "down"},
        biased_if("add_qkv_bias", "q k v", default=True),
        prefix="transformer.",
        layers="encoder.layers.",
        embed="embedding.word_embeddings",
        norm="encoder.final_layernorm",
        head="transformer.output_layer",
        stock=False,
    ),
}

# Buffers of older versions of transformers: computed, not trained.
COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias)")


def family_of(config: Config) -> ModelFamily:
    """Return the family of a configuration."""
    kind = config.get("model_type", "")
    for family in FAMILIES.values():
        if kind in family.types:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.types)
    raise UsageError(f"config.json: model_type {kind!r} is not supported; supported are {known}")
