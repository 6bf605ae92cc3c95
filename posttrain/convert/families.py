"""The table of model families: how Hugging Face names and fuses the parts of a model. A new family is one row."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from posttrain.convert.pieces import Part, Span, Stored, stacked
from posttrain.core.errors import UsageError

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the conversion has to know of a model: sizes, and which parts it has."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    head: str = "token"  # or score, or none
    labels: int = 1
    positions: int = 0
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()  # of a mixture of experts: layers without experts
    router_bias: bool = False
    mla: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    biased: frozenset[str] = frozenset()
    embedding_norm: bool = False
    predictors: int = 0  # layers behind the last one that predict later tokens (DeepSeek-V3)

    def is_dense(self, layer: int) -> bool:
        return not self.experts or layer in self.dense_layers


@dataclass(frozen=True, slots=True)
class Family:
    """A row: names of modules -> the parts they hold. Several parts are fused: one below the other, or `grouped`."""

    types: tuple[str, ...]  # model_type in config.json
    layer: dict[str, str]
    dense: dict[str, str]
    biased: Callable[[Config], str] = lambda config: ""
    experts: dict[str, str] = field(default_factory=dict)
    predictor: dict[str, str] = field(default_factory=dict)  # what else a layer has that predicts later tokens
    prefix: str = "model."
    layers: str = "layers."
    embed: str = "embed_tokens"
    embedding_norm: str = ""
    norm: str = "norm"
    head: str = "lm_head"
    positions: str = ""
    transposed: bool = False  # GPT-2 keeps its matrices as (in, out)
    stock: bool = True  # transformers has the code


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
DEEPSEEK = NORMS | {
    "self_attn.q_proj": "q",  # without compression of queries
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
PREDICTOR = {
    "enorm": "embed_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "join",
    "shared_head.norm": "predictor_norm",
}
PREDICTOR_COPIES = {"embed_tokens": "embed", "shared_head.head": "head"}  # of the model's own
CHATGLM = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attention.query_key_value": "q k v",
    "self_attention.dense": "o",
}


def on(key: str, parts: str, default: bool = False) -> Callable[[Config], str]:
    """These parts have biases if the configuration says so."""
    return lambda config: parts if config.get(key, default) else ""


def llama_biases(config: Config) -> str:
    return " ".join((on("attention_bias", "q k v o")(config), on("mlp_bias", "gate up down")(config)))


def phimoe_biases(config: Config) -> str:
    layer = f"input_norm mlp_norm final_norm {on('attention_bias', 'q k v o')(config)}"
    return f"{layer} {on('lm_head_bias', 'head')(config)}"


FAMILIES: dict[str, Family] = {
    "llama": Family(("llama",), LLAMA, DENSE, llama_biases),
    "qwen2": Family(("qwen2",), LLAMA, DENSE, lambda config: "q k v"),
    "qwen3": Family(("qwen3",), LLAMA | QK_NORMS, DENSE, on("attention_bias", "q k v o")),
    "qwen3_moe": Family(("qwen3_moe",), LLAMA | QK_NORMS, DENSE, on("attention_bias", "q k v o"), MLP_EXPERTS),
    "qwen2_moe": Family(
        ("qwen2_moe",),
        LLAMA,
        DENSE,
        on("qkv_bias", "q k v", default=True),
        MLP_EXPERTS
        | {
            "mlp.shared_expert_gate": "shared_gate",
            "mlp.shared_expert.gate_proj": "shared.gate",
            "mlp.shared_expert.up_proj": "shared.up",
            "mlp.shared_expert.down_proj": "shared.down",
        },
    ),
    "mistral": Family(("mistral",), LLAMA, DENSE),
    "mixtral": Family(("mixtral",), LLAMA, DENSE, experts=MIXTRAL_EXPERTS),
    "phimoe": Family(("phimoe",), LLAMA, DENSE, phimoe_biases, MIXTRAL_EXPERTS),
    "deepseek": Family(
        ("deepseek_v2", "deepseek_v3"), DEEPSEEK, DENSE, experts=MLP_EXPERTS | SHARED, predictor=PREDICTOR
    ),
    "minicpm": Family(("minicpm",), LLAMA, DENSE, on("attention_bias", "q k v o"), stock=False),
    "minicpm3": Family(("minicpm3",), DEEPSEEK, DENSE, on("attention_bias", "q_down kv_down o")),
    "hunyuan": Family(
        ("hunyuan_v1_dense",),
        LLAMA | {"self_attn.query_layernorm": "q_norm", "self_attn.key_layernorm": "k_norm"},
        DENSE,
        on("attention_bias", "q k v o"),
    ),
    "gemma": Family(("gemma",), LLAMA, DENSE, on("attention_bias", "q k v o")),
    "gemma2": Family(
        ("gemma2",),
        ATTENTION
        | {
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "attention_out_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_out_norm",
        },
        DENSE,
        on("attention_bias", "q k v o"),
    ),
    "phi3": Family(("phi3",), FUSED, FUSED_DENSE),
    "glm": Family(("glm",), LLAMA, FUSED_DENSE, on("attention_bias", "q k v")),
    "glm4": Family(
        ("glm4",),
        LLAMA | {"post_self_attn_layernorm": "attention_out_norm", "post_mlp_layernorm": "mlp_out_norm"},
        FUSED_DENSE,
        on("attention_bias", "q k v"),
    ),
    "gpt2": Family(
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
    "bloom": Family(
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
    "internlm2": Family(
        ("internlm2",),
        {
            "attention_norm": "input_norm",
            "ffn_norm": "mlp_norm",
            "attention.wqkv": "grouped q k v",
            "attention.wo": "o",
        },
        {"feed_forward.w1": "gate", "feed_forward.w3": "up", "feed_forward.w2": "down"},
        on("bias", "q k v o"),
        embed="tok_embeddings",
        head="output",
        stock=False,
    ),
    "baichuan": Family(
        ("baichuan",), NORMS | {"self_attn.W_pack": "q k v", "self_attn.o_proj": "o"}, DENSE, stock=False
    ),
    "chatglm": Family(
        ("chatglm",),
        CHATGLM,
        {"mlp.dense_h_to_4h": "gate up", "mlp.dense_4h_to_h": "down"},
        on("add_qkv_bias", "q k v", default=True),
        prefix="transformer.",
        layers="encoder.layers.",
        embed="embedding.word_embeddings",
        norm="encoder.final_layernorm",
        head="transformer.output_layer",
        stock=False,
    ),
}

# Buffers of older versions; they are computed, not learnt.
COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias)")


def family_of(config: Config) -> Family:
    """The row for a configuration."""
    kind = config.get("model_type", "")
    for family in FAMILIES.values():
        if kind in family.types:
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.types)
    raise UsageError(f"config.json: model_type {kind!r} is in no row of the table of families; there are {known}")


def shape_of(config: Config, predictors: int = 0) -> Shape:
    """Sizes and parts, from config.json; and of layers that predict later tokens, as many as the files have."""
    family = family_of(config)

    def first(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(found, int):
            raise UsageError(f"config.json: {names[0]} is missing or no whole number")
        return found

    hidden, heads = first("n_embed", "hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    layers = first("num_hidden_layers", "n_layer", "num_layers")
    mla = "kv_lora_rank" in config
    experts = first("num_local_experts", "n_routed_experts", "num_experts", default=0) if family.experts else 0
    ffn = first("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden)
    expert_ffn = first("moe_intermediate_size", default=ffn)
    dense = dense_layers(config, layers)
    architecture = (config.get("architectures") or ["ForCausalLM"])[0]
    head = "score" if architecture.endswith(("ForSequenceClassification", "ForTokenClassification")) else "token"
    biased_head = frozenset({"score"} if architecture.endswith("ForTokenClassification") else ())
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=first("multi_query_group_num", "num_key_value_heads", default=heads),
        head_dim=first("qk_nope_head_dim") + first("qk_rope_head_dim")
        if mla
        else first("head_dim", "kv_channels", default=hidden // heads),
        ffn=ffn,
        vocabulary=first("padded_vocab_size", "vocab_size"),
        tied=head == "token" and tied(config),
        head=head,
        labels=labels_of(config),
        positions=first("n_positions", "max_position_embeddings") if family.positions else 0,
        experts=experts,
        expert_ffn=expert_ffn,
        shared_ffn=config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * expert_ffn,
        dense_layers=dense,
        router_bias=config["model_type"] == "deepseek_v3",
        mla=mla,
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config.get("kv_lora_rank") or 0,
        rope_dim=config.get("qk_rope_head_dim") or 0,
        value_dim=config.get("v_head_dim") or 0,
        biased=frozenset(family.biased(config).split()) | biased_head,
        embedding_norm=bool(family.embedding_norm),
        predictors=predictors,
    )


def dense_layers(config: Config, layers: int) -> frozenset[int]:
    """Layers of a mixture that have no experts."""
    first, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    listed = config.get("mlp_only_layers") or ()
    return frozenset(n for n in range(layers) if n < first or n in listed or (n + 1) % step)


def tied(config: Config) -> bool:
    """Families differ in what they mean when they do not say."""
    return bool(config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "gemma", "gemma2", "bloom")))


def labels_of(config: Config) -> int:
    names = config.get("id2label")
    return len(names) if names else int(config.get("num_labels", 2))


def parts_of(shape: Shape) -> dict[str, Part]:
    """Every part of the model, in the model's order, with its size."""
    hidden = shape.hidden
    found = {"embed.weight": Part(shape.vocabulary, hidden)}
    if shape.embedding_norm:
        found |= {f"embedding_norm.{kind}": Part(hidden, vector=True) for kind in ("weight", "bias")}
    if shape.positions:
        found["positions.weight"] = Part(shape.positions, hidden)
    for layer in range(shape.layers + shape.predictors):
        for name, part in layer_parts(shape, layer):
            found[f"{layer}.{name}.weight"] = part
            if name in shape.biased:
                found[f"{layer}.{name}.bias"] = Part(part.rows, vector=True)
    found["final_norm.weight"] = Part(hidden, vector=True)
    if "final_norm" in shape.biased:
        found["final_norm.bias"] = Part(hidden, vector=True)
    if shape.head == "score":
        found["score.weight"] = Part(shape.labels, hidden)
        if "score" in shape.biased:
            found["score.bias"] = Part(shape.labels, vector=True)
    elif not shape.tied:
        found["head.weight"] = Part(shape.vocabulary, hidden)
        if "head" in shape.biased:
            found["head.bias"] = Part(shape.vocabulary, vector=True)
    return found


def layer_parts(shape: Shape, layer: int) -> Iterator[tuple[str, Part]]:
    """All that one layer could have; the tables of names say which of the norms it does have."""
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    for norm in ("input_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"):
        yield norm, Part(hidden, vector=True)
    if layer >= shape.layers:
        yield "join", Part(hidden, 2 * hidden)
        for norm in ("embed_norm", "hidden_norm", "predictor_norm"):
            yield norm, Part(hidden, vector=True)
    if shape.mla:
        if shape.q_rank:
            yield "q_down", Part(shape.q_rank, hidden)
            yield "q_rank_norm", Part(shape.q_rank, vector=True)
            yield "q_up", Part(width, shape.q_rank)
        else:
            yield "q", Part(width, hidden)
        yield "kv_down", Part(shape.kv_rank + shape.rope_dim, hidden)
        yield "kv_rank_norm", Part(shape.kv_rank, vector=True)
        yield "kv_up", Part(shape.heads * (shape.head_dim - shape.rope_dim + shape.value_dim), shape.kv_rank)
        yield "o", Part(hidden, shape.heads * shape.value_dim)
    else:
        yield "q", Part(width, hidden)
        yield "k", Part(shape.groups * shape.head_dim, hidden)
        yield "v", Part(shape.groups * shape.head_dim, hidden)
        yield "o", Part(hidden, width)
        yield "q_norm", Part(shape.head_dim, vector=True)
        yield "k_norm", Part(shape.head_dim, vector=True)
    if shape.is_dense(layer):
        yield from mlp_parts("", hidden, shape.ffn)
        return
    yield "router", Part(shape.experts, hidden)
    if shape.router_bias:
        yield "router_bias", Part(shape.experts, vector=True)
    for expert in range(shape.experts):
        yield from mlp_parts(f"expert.{expert}.", hidden, shape.expert_ffn)
    if shape.shared_ffn:
        yield "shared_gate", Part(1, hidden)
        yield from mlp_parts("shared.", hidden, shape.shared_ffn)


def mlp_parts(prefix: str, hidden: int, ffn: int) -> Iterator[tuple[str, Part]]:
    yield f"{prefix}gate", Part(ffn, hidden)
    yield f"{prefix}up", Part(ffn, hidden)
    yield f"{prefix}down", Part(hidden, ffn)


def whole(part: Part) -> tuple[Span, Span]:
    return (0, part.rows), (0, part.columns)


def by_group(names: list[str], parts: dict[str, Part], first: int, count: int, groups: int) -> Iterator[Any]:
    """Blocks for key-value groups `first` to `first + count`: the group's queries, its key, its value."""
    for group in range(first, first + count):
        for name in names:
            rows = parts[name].rows // groups
            yield name, (group * rows, (group + 1) * rows), (0, parts[name].columns)


def model_parts(config: Config, predictors: int = 0) -> tuple[Shape, dict[str, Part]]:
    """The parts that a model has: those of its shape that its family has names for."""
    family, shape = family_of(config), shape_of(config, predictors)
    named = {
        word
        for names in (family.layer, family.dense, family.experts, family.predictor)
        for spec in names.values()
        for word in spec.split()
    }

    def exists(name: str) -> bool:
        first, *rest = name.split(".")
        if not first.isdigit():
            return True
        return re.sub(r"^expert\.\d+\.", "expert.{e}.", ".".join(rest[:-1])) in named

    return shape, {name: part for name, part in parts_of(shape).items() if exists(name)}


def predictors_in(names: Iterable[str], config: Config) -> int:
    """How many layers for later tokens these tensors of a Hugging Face folder or of Megatron belong to."""
    family, layers = family_of(config), shape_of(config).layers
    if not family.predictor:
        return 0
    pattern = re.compile(rf"{re.escape(family.prefix + family.layers)}(\d+)\.|.*\bmtp\.layers\.(\d+)\.")
    numbers = [int(match[1] or 0) - layers if match[1] else int(match[2]) for n in names if (match := pattern.match(n))]
    return max([number + 1 for number in numbers if number >= 0], default=0)


def hf_stored(config: Config, shape: Shape, parts: dict[str, Part], file: str = "model.safetensors") -> list[Stored]:
    """The tensors of a Hugging Face folder."""
    family = family_of(config)
    found = []

    def add(module: str, spec: str, transposed: bool = False) -> None:
        words = spec.split()
        grouped = words[0] == "grouped"
        names = words[1:] if grouped else words
        for kind in ("weight", "bias"):
            full = [f"{name}.{kind}" for name in names]
            if full[0] not in parts:
                continue
            vector = parts[full[0]].vector
            blocks = (
                by_group(full, parts, 0, shape.groups, shape.groups)
                if grouped
                else ((name, *whole(parts[name])) for name in full)
            )
            name = module if full[0].endswith("router_bias.weight") else f"{module}.{kind}"
            found.append(stacked(file, name, blocks, vector, transposed and not vector))

    prefix = family.prefix
    add(prefix + family.embed, "embed")
    add(prefix + family.embedding_norm, "embedding_norm")
    if family.positions:
        add(prefix + family.positions, "positions")
    for layer in range(shape.layers + shape.predictors):
        names = family.layer | (family.dense if shape.is_dense(layer) else family.experts)
        if layer >= shape.layers:
            names = names | family.predictor
            for module, part in PREDICTOR_COPIES.items():
                add(f"{prefix}{family.layers}{layer}.{module}", part)
        for module, spec in names.items():
            for expert in range(shape.experts) if "{e}" in module else (0,):
                words = spec.replace("{e}", str(expert)).split()
                spec_here = " ".join(word if word == "grouped" else f"{layer}.{word}" for word in words)
                add(
                    f"{prefix}{family.layers}{layer}.{module.replace('{e}', str(expert))}", spec_here, family.transposed
                )
    add(prefix + family.norm, "final_norm")
    add(family.head, "head")
    add("score", "score")
    return found
