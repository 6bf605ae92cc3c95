"""Option names of other libraries and the option here that does the same, for messages about unknown options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

ELSEWHERE = {
    "lr": "train.learning_rate",
    "train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "micro_train_batch_size": "train.micro_batch_tokens",
    "num_train_epochs": "train.epochs",
    "total_epochs": "train.epochs",
    "save_path": "output_dir",
    "resume_from_checkpoint": "resume",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "device": "cluster.devices",
    "num_gpus": "cluster.devices",
    "n_gpus_per_node": "cluster.devices",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "lora_r": "model.lora_rank",
    "target_modules": "model.lora_target_modules",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "train_files": "data.train",
    "val_files": "data.eval",
    "max_seq_length": "data.max_length",
    "cutoff_len": "data.max_length",
    "lr_scheduler_type": "train.lr_scheduler",
    "save_steps": "save.every_steps",
    "save_total_limit": "save.max_checkpoints",
    "eval_steps": "eval.every_steps",
    "reward_funcs": "reward.functions",
    "normalize_reward": "reward.normalize",
    "scale_reward": "reward.normalize",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "num_iterations": "algo.epochs_per_batch",
    "ref_model": "algo.reference",
}


class Unknown(NamedTuple):
    """An option that does not exist."""

    where: str  # `file:line: `, or empty
    dashes: str  # `--` if it was typed
    key: str


def explain(verb: str, unknown: Sequence[Unknown], known: Collection[str]) -> str:
    """What to write instead of names from other libraries; empty if none of the names is known from one.

    `known`: the options of the verb.
    """
    if not any(counterpart(verb, option.key, known) for option in unknown):
        return ""
    lines = []
    for where, dashes, key in unknown:
        new = counterpart(verb, key, known)
        lines.append(f"{where}{dashes}{key}: no such option" + (f"; here it is {dashes}{new}." if new else "."))
    return "\n".join(lines)


def counterpart(verb: str, key: str, known: Collection[str]) -> str:
    """The option of this verb that does the same, or nothing."""
    found = ELSEWHERE.get(key.split(".")[-1], "")
    return found if found in known else ""
