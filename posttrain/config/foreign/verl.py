"""verl's options: main_ppo with ppo_trainer.yaml, and its SFT trainer (2025 and 2026)."""

from __future__ import annotations

from typing import Any

from posttrain.config.foreign.huggingface import (
    DTYPES,
    KERNELS,
    LOADER,
    NO_REMOTE_CODE,
    ONE_SEED,
    PACKING,
    SAVES_ALL,
    TRACKERS,
    scheduler,
)
from posttrain.config.foreign.meanings import (
    EXPERTS_BY_TENSORS,
    GROUPED,
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_INPUTS,
    ONLINE,
    Found,
    Given,
    Library,
    Meaning,
    Table,
    absent,
    by_hand,
    chosen,
    clip_both,
    here,
    if_positive,
    if_true,
    items,
    listed,
    made,
    needless,
    number,
    offload,
    part_of,
    positive_only,
    product,
    reward_model,
    sequence_parallel,
    truth,
    unrelated,
    vllm,
    with_pattern,
)

ACTOR, CRITIC, ROLLOUT, MODEL = (
    "actor_rollout_ref.actor",
    "critic",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)
SHORT_NAMES = needless("kernels and memory are handled by the engine")
PROFILER = unrelated("set train.profile_steps by hand")
MICRO = by_hand(
    "train.micro_batch_tokens", note="tokens of a forward pass, not examples; does not change the result", harmless=True
)
TOKENS = here("train.micro_batch_tokens", "one bound for all forward passes")
ESTIMATORS = {
    "gae": ("ppo",),
    "grpo": GROUPED,
    "grpo_vectorized": GROUPED,
    "grpo_passk": ("grpo",),
    "rloo": ("rloo",),
    "rloo_vectorized": ("rloo",),
    "reinforce_plus_plus": ("reinforce",),
    "reinforce_plus_plus_baseline": ("reinforce",),
    "remax": ("remax",),
    "opo": ("grpo",),
}
GROUP_ADVANTAGES = {"grpo_passk": "best_minus_second", "opo": "length_weighted_mean"}


def column(ours: str) -> Meaning:
    """Translate the name of a column."""
    return Meaning(
        ("data.map_keys",),
        f"as {ours}",
        lambda value, given: {} if value == ours else {"data.map_keys": {ours: value}},
    )


def loggers(value: Any, given: Given) -> Found:
    known = [name for name in items(value) if name in TRACKERS]
    return {"log.report_to": known} if known else {}


def has_tracker(given: Given) -> bool:
    """Whether there is a tracker that has projects."""
    return any(name in TRACKERS and name != "tensorboard" for name in items(given.get("trainer.logger", [])))


def project(value: Any, given: Given) -> Found:
    return {"log.project": value} if has_tracker(given) else {}


def experiment(value: Any, given: Given) -> Found:
    return {"log.run_name": value} if has_tracker(given) else {}


def virtual_stages(value: Any, given: Given) -> Found:
    """Translate stages per device, null without a pipeline."""
    stages = number(value) or 1
    interleaved = {"cluster.virtual_pipeline_parallel_size": value, "cluster.pipeline_schedule": "interleaved"}
    return interleaved if stages > 1 else {}


def kl_in_loss(value: Any, given: Given) -> Found:
    coefficient = given.get(f"{ACTOR}.kl_loss_coef", "0.001")
    if truth(value):
        return {"algo.kl_coef": coefficient, "algo.kl_in": "loss"}
    return {} if truth(given.get("algorithm.use_kl_in_reward")) else {"algo.kl_coef": "0"}


def kl_in_reward(value: Any, given: Given) -> Found:
    coefficient = given.get("algorithm.kl_ctrl.kl_coef", "0.001")
    return {"algo.kl_coef": coefficient, "algo.kl_in": "reward"} if truth(value) else {}


def reward_file(value: Any, given: Given) -> Found:
    names = ("custom_reward_function.name", "reward.custom_reward_function.name")
    name = next((given[key] for key in names if given.get(key)), "compute_score")
    return {"reward.functions": [f"{value}:{name}"]}


def total_devices(value: Any, given: Given) -> Found | None:
    """Nodes times devices of each."""
    nodes, devices = number(given.get("trainer.nnodes", "1")), number(given.get("trainer.n_gpus_per_node"))
    return None if nodes is None or devices is None else {"cluster.devices": str(round(nodes * devices))}


def warmup_steps(value: Any, given: Given) -> Found | None:
    steps = number(value)
    return None if steps is None else {"train.warmup_steps": value} if steps > 0 else {}


def estimator(value: Any, given: Given) -> Found | None:
    kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    return {"algo.kl_estimator": kinds[value]} if value in kinds else None


def dual_clip(value: Any, given: Given) -> Found:
    """Translate the bound, which only the clipped ratio of single tokens has there."""
    vanilla = str(given.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")) == "vanilla"
    return {"algo.dual_clip": value} if vanilla else {}


def by_covariance(value: Any, given: Given) -> Found:
    """Translate the losses that treat tokens by their covariance; KL-Cov has no clipping there."""

    def of(name: str, default: str) -> Any:
        return given.get(f"{ACTOR}.policy_loss.{name}", default)

    if value == "clip_cov":
        share = {"algo.clip_cov_fraction": of("clip_cov_ratio", "0.0002")}
        return share | {"algo.clip_cov_low": of("clip_cov_lb", "1.0"), "algo.clip_cov_high": of("clip_cov_ub", "5.0")}
    if value == "kl_cov":
        return {"algo.kl_cov_fraction": of("kl_cov_ratio", "0.0002"), "algo.kl_cov_coef": of("ppo_kl_coef", "0.1")}
    return {}


def resampling(value: Any, given: Given) -> Found | None:
    """Translate PF-PPO, which draws by powers of the scores unless it is told otherwise."""
    if not truth(value):
        return {}
    kinds = {"pow": "power", "max_min": "best_and_worst", "max_random": "best_and_random"}
    kind = kinds.get(str(given.get("algorithm.pf_ppo.reweight_method", "pow")))
    power = given.get("algorithm.pf_ppo.weight_pow", "2.0")
    found = {"algo.resample_by_reward": kind} | ({"algo.resample_power": power} if kind == "power" else {})
    return found if kind else None


def aggregation(value: Any, given: Given) -> Found | None:
    ways = {"token-mean": "token_mean", "seq-mean-token-mean": "sample_mean"}
    return {"algo.loss_aggregation": ways[value]} if value in ways else None


OPTIMIZER: Table = {
    "lr": "train.learning_rate",
    "lr_warmup_steps_ratio": "train.warmup_ratio",
    "lr_warmup_steps": made("train.warmup_steps", by=warmup_steps, note="-1 there: not set"),
    "warmup_style lr_scheduler_type lr_scheduler": made("train.lr_scheduler", "train.min_lr_ratio", by=scheduler),
    "min_lr_ratio": "train.min_lr_ratio",
    "weight_decay": "train.weight_decay",
    "betas": made(
        "train.adam_beta1",
        "train.adam_beta2",
        by=lambda value, given: dict(zip(("train.adam_beta1", "train.adam_beta2"), items(value), strict=False)),
    ),
    "clip_grad": "train.max_grad_norm",
    "optimizer optimizer_impl override_optimizer_config num_cycles zero_indexed_step": absent(
        "the optimizer is AdamW with float32 master weights", "adamw", "torch.optim", "0.5", "true"
    ),
    "total_training_steps": needless("train.max_steps counts once for all"),
    "*": absent("the optimizer is AdamW with float32 master weights"),
}

TRAINER: Table = with_pattern(
    "trainer",
    {
        "total_epochs": "train.epochs",
        "total_training_steps": if_positive("train.max_steps"),
        "save_freq": positive_only("save.every_steps", "-1 there is 0 here: only at the end"),
        "test_freq": positive_only("eval.every_steps", "-1 there is 0 here: only at the end"),
        "default_local_dir": here("output_dir", "the run directory"),
        "project_name": made("log.project", by=project, note="with wandb, trackio, mlflow or swanlab"),
        "experiment_name": made("log.run_name", by=experiment, note="with wandb, trackio, mlflow or swanlab"),
        "logger": made("log.report_to", by=loggers, note="console and metrics.jsonl are always there"),
        "nnodes n_gpus_per_node": made(
            "cluster.devices", by=total_devices, note="all devices together; several nodes by cluster.ray_address"
        ),
        "resume_mode resume_from_path": Meaning(
            ("resume", "output_dir"),
            "resume continues the run in output_dir",
            lambda value, given: {} if value in ("auto", "disable") else None,
        ),
        "max_ckpt_to_keep max_actor_ckpt_to_keep max_critic_ckpt_to_keep": if_positive("save.max_checkpoints"),
        "seed": here("seed"),
        "val_before_train": unrelated("posttrain eval evaluates a model by itself"),
        "val_only": absent("posttrain eval evaluates a model by itself"),
        "log_val_generations rollout_data_dir validation_data_dir": needless("posttrain samples shows all of them"),
        "balance_batch use_legacy_worker_impl device": needless("samples are spread by their length"),
        "default_hdfs_dir remove_previous_ckpt_in_save del_local_ckpt_after_load esi_redundant_time": unrelated(
            "checkpoints are in the run directory; save.max_checkpoints and save.max_gigabytes bound them"
        ),
        "checkpoint.*": SAVES_ALL,
        "ray_wait_register_center_timeout": by_hand(
            "cluster.worker_timeout_seconds", note="longest wait", harmless=True
        ),
        "*": unrelated("a setting of verl's controller"),
    },
)
RUNNING: Table = {
    **TRAINER,
    "ray_kwargs.* ray_init.*": by_hand(
        "cluster.ray_address", note="auto, or the address of a Ray cluster", harmless=True
    ),
    "global_profiler.* profiler.* *.profiler.*": PROFILER,
    "checkpoint.* *.checkpoint.*": SAVES_ALL,
    "transfer_queue.* trainer.v1.*": unrelated("a setting of verl's controller"),
    "engine model_engine optim model@* engine@* optim@*": unrelated("names parts of verl's own configuration"),
    "distillation.*": absent("posttrain opd learns from a teacher, in a run of its own"),
    "skip.*": absent("rollout.replay takes completions from another run"),
    "_target_ *._target_": needless("names a class of verl"),
    "hydra.* config_path config_name": needless("a file comes first: posttrain VERB FILE.yaml"),
    "defaults": needless("names parts of verl's own configuration"),
}


def truncation(value: Any, given: Given) -> Found | None:
    """Prompts that are too long are dropped before, with filter_overlong_prompts."""
    if truth(given.get("data.filter_overlong_prompts")):
        return {}
    kinds = {"error": "error", "right": "truncate"}
    return {"data.on_overlong": kinds[value]} if value in kinds else None


DATA: Table = with_pattern(
    "data",
    {
        "train_files": listed("data.train"),
        "val_files": listed("data.eval"),
        "train_max_samples": positive_only("data.max_examples", "-1 there is 0 here: all"),
        "shuffle": "data.shuffle",
        "seed": ONE_SEED,
        "chat_template custom_chat_template": "data.chat_template",
        "reward_fn_key tools_key": needless("reward functions get all columns; the format has a column tools"),
        "prompt_key": column("prompt"),
        "response_key": column("response"),
        "messages_key": column("messages"),
        "prompt_dict_keys response_dict_keys multiturn.* enable_thinking_key enable_thinking_default": needless(
            "formats are recognised by their columns"
        ),
        "truncation": made(
            "data.on_overlong",
            by=truncation,
            note="error or truncate, which cuts the end; prompts of online trainers are never cut",
        ),
        "apply_chat_template_kwargs": absent("data.chat_template names another template"),
        "custom_cls.* sampler.*": absent("data are files; posttrain data check shows how they are read"),
        "num_workers dataloader_num_workers filter_overlong_prompts_workers use_shm tokenizer": LOADER,
        "return_raw_chat return_raw_input_ids return_full_prompt return_multi_modal_inputs pad_mode": LOADER,
        "trust_remote_code": NO_REMOTE_CODE,
        "image_key video_key audio_key image_patch_size mm_processor_kwargs": unrelated("models of text alone"),
        "tool_config_path function_tool_path": absent("tools are part of rollout.environment"),
        "validation_shuffle": needless("the evaluation does not depend on the order"),
    },
)


def long_prompts(value: Any, given: Given) -> Found:
    return {"data.on_overlong": "drop"} if truth(value) else {}


PPO_DATA: Table = with_pattern(
    "data",
    {
        "train_batch_size": here("train.batch_size", "prompts of a rollout batch"),
        "gen_batch_size": by_hand(
            "rollout.dynamic_sampling", note="further batches are generated as they are needed", harmless=True
        ),
        "val_batch_size": needless("the engine batches by itself"),
        "val_max_samples": positive_only("eval.max_examples", "-1 there is 0 here: all"),
        "max_prompt_length": here("data.max_length", "tokens of a prompt"),
        "max_response_length": here("rollout.max_tokens", "tokens of a completion"),
        "filter_overlong_prompts": made("data.on_overlong", by=long_prompts, note="drop"),
    },
)
MODEL_ROWS: Table = with_pattern(
    MODEL,
    {
        "path": "model.path",
        "tokenizer_path": "model.tokenizer",
        "custom_chat_template": "data.chat_template",
        "enable_gradient_checkpointing": "model.gradient_checkpointing",
        "lora_rank lora.rank": "model.lora_rank",
        "lora_alpha lora.alpha": "model.lora_alpha",
        "lora.dropout": "model.lora_dropout",
        "target_modules lora.target_modules": listed("model.lora_target_modules"),
        "enable_activation_offload": if_true(OFFLOADED_ACTIVATIONS, note=OFFLOADED_INPUTS),
        "use_remove_padding": PACKING,
        "trust_remote_code": NO_REMOTE_CODE,
        "*": SHORT_NAMES,
    },
)
ACTOR_ROWS: Table = with_pattern(
    ACTOR,
    {
        **with_pattern("optim", OPTIMIZER),
        "ppo_mini_batch_size": product(
            "algo.mini_batch_size",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ROLLOUT}.n",
            note="completions of an optimizer step: prompts there, times rollout.n",
        ),
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu": MICRO,
        "ppo_max_token_len_per_gpu": TOKENS,
        "use_dynamic_bsz": PACKING,
        "ppo_epochs": "algo.epochs_per_batch",
        "shuffle": "algo.shuffle_mini_batch",
        "clip_ratio": clip_both(unless=f"{ACTOR}.clip_ratio_high"),
        "clip_ratio_low": "algo.clip_low",
        "clip_ratio_high": "algo.clip_high",
        "clip_ratio_c": made("algo.dual_clip", by=dual_clip, note="where the loss mode there is vanilla, its default"),
        "loss_agg_mode": made(
            "algo.loss_aggregation",
            by=aggregation,
            note="token-mean: token_mean, seq-mean-token-mean: sample_mean; fixed_length divides by rollout.max_tokens",
        ),
        "entropy_coeff": "algo.entropy_coef",
        "use_kl_loss": made("algo.kl_coef", "algo.kl_in", by=kl_in_loss, note="a weight above 0, in the loss"),
        "kl_loss_coef": part_of("algo.kl_coef", "with use_kl_loss"),
        "kl_loss_type": made("algo.kl_estimator", by=estimator, note="kl: k1, mse: k2, low_var_kl: k3"),
        "grad_clip": "train.max_grad_norm",
        "ulysses_sequence_parallel_size fsdp_config.ulysses_sequence_parallel_size": "cluster.context_parallel_size",
        "fsdp_config.param_offload": offload("parameters"),
        "fsdp_config.optimizer_offload": offload("optimizer"),
        "fsdp_config.model_dtype": needless(
            "weights in half precision have float32 masters; model.dtype sets the type"
        ),
        "fsdp_config.dtype": chosen("model.dtype", DTYPES),
        "fsdp_config.fsdp_size strategy": needless("a model is divided among all devices by FSDP2"),
        "fsdp_config.reshard_after_forward": chosen(
            "cluster.zero_stage", {"true": "3", "false": "2"}, note="3 frees parameters after each layer, 2 keeps them"
        ),
        "megatron.tensor_model_parallel_size": "cluster.tensor_parallel_size",
        "megatron.sequence_parallel": sequence_parallel(f"{ACTOR}.megatron.tensor_model_parallel_size"),
        "megatron.expert_tensor_parallel_size": EXPERTS_BY_TENSORS,
        "megatron.context_parallel_size": "cluster.context_parallel_size",
        "megatron.expert_model_parallel_size": "cluster.expert_parallel_size",
        "megatron.pipeline_model_parallel_size": "cluster.pipeline_parallel_size",
        "megatron.virtual_pipeline_model_parallel_size": made(
            *("cluster.virtual_pipeline_parallel_size", "cluster.pipeline_schedule"),
            by=virtual_stages,
            note="with the schedule interleaved",
        ),
        "policy_loss.loss_mode": Meaning(
            ("algo.clip_cov_fraction", "algo.kl_cov_fraction"),
            "gspo, gmpo (geo_mean), cispo and sapo are verbs; clip_cov and kl_cov are these options, the latter also "
            "with algo.clip_low 0 and algo.clip_high 0",
            by_covariance,
            verbs={
                "gspo": ("gspo",),
                "geo_mean": ("gmpo",),
                "cispo": ("cispo",),
                "sapo": ("sapo",),
                **dict.fromkeys(("vanilla", "clip_cov", "kl_cov"), ()),
            },
        ),
        "policy_loss.clip_cov_ratio": part_of("algo.clip_cov_fraction", "with loss_mode clip_cov"),
        "policy_loss.clip_cov_lb": part_of("algo.clip_cov_low", "with loss_mode clip_cov"),
        "policy_loss.clip_cov_ub": part_of("algo.clip_cov_high", "with loss_mode clip_cov"),
        "policy_loss.kl_cov_ratio": part_of("algo.kl_cov_fraction", "with loss_mode kl_cov"),
        "policy_loss.ppo_kl_coef": part_of("algo.kl_cov_coef", "with loss_mode kl_cov"),
        "tau_pos tau_neg": unrelated("posttrain sapo has algo.temperature_positive and algo.temperature_negative"),
        "tis_imp_ratio_cap": "algo.importance_cap",
        "policy_loss.*": absent("this variant of the loss does not exist"),
        "data_loader_seed": ONE_SEED,
        "*": SHORT_NAMES,
    },
)
ENGINE: Table = {
    "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout": needless(
        "models share devices unless they are given their own"
    ),
}
REFERENCE_ROWS: Table = with_pattern(
    "actor_rollout_ref.ref",
    {
        "fsdp_config.param_offload": offload("reference"),
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu": MICRO,
        "log_prob_max_token_len_per_gpu": by_hand(
            "train.micro_batch_tokens", note="one bound for all forward passes", harmless=True
        ),
        "log_prob_use_dynamic_bsz": PACKING,
        "ulysses_sequence_parallel_size": "cluster.reference_context_parallel_size",
        "megatron.tensor_model_parallel_size": "cluster.reference_tensor_parallel_size",
        "megatron.pipeline_model_parallel_size": "cluster.reference_pipeline_parallel_size",
        "model.path": "algo.reference",
        "*": SHORT_NAMES,
    },
)


def engine_name(value: Any, given: Given) -> Found | None:
    return {"rollout.engine": "vllm"} if value == "vllm" else {"rollout.engine": "local"} if value == "hf" else None


ROLLOUT_ROWS: Table = with_pattern(
    ROLLOUT,
    {
        "n": "rollout.samples_per_prompt",
        "name": made("rollout.engine", by=engine_name, note="vllm, or local, which shares the trainer's weights"),
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "top_k": positive_only("rollout.top_k"),
        "gpu_memory_utilization": vllm("gpu_memory_utilization"),
        "tensor_model_parallel_size": vllm("tensor_parallel_size"),
        "max_num_seqs": vllm("max_num_seqs"),
        "max_num_batched_tokens": vllm("max_num_batched_tokens"),
        "max_model_len": vllm("max_model_len"),
        "enforce_eager": vllm("enforce_eager"),
        "enable_chunked_prefill": vllm("enable_chunked_prefill"),
        "enable_prefix_caching": vllm("enable_prefix_caching"),
        "engine_kwargs.vllm.*": by_hand("rollout.vllm_options", note="by vLLM's own names", harmless=True),
        "response_length": needless("rollout.max_tokens, from data.max_response_length"),
        "prompt_length": needless("data.max_length, from data.max_prompt_length"),
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu": MICRO,
        "log_prob_max_token_len_per_gpu": by_hand(
            "train.micro_batch_tokens", note="one bound for all forward passes", harmless=True
        ),
        "log_prob_use_dynamic_bsz": PACKING,
        "val_kwargs.n": "eval.samples_per_prompt",
        "val_kwargs.temperature": "eval.temperature",
        "val_kwargs.do_sample val_kwargs.top_p val_kwargs.top_k": by_hand(
            "eval.temperature", note="0 takes the likeliest token, above 0 it is sampled", harmless=True
        ),
        "multi_turn.* agent.*": by_hand("rollout.environment", note="FILE.py:CLASS with start and step"),
        "free_cache_engine load_format dtype layered_summon": needless(
            "weights reach the engine by the cheapest route"
        ),
        "repetition_penalty": absent("rollouts are drawn from the policy itself, without such changes", "1", "1.0"),
        "do_sample ignore_eos seed calculate_log_probs": needless("completions are sampled and end at the end token"),
        "*": unrelated("a setting of verl's rollout servers"),
    },
)
ALGORITHM: Table = with_pattern(
    "algorithm",
    {
        "adv_estimator": Meaning(note="not an option: the verb here", verbs=ESTIMATORS),
        "use_kl_in_reward": made("algo.kl_coef", "algo.kl_in", by=kl_in_reward, note="a weight above 0, in the reward"),
        "kl_penalty": Meaning(
            ("algo.kl_estimator",),
            "kl: k1, mse: k2, low_var_kl: k3",
            lambda value, given: estimator(value, given) if truth(given.get("algorithm.use_kl_in_reward")) else {},
        ),
        "kl_ctrl.kl_coef": part_of("algo.kl_coef", "with use_kl_in_reward"),
        "kl_ctrl.type": chosen("algo.kl_target", {"fixed": "0"}, note="adaptive: a target above 0"),
        "kl_ctrl.target_kl": part_of("algo.kl_target", "the KL of a whole completion, with kl_ctrl.type adaptive"),
        "kl_ctrl.horizon": part_of("algo.kl_horizon", "with algo.kl_target"),
        "filter_groups.enable": "rollout.dynamic_sampling",
        "filter_groups.max_num_gen_batches": if_positive("rollout.dynamic_sampling_max_batches"),
        "filter_groups.*": needless("groups with equal rewards are replaced"),
        "rollout_correction.rollout_is_threshold": "algo.importance_cap",
        "rollout_correction.rollout_is": chosen(
            "algo.importance_mode",
            {"token": "token_truncate", "sequence": "sequence_truncate"},
            note="token: token_truncate, sequence: sequence_truncate",
        ),
        "rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold": by_hand(
            *("algo.importance_mode", "algo.importance_floor", "algo.importance_cap"),
            note="token_mask, sequence_mask, or geometric_mask for seq_mean_k1, with two bounds",
        ),
        "rollout_correction.*": by_hand("algo.importance_cap", note="0 turns the correction off"),
        "use_pf_ppo pf_ppo.*": unrelated("only posttrain ppo draws completions anew, as there with the estimator gae"),
    },
)
REWARDS: Table = {
    "custom_reward_function.path reward.custom_reward_function.path": made(
        "reward.functions", by=reward_file, note="FILE.py:FUNCTION"
    ),
    "custom_reward_function.name reward.custom_reward_function.name": part_of(
        "reward.functions", "behind the file: FILE.py:FUNCTION"
    ),
    "reward_model.model.path reward.reward_model.model_path": reward_model(),
    "reward_model.enable reward.reward_model.enable": part_of("reward.functions", "model:PATH among the rewards"),
    "reward_model.reward_manager reward.reward_manager.*": part_of(
        "reward.overlong_tokens", "rewards are functions; of dapo the length penalty is reward.overlong_tokens"
    ),
    "reward_model.overlong_buffer.len reward.reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_tokens",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong_penalty",
    "reward_model.num_workers reward.num_workers": "reward.workers",
    "reward_model.nnodes reward_model.n_gpus_per_node": by_hand(
        "cluster.reward_devices", note="all of them together", harmless=True
    ),
    "reward_model.* reward.reward_model.* reward.*": unrelated("rewards run in processes of their own, with limits"),
    "sandbox_fusion.* reward.sandbox_fusion.*": needless("programs of the model run in a sandbox on this machine"),
}
CRITIC_ROWS: Table = with_pattern(
    CRITIC,
    {
        "optim.lr": "algo.critic_learning_rate",
        "optim.*": needless("the critic has the policy's schedule, with a peak of its own"),
        "model.path": "algo.critic",
        "cliprange_value": "algo.value_clip",
        "fsdp_config.param_offload fsdp.param_offload": offload("critic"),
        "ulysses_sequence_parallel_size": "cluster.critic_context_parallel_size",
        "megatron.tensor_model_parallel_size": "cluster.critic_tensor_parallel_size",
        "megatron.pipeline_model_parallel_size": "cluster.critic_pipeline_parallel_size",
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu forward_micro_batch_size_per_gpu": MICRO,
        "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu": by_hand(
            "train.micro_batch_tokens", note="one bound for all forward passes", harmless=True
        ),
        "*": needless("the critic is trained as the policy is"),
    },
)
PPO: Table = {
    "algorithm.use_pf_ppo": made(
        *("algo.resample_by_reward", "algo.resample_power"), by=resampling, note="power unless pf_ppo names another"
    ),
    "algorithm.pf_ppo.reweight_method": part_of("algo.resample_by_reward", "with use_pf_ppo"),
    "algorithm.pf_ppo.weight_pow": part_of("algo.resample_power", "with use_pf_ppo and power"),
    **CRITIC_ROWS,
    "algorithm.gamma": "algo.gamma",
    "algorithm.lam": "algo.gae_lambda",
    "trainer.critic_warmup": "algo.freeze_actor_steps",
}
NO_GROUPS: Table = {"algorithm.norm_adv_by_std_in_grpo": unrelated("this trainer does not scale by a group")}
NO_CRITIC: Table = {
    "critic.* trainer.critic_warmup algorithm.lam": unrelated("this trainer has no critic; posttrain ppo has"),
    "algorithm.gamma": absent("a completion has one advantage in this trainer, without discount", "1", "1.0"),
}

SFT: Table = {
    **with_pattern("optim", OPTIMIZER),
    "data.train_batch_size": "train.batch_size",
    "data.micro_batch_size data.micro_batch_size_per_gpu": MICRO,
    "data.max_token_len_per_gpu": "train.micro_batch_tokens",
    "data.use_dynamic_bsz data.balance_dp_token": PACKING,
    "data.max_length": "data.max_length",
    "data.val_max_samples data.ignore_input_ids_mismatch": unrelated("all examples of data.eval are evaluated"),
    "model.partial_pretrain model.path": "model.path",
    "model.tokenizer_path": "model.tokenizer",
    "model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "model.lora_rank": "model.lora_rank",
    "model.lora_alpha": "model.lora_alpha",
    "model.target_modules": listed("model.lora_target_modules"),
    "model.trust_remote_code": NO_REMOTE_CODE,
    "model.fsdp_config.cpu_offload model.fsdp_config.offload_params engine.param_offload": offload("parameters"),
    "model.fsdp_config.model_dtype engine.model_dtype": needless(
        "weights in half precision have float32 masters; model.dtype sets the type"
    ),
    "model.use_liger model.use_fused_kernels engine.use_torch_compile": KERNELS,
    "ulysses_sequence_parallel_size engine.ulysses_sequence_parallel_size": "cluster.context_parallel_size",
    "use_remove_padding model.use_remove_padding": PACKING,
    "model.* engine.*": SHORT_NAMES,
}
DISTILLED = "distillation.distillation_loss"


def teacher_top_k(value: Any, given: Given) -> Found:
    return {"algo.divergence_top_k": value} if given.get(f"{DISTILLED}.loss_mode") == "forward_kl_topk" else {}


OPD: Table = {
    "distillation.enabled": needless("the verb says it"),
    "distillation.teacher_model.model_path distillation.teacher_models.*.model_path": "algo.teacher",
    f"{DISTILLED}.loss_mode": chosen(
        "algo.divergence",
        {"forward_kl_topk": "forward_kl", "k1": "reverse_kl"},
        note="forward_kl_topk: forward_kl with algo.divergence_top_k; k1: algo.objective policy_gradient",
    ),
    f"{DISTILLED}.use_policy_gradient": chosen(
        "algo.objective", {"true": "policy_gradient", "false": "divergence"}, note="policy_gradient or divergence"
    ),
    f"{DISTILLED}.topk": made("algo.divergence_top_k", by=teacher_top_k, note="with loss_mode forward_kl_topk"),
    f"{DISTILLED}.loss_max_clamp": "algo.divergence_clip",
    f"{DISTILLED}.distillation_loss_coef": "algo.distill_coef",
    f"{DISTILLED}.use_task_rewards": chosen("algo.reward_coef", {"true": "1", "false": "0"}, note="1 or 0"),
}
SAPO: Table = {
    f"{ACTOR}.tau_pos": "algo.temperature_positive",
    f"{ACTOR}.tau_neg": "algo.temperature_negative",
}
GROUP: Table = {
    "algorithm.adv_estimator": Meaning(
        ("algo.group_advantage",),
        "not an option: the verb here; of grpo_passk and opo also algo.group_advantage",
        lambda value, given: {"algo.group_advantage": GROUP_ADVANTAGES[value]} if value in GROUP_ADVANTAGES else {},
        verbs=ESTIMATORS,
    ),
}
REINFORCE: Table = {
    "algorithm.gamma": "algo.gamma",
    "algorithm.adv_estimator": Meaning(
        ("algo.baseline",),
        "not an option: the verb here; of reinforce_plus_plus_baseline also algo.baseline",
        lambda value, given: {"algo.baseline": "true"} if value == "reinforce_plus_plus_baseline" else {},
        verbs=ESTIMATORS,
    ),
}

VERL = Library(
    "verl",
    (
        (("sft", *ONLINE), {**RUNNING, **DATA}),
        (("sft",), SFT),
        (
            ONLINE,
            {
                **ENGINE,
                **PPO_DATA,
                **MODEL_ROWS,
                **ACTOR_ROWS,
                **REFERENCE_ROWS,
                **ROLLOUT_ROWS,
                **ALGORITHM,
                **REWARDS,
            },
        ),
        (ONLINE, NO_GROUPS),
        (tuple(verb for verb in ONLINE if verb != "ppo"), NO_CRITIC),
        (("reinforce",), REINFORCE),
        (("grpo",), GROUP),
        (GROUPED, {"algorithm.norm_adv_by_std_in_grpo": "algo.scale_by_std"}),
        (("sapo",), SAPO),
        (("ppo",), PPO),
        (("opd",), OPD),
    ),
    {"sft": "SFT trainer", **dict.fromkeys(ONLINE, "main_ppo")},
    defaults=(
        (
            ONLINE,
            {
                "data.train_batch_size": "1024",
                "data.max_prompt_length": "512",
                "data.max_response_length": "512",
                f"{ACTOR}.optim.lr": "1e-6",
                f"{ACTOR}.optim.warmup_style": "constant",
                f"{ACTOR}.optim.weight_decay": "0.01",
                f"{ACTOR}.optim.betas": ["0.9", "0.999"],
                f"{ACTOR}.ppo_mini_batch_size": "256",
                f"{ACTOR}.clip_ratio": "0.2",
                f"{ACTOR}.clip_ratio_c": "3.0",
                f"{ACTOR}.entropy_coeff": "0",
                f"{ACTOR}.use_kl_loss": "False",
                f"{ACTOR}.loss_agg_mode": "token-mean",
                f"{ROLLOUT}.n": "1",
                "trainer.total_epochs": "30",
                "trainer.save_freq": "-1",
                "trainer.test_freq": "-1",
                "trainer.project_name": "verl_examples",
            },
        ),
        (("ppo",), {"critic.optim.lr": "1e-5", "critic.cliprange_value": "0.5", "algorithm.lam": "1.0"}),
        (
            ("sft",),
            {
                "data.train_batch_size": "256",
                "data.max_length": "1024",
                "optim.lr": "1e-5",
                "optim.betas": ["0.9", "0.95"],
                "optim.weight_decay": "0.01",
                "optim.lr_warmup_steps_ratio": "0.1",
                "optim.lr_scheduler": "cosine",
                "trainer.total_epochs": "4",
            },
        ),
    ),
    default_verb="ppo",
)
