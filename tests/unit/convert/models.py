"""Tiny random checkpoints of every model family."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.convert.conversion import convert
from posttrain.convert.source import open_source

VOCABULARY = 101  # odd: it has to be padded
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
STOCK = {
    "llama": COMMON,
    "llama-biased": COMMON | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied": COMMON | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": COMMON | {"tie_word_embeddings": True},
    "qwen3": COMMON | {"head_dim": 6},
    "qwen3_moe": COMMON | {"num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [2]},
    "qwen2_moe": COMMON
    | {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "mlp_only_layers": [2],
    },
    "minicpm3": COMMON
    | {key: DEEPSEEK[key] for key in DEEPSEEK if "rank" in key or key.endswith("head_dim") or "key_value" in key},
    "hunyuan_v1_dense": COMMON,
    "hunyuan_v1_moe": COMMON | {"num_experts": 4, "num_shared_expert": 1, "moe_topk": 2},
    "mistral": COMMON,
    "mixtral": COMMON | {"num_local_experts": 4},
    "phimoe": COMMON | {"num_local_experts": 4},
    "phimoe-biased": COMMON
    | {"model_type": "phimoe", "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 4, "n_head": 4},
    "deepseek_v2": COMMON | DEEPSEEK,
    "deepseek_v2-lite": COMMON | DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": COMMON | DEEPSEEK,
    "deepseek_v3-later": COMMON | DEEPSEEK | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
    "llama-wide": COMMON | {"model_type": "llama", "num_key_value_heads": 4},
    "gemma": COMMON,
    "gemma2": COMMON,
    "phi3": COMMON,
    "glm": COMMON | {"attention_bias": True},
    "glm4": COMMON | {"attention_bias": True},
    "gpt2": {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 4},
}
SIZES = (VOCABULARY, 16, 24)


def written_by_hand():
    """Families without code in transformers: names and shapes as their authors' files have them."""
    vocabulary, hidden, ffn = SIZES
    basic = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"tie_word_embeddings": False}
    internlm2 = {"model.tok_embeddings.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    baichuan = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    chatglm = {
        "transformer.embedding.word_embeddings.weight": (vocabulary, hidden),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (vocabulary, hidden),
    }
    internlm2["output.weight"] = baichuan["lm_head.weight"] = (vocabulary, hidden)
    for n in range(4):
        internlm2 |= {
            f"model.layers.{n}.attention.wqkv.weight": (32, hidden),
            f"model.layers.{n}.attention.wo.weight": (hidden, hidden),
            f"model.layers.{n}.feed_forward.w1.weight": (ffn, hidden),
            f"model.layers.{n}.feed_forward.w3.weight": (ffn, hidden),
            f"model.layers.{n}.feed_forward.w2.weight": (hidden, ffn),
            f"model.layers.{n}.attention_norm.weight": (hidden,),
            f"model.layers.{n}.ffn_norm.weight": (hidden,),
        }
        baichuan |= {
            f"model.layers.{n}.self_attn.W_pack.weight": (48, hidden),
            f"model.layers.{n}.self_attn.o_proj.weight": (hidden, hidden),
            f"model.layers.{n}.mlp.gate_proj.weight": (ffn, hidden),
            f"model.layers.{n}.mlp.up_proj.weight": (ffn, hidden),
            f"model.layers.{n}.mlp.down_proj.weight": (hidden, ffn),
            f"model.layers.{n}.input_layernorm.weight": (hidden,),
            f"model.layers.{n}.post_attention_layernorm.weight": (hidden,),
        }
        chatglm |= {
            f"transformer.encoder.layers.{n}.self_attention.query_key_value.weight": (32, hidden),
            f"transformer.encoder.layers.{n}.self_attention.query_key_value.bias": (32,),
            f"transformer.encoder.layers.{n}.self_attention.dense.weight": (hidden, hidden),
            f"transformer.encoder.layers.{n}.mlp.dense_h_to_4h.weight": (2 * ffn, hidden),
            f"transformer.encoder.layers.{n}.mlp.dense_4h_to_h.weight": (hidden, ffn),
            f"transformer.encoder.layers.{n}.input_layernorm.weight": (hidden,),
            f"transformer.encoder.layers.{n}.post_attention_layernorm.weight": (hidden,),
        }
    minicpm = {name: shape for name, shape in baichuan.items() if "W_pack" not in name}
    for n in range(4):
        minicpm |= {
            f"model.layers.{n}.self_attn.{parameter}_proj.weight": (rows, hidden)
            for parameter, rows in zip("qkv", (16, 8, 8), strict=True)
        }
    hunyuan, experts, qwen = dict(minicpm), dict(minicpm), {"transformer.wte.weight": (vocabulary, hidden)}
    qwen |= {"lm_head.weight": (vocabulary, hidden), "transformer.ln_f.weight": (hidden,)}
    for n in range(4):
        place, block = f"model.layers.{n}.mlp.", f"transformer.h.{n}."
        for tensors in (hunyuan, experts):
            for part in ("gate", "up", "down"):
                del tensors[f"{place}{part}_proj.weight"]
        matrices = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        experts |= {f"{place}gate.weight": (4, hidden)}
        hunyuan |= {f"{place}gate.wg.weight": (4, hidden)}
        hunyuan |= {f"{place}shared_mlp.{name}.weight": shape for name, shape in matrices.items()}
        hunyuan |= {f"model.layers.{n}.self_attn.{name}_layernorm.weight": (4,) for name in ("query", "key")}
        for e in range(4):
            hunyuan |= {f"{place}experts.{e}.{name}.weight": shape for name, shape in matrices.items()}
            named = zip(("w1", "w3", "w2"), matrices.values(), strict=True)
            experts |= {f"{place}experts.{e}.{name}.weight": shape for name, shape in named}
        qwen |= {
            f"{block}ln_1.weight": (hidden,),
            f"{block}ln_2.weight": (hidden,),
            f"{block}attn.c_attn.weight": (48, hidden),
            f"{block}attn.c_attn.bias": (48,),
            f"{block}attn.c_proj.weight": (hidden, hidden),
            f"{block}mlp.w1.weight": (ffn, hidden),
            f"{block}mlp.w2.weight": (ffn, hidden),
            f"{block}mlp.c_proj.weight": (hidden, ffn),
        }
    listed = {"num_experts": 4, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [ffn] * 4}
    plain = {key: value for key, value in basic.items() if key != "num_key_value_heads"}
    glm = {
        "padded_vocab_size": vocabulary,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_layers": 4,
        "num_attention_heads": 4,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 4,
        "add_qkv_bias": True,
        "tie_word_embeddings": False,
    }
    return {
        "internlm2": (basic | {"model_type": "internlm2", "bias": False}, internlm2),
        "minicpm": (basic | {"model_type": "minicpm", "scale_emb": 12}, minicpm),
        "minicpm-moe": (basic | {"model_type": "minicpm", "num_experts": 4, "num_experts_per_tok": 2}, experts),
        "hunyuan": (basic | listed | {"model_type": "hunyuan", "head_dim": 4}, hunyuan),
        "qwen": (plain | {"model_type": "qwen", "kv_channels": 4, "no_bias": True, "intermediate_size": 2 * ffn}, qwen),
        "baichuan": (plain | {"model_type": "baichuan"}, baichuan),
        "chatglm": (glm | {"model_type": "chatglm"}, chatglm),
    }


NAMES = (*STOCK, *written_by_hand())


def make(name, folder, seed=0):
    """A folder with random weights; of a stock family as transformers saves it."""
    generator = torch.Generator().manual_seed(seed)
    if name in STOCK:
        fields = dict(STOCK[name])
        kind = fields.pop("model_type", name)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        model.save_pretrained(folder)
        if name.endswith("-later"):
            add_predictor(folder, generator)
        return folder
    config, shapes = written_by_hand()[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}, folder / "model.safetensors"
    )
    return folder


def add_predictor(folder, generator):
    """The layer for the token after the next, as DeepSeek-V3's files have it; transformers drops it."""
    tensors = weights(folder)
    place = "model.layers.4."
    shapes = {n.replace("layers.3.", "layers.4."): t.shape for n, t in tensors.items() if "layers.3." in n}
    shapes |= {f"{place}{norm}.weight": (16,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{place}eh_proj.weight"] = (16, 32)
    tensors |= {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors[f"{place}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{place}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")


def weights(folder):
    return load_file(folder / "model.safetensors")


def core(folder, tp=0, pp=0, ep=0, single=""):
    """The state dict of one rank."""
    name = single or f"mp_rank_{tp:02d}_{pp:03d}" + (f"_{ep:03d}" if ep is not None else "")
    return torch.load(folder / "iter_0000001" / name / "model_optim_rng.pt", weights_only=False)


def converted(source, out, layout, kind="hf", **options):
    """Convert a folder; returns the report."""
    opened = open_source(source, kind, None, None)
    try:
        return convert(opened, out, layout, **options)
    finally:
        opened.close()


def assert_equal(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name
