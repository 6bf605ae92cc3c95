"""LLaMA-Factory's options: the flat YAML of llamafactory-cli train."""

from __future__ import annotations

import math
import re
from typing import Any

from posttrain.config.foreign.datasets import from_dataset_info
from posttrain.config.foreign.huggingface import ADAPTERS, DEFAULTS, KERNELS, PACKING, TRAINING
from posttrain.config.foreign.meanings import (
    DEVICES,
    EVERY,
    REFERENCED,
    Found,
    Given,
    Library,
    Meaning,
    Table,
    TranslationError,
    absent,
    by_hand,
    chosen,
    here,
    if_true,
    items,
    listed,
    made,
    needless,
    number,
    part_of,
    positive_only,
    ratio,
    reward_model,
    truth,
    unrelated,
)

STAGES = {
    "pt": ("pretrain",),
    "sft": ("sft",),
    "rm": ("reward",),
    "ppo": ("ppo",),
    "dpo": ("dpo", "orpo", "simpo"),
    "kto": ("kto",),
}


def adapter(value: Any, given: Given) -> Found | None:
    """LoRA has rank 8 there unless it is given, and an alpha of twice the rank; `freeze` trains the last 2 layers."""
    if value == "full":
        return {}
    if value == "freeze":
        return {"model.trainable_layers": given.get("freeze_trainable_layers") or "2"}
    if value != "lora":
        return None
    rank = given.get("lora_rank") or "8"
    alpha = given.get("lora_alpha") or f"{2 * (number(rank) or 8):g}"
    return {"model.lora_rank": rank, "model.lora_alpha": alpha}


def with_lora(option: str, note: str = "") -> Meaning:
    """Counts only with finetuning_type lora, the default."""
    return Meaning(
        (option,), note, lambda value, given: {option: value} if given.get("finetuning_type", "lora") == "lora" else {}
    )


def targets(value: Any, given: Given) -> Found:
    if given.get("finetuning_type", "lora") != "lora":
        return {}
    return {"model.lora_target_modules": ["all-linear"] if value in ("all", ["all"]) else items(value)}


def pissa(value: Any, given: Given) -> Found | None:
    """16 iterations are the default there; -1 is the exact decomposition."""
    if not truth(value) or given.get("finetuning_type", "lora") != "lora":
        return {}
    names = {"16": "pissa_niter_16", "-1": "pissa"}
    name = names.get(str(given.get("pissa_iter", "16")))
    return None if name is None else {"model.lora_init": name}


def with_freeze(option: str, note: str) -> Meaning:
    """Counts only with finetuning_type freeze."""
    return Meaning(
        (option,), note, lambda value, given: {option: value} if given.get("finetuning_type") == "freeze" else {}
    )


def with_swanlab(option: str) -> Meaning:
    """Counts only with use_swanlab."""
    return Meaning(
        (option,), "with use_swanlab", lambda value, given: {option: value} if truth(given.get("use_swanlab")) else {}
    )


def extra_modules(value: Any, given: Given) -> Found:
    """A weight is trained if its name has the module's in it."""
    if given.get("finetuning_type") != "freeze":
        return {}
    return {"model.trainable_parameters": [f".*{re.escape(name)}" for name in items(value)]}


def held_out(value: Any, given: Given) -> Found | None:
    size = number(value)
    return {"data.eval_fraction": value} if size is not None and 0 < size < 1 else {} if size == 0 else None


def checkpointing(value: Any, given: Given) -> Found:
    return {"model.gradient_checkpointing": "false" if str(value).lower() == "true" else "true"}


def loss(value: Any, given: Given) -> Found | None:
    """IPO is a mean over tokens there."""
    if value not in ("sigmoid", "hinge", "ipo"):
        return None
    return {"algo.loss_type": value} | ({"algo.length_normalize": "true"} if value == "ipo" else {})


def mixing(value: Any, given: Given) -> Found | None:
    """concat is the default; the others interleave with interleave_probs."""
    if value == "concat":
        return {}
    if "interleave_probs" not in given or value not in ("interleave_under", "interleave_over"):
        return None
    return {"data.repeat": "true" if value == "interleave_over" else "false"}


def ppo_batch(value: Any, given: Given) -> Found | None:
    """The product is a mini-batch there, and ppo_buffer_size of them a rollout batch."""
    if DEVICES not in given:
        raise TranslationError("a size per device, and the number of devices is not known. Give it with --devices N")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", DEVICES)
    size = round(math.prod(number(given.get(name, "1")) or 0 for name in names))
    buffer = round(number(given.get("ppo_buffer_size", "1")) or 1)
    return {"train.batch_size": str(size * buffer)} | ({"algo.mini_batch_size": str(size)} if buffer > 1 else {})


def datasets(stage: str) -> dict[str, str | Meaning]:
    """Return the rows of the names in dataset_info.json, for one of their stages."""
    note = "the files and columns of the names in dataset_info.json"
    return {
        "dataset": made("data.train", "data.map_keys", by=from_dataset_info("data.train", stage), note=note),
        "eval_dataset": made("data.eval", "data.map_keys", by=from_dataset_info("data.eval", stage), note=note),
    }


PREFERENCES = Meaning(
    note="not an option: orpo and simpo are verbs",
    verbs={"orpo": ("orpo",), "simpo": ("simpo",), **dict.fromkeys(("sigmoid", "hinge", "ipo"), ("dpo",))},
)
OTHER_METHODS = absent("this way of training does not exist")

COMMON: Table = {
    **TRAINING,
    **{key: value for key, value in ADAPTERS.items() if key not in ("lora_r", "lora_alpha", "lora_dropout")},
    "stage": Meaning(note="not an option: the verb here", verbs=STAGES),
    "model_name_or_path": "model.path",
    "adapter_name_or_path": by_hand("model.path", note="a run directory, or a model merged by posttrain export"),
    "template": here("data.chat_template", "without it the model's own template is used"),
    **datasets("sft"),
    "dataset_dir media_dir": needless("data.train takes paths; data.map_keys names the columns"),
    "cutoff_len": "data.max_length",
    "max_samples": here("data.max_examples", "of all sources, or of each with data.weights"),
    "val_size": made("data.eval_fraction", by=held_out, note="a part of the examples, not a number of them"),
    "mix_strategy": made(
        "data.weights", "data.repeat", by=mixing, note="weights interleave; data.repeat is interleave_over"
    ),
    "interleave_probs": listed("data.weights"),
    "finetuning_type": made(
        *("model.lora_rank", "model.lora_alpha", "model.trainable_layers"),
        by=adapter,
        note="a rank above 0 is lora, 0 is full; freeze is model.trainable_layers",
    ),
    "lora_rank": with_lora("model.lora_rank"),
    "lora_alpha": with_lora("model.lora_alpha", "16 by default, there twice the rank"),
    "lora_dropout": with_lora("model.lora_dropout"),
    "lora_target": made("model.lora_target_modules", by=targets, note="all is all-linear"),
    "quantization_bit": chosen("model.load_in_4bit", {"4": "true"}, note="4 bits only"),
    "quantization_method quantization_type double_quantization quantization_device_map": needless(
        "model.load_in_4bit is NF4 with double quantisation"
    ),
    "disable_gradient_checkpointing": made("model.gradient_checkpointing", by=checkpointing, note="turned round"),
    "use_reentrant_gc use_unsloth_gc": needless("model.gradient_checkpointing has one form"),
    "moe_aux_loss_coef": "model.router_aux_loss_coef",
    "flash_attn enable_liger_kernel use_unsloth use_v1_kernels low_cpu_mem_usage upcast_layernorm": KERNELS,
    "fp8": "train.fp8",
    "fp8_* nvfp4*": absent("train.fp8 has one form: a scale per row, gradients of weights in bfloat16"),
    "image_* video_* audio_* use_audio_in_video crop_to_patches": unrelated("models of text alone"),
    "predict_with_generate": needless("posttrain generate and posttrain eval do this"),
    "fsdp_*": by_hand(
        "cluster.zero_stage", note="several devices share a model by FSDP2 without further settings", harmless=True
    ),
    "pure_bf16": unrelated("weights in half precision have float32 masters"),
    "packing neat_packing ignore_pad_token_for_loss": PACKING,
    "train_on_prompt mask_history": absent("prompts never count, all assistant turns do"),
    "overwrite_cache preprocessing_num_workers preprocessing_batch_size tokenized_path": needless(
        "examples are tokenised as they are read; posttrain data preprocess does it before"
    ),
    "streaming buffer_size": needless("files are read as they are used"),
    "disable_shuffling": chosen("data.shuffle", {"true": "false", "false": "true"}, note="turned round"),
    "early_stopping_steps": by_hand(
        "eval.early_stopping_patience", note="counted in evaluations, with eval.every_steps"
    ),
    "eval_on_each_dataset compute_accuracy include_effective_tokens_per_second": unrelated(
        "the evaluation has one result; metrics.jsonl holds it with the throughput"
    ),
    "default_system tool_format enable_thinking preserve_thinking": by_hand(
        "data.chat_template", note="a template of its own; system messages and tools stand in the examples"
    ),
    "use_fast_tokenizer split_special_tokens cache_dir model_revision hf_hub_token ms_hub_token": needless(
        "the model's directory or cached snapshot is used as it is"
    ),
    "resize_vocab add_tokens add_special_tokens new_special_tokens_config init_special_tokens": absent(
        "the vocabulary is the model's"
    ),
    "rope_scaling shift_attn mixture_of_depths train_from_scratch": absent("the model is used as its directory says"),
    "use_rslora": with_lora("model.use_rslora"),
    "use_dora": with_lora("model.use_dora"),
    "pissa_init": made("model.lora_init", by=pissa, note="pissa with pissa_iter -1, pissa_niter_16 with 16"),
    "pissa_iter": part_of("model.lora_init", "16, or -1 for the exact decomposition"),
    "pissa_convert": needless("adapters that began with PiSSA are always saved as plain LoRA of twice the rank"),
    "freeze_trainable_layers": with_freeze("model.trainable_layers", "with finetuning_type freeze"),
    "freeze_trainable_modules": absent("all weights of a layer are trained, or none", "all"),
    "freeze_extra_modules": made("model.trainable_parameters", by=extra_modules, note="with finetuning_type freeze"),
    "use_muon": if_true({"train.optimizer": "muon"}, note="muon"),
    "create_new_adapter additional_target loraplus_* use_llama_pro freeze_* oft_* module_dropout": OTHER_METHODS,
    "use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini use_mca": OTHER_METHODS,
    "use_swanlab": if_true({"log.report_to": ["swanlab"]}, note="swanlab"),
    "swanlab_project": with_swanlab("log.project"),
    "swanlab_run_name": with_swanlab("log.run_name"),
    "swanlab_logdir": with_swanlab("log.tracker_dir"),
    "swanlab_*": needless("swanlab's own variables, such as SWANLAB_MODE and SWANLAB_API_KEY"),
    "use_dft_loss": absent("an option of posttrain sft alone: --algo.loss_type dft"),
    "use_asft_loss asft_alpha use_eaft_loss eaft_alpha": absent("the loss is the plain one"),
    "infer_backend infer_dtype vllm_* sglang_* export_*": needless("posttrain generate, serve and export do this"),
    "ray_run_name ray_storage_path ray_num_workers resources_per_worker placement_strategy": by_hand(
        "cluster.ray_address", note="auto, with cluster.devices", harmless=True
    ),
}
PREFERENCE: Table = {"pref_loss": PREFERENCES}
DPO: Table = {
    "pref_beta": "algo.beta",
    "pref_ftx": "algo.sft_coef",
    "dpo_label_smoothing": "algo.label_smoothing",
    "pref_loss": Meaning(
        ("algo.loss_type", "algo.length_normalize"),
        "sigmoid, hinge, ipo with algo.length_normalize; orpo and simpo are verbs",
        loss,
        verbs=PREFERENCES.verbs,
    ),
    "pref_bco_weight ld_alpha": absent("this variant of the loss does not exist"),
}
REFERENCE: Table = {
    "ref_model": "algo.reference",
    "ref_model_adapters ref_model_quantization_bit": by_hand("algo.reference", note="a run directory or merged model"),
}
KTO: Table = {
    "pref_beta": "algo.beta",
    "kto_chosen_weight": "algo.desirable_weight",
    "kto_rejected_weight": "algo.undesirable_weight",
    "pref_ftx": absent("this trainer has no SFT term"),
}
PPO: Table = {
    "per_device_train_batch_size gradient_accumulation_steps ppo_buffer_size": made(
        "train.batch_size",
        "algo.mini_batch_size",
        by=ppo_batch,
        note="train.batch_size: prompts of a batch, all of the product; algo.mini_batch_size: without ppo_buffer_size",
    ),
    "reward_model": reward_model(),
    "reward_model_type reward_model_adapters reward_model_quantization_bit": by_hand(
        "reward.functions", note="model:PATH, or http://... for an API"
    ),
    "ref_model": "algo.reference",
    "ppo_epochs": "algo.epochs_per_batch",
    "ppo_target": here("algo.kl_target", "the KL of a completion"),
    "ppo_score_norm": if_true({"reward.normalize": "running"}, note="running"),
    "ppo_whiten_rewards": absent("advantages are whitened, algo.whiten_advantages, rewards are not"),
    "cutoff_len": here("data.max_length", "tokens of a prompt"),
    "max_new_tokens": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": positive_only("rollout.top_k"),
    "do_sample num_beams repetition_penalty length_penalty": absent(
        "rollouts are drawn from the policy itself", "true", "1", "1.0"
    ),
}

VERBS = tuple(verb for verb in EVERY if verb in ("pretrain", "sft", "reward", "dpo", "kto", "simpo", "orpo", "ppo"))
LLAMA_FACTORY = Library(
    "LLaMA-Factory",
    (
        (VERBS, COMMON),
        (("pretrain",), datasets("pt")),
        (("kto",), datasets("kto")),
        (("dpo", "orpo", "simpo"), PREFERENCE),
        (REFERENCED, REFERENCE),
        (("dpo",), DPO),
        (("kto",), KTO),
        (("orpo",), {"pref_beta": here("algo.odds_ratio_coef", "the paper's lambda")}),
        (
            ("simpo",),
            {
                "pref_beta": "algo.beta",
                "pref_ftx": "algo.sft_coef",
                "simpo_gamma": ratio("algo.gamma_beta_ratio", "pref_beta", note="divided by pref_beta"),
            },
        ),
        (("ppo",), PPO),
    ),
    defaults=(
        (
            VERBS,
            {**DEFAULTS, "finetuning_type": "lora", "cutoff_len": "2048", "lora_target": "all"},
        ),
        (("dpo", "kto", "simpo", "orpo"), {"pref_beta": "0.1"}),
        (("simpo",), {"simpo_gamma": "0.5"}),
        (("ppo",), {"max_new_tokens": "1024", "temperature": "0.95", "top_p": "0.7", "top_k": "50"}),
    ),
    default_verb="sft",
)
