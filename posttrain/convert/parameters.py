"""Derive a model's parameters and their shapes from its config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from posttrain.convert.families import Config, family_of
from posttrain.convert.stored_tensors import ParameterShape
from posttrain.core.errors import UsageError

TIED_BY_DEFAULT = ("gpt2", "gemma", "gemma2", "bloom", "minicpm")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, and which parameters it has."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool
    head: str = "token"  # or score
    labels: int = 1
    positions: int = 0
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # of the shared experts together
    dense_layers: frozenset[int] = frozenset()  # layers without experts of a mixture-of-experts model
    router_bias: bool = False
    mla: bool = False  # multi-latent attention; the next four are its sizes
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    biased: frozenset[str] = frozenset()  # names of parameters that have a bias
    embedding_norm: bool = False
    mtp_layers: int = 0  # multi-token-prediction layers after the last layer (DeepSeek-V3)

    def is_dense(self, layer: int) -> bool:
        return not self.experts or layer in self.dense_layers


def shape_of(config: Config, mtp_layers: int = 0) -> ModelShape:
    """Read the sizes of a model from config.json; `mtp_layers` comes from the files, which may lack these layers."""
    family = family_of(config)

    def first(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if isinstance(found, list) and len(set(found)) == 1:  # HunYuan: one number per layer
            found = found[0]
        if not isinstance(found, int):
            raise UsageError(f"config.json: {names[0]} is missing, or not one integer")
        return found

    hidden, heads = first("n_embed", "hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    layers = first("num_hidden_layers", "n_layer", "num_layers")
    mla = "kv_lora_rank" in config
    experts = first("num_local_experts", "n_routed_experts", "num_experts", default=0) if family.experts else 0
    if config.get("use_cla"):
        raise UsageError("config.json: use_cla (layers that share keys and values) has no form in Megatron")
    ffn = first("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden)
    if config["model_type"] == "qwen":
        ffn //= 2  # it counts gate and up
    expert_ffn = first("moe_intermediate_size", default=ffn)
    dense = dense_layers(config, layers)
    architecture = (config.get("architectures") or ["ForCausalLM"])[0]
    head = "score" if architecture.endswith(("ForSequenceClassification", "ForTokenClassification")) else "token"
    biased_head = frozenset({"score"} if architecture.endswith("ForTokenClassification") else ())
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=first("multi_query_group_num", "num_key_value_heads", default=heads),
        head_dim=first("qk_nope_head_dim") + first("qk_rope_head_dim")
        if mla
        else first("head_dim", "kv_channels", default=hidden // heads),
        ffn=ffn,
        vocabulary=first("padded_vocab_size", "vocab_size"),
        tied=head == "token" and has_tied_head(config),
        head=head,
        labels=label_count(config),
        positions=first("n_positions", "max_position_embeddings") if family.positions else 0,
        experts=experts,
        expert_ffn=expert_ffn,
        shared_ffn=config.get("shared_expert_intermediate_size")
        or first("n_shared_experts", "num_shared_expert", default=0) * expert_ffn,
        dense_layers=dense,
        router_bias=config["model_type"] == "deepseek_v3",
        mla=mla,
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config.get("kv_lora_rank") or 0,
        rope_dim=config.get("qk_rope_head_dim") or 0,
        value_dim=config.get("v_head_dim") or 0,
        biased=frozenset(family.biased(config).split()) | biased_head,
        embedding_norm=bool(family.embedding_norm),
        mtp_layers=mtp_layers,
    )


def dense_layers(config: Config, layers: int) -> frozenset[int]:
    """Return the layers of a mixture-of-experts model that have no experts."""
    first, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    listed = config.get("mlp_only_layers") or ()
    return frozenset(n for n in range(layers) if n < first or n in listed or (n + 1) % step)


def has_tied_head(config: Config) -> bool:
    """Whether head and embeddings are tied; the default depends on the family."""
    return bool(config.get("tie_word_embeddings", config["model_type"] in TIED_BY_DEFAULT))


def label_count(config: Config) -> int:
    names = config.get("id2label")
    return len(names) if names else int(config.get("num_labels", 2))


def parameters_of(shape: ModelShape) -> dict[str, ParameterShape]:
    """Return the shape of every parameter, in the model's order."""
    hidden = shape.hidden
    found = {"embed.weight": ParameterShape(shape.vocabulary, hidden)}
    if shape.embedding_norm:
        found |= {f"embedding_norm.{kind}": ParameterShape(hidden, vector=True) for kind in ("weight", "bias")}
    if shape.positions:
        found["positions.weight"] = ParameterShape(shape.positions, hidden)
    for layer in range(shape.layers + shape.mtp_layers):
        for name, parameter in layer_parameters(shape, layer):
            found[f"{layer}.{name}.weight"] = parameter
            if name in shape.biased:
                found[f"{layer}.{name}.bias"] = ParameterShape(parameter.rows, vector=True)
    found["final_norm.weight"] = ParameterShape(hidden, vector=True)
    if "final_norm" in shape.biased:
        found["final_norm.bias"] = ParameterShape(hidden, vector=True)
    if shape.head == "score":
        found["score.weight"] = ParameterShape(shape.labels, hidden)
        if "score" in shape.biased:
            found["score.bias"] = ParameterShape(shape.labels, vector=True)
    elif not shape.tied:
        found["head.weight"] = ParameterShape(shape.vocabulary, hidden)
        if "head" in shape.biased:
            found["head.bias"] = ParameterShape(shape.vocabulary, vector=True)
    return found


def layer_parameters(shape: ModelShape, layer: int) -> Iterator[tuple[str, ParameterShape]]:
    """Yield all parameters that a layer can have; the family's table decides which of the norms exist."""
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    for norm in ("input_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"):
        yield norm, ParameterShape(hidden, vector=True)
    if layer >= shape.layers:
        yield "join", ParameterShape(hidden, 2 * hidden)
        for norm in ("embed_norm", "hidden_norm", "predictor_norm"):
            yield norm, ParameterShape(hidden, vector=True)
    if shape.mla:
        if shape.q_rank:
            yield "q_down", ParameterShape(shape.q_rank, hidden)
            yield "q_rank_norm", ParameterShape(shape.q_rank, vector=True)
            yield "q_up", ParameterShape(width, shape.q_rank)
        else:
            yield "q", ParameterShape(width, hidden)
        yield "kv_down", ParameterShape(shape.kv_rank + shape.rope_dim, hidden)
        yield "kv_rank_norm", ParameterShape(shape.kv_rank, vector=True)
        yield "kv_up", ParameterShape(shape.heads * (shape.head_dim - shape.rope_dim + shape.value_dim), shape.kv_rank)
        yield "o", ParameterShape(hidden, shape.heads * shape.value_dim)
    else:
        yield "q", ParameterShape(width, hidden)
        yield "k", ParameterShape(shape.groups * shape.head_dim, hidden)
        yield "v", ParameterShape(shape.groups * shape.head_dim, hidden)
        yield "o", ParameterShape(hidden, width)
        yield "q_norm", ParameterShape(shape.head_dim, vector=True)
        yield "k_norm", ParameterShape(shape.head_dim, vector=True)
    if shape.is_dense(layer):
        yield from mlp_parameters("", hidden, shape.ffn)
        return
    yield "router", ParameterShape(shape.experts, hidden)
    if shape.router_bias:
        yield "router_bias", ParameterShape(shape.experts, vector=True)
    for expert in range(shape.experts):
        yield from mlp_parameters(f"expert.{expert}.", hidden, shape.expert_ffn)
    if shape.shared_ffn:
        yield "shared_gate", ParameterShape(1, hidden)
        yield from mlp_parameters("shared.", hidden, shape.shared_ffn)


def mlp_parameters(prefix: str, hidden: int, ffn: int) -> Iterator[tuple[str, ParameterShape]]:
    yield f"{prefix}gate", ParameterShape(ffn, hidden)
    yield f"{prefix}up", ParameterShape(ffn, hidden)
    yield f"{prefix}down", ParameterShape(hidden, ffn)


def model_parameters(config: Config, mtp_layers: int = 0) -> tuple[ModelShape, dict[str, ParameterShape]]:
    """Return a model's parameters: those of its shape that its family has names for."""
    family, shape = family_of(config), shape_of(config, mtp_layers)
    named = {
        word
        for names in (family.layer, family.dense, family.experts, family.mtp)
        for spec in names.values()
        for word in spec.split()
    }

    def exists(name: str) -> bool:
        first, *rest = name.split(".")
        if not first.isdigit():
            return True
        return re.sub(r"^expert\.\d+\.", "expert.{e}.", ".".join(rest[:-1])) in named

    return shape, {name: parameter for name, parameter in parameters_of(shape).items() if exists(name)}


def count_mtp_layers(names: Iterable[str], config: Config) -> int:
    """Count the multi-token-prediction layers among the tensor names of a Hugging Face or Megatron checkpoint."""
    family, layers = family_of(config), shape_of(config).layers
    if not family.mtp:
        return 0
    pattern = re.compile(rf"{re.escape(family.prefix + family.layers)}(\d+)\.|.*\bmtp\.layers\.(\d+)\.")
    numbers = [int(match[1] or 0) - layers if match[1] else int(match[2]) for n in names if (match := pattern.match(n))]
    return max([number + 1 for number in numbers if number >= 0], default=0)
