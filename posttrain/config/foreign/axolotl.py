"""axolotl's options: the YAML of `axolotl train`."""

from __future__ import annotations

from typing import Any

from posttrain.config.foreign.datasets import from_datasets
from posttrain.config.foreign.huggingface import (
    ADAPTERS,
    KERNELS,
    LOADER,
    NO_UPLOAD,
    OPTIMIZER,
    PACKING,
    STEP_LOG,
    TRAINING,
    WHOLE_BATCH,
    scheduler,
)
from posttrain.config.foreign.meanings import (
    GROUPED,
    OFFLOADED_ACTIVATIONS,
    Found,
    Given,
    Library,
    Meaning,
    Table,
    absent,
    batch_of,
    by_hand,
    chosen,
    here,
    if_positive,
    if_true,
    listed,
    made,
    needless,
    number,
    ratio,
    truth,
    unrelated,
    with_pattern,
)
from posttrain.config.foreign.trl import GRPO, ROLLOUTS, dpo_loss

KINDS = {
    "dpo": ("dpo",),
    "ipo": ("dpo",),
    "kto": ("kto",),
    "orpo": ("orpo",),
    "simpo": ("simpo",),
    "grpo": GROUPED,
}
VERBS = ("sft", "pretrain", "reward", "prm", "dpo", "kto", "orpo", "simpo", *GROUPED)


def data_sets(option: str) -> Meaning:
    """Translate a list of data sets: their paths, and the columns that their types name."""
    note = "the paths; types and field names become data.map_keys"
    options = (option, "data.map_keys", "data.chat_template") if option == "data.train" else (option, "data.map_keys")
    return made(*options, by=from_datasets(option), note=note)


def adapter(value: Any, given: Given) -> Found | None:
    """qlora needs 4 bits; the rank is an option of its own."""
    return {"model.load_in_4bit": "true"} if value == "qlora" else {} if value == "lora" else None


def held_out(value: Any, given: Given) -> Found | None:
    size = number(value)
    return None if size is None or size >= 1 else {"data.eval_fraction": value} if size else {}


def tracker(name: str, option: str) -> Meaning:
    """Naming a project or a run is enough to use a tracker."""
    return Meaning(
        (option, "log.report_to"),
        f"with log.report_to {name}",
        lambda value, given: {option: value, "log.report_to": [name]},
    )


def unfrozen(value: Any, given: Given) -> Found | None:
    """A range of rows may follow a name there, as in weight$[:32000]."""
    patterns = value if isinstance(value, list) else [str(value)]
    return (
        None
        if any("[:" in pattern or "$[" in pattern for pattern in patterns)
        else {"model.trainable_parameters": patterns}
    )


def template(value: Any, given: Given) -> Found | None:
    """tokenizer_default is the model's own, which is the default here."""
    return {} if value in ("tokenizer_default", "jinja") else {"data.chat_template": value}


def checkpointing(value: Any, given: Given) -> Found | None:
    word = str(value).lower()
    if word.startswith("offload"):
        return OFFLOADED_ACTIVATIONS
    return {"model.gradient_checkpointing": word if word in ("true", "false") else "true"}


def mixed(value: Any, given: Given) -> Found | None:
    return {"model.dtype": "bfloat16"} if truth(value) else {}


COMMON: Table = {
    **TRAINING,
    **ADAPTERS,
    "base_model": "model.path",
    "model_config.* overrides_of_model_config.* processor_type": needless("the model's own configuration counts"),
    "base_model_config model_type tokenizer_type cls_model_config is_*_derived_model": needless("the model says it"),
    "tokenizer_config": "model.tokenizer",
    "special_tokens.pad_token": needless("examples are packed, not padded"),
    "special_tokens special_tokens.* tokens added_tokens_overrides resize_token_embeddings_to_32x": absent(
        "the vocabulary is the model's"
    ),
    "datasets": data_sets("data.train"),
    "pretraining_dataset": Meaning(
        ("data.train", "data.map_keys"),
        "not an option: posttrain pretrain",
        from_datasets("data.train"),
    ),
    "test_datasets": data_sets("data.eval"),
    "val_set_size": made("data.eval_fraction", by=held_out, note="a part of the examples, not a number of them"),
    "dataset_prepared_path dataset_processes dataset_num_proc dataset_shard_num dataset_keep_in_memory": needless(
        "examples are tokenised as they are read; posttrain data preprocess does it before"
    ),
    "shuffle_merged_datasets": "data.shuffle",
    "dataset_exact_deduplication": absent("posttrain data check reports duplicates"),
    "streaming streaming_multipack_buffer_size": needless("files are read as they are used"),
    "sequence_len": "data.max_length",
    "excess_length_strategy": chosen(
        "data.on_overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"}, note="drop is the default there"
    ),
    "eval_sequence_len min_sample_len": needless("data.max_length counts for both; empty examples are refused"),
    "sample_packing sample_packing_* eval_sample_packing pad_to_sequence_len pad_to_multiple_of batch_flattening": (
        PACKING
    ),
    "multipack_real_batches curriculum_sampling": PACKING,
    "train_on_inputs roles_to_train train_on_eos": absent(
        "prompts never count, all assistant turns do with their end", "assistant", "turn"
    ),
    "chat_template": made("data.chat_template", by=template, note="without it the model's own template is used"),
    "chat_template_jinja": here("data.chat_template", "the template, or a file with it"),
    "default_system_message eot_tokens chat_template_kwargs": by_hand(
        "data.chat_template", note="a template of its own; system messages stand in the examples"
    ),
    "adapter": made("model.load_in_4bit", "model.lora_rank", by=adapter, note="lora: a rank; qlora: also 4 bits"),
    "lora_target_modules": listed("model.lora_target_modules"),
    "lora_target_linear": chosen("model.lora_target_modules", {"true": ["all-linear"]}, note="all-linear"),
    "lora_model_dir": by_hand("model.path", note="a run directory, or a model merged by posttrain export"),
    "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel lora_fan_in_fan_out lora_on_cpu": KERNELS,
    "peft_use_dora": "model.use_dora",
    "peft_use_rslora": "model.use_rslora",
    "peft_init_lora_weights": chosen(
        "model.lora_init", {"true": "zeros", "pissa": "pissa", "pissa_niter_16": "pissa_niter_16"}
    ),
    "peft peft.* peft_* loftq_config.* loraplus_* relora relora_*": absent("adapters have no further settings"),
    "gptq bnb_config_kwargs": absent("frozen weights have 4 bits, with model.load_in_4bit, or all of them"),
    "diffusion.* llmcompressor.* nvfp4_* reinit_weights": absent("this way of training does not exist"),
    "unfrozen_parameters": made(
        "model.trainable_parameters", by=unfrozen, note="regular expressions; a weight is trained whole or not at all"
    ),
    "micro_batch_size gradient_accumulation_steps": batch_of(
        "train.batch_size", WHOLE_BATCH, "micro_batch_size", "gradient_accumulation_steps"
    ),
    "batch_size": here("train.batch_size", "examples of an optimizer step"),
    "eval_batch_size": needless("train.micro_batch_tokens bounds every forward pass"),
    "num_epochs": "train.epochs",
    "optimizer": OPTIMIZER,
    "optim_args lr_groups embedding_lr embedding_lr_scale dion_* qgalore_*": absent(
        "optimizers have no further settings"
    ),
    "lr_scheduler": made(
        "train.lr_scheduler", "train.min_lr_ratio", by=scheduler, note="cosine and linear end at 0 there"
    ),
    "cosine_min_lr_ratio": "train.min_lr_ratio",
    "cosine_constant_lr_ratio lr_quadratic_warmup": absent("the schedule has warm-up and one shape"),
    "bf16 bfloat16": made("model.dtype", by=mixed, note="bfloat16; the default on an accelerator"),
    "float16": here("model.dtype", "float16"),
    "fp8": "train.fp8",
    "fp8_*": absent("train.fp8 has one form: a scale per row, gradients of weights in bfloat16"),
    "qat qat.* quantization.*": absent("training does not imitate quantized weights"),
    "gradient_checkpointing": made("model.gradient_checkpointing", "cluster.offload", by=checkpointing),
    "flash_attention xformers_attention sdp_attention flex_attention eager_attention sage_attention": KERNELS,
    "attn_implementation flex_attn_* fused_attn_kernel experts_implementation use_sonicmoe": KERNELS,
    "flash_attn_* flash_optimum plugins liger_* cut_cross_entropy chunked_cross_entropy unsloth_*": KERNELS,
    "evals_per_epoch": by_hand("eval.every_steps", note="counted in steps", harmless=True),
    "saves_per_epoch": by_hand("save.every_steps", note="counted in steps", harmless=True),
    "loss_watchdog_threshold loss_watchdog_patience": unrelated("a run ends at values that are not finite"),
    "early_stopping_patience": by_hand(
        "eval.early_stopping_patience", note="counted in evaluations, with eval.every_steps"
    ),
    "wandb_project": Meaning(
        ("log.project", "log.report_to"),
        "with log.report_to wandb",
        lambda value, given: {"log.project": value, "log.report_to": ["wandb"]},
    ),
    "wandb_name": Meaning(
        ("log.run_name",),
        "with wandb_project",
        lambda value, given: {"log.run_name": value} if given.get("wandb_project") else {},
    ),
    "wandb_entity wandb_run_id wandb_watch wandb_log_model wandb_mode": needless(
        "the variables WANDB_ENTITY and WANDB_MODE"
    ),
    "use_ray ray_num_workers ray_run_name resources_per_worker": by_hand(
        "cluster.ray_address", note="auto, with cluster.devices", harmless=True
    ),
    "use_wandb": by_hand("log.report_to", note="wandb", harmless=True),
    "use_tensorboard": Meaning(
        ("log.report_to",),
        "tensorboard, in the run directory",
        lambda value, given: {"log.report_to": ["tensorboard"]} if truth(value) else {},
    ),
    "mlflow_experiment_name": tracker("mlflow", "log.project"),
    "mlflow_run_name": tracker("mlflow", "log.run_name"),
    "use_mlflow": if_true({"log.report_to": ["mlflow"]}, note="mlflow"),
    "mlflow_*": needless("the variable MLFLOW_TRACKING_URI"),
    "trackio_project_name": tracker("trackio", "log.project"),
    "trackio_run_name": tracker("trackio", "log.run_name"),
    "use_trackio": if_true({"log.report_to": ["trackio"]}, note="trackio"),
    "trackio_* comet_* use_comet": unrelated("log.report_to takes tensorboard, wandb, trackio, mlflow and swanlab"),
    "auto_resume_from_checkpoints": by_hand("resume", "output_dir", note="continues the run in output_dir"),
    "fsdp_version fsdp_config.* deepcompile dp_shard_size dp_replicate_size": by_hand(
        "cluster.zero_stage", note="several devices share a model by FSDP2 without further settings", harmless=True
    ),
    "tensor_parallel_size": "cluster.tensor_parallel_size",
    "context_parallel_size sequence_parallel_degree": here(
        "cluster.context_parallel_size", "a ring only where the heads do not suffice, or with cluster.ulysses_degree 1"
    ),
    "heads_k_stride ring_attn_func": needless("keys and values of all heads are sent together, from chunks in zig-zag"),
    "debug strict profiler_steps gc_steps include_tkps logging_steps": STEP_LOG,
    "device_map max_memory gpu_memory_limit low_cpu_mem_usage world_size ddp": LOADER,
    "hub_revision push_dataset_to_hub hf_use_auth_token": NO_UPLOAD,
    "rl": Meaning(note="not an option: the verb here", verbs=KINDS),
    "reward_model": Meaning(note="not an option: posttrain reward", verbs={"true": ("reward",)}),
    "process_reward_model": Meaning(note="not an option: posttrain prm", verbs={"true": ("prm",)}),
}
DPO: Table = {
    "rl_beta": "algo.beta",
    "dpo_label_smoothing": "algo.label_smoothing",
    "precompute_ref_log_probs": "algo.precompute_reference",
    "dpo_loss_type": made("algo.loss_type", "algo.length_normalize", by=dpo_loss, note="sigmoid, hinge, ipo or robust"),
    "dpo_loss_weights rpo_alpha": by_hand("algo.sft_coef", note="the weight of the SFT loss"),
    "dpo_use_weighting": absent("this variant of the loss does not exist"),
    "dpo_use_logits_to_keep": KERNELS,
    "rl": Meaning(
        ("algo.loss_type",),
        "not an option: the verb here; ipo is a loss of dpo",
        lambda value, given: {"algo.loss_type": "ipo", "algo.length_normalize": "true"} if value == "ipo" else {},
        verbs=KINDS,
    ),
}
KTO: Table = {
    "rl_beta": "algo.beta",
    "kto_desirable_weight": "algo.desirable_weight",
    "kto_undesirable_weight": "algo.undesirable_weight",
}
ORPO: Table = {"orpo_alpha rl_beta": here("algo.odds_ratio_coef", "the paper's lambda")}


SIMPO: Table = {
    "rl_beta": "algo.beta",
    "simpo_gamma": ratio("algo.gamma_beta_ratio", "rl_beta", note="divided by rl_beta"),
    "cpo_alpha": "algo.sft_coef",
}
REWARD: Table = {"center_rewards_coefficient": "algo.center_coef", "num_labels": needless("a reward is one number")}


def own_names(table: Table) -> dict[str, str | Meaning]:
    """Return the rows of TRL's table whose values depend on no other option."""
    return {names: entry for names, entry in table.items() if not names.startswith(("per_device", "vllm_", "use_vllm"))}


ONLINE_ROWS: Table = {
    **with_pattern("trl", own_names(ROLLOUTS)),
    **with_pattern("trl", GRPO),
    "micro_batch_size gradient_accumulation_steps": ROLLOUTS["per_device_train_batch_size gradient_accumulation_steps"],
    "sequence_len": here("data.max_length", "tokens of a prompt"),
    "max_prompt_len": "data.max_length",
    "trl.use_vllm": ROLLOUTS["use_vllm"],
    "trl.vllm_mode": ROLLOUTS["vllm_mode"],
    "trl.vllm_*": needless("engines are started by the run; rollout.vllm_options passes options on"),
    "vllm.gpu_memory_utilization vllm.max_model_len vllm.tensor_parallel_size vllm.enable_prefix_caching": by_hand(
        "rollout.vllm_options", note="by the same names, with rollout.engine vllm"
    ),
    "vllm.*": needless("engines are started by the run; rollout.vllm_options passes options on"),
    "trl.reward_num_workers": if_positive("reward.workers"),
    "trl.async_prefetch trl.prefetch_depth": by_hand("rollout.ahead", note="batches in advance; 0 is on-policy"),
    "trl.skip_zero_advantage_batches trl.reroll_*": by_hand(
        "rollout.dynamic_sampling", note="groups with equal rewards are replaced"
    ),
    "trl.*": absent("a setting of axolotl's own GRPO trainer"),
}

AXOLOTL = Library(
    "axolotl",
    (
        (VERBS, COMMON),
        (("dpo",), DPO),
        (("kto",), KTO),
        (("orpo",), ORPO),
        (("simpo",), SIMPO),
        (("reward",), REWARD),
        (GROUPED, ONLINE_ROWS),
    ),
    defaults=(
        (
            VERBS,
            {
                "lr_scheduler": "cosine",
                "micro_batch_size": "1",
                "num_epochs": "1",
                "adam_beta2": "0.999",
                "seed": "42",
                "sequence_len": "512",
            },
        ),
        (("dpo", "kto", "simpo"), {"rl_beta": "0.1"}),
    ),
    default_verb="sft",
)
