"""MindRLHF's options: grpo_config.yaml, the flags of grpo_one_stage.py and of main.py, and PPOConfig."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from posttrain.config.foreign.huggingface import NO_REMOTE_CODE, PACKING, SAVES_ALL, STEP_LOG
from posttrain.config.foreign.meanings import (
    GROUPED,
    Found,
    Given,
    Library,
    Meaning,
    Table,
    TranslationError,
    absent,
    by_hand,
    chosen,
    clip_both,
    here,
    if_true,
    items,
    listed,
    made,
    needless,
    number,
    part_of,
    ratio,
    reward_model,
    truth,
    unrelated,
    vllm,
    with_pattern,
)
from posttrain.config.foreign.mindspeed import HF_ONLY, MICRO, PACKED_PASSES, SAMPLING

STRATEGY = needless("Hugging Face directories are read for any number of devices")
MINDSPORE = unrelated("a setting of MindSpore")
SAMPLER = needless("the sampler has the trainer's weights")
SHAPE = needless("the shape is in the model's directory, model.path")


def prompts(given: Given) -> Found | None:
    """Multiply what the file or the flags give; data_parallel of generation is 1 if it is not given."""
    for prefix in ("", "rl_config."):
        chunk, rollouts = (number(given.get(f"{prefix}{name}")) for name in ("chunk_size", "num_rollouts"))
        if chunk or rollouts:
            parallel = number(given.get("generate_config.parallel_config.data_parallel", "1")) or 1
            return {"train.batch_size": f"{(chunk or 1) * (rollouts or 1) * parallel:g}"}
    return None


def original(value: Any, given: Given) -> Found:
    """A mindrecord cannot be read; its original can."""
    if str(value).endswith(".mindrecord"):
        raise TranslationError(
            "a mindrecord is MindSpore's own format. Give the file that it was made of with --data.train"
        )
    return {"data.train": [str(value)]}


def file_section(value: Any, *names: str, why: str) -> dict[str, Any]:
    """Return a section of a MindFormers file; empty if it has none."""
    try:
        section = yaml.safe_load(Path(str(value)).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise TranslationError(f"cannot be read ({type(error).__name__}), and it says {why}") from None
    for name in names:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def infer_sampling(value: Any, given: Given) -> Found:
    """Read how completions are sampled from the MindFormers file of the sampler."""
    entries = file_section(value, "model", "model_config", why="how completions are sampled")
    penalty = number(entries.get("repetition_penalty", 1))
    if penalty != 1:
        raise TranslationError(
            f"model.model_config.repetition_penalty is {penalty:g} there; rollouts are drawn from the policy itself, "
            "without such changes. Give --rollout.temperature and the like and leave the file out"
        )
    found = {f"rollout.{name}": str(entries[name]) for name in ("temperature", "top_p", "top_k") if name in entries}
    return found if entries.get("do_sample", True) else {"rollout.temperature": "0"}


def decay_end(scheduler: str) -> Meaning:
    """Translate the step at which the rate reaches its minimum; a constant one has none."""
    return made(
        "train.lr_decay_steps",
        by=lambda value, given: {} if given.get(scheduler) == "constant" else {"train.lr_decay_steps": value},
        note="the step of the lowest rate",
    )


def first_loss(value: Any, given: Given) -> Found:
    """Return what configs/mindrlhf-grpo.yaml says about the loss of models/grpo_models.py."""
    return {
        "algo.clip_low": "0",
        "algo.clip_high": "0",
        "algo.kl_in": "loss",
        "algo.kl_estimator": "k3",
        "algo.loss_aggregation": "sample_mean",
        "algo.std_epsilon": "1e-4",
        "algo.importance_cap": "0",
    }


def train_layout(value: Any, given: Given) -> Found:
    """Read the layout of training from the MindFormers file; its other entries describe the model."""
    parallel = file_section(value, "parallel_config", why="how the model is divided")
    size = number(parallel.get("model_parallel", 1))
    return {"cluster.tensor_parallel_size": f"{size:g}"} if size and size > 1 else {}


def tokenizer_files(value: Any, given: Given) -> Found:
    return {"model.tokenizer": str(Path(str(value)).parent)}


PROMPTS = made(
    "train.batch_size",
    by=lambda value, given: prompts(given),
    note="prompts of a step: chunk_size times num_rollouts times data_parallel of generation",
)


def verifiers(value: Any, given: Given) -> Found:
    return {"reward.functions": items(value)}


def vllm_used(value: Any, given: Given) -> Found:
    """1 there is vLLM, 0 MindFormers."""
    return {"rollout.engine": "vllm"} if str(value) == "1" or str(value).lower() == "true" else {}


def synchronised(value: Any, given: Given) -> Found:
    on = given.get("ref_config.sync_ref_model", given.get("sync_ref_model"))
    return {"algo.reference_sync_steps": value} if truth(on) else {}


PROFILE: Table = {
    "profiler_config.* monitor_config.*": unrelated("set train.profile_steps by hand"),
    "context.*": MINDSPORE,
}
RL: Table = {
    "dataset_file": made("data.train", by=original, note="the original file, not the mindrecord made of it"),
    "tokenizer_dir": "model.tokenizer",
    "epochs": "train.epochs",
    "chunk_size num_rollouts": PROMPTS,
    "batch_size": MICRO,
    "seq_length": part_of("data.max_length", "max_prompt_length and max_tokens bound prompts and completions"),
    "num_generations": "rollout.samples_per_prompt",
    "beta": here("algo.kl_coef", "the weight of the KL to the reference"),
    "epsilon_low": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "num_iterations": "algo.epochs_per_batch",
    "save_ckpt_interval": "save.every_steps",
    "save_max_ckpt_num": "save.max_checkpoints",
    "save_checkpoint_dir": "output_dir",
    "load_ckpt_format save_ckpt_format": SAVES_ALL,
    "packing pack_num": PACKING,
    "seed": here("seed"),
    "tensorboard": if_true({"log.report_to": ["tensorboard"]}, note="tensorboard"),
    "tensorboard_dir": made(
        "log.tensorboard_dir",
        by=lambda value, given: {"log.tensorboard_dir": value} if truth(given.get("rl_config.tensorboard")) else {},
        note="with tensorboard",
    ),
    "tensorboard_queue_size": needless("tensorboard writes every step"),
    "save_data_file save_prompt_completions_*": needless("posttrain samples shows all completions"),
    "performance_stats calculate_entropy enable_full_monitor": STEP_LOG,
    "save_strategy_dir use_parallel parallel_mode": STRATEGY,
    "model_name tokenizer_type align_type": SHAPE,
    "enable_oldpolicy": needless("old log-probabilities are computed where several updates need them"),
    "*": MINDSPORE,
}
PARALLEL: Table = {
    "parallel_config.model_parallel": "cluster.tensor_parallel_size",
    "parallel_config.data_parallel": needless("the rest of cluster.devices"),
    "parallel_config.context_parallel": "cluster.context_parallel_size",
    "parallel_config.expert_parallel": "cluster.expert_parallel_size",
    "parallel_config.pipeline_stage": "cluster.pipeline_parallel_size",
    "parallel_config.micro_batch_num": PACKED_PASSES,
    "parallel_config.*": MINDSPORE,
}
ACTOR: Table = {
    **PARALLEL,
    "load": here("model.path", HF_ONLY),
    "save": needless("checkpoints are in the run directory, output_dir"),
    "model_config": SHAPE,
    "recompute_config.recompute": "model.gradient_checkpointing",
    "recompute_config.*": needless("model.gradient_checkpointing has one form"),
    "optimizer.adam_beta1": "train.adam_beta1",
    "optimizer.adam_beta2": "train.adam_beta2",
    "optimizer.weight_decay": "train.weight_decay",
    "optimizer.opt_offload": if_true({"cluster.offload": ["optimizer"]}, note="optimizer"),
    "optimizer.*": absent("the optimizer is AdamW with float32 master weights", "adamw", "1e-8", "1e-08", "1.0e-8"),
    "lr_schedule.lr": "train.learning_rate",
    "lr_schedule.min_lr": ratio("train.min_lr_ratio", "actor_config.lr_schedule.lr", note="as a part of the peak"),
    "lr_schedule.warmup_step": "train.warmup_steps",
    "lr_schedule.lr_decay_style": chosen(
        "train.lr_scheduler", {"cosine": "cosine", "linear": "linear", "constant": "constant"}
    ),
    "lr_schedule.decay_steps": decay_end("actor_config.lr_schedule.lr_decay_style"),
    "*": MINDSPORE,
}
REFERENCE: Table = {
    "load": here("algo.reference", HF_ONLY + "; left out, it is the policy at the start"),
    "model_config": SHAPE,
    "sync_ref_model": part_of("algo.reference_sync_steps", "ref_model_sync_steps, a number of steps, turns it on"),
    "ref_model_sync_steps": made("algo.reference_sync_steps", by=synchronised, note="with sync_ref_model"),
    "ref_model_batch_size": MICRO,
    "parallel_config.model_parallel": "cluster.reference_tensor_parallel_size",
    "parallel_config.context_parallel": "cluster.reference_context_parallel_size",
    "parallel_config.data_parallel": needless("the rest of the devices"),
    "parallel_config.pipeline_stage": "cluster.reference_pipeline_parallel_size",
    "*": MINDSPORE,
}
REWARD: Table = {
    "verifier_function": made("reward.functions", by=verifiers, note="names: posttrain rewards list"),
    "verifier_weight": listed("reward.weights"),
}
GENERATE: Table = {
    **with_pattern("sampling_config", SAMPLING),
    "use_vllm": made("rollout.engine", by=vllm_used, note="vllm, or local, which shares the trainer's weights"),
    "max_model_len": vllm("max_model_len", unless="generate_config.use_vllm"),
    "max_num_seqs": vllm("max_num_seqs", unless="generate_config.use_vllm"),
    "max_num_batched_tokens": vllm("max_num_batched_tokens", unless="generate_config.use_vllm"),
    "gpu_memory_utilization": vllm("gpu_memory_utilization", unless="generate_config.use_vllm"),
    "max_prompt_length": here("data.max_length", "tokens of a prompt"),
    "load model_config hf_config_path": SAMPLER,
    "parallel_config.model_parallel": vllm("tensor_parallel_size", unless="generate_config.use_vllm"),
    "parallel_config.*": STRATEGY,
    "trust_remote_code": NO_REMOTE_CODE,
    "infer_model_batch_size block_size num_scheduler_steps *": needless("the engine batches by itself"),
}
GRPO: Table = {
    **PROFILE,
    **with_pattern("rl_config", RL),
    **with_pattern("actor_config", ACTOR),
    **with_pattern("ref_config", REFERENCE),
    **with_pattern("reward_config", REWARD),
    **with_pattern("generate_config", GENERATE),
}

# Flags: those of main.py stand for entries of the file, those of grpo_one_stage.py came before there was one.
FLAGS: Table = {
    "config": needless("a file comes first: posttrain grpo FILE.yaml"),
    "sft_model_path": SHAPE,
    "sft_path_infer": made("rollout.temperature", by=infer_sampling, note="as the model_config of that file samples"),
    "grpo_with_grad": made(
        "algo.clip_low", by=first_loss, note="the loss of models/grpo_models.py, as in configs/mindrlhf-grpo.yaml"
    ),
    "grpo_epochs": "algo.epochs_per_batch",
    "epochs": "train.epochs",
    "batch_size": here("algo.mini_batch_size", "completions of an update"),
    "max_prompt_length": "data.max_length",
    "max_decode_length": "rollout.max_tokens",
    "sft_path_train": made(
        "cluster.tensor_parallel_size", by=train_layout, note="model_parallel of that file; the rest is in model.path"
    ),
    "vocab_path merges_file_path": made(
        "model.tokenizer", by=tokenizer_files, note="their directory; left out, it is the model's own"
    ),
    "tokenizer_dir": "model.tokenizer",
    "mind_dataset_dir dataset_file": RL["dataset_file"],
    "save_data_file": needless("posttrain samples shows all completions"),
    "save_ckpt_dir save_checkpoint_dir": "output_dir",
    "load_sft_checkpoint_train actor_checkpoint_path": here("model.path", HF_ONLY),
    "load_sft_checkpoint_infer generate_checkpoint_path": SAMPLER,
    "load_ref_checkpoint ref_checkpoint_path": here("algo.reference", HF_ONLY + "; left out, the policy at the start"),
    "use_parallel save_strategy_dir": STRATEGY,
    "only_save_strategy": absent("posttrain plan shows the layout and trains nothing", "false"),
    "enable_compile_cache device_target parallel_mode full_batch enable_alltoall sink_size": MINDSPORE,
    "verifier_function reward_funcs": REWARD["verifier_function"],
    "verifier_weight reward_weights": REWARD["verifier_weight"],
    "worker_num": here("cluster.devices", "all devices together; several nodes by Ray or Slurm"),
    "local_worker_num": needless("cluster.devices counts all devices together"),
    "master_addr master_port join": needless("workers are started by cluster.devices, torchrun or srun"),
    "log_dir": needless("the run directory has a log of every worker"),
    **{name: RL[name] for name in ("beta", "num_generations", "epsilon_low", "epsilon_high", "num_iterations")},
    "chunk_size num_rollouts": PROMPTS,
    "sync_ref_model": REFERENCE["sync_ref_model"],
    "ref_model_sync_steps": REFERENCE["ref_model_sync_steps"],
    "use_vllm": GENERATE["use_vllm"],
}
OPTIMIZER: Table = {
    "lr start_lr": "train.learning_rate",
    "warmup_step": "train.warmup_steps",
    "beta1": "train.adam_beta1",
    "beta2": "train.adam_beta2",
    "weight_decay": "train.weight_decay",
    "end_lr eta_min": ratio("train.min_lr_ratio", "lr", "start_lr", note="as a part of the peak"),
    "decay_steps T_max": decay_end("sceduler_name"),
    "sceduler_name": chosen("train.lr_scheduler", {"cosine": "cosine", "linear": "linear", "constant": "constant"}),
    "opt_offload": if_true({"cluster.offload": ["optimizer"]}, note="optimizer"),
}
PPO: Table = {
    **OPTIMIZER,
    **{names: FLAGS[names] for names in FLAGS if names.split()[0] in ("vocab_path", "save_ckpt_dir", "save_data_file")},
    **{names: FLAGS[names] for names in FLAGS if names.split()[0] in ("mind_dataset_dir", "use_parallel")},
    "enable_compile_cache device_target parallel_mode full_batch enable_alltoall sink_size": MINDSPORE,
    "epochs": "train.epochs",
    "total_steps": "train.max_steps",
    "batch_size": MICRO,
    "num_rollouts chunk_size": PROMPTS,
    "checkpoint_interval": "save.every_steps",
    "eval_interval": "eval.every_steps",
    "ppo_epochs": "algo.epochs_per_batch",
    "init_kl_coef": "algo.kl_coef",
    "kl_coef": "algo.kl_coef",
    "target": here("algo.kl_target", "the KL of a completion"),
    "horizon": "algo.kl_horizon",
    "gamma": "algo.gamma",
    "lam": "algo.gae_lambda",
    "cliprange": clip_both(),
    "cliprange_value": "algo.value_clip",
    "vf_coef": here("algo.value_loss_coef", "with algo.share_critic"),
    "is_shared_backbone": "algo.share_critic",
    "pretrain_coef": by_hand("algo.pretrain_data", "algo.pretrain_coef", note="the files and their weight"),
    "scale_reward": Meaning(
        ("reward.normalize",),
        "running, or saved, for the numbers that ref_mean and ref_std name",
        lambda value, given: (
            {"reward.normalize": {"running": "running", "ref": "saved"}[value]} if value in ("running", "ref") else {}
        ),
    ),
    "ref_mean ref_std": needless("a reward model keeps its mean and deviation; reward.normalize saved uses them"),
    "sft_model_path": SHAPE,
    "critic_model_path": here("algo.critic", "a reward model's directory"),
    "reward_model_path": reward_model(note="model:PATH, a Hugging Face directory"),
    "gen_experience_kwargs align_type model_name": SHAPE,
}

MINDRLHF = Library(
    "MindRLHF",
    ((GROUPED, {**FLAGS, **OPTIMIZER, **GRPO}), (("ppo",), PPO)),
    {**dict.fromkeys(GROUPED, "GRPO example"), "ppo": "PPOConfig"},
    defaults=(
        (
            GROUPED,
            {
                "rl_config.epochs": "10",
                "rl_config.beta": "0.01",
                "rl_config.num_generations": "8",
                "rl_config.num_rollouts": "4",
                "rl_config.save_ckpt_interval": "1",
                "rl_config.save_max_ckpt_num": "5",
                "actor_config.lr_schedule.lr": "5e-7",
                "actor_config.lr_schedule.min_lr": "1e-10",
                "actor_config.lr_schedule.warmup_step": "10",
                "actor_config.optimizer.weight_decay": "0.01",
                "generate_config.max_prompt_length": "2048",
                "generate_config.sampling_config.temperature": "0.8",
                "generate_config.sampling_config.top_p": "0.8",
                "generate_config.sampling_config.top_k": "20",
                "generate_config.sampling_config.min_p": "0.01",
                "generate_config.sampling_config.max_tokens": "512",
                "generate_config.sampling_config.repetition_penalty": "1.05",
            },
        ),
    ),
)

ONE_STAGE = replace(  # grpo_one_stage.py of February 2025: flags, and the rest in configs/grpo_configs.py
    MINDRLHF,
    defaults=(
        (
            GROUPED,
            {
                "beta": "0.01",
                "num_generations": "2",
                "grpo_epochs": "2",
                "epochs": "100",
                "batch_size": "1",
                "chunk_size": "1",
                "num_rollouts": "8",
                "sync_ref_model": "True",
                "ref_model_sync_steps": "50",
                "start_lr": "5e-7",
                "end_lr": "1e-10",
                "sceduler_name": "cosine",
                "warmup_step": "10",
                "decay_steps": "200000",
                "beta1": "0.9",
                "beta2": "0.95",
                "weight_decay": "0.01",
                "max_prompt_length": "512",
                "max_decode_length": "512",
                "grpo_with_grad": "GRPOTrainOneStepCell",
                "reward_funcs": ["accuracy_reward", "format_reward"],
            },
        ),
    ),
)
