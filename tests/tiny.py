"""Tiny random models of every architecture that the tests cover, and folders of them with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from posttrain.config.sections import ModelConfig
from posttrain.models.adapters import add_adapters, save_adapter

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
CHARACTERS = tuple("\n" + "".join(map(chr, range(32, 127))))
VOCABULARY = 104  # 102 tokens, rounded up as real models do

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SPECIAL_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 5, "pad_token_id": 0}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **_SPECIAL_IDS,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2}  # the first layer is dense
_GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gpt2": (GPT2Config, _GPT2 | _SPECIAL_IDS),
    "llama": (LlamaConfig, _COMMON),
    "qwen2": (Qwen2Config, _COMMON | {"tie_word_embeddings": True}),
    "qwen2_untied": (Qwen2Config, _COMMON | {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, _COMMON | {"head_dim": 8}),
    "mixtral": (MixtralConfig, _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (DeepseekV3Config, _COMMON | _DEEPSEEK),
    "gemma2": (Gemma2Config, _COMMON | {"head_dim": 8, "sliding_window": 8}),
    "mistral": (MistralConfig, _COMMON | {"sliding_window": 8}),
}
NAMES = tuple(CONFIGS)  # tests/recorded has numbers of these
CONFIGS |= {
    "llama_odd": (LlamaConfig, _COMMON | {"vocab_size": VOCABULARY - 1}),
    "qwen2_moe": (Qwen2MoeConfig, _COMMON | _EXPERTS | _SHARED),
    "qwen3_moe": (Qwen3MoeConfig, _COMMON | _EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "deepseek_v2": (DeepseekV2Config, _COMMON | _DEEPSEEK | {"topk_method": "group_limited_greedy"}),
}
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def tiny_model(name: str, *, head: str = "token", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in eval mode; `changes` are fields of its config."""
    config_class, fields = CONFIGS[name]
    config = config_class(**(fields | changes))
    if head == "score":
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too: a lost one must show
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, <unk> for all others, and a template in the manner of ChatML."""
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["</s>", "<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def tiny_folder(name: str, tmp_path: Path, *, head: str = "token", seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face folder with a tiny model and its tokenizer."""
    folder = tmp_path / f"tiny-{name}-{head}"
    tiny_model(name, head=head, seed=seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def saved_adapter(model: PreTrainedModel, folder: Path, rank: int, targets: tuple[str, ...] = ("all-linear",)) -> Path:
    """Add an adapter that changes the outputs, and save it."""
    add_adapters(model, ModelConfig(lora_rank=rank, lora_target_modules=targets), "token")
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    save_adapter(model, folder)
    return folder
