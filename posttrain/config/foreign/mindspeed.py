"""MindSpeed-RL's nested YAML, and the flags of MindSpeed-LLM's training scripts."""

from __future__ import annotations

from typing import Any

from posttrain.config.foreign.huggingface import KERNELS, NO_REMOTE_CODE, PACKING, SAVES_ALL, STEP_LOG
from posttrain.config.foreign.meanings import (
    EVERY,
    EXPERTS_BY_TENSORS,
    GROUPED,
    ONLINE,
    STEP_TOKENS,
    Found,
    Given,
    Library,
    Meaning,
    Table,
    TranslationError,
    absent,
    as_meaning,
    by_hand,
    chosen,
    here,
    if_positive,
    if_true,
    is_off,
    items,
    listed,
    made,
    needless,
    number,
    offload,
    part_of,
    positive_only,
    ratio,
    sequence_parallel,
    truth,
    unrelated,
    vllm,
    with_pattern,
)

PACKED_PASSES = needless("micro-batches of a pipeline are packed by tokens: train.micro_batch_tokens")
MEGATRON = unrelated("a setting of Megatron or MindSpeed: models are Hugging Face directories divided by FSDP2")
MICRO = by_hand(
    "train.micro_batch_tokens", note="tokens of a forward pass, not samples; does not change the result", harmless=True
)
LOADING = needless("resume loads all of a checkpoint; without it only model.path is loaded")
HF_ONLY = "a Hugging Face directory; posttrain convert makes one from Megatron weights"


ROLE_DEVICES = "of a role; cluster.devices counts all of them together"
SHAPES = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
DTYPE = if_true({"model.dtype": "bfloat16"}, note="bfloat16; the default on an accelerator")


def optimizer(*prefixes: str) -> dict[str, str | Meaning]:
    """Return the rows of a section; `prefixes`: where its rate may stand."""
    return {
        "lr": "train.learning_rate",
        "min_lr": ratio("train.min_lr_ratio", *(f"{prefix}lr" for prefix in prefixes), note="as a part of the peak"),
        "lr_decay_style": chosen("train.lr_scheduler", SHAPES, note="cosine, linear or constant"),
        "lr_warmup_fraction": "train.warmup_ratio",
        "lr_warmup_iters": "train.warmup_steps",
        "lr_decay_iters": needless("the schedule lasts as long as the run"),
        "weight_decay": "train.weight_decay",
        "clip_grad": "train.max_grad_norm",
        "adam_beta1": "train.adam_beta1",
        "adam_beta2": "train.adam_beta2",
        "adam_eps": absent("AdamW's epsilon is fixed", "1e-8", "1e-08", "1.0e-8"),
        "initial_loss_scale": unrelated("bfloat16 needs no loss scale"),
    }


def held_out(value: Any, given: Given) -> Found | None:
    """Translate 95,5,0: parts of training, evaluation and test."""
    parts = [number(part) for part in items(value)]
    if len(parts) < 2 or None in parts or not sum(part or 0 for part in parts):
        return None
    share = (parts[1] or 0) / sum(part or 0 for part in parts)
    return {"data.eval_fraction": f"{share:g}"} if share else {}


def evaluated(value: Any, given: Given) -> Found:
    """There the interval is always set; it counts if there is something to evaluate."""
    split = next((given[name] for name in ("split", "megatron_training.split") if name in given), "")
    return {"eval.every_steps": value} if held_out(split, given) else {}


def reward_path(value: Any, given: Given) -> Found:
    return {} if truth(given.get("rl_config.rule_reward")) else {"reward.functions": [f"model:{value}"]}


UNTIL_MAY_2025 = ("experience_count", "colocate_actor_ref", "colocate_all_models")
SINCE_MAY_2025 = (
    *("use_integrated_worker", "guarantee_order", "integrated_mode_config", "actor_rollout_dispatch_size"),
    *("actor_logprob_dispatch_size", "ref_dispatch_size", "adv_dispatch_size", "actor_update_dispatch_size"),
    *("use_remove_padding", "token_level_loss", "use_kl_in_reward", "clip_higher_enable", "zmq_communication"),
    *("use_dp_batch_balance", "filter_groups_enable", "async_engine"),
)


def has_key(given: Given, names: tuple[str, ...]) -> bool:
    starts = tuple(f"rl_config.{name}" for name in names)
    return any(name.startswith(starts) for name in given)


def is_earlier(given: Given) -> bool:
    """Whether a file was written for a release before May 2025, whose sizes and losses mean something else."""
    return has_key(given, UNTIL_MAY_2025) and not has_key(given, SINCE_MAY_2025)


def completions(value: Any, given: Given) -> Found | None:
    """Completions in releases before May 2025, prompts since; without a key that tells, by the size of the batch."""
    size = number(value)
    batch, count = (
        number(given.get(n)) for n in ("megatron_training.global_batch_size", "rl_config.n_samples_per_prompt")
    )
    if size is None or batch is None or count is None:
        return None
    if is_earlier(given):
        return {"algo.mini_batch_size": value}
    if has_key(given, SINCE_MAY_2025):
        return {"algo.mini_batch_size": f"{size * count:g}"}
    if size <= batch and batch * count != size:
        raise TranslationError(
            f"{size:g} may count prompts or completions, depending on the release. Give --algo.mini_batch_size "
            f"{size * count:g} if they are prompts (of 2025 and later), {size:g} if they are completions"
        )
    return {"algo.mini_batch_size": value}


SHARING = ("use_integrated_worker", "colocate_all_models")


def placed(given: Given) -> dict[str, int]:
    """Return the devices that each role has for itself."""
    shared = any(truth(given.get(f"rl_config.{name}")) for name in SHARING)
    found = {}
    for role in ("actor", "reference", "reward", "critic"):
        own = role == "actor" or not (
            shared or (role == "reference" and truth(given.get("rl_config.colocate_actor_ref")))
        )
        unused = role == "reward" and truth(given.get("rl_config.rule_reward"))
        amount = number(given.get(f"rl_config.{role}_resource.num_npus")) or 0
        found[role] = round(amount) if own and not unused else 0
    return found


def all_devices(value: Any, given: Given) -> Found:
    return {"cluster.devices": str(sum(placed(given).values()))}


def role_devices(role: str) -> Meaning:
    """Translate the devices of a role, unless it shares those of the policy."""

    def translate(value: Any, given: Given) -> Found:
        devices = placed(given)[role]
        return {f"cluster.{role}_devices": str(devices)} if devices else {}

    return made(f"cluster.{role}_devices", by=translate, note=ROLE_DEVICES)


def template_name(prefix: str) -> Meaning:
    """Translate prompt_type, a name in the file prompt_type_path if that is given."""

    def translate(value: Any, given: Given) -> Found:
        file = given.get(f"{prefix}prompt_type_path")
        return {"data.chat_template": f"{file}:{value}" if file else value}

    return made("data.chat_template", by=translate, note="FILE.json:NAME with prompt_type_path")


def stage_layers(value: Any, given: Given) -> Found:
    return {} if is_off(value) else {"cluster.pipeline_layers_per_stage": items(value)}


def virtual_stages(value: Any, given: Given) -> Found | None:
    """Translate layers of a virtual stage to stages per device; by hand where the number of layers is not given."""
    if is_off(value):
        return {}
    sections = ("", "actor_config.", "megatron_training.")
    found = [
        next((size for section in sections if (size := number(given.get(section + name)))), None)
        for name in ("num_layers", "pipeline_model_parallel_size")
    ]
    each, layers, ranks = number(value), *found
    if not each or not layers or not ranks or layers % (each * ranks):
        return None
    stages = {"cluster.virtual_pipeline_parallel_size": f"{layers / each / ranks:g}"}
    return stages | {"cluster.pipeline_schedule": "interleaved"} if layers > each * ranks else {}


PARALLEL: Table = {
    "tensor_model_parallel_size": "cluster.tensor_parallel_size",
    "context_parallel_size": "cluster.context_parallel_size",
    "ulysses_degree_in_cp": "cluster.ulysses_degree",
    "expert_model_parallel_size": "cluster.expert_parallel_size",
    "pipeline_model_parallel_size": "cluster.pipeline_parallel_size",
    "num_layer_list": made("cluster.pipeline_layers_per_stage", by=stage_layers, note="numbers, stage by stage"),
    "num_layers_per_virtual_pipeline_stage": made(
        *("cluster.virtual_pipeline_parallel_size", "cluster.pipeline_schedule"),
        by=virtual_stages,
        note="stages per device: the layers divided by this number and by the pipeline size; with interleaved",
    ),
    "sequence_parallel": sequence_parallel(
        *(f"{section}tensor_model_parallel_size" for section in ("", "actor_config.", "megatron_training."))
    ),
    "expert_tensor_parallel_size": EXPERTS_BY_TENSORS,
    "noop_layers": unrelated("stages may have different numbers of layers: cluster.pipeline_layers_per_stage"),
}
RUN: Table = {
    "global_batch_size": "train.batch_size",
    "micro_batch_size": MICRO,
    "train_iters": "train.max_steps",
    "save_interval": "save.every_steps",
    "eval_interval": made("eval.every_steps", by=evaluated, note="where split leaves examples for evaluation"),
    "eval_iters": needless("all examples of data.eval are evaluated"),
    "log_interval": STEP_LOG,
    "seed": here("seed"),
    "tokenizer_name_or_path": "model.tokenizer",
    "tokenizer_type tokenizer_not_use_fast padded_vocab_size make_vocab_size_divisible_by": needless(
        "the tokenizer and vocabulary are the model's"
    ),
    "data_path": listed("data.train", "files, or what the preprocessing there wrote"),
    "split": made("data.eval_fraction", by=held_out, note="the second part of the three"),
    "dataset_additional_keys": needless("reward functions get all columns"),
    "no_shuffle": made(
        "data.shuffle",
        by=lambda value, given: {"data.shuffle": "false"} if truth(value) else {},
        note="no_shuffle turned round",
    ),
    "full_shuffle_instruction_dataset": needless("every epoch has an order of its own"),
    "bf16": DTYPE,
    "fp16": if_true({"model.dtype": "float16"}, note="float16"),
    "recompute_activation_function": KERNELS,
    "recompute_granularity recompute_method recompute_num_layers": made(
        "model.gradient_checkpointing",
        by=lambda value, given: {} if is_off(value) else {"model.gradient_checkpointing": "true"},
        note="activations of every layer are recomputed",
    ),
    "finetune no_load_optim no_load_rng": LOADING,
    "no_save_optim no_save_rng": SAVES_ALL,
    "use_flash_attn use_fused_* reuse_fp32_param swap_attention": KERNELS,
    "variable_seq_lengths no_pad_to_seq_lengths reset_position_ids is_instruction_dataset": PACKING,
    "attention_dropout hidden_dropout": needless("the model's own dropout is always off"),
    "use_tensorboard": if_true({"log.report_to": ["tensorboard"]}, note="tensorboard"),
}


STAGES = {
    "ray_grpo": ("grpo",),
    "ray_dapo": ("grpo",),
    "ray_ppo": ("ppo",),
    "sft": ("sft",),
    "dpo": ("dpo",),
    "ray_online_dpo": ("iterative-dpo",),
}
SHARED_OPTIMIZER = optimizer("actor_config.", "megatron_training.")
SHARED_OPTIMIZER |= {"load": here("model.path", HF_ONLY), "save": "output_dir"}


def for_all_roles(names: str, entry: str | Meaning) -> Meaning:
    """Return the meaning of entries of megatron_training, which the section of the role replaces."""
    meaning = as_meaning(entry)
    if meaning.translate is None:
        return meaning
    own, note = tuple(f"actor_config.{name}" for name in names.split()), meaning.note or "unless actor_config has it"
    translate = meaning.translate
    return Meaning(
        meaning.options, note, lambda value, given: {} if any(n in given for n in own) else translate(value, given)
    )


MEGATRON_TRAINING: Table = with_pattern(
    "megatron_training",
    {
        **RUN,
        **PARALLEL,
        **{names: for_all_roles(names, entry) for names, entry in SHARED_OPTIMIZER.items()},
        "stage": Meaning(note="not an option: the verb here", verbs=STAGES),
        "model": needless("the shape is in the model's directory, model.path"),
        "seq_length": part_of("data.max_length", "max_prompt_length and max_tokens bound prompts and completions"),
        "global_batch_size": here("train.batch_size", "prompts of a rollout batch"),
        "prompt_type": template_name("megatron_training."),
        "prompt_type_path": part_of("data.chat_template", "FILE.json:NAME with prompt_type"),
        "*": MEGATRON,
    },
)
ACTOR: Table = with_pattern(
    "actor_config",
    {
        **SHARED_OPTIMIZER,
        **PARALLEL,
        "load": here("model.path", HF_ONLY),
        "save": "output_dir",
        "model": needless("the shape is in the model's directory, model.path"),
        "micro_batch_size": MICRO,
        "finetune no_load_optim no_load_rng": LOADING,
        "no_save_optim no_save_rng": SAVES_ALL,
        "lora_r": "model.lora_rank",
        "lora_alpha": "model.lora_alpha",
        "lora_target_modules": listed("model.lora_target_modules"),
        "recompute_granularity": RUN["recompute_granularity recompute_method recompute_num_layers"],
        "*": MEGATRON,
    },
)
REFERENCE: Table = with_pattern(
    "ref_config",
    {
        "load": here("algo.reference", HF_ONLY + "; left out, it is the policy at the start"),
        "tensor_model_parallel_size": "cluster.reference_tensor_parallel_size",
        "context_parallel_size": "cluster.reference_context_parallel_size",
        "expert_model_parallel_size": "cluster.reference_expert_parallel_size",
        "pipeline_model_parallel_size": "cluster.reference_pipeline_parallel_size",
        "micro_batch_size": MICRO,
        "*": MEGATRON,
    },
)
REWARD_MODEL: Table = with_pattern(
    "reward_config",
    {
        "load": made(
            "reward.functions", by=reward_path, note="model:PATH, a Hugging Face directory; not with rule_reward"
        ),
        "tensor_model_parallel_size": made(
            "cluster.reward_tensor_parallel_size",
            by=lambda value, given: (
                {} if truth(given.get("rl_config.rule_reward")) else {"cluster.reward_tensor_parallel_size": [value]}
            ),
            note="not with rule_reward",
        ),
        "pipeline_model_parallel_size": made(
            "cluster.reward_pipeline_parallel_size",
            by=lambda value, given: (
                {} if truth(given.get("rl_config.rule_reward")) else {"cluster.reward_pipeline_parallel_size": [value]}
            ),
            note="not with rule_reward",
        ),
        "micro_batch_size": MICRO,
        "*": MEGATRON,
    },
)
CRITIC: Table = with_pattern(
    "critic_config",
    {
        "load": here("algo.critic", "a reward model's directory"),
        "lr": "algo.critic_learning_rate",
        "tensor_model_parallel_size": "cluster.critic_tensor_parallel_size",
        "context_parallel_size": "cluster.critic_context_parallel_size",
        "pipeline_model_parallel_size": "cluster.critic_pipeline_parallel_size",
        "*": needless("the critic is trained as the policy is"),
    },
)


def rule_rewards(value: Any, given: Given) -> Found:
    return {"reward.functions": value if isinstance(value, list) else [value]}


def penalised(value: Any, given: Given) -> Found | None:
    """The estimator; before May 2025 that of the loss is k3, whatever is given."""
    if not has_key(given, SINCE_MAY_2025):
        return {"algo.kl_estimator": "k3"}
    found = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(str(value))
    return {"algo.kl_estimator": found} if found else None


def high_clip(side: str) -> Meaning:
    return Meaning(
        (f"algo.clip_{side}",),
        "with clip_higher_enable",
        lambda value, given: {f"algo.clip_{side}": value} if truth(given.get("rl_config.clip_higher_enable")) else {},
    )


def penalty(option: str) -> Meaning:
    return Meaning(
        (option,),
        "with overlong_buffer_enable",
        lambda value, given: {option: value} if truth(given.get("rl_config.overlong_buffer_enable")) else {},
    )


def tracked(name: str) -> Meaning:
    return if_true({"log.report_to": [name]}, note=name)


def with_wandb(option: str) -> Meaning:
    return Meaning(
        (option,),
        "with use_wandb",
        lambda value, given: {option: value} if truth(given.get("rl_config.use_wandb")) else {},
    )


def stage_size(value: Any, given: Given) -> Found:
    """Translate blocking: false, which passes parts of a batch from stage to stage."""
    if truth(value):
        return {}
    names = ("experience_count", "actor_rollout_dispatch_size")
    size = next((number(given[name]) for name in (f"rl_config.{name}" for name in names) if given.get(name)), None)
    batch = number(given.get("megatron_training.global_batch_size")) or 4
    return {"rollout.prompts_per_stage": f"{max(1, round(size or batch / 4)):g}"}


RL: Table = with_pattern(
    "rl_config",
    {
        "blocking": made(
            "rollout.prompts_per_stage",
            by=stage_size,
            note="false: parts of a batch overlap; experience_count, or actor_rollout_dispatch_size, is their size",
        ),
        "experience_count actor_rollout_dispatch_size": part_of("rollout.prompts_per_stage", "with blocking false"),
        "guarantee_order async_engine data_strategy use_dp_batch_balance zmq_communication": needless(
            "results do not depend on the order of work"
        ),
        "use_integrated_worker colocate_actor_ref colocate_all_models integrated_mode_config.*": needless(
            "models share devices unless they are given their own"
        ),
        "adv_estimator": Meaning(
            note="not an option: the verb here",
            verbs={"group_norm": GROUPED, "gae": ("ppo",), "rloo": ("rloo",)},
        ),
        "init_kl_coef": here("algo.kl_coef", "in the loss for GRPO"),
        "kl_penalty": made(
            "algo.kl_estimator",
            by=penalised,
            note="kl: k1, mse: k2, low_var_kl: k3; before May 2025 the loss there always has k3",
        ),
        "kl_ctrl_type": chosen("algo.kl_target", {"fixed": "0"}, note="adaptive: a target above 0"),
        "kl_target": part_of("algo.kl_target", "the KL of a completion, with kl_ctrl_type adaptive"),
        "kl_horizon": part_of("algo.kl_horizon", "with algo.kl_target"),
        "use_kl_in_reward": chosen("algo.kl_in", {"true": "reward", "false": "loss"}, note="reward, or loss"),
        "mini_batch_size": made(
            "algo.mini_batch_size",
            by=completions,
            note="completions of an optimizer step; releases that count prompts multiply by n_samples_per_prompt",
        ),
        "epochs": here("algo.epochs_per_batch", "passes over a rollout batch"),
        "shuffle_mini_batch shuffle_minibatch": "algo.shuffle_mini_batch",
        "clip_ratio": Meaning(
            ("algo.clip_low", "algo.clip_high"),
            "both sides",
            lambda value, given: (
                {}
                if truth(given.get("rl_config.clip_higher_enable"))
                else {"algo.clip_low": value, "algo.clip_high": value}
            ),
        ),
        "clip_higher_enable": needless("algo.clip_low and algo.clip_high are two options"),
        "clip_ratio_low": high_clip("low"),
        "clip_ratio_high": high_clip("high"),
        "entropy_coeff": made(
            "algo.entropy_coef",
            by=lambda value, given: {} if is_earlier(given) else {"algo.entropy_coef": value},
            note="no effect in releases before May 2025: their loss has no entropy",
        ),
        "token_level_loss": chosen(
            "algo.loss_aggregation", {"true": "token_mean", "false": "sample_mean"}, note="token_mean or sample_mean"
        ),
        "max_prompt_length": here("data.max_length", "tokens of a prompt"),
        "n_samples_per_prompt": "rollout.samples_per_prompt",
        "rule_reward": needless("reward.functions takes verifiers and reward models alike"),
        "verifier_function": made("reward.functions", by=rule_rewards, note="names: posttrain rewards list"),
        "verifier_weight": listed("reward.weights"),
        "verifier_timeout": "reward.timeout_seconds",
        "verifier_parallel": "reward.workers",
        "num_cpus_for_local_task num_cpus_for_placement_group": by_hand(
            "reward.workers", note="processes for rewards", harmless=True
        ),
        "actor_resource.num_npus": made(
            "cluster.devices", by=all_devices, note="all devices, those of other roles too"
        ),
        "reference_resource.num_npus": role_devices("reference"),
        "reward_resource.num_npus": role_devices("reward"),
        "critic_resource.num_npus": role_devices("critic"),
        "actor_forward_micro_batch_size ref_forward_micro_batch_size *_dispatch_size num_samples_per_step": MICRO,
        "use_remove_padding use_dynamic_bsz *dynamic_max_batch_size": PACKING,
        "max_packing_token_size *_max_packing_token_size": by_hand(
            "train.micro_batch_tokens", note="one bound for all forward passes", harmless=True
        ),
        "overlong_buffer": penalty("reward.overlong_tokens"),
        "overlong_buffer_penalty_factor": penalty("reward.overlong_penalty"),
        "overlong_buffer_enable": needless("reward.overlong_tokens above 0 turns it on"),
        "rollout_max_tokens": needless("the penalty ends at rollout.max_tokens"),
        "filter_groups_enable": "rollout.dynamic_sampling",
        "filter_groups_max_batches": if_positive("rollout.dynamic_sampling_max_batches"),
        "filter_groups_metric filter_groups_train_batch_size": needless("groups with equal rewards are replaced"),
        "multi_turn_enable tool_config_path max_tool_calls max_parallel_calls *_response_length": by_hand(
            "rollout.environment", note="FILE.py:CLASS with start and step"
        ),
        "partial_rollout_max_split require_max_age_all_finished": by_hand(
            "rollout.inflight_updates", note="new weights for completions in progress, with rollout.ahead"
        ),
        "use_tensorboard": Meaning(
            ("log.report_to",),
            "tensorboard; there it gives way to wandb",
            lambda value, given: (
                {"log.report_to": ["tensorboard"]}
                if truth(value) and not truth(given.get("rl_config.use_wandb"))
                else {}
            ),
        ),
        "use_wandb": tracked("wandb"),
        "wandb_project": with_wandb("log.project"),
        "wandb_exp_name": with_wandb("log.run_name"),
        "wandb_save_dir": with_wandb("log.tracker_dir"),
        "use_swanlab swanlab_*": by_hand(
            "log.report_to", note="swanlab, with log.project and log.run_name", harmless=True
        ),
        "log_max_throughput": STEP_LOG,
        "gamma lam cliprange_value advantage_whiten": unrelated("this trainer has no critic; posttrain ppo has"),
        "beta": absent("rule rewards and reward models are weighed by reward.weights"),
        "is_multimodal reuse_image_embeds *vit* actor_image_embeds_dispatch_size": absent("models of text alone"),
        "*": unrelated("a setting of MindSpeed-RL's controller"),
    },
)
SAMPLING: Table = {
    "max_tokens": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": positive_only("rollout.top_k", "-1 there is 0 here: all"),
    "min_p": "rollout.min_p",
    "logprobs detokenize seed *_token_id min_tokens": needless("the engine returns token ids with log-probabilities"),
    "repetition_penalty": absent("rollouts are drawn from the policy itself, without such changes", "1", "1.0"),
}


def weights_away(value: Any, given: Given) -> Found:
    """The policy's weights leave the device while others work, unless the stages of a batch overlap."""
    overlap = "rl_config.blocking" in given and not truth(given["rl_config.blocking"])
    return {"cluster.offload": ["policy", "engine"]} if truth(value) and not overlap else {}


GENERATE: Table = with_pattern(
    "generate_config",
    {
        **with_pattern("sampling_config", SAMPLING),
        "infer_tensor_parallel_size": vllm("tensor_parallel_size"),
        "infer_pipeline_parallel_size infer_expert_parallel_size": unrelated("an engine is divided by tensors alone"),
        "max_num_seqs": vllm("max_num_seqs"),
        "max_num_batched_tokens": vllm("max_num_batched_tokens"),
        "max_model_len": vllm("max_model_len"),
        "gpu_memory_utilization": vllm("gpu_memory_utilization"),
        "enforce_eager": vllm("enforce_eager"),
        "enable_prefix_caching": vllm("enable_prefix_caching"),
        "dtype": needless("the engine has the trainer's type, model.dtype"),
        "offload_train_optimizer": offload("optimizer"),
        "offload_train_param": made(
            "cluster.offload", by=weights_away, note="policy; not while stages overlap, when it works all the time"
        ),
        "offload_train_grad": needless("gradients are freed after each update"),
        "trust_remote_code": NO_REMOTE_CODE,
        "micro_batch_size limit_mm_image_per_prompt *": needless("the engine batches by itself"),
    },
)
PPO: Table = {
    **CRITIC,
    "rl_config.gamma": "algo.gamma",
    "rl_config.lam": "algo.gae_lambda",
    "rl_config.cliprange_value": "algo.value_clip",
    "rl_config.advantage_whiten": "algo.whiten_advantages",
    "rl_config.init_kl_coef": here("algo.kl_coef", "in the loss there unless use_kl_in_reward; here algo.kl_in"),
}
OTHER_FILES: Table = {
    "defaults defaults.*": needless("names the shape of the model, which is in the model's directory"),
    "msprobe_config.* profiler_config.*": unrelated("set train.profile_steps by hand"),
    "model.*": MEGATRON,
}

MINDSPEED_RL = Library(
    "MindSpeed-RL",
    (
        (ONLINE, {**OTHER_FILES, **MEGATRON_TRAINING, **ACTOR, **REFERENCE, **REWARD_MODEL, **RL, **GENERATE}),
        (("reinforce",), {"rl_config.gamma": "algo.gamma"}),
        (("ppo",), PPO),
    ),
    defaults=(
        (
            ONLINE,
            {
                "megatron_training.seed": "1234",
                "megatron_training.adam_beta2": "0.999",
                "megatron_training.weight_decay": "0.01",
                "megatron_training.lr_decay_style": "linear",
                "megatron_training.min_lr": "0.0",
                "rl_config.max_prompt_length": "512",
                "rl_config.init_kl_coef": "0.01",
                "rl_config.shuffle_mini_batch": "False",
            },
        ),
    ),
)

LLM_STAGES = {
    "sft": ("sft",),
    "dpo": ("dpo",),
    "simpo": ("simpo",),
    "orm": ("reward",),
    "prm": ("prm",),
    "trl_ppo": ("ppo",),
    "ray_ppo": ("ppo",),
}
FLAGS: Table = {
    **RUN,
    **PARALLEL,
    **optimizer(""),
    "stage": Meaning(note="not an option: the verb here", verbs=LLM_STAGES),
    "load": here("model.path", HF_ONLY),
    "save": "output_dir",
    "tokenizer_name_or_path": "model.tokenizer",
    "prompt_type": template_name(""),
    "prompt_type_path": part_of("data.chat_template", "FILE.json:NAME with prompt_type"),
    "seq_length": "data.max_length",
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_target_modules": listed("model.lora_target_modules"),
    "lora_fusion lora_load": by_hand("model.path", note="a run directory, or a model merged by posttrain export"),
    "moe_aux_loss_coeff": "model.router_aux_loss_coef",
    "use_mcore_models use_distributed_optimizer overlap_grad_reduce overlap_param_gather": MEGATRON,
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups": MEGATRON,
    "max_position_embeddings position_embedding_type rotary_base normalization norm_epsilon swiglu": MEGATRON,
    "untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias init_method_std": MEGATRON,
    "no_masked_softmax_fusion no_gradient_accumulation_fusion attention_softmax_in_fp32 vocab_size": MEGATRON,
    "use_rotary_position_embeddings rope_scaling_* rotary_percent original_max_position_embeddings": MEGATRON,
    "no_shared_storage load_checkpoint_loosely use_kv_cache pad_to_multiple_of log_throughput": MEGATRON,
    "defaults model": needless("names the shape of the model, which is in the model's directory"),
    "is_pairwise_dataset": needless("pairs are recognised by their columns"),
    "distributed_backend distributed_timeout_minutes": by_hand(
        "cluster.worker_timeout_seconds", note="longest wait", harmless=True
    ),
    "no_load_optim no_load_rng finetune": LOADING,
    "no_save_optim no_save_rng": SAVES_ALL,
}
PREFERENCE: Table = {
    "dpo_beta": "algo.beta",
    "dpo_loss_type": chosen("algo.loss_type", {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"}),
    "dpo_label_smoothing": "algo.label_smoothing",
    "pref_ftx": "algo.sft_coef",
    "ref_model": here("algo.reference", HF_ONLY),
    "refer_model_iter": needless("the reference is the model at the start, or algo.reference"),
}
MINDSPEED_LLM = Library(
    "MindSpeed-LLM",
    (
        (tuple(verb for verb in EVERY if verb in ("pretrain", "sft", "dpo", "simpo", "reward", "prm")), FLAGS),
        (("dpo",), PREFERENCE),
        (
            ("simpo",),
            {
                "simpo_beta": "algo.beta",
                "gamma_beta_ratio": "algo.gamma_beta_ratio",
                "simpo_label_smoothing": "algo.label_smoothing",
                "simpo_loss_type": chosen("algo.loss_type", {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"}),
            },
        ),
        (("prm",), {"placeholder_token": "algo.placeholder", "reward_tokens": STEP_TOKENS}),
    ),
    {"pretrain": "pretrain_gpt.py", **dict.fromkeys(("sft", "dpo", "simpo", "reward", "prm"), "posttrain_gpt.py")},
)
