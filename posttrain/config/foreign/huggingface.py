"""Options of transformers' TrainingArguments and of PEFT, which TRL, LLaMA-Factory and axolotl pass on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from posttrain.config.foreign.meanings import (
    CHOSEN,
    DEVICES,
    DIRECTORY,
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_INPUTS,
    Found,
    Given,
    Table,
    absent,
    batch_of,
    by_hand,
    chosen,
    here,
    if_positive,
    if_true,
    is_off,
    made,
    needless,
    number,
    unrelated,
)

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
    "auto": "auto",
}
KERNELS = needless("kernels are chosen by model and device")
PACKING = needless("examples are always packed and never see each other")
STEP_LOG = needless("every step is logged, in metrics.jsonl of the run directory")
NO_UPLOAD = unrelated("a run uploads nothing; posttrain export --push does")
NO_REMOTE_CODE = unrelated("code from a model's repository is never run")
ADAMW_NAMES = (
    *("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit"),
)
ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_torch_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")


def optimizer(value: Any, given: Given) -> Found | None:
    """On several devices the states of AdamW are divided among them, and not of 8 bits."""
    name = str(value).lower().removeprefix("optimizernames.")
    devices = number(given.get(CHOSEN, given.get(DEVICES, "1"))) or 1
    if name in ADAMW_NAMES or (name in ADAMW_8BIT_NAMES and devices > 1):
        return {}
    names = {**dict.fromkeys(ADAMW_8BIT_NAMES, "adamw_8bit"), "adafactor": "adafactor", "muon": "muon"}
    names["schedule_free_adamw"] = "schedule_free"
    return {"train.optimizer": names[name]} if name in names else None


OPTIMIZER = made(
    "train.optimizer",
    by=optimizer,
    note="adamw, adafactor, muon, schedule_free_adamw; 8-bit AdamW on one device; paged ones are adamw",
)
ONE_SEED = needless("seed sets data order, initialisation and sampling")
LOADER = needless("examples are read and tokenised without worker processes to configure")
SAVES_ALL = needless("a checkpoint holds everything that an exact resume needs")
WHOLE_BATCH = (
    "all examples of an optimizer step: the size per device times accumulation steps times devices; "
    "train.micro_batch_tokens bounds memory"
)


def scheduler(value: Any, given: Given) -> Found | None:
    """cosine and linear end at 0 there."""
    shapes = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
    name = str(value).lower()
    if name == "cosine_with_min_lr":
        return {"train.lr_scheduler": "cosine"}
    if name not in shapes:
        return None
    ends = {"train.min_lr_ratio": "0"} if shapes[name] != "constant" else {}
    return {"train.lr_scheduler": shapes[name], **ends}


def warms_up(given: Given) -> bool:
    """Whether the schedule there has a warm-up: `constant` has none, whatever is set for it."""
    names = ("lr_scheduler", "lr_scheduler_type", "actor.lr_scheduler")
    return "constant" not in (str(given.get(name)).lower() for name in names)


def warmup(value: Any, given: Given) -> Found | None:
    """Convert a number of steps, or, below 1, a share of all steps."""
    amount = number(value)
    if amount is None or not warms_up(given):
        return None if amount is None else {}
    return {"train.warmup_ratio" if 0 < amount < 1 else "train.warmup_steps": value}


def saving(value: Any, given: Given) -> Found | None:
    """Translate only `no`, which is a number of steps here."""
    return {"save.every_steps": "0"} if str(value).lower() in ("no", "false") else {} if value == "steps" else None


TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")


def trackers(value: Any, given: Given) -> Found | None:
    """Only places that exist here are taken over."""
    names = value if isinstance(value, list) else [value]
    known = [str(name) for name in names if name in TRACKERS]
    project = {"log.project": "huggingface"} if "wandb" in known and "wandb_project" not in given else {}
    return {"log.report_to": known, **project} if known else {}


def last_rate(value: Any, given: Given) -> Found | None:
    """Convert min_lr, or min_lr_rate of a mapping, to a fraction of the peak."""
    if isinstance(value, dict):
        if (ratio := value.get("min_lr_rate")) is not None:
            return {"train.min_lr_ratio": ratio}
        value = value.get("min_lr")
    low, peak = number(value), number(given.get("learning_rate"))
    return None if low is None or not peak else {"train.min_lr_ratio": f"{low / peak:g}"}


def warmup_ratio(value: Any, given: Given) -> Found:
    replaced = (number(given.get("warmup_steps")) or 0) > 0
    return {"train.warmup_ratio": value} if warms_up(given) and not replaced else {}


EVALUATED = ("val_size", "eval_dataset", "val_set_size", "test_datasets", "test_split_size")


def eval_steps(value: Any, given: Given) -> Found:
    """Steps count only where there is something to evaluate on, and an evaluation at all."""
    strategy = str(given.get("eval_strategy", given.get("evaluation_strategy", "steps"))).lower()
    splits = "dataset_name" in given and strategy != "no" and "eval_strategy" in given
    there = splits or any(not is_off(given.get(name)) for name in EVALUATED)
    return {"eval.every_steps": value} if there and strategy not in ("no", "epoch") else {}


def deepspeed(value: Any, given: Given) -> Found | None:
    """Read the stage from the file, or from its name: ds_z3_config.json."""
    if is_off(value):
        return {}
    places = [Path(str(value)), Path(str(given.get(DIRECTORY, "."))) / str(value)]
    for place in places:
        if place.is_file():
            try:
                stage = json.loads(place.read_text(encoding="utf-8"))["zero_optimization"]["stage"]
            except (ValueError, KeyError, TypeError):
                return None
            return {"cluster.zero_stage": str(stage)} if stage in (2, 3) else {}
    named = re.search(r"z(?:ero)?[_-]?([0-3])", Path(str(value)).name)
    return None if named is None else {"cluster.zero_stage": named[1]} if named[1] in "23" else {}


TRAINING: Table = {
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": made(
        "train.lr_scheduler", "train.min_lr_ratio", by=scheduler, note="cosine and linear end at 0 there"
    ),
    "lr_scheduler_kwargs": made(
        "train.min_lr_ratio", by=last_rate, note="min_lr_rate: the last learning rate as a part of the peak"
    ),
    "lr_scheduler_kwargs.min_lr_rate": "train.min_lr_ratio",
    "lr_scheduler_kwargs.min_lr": made("train.min_lr_ratio", by=last_rate, note="as a part of the peak"),
    "warmup_steps": made(
        "train.warmup_steps", "train.warmup_ratio", by=warmup, note="below 1 a ratio there; constant has none"
    ),
    "warmup_ratio": made("train.warmup_ratio", by=warmup_ratio, note="warmup_steps wins there; constant has none"),
    "weight_decay": "train.weight_decay",
    "adam_beta1": "train.adam_beta1",
    "adam_beta2": "train.adam_beta2",
    "max_grad_norm": "train.max_grad_norm",
    "optim": OPTIMIZER,
    "optim_args optim_target_modules": absent("optimizers have no further settings"),
    "adam_epsilon": absent("AdamW's epsilon is fixed", "1e-8", "1e-08", "1.0e-8"),
    "num_train_epochs": "train.epochs",
    "max_steps": if_positive("train.max_steps"),
    "per_device_train_batch_size gradient_accumulation_steps": batch_of(
        "train.batch_size", WHOLE_BATCH, "per_device_train_batch_size", "gradient_accumulation_steps"
    ),
    "per_device_eval_batch_size eval_accumulation_steps auto_find_batch_size": needless(
        "train.micro_batch_tokens bounds every forward pass"
    ),
    "bf16": if_true({"model.dtype": "bfloat16"}, note="bfloat16; the default on an accelerator"),
    "fp16": if_true({"model.dtype": "float16"}, note="float16"),
    "dtype torch_dtype": chosen("model.dtype", DTYPES),
    "tf32": KERNELS,
    "gradient_checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing_kwargs": needless("model.gradient_checkpointing has one form"),
    "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel": KERNELS,
    "activation_offloading": if_true(OFFLOADED_ACTIVATIONS, note=OFFLOADED_INPUTS),
    "output_dir": "output_dir",
    "overwrite_output_dir": unrelated("an existing run is never overwritten; resume continues it"),
    "save_steps": "save.every_steps",
    "save_strategy": made(
        "save.every_steps", by=saving, note="counted in steps; 0 saves only at the end", harmless=True
    ),
    "save_total_limit": "save.max_checkpoints",
    "save_only_model save_safetensors": SAVES_ALL,
    "eval_steps": made("eval.every_steps", by=eval_steps, note="with eval_strategy steps and data to evaluate on"),
    "eval_strategy evaluation_strategy do_eval eval_on_start": by_hand(
        "eval.every_steps", note="counted in steps; there is always an evaluation at the end", harmless=True
    ),
    "load_best_model_at_end": needless("the best checkpoint is kept besides the newest ones"),
    "metric_for_best_model": by_hand(
        "eval.metric_for_best_model", note="loss, reward, accuracy or TASK/METRIC", harmless=True
    ),
    "greater_is_better": by_hand("eval.metric_mode", note="min or max", harmless=True),
    "logging_steps logging_strategy logging_first_step logging_dir plot_loss": STEP_LOG,
    "log_level disable_tqdm": by_hand("quiet", note="prints only warnings, errors and the last line", harmless=True),
    "report_to": made("log.report_to", "log.project", by=trackers, note="trackers that exist here"),
    "run_name": needless("a run is named by output_dir"),
    "seed": "seed",
    "data_seed": ONE_SEED,
    "full_determinism": needless("runs are deterministic wherever the device allows it"),
    "resume_from_checkpoint": by_hand("resume", "output_dir", note="continues the run in output_dir"),
    "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last": LOADER,
    "remove_unused_columns": needless("reward functions get all columns, trainers take what they know"),
    "group_by_length length_column_name train_sampling_strategy": PACKING,
    "ddp_timeout": by_hand("cluster.worker_timeout_seconds", note="longest wait for a worker", harmless=True),
    "ddp_find_unused_parameters local_rank": needless("workers are started by cluster.devices, torchrun or srun"),
    "deepspeed": made(
        "cluster.zero_stage", by=deepspeed, note="the stage, 2 or 3; models are divided by FSDP2", harmless=True
    ),
    "fsdp fsdp_config fsdp_config.* accelerator_config accelerator_config.*": by_hand(
        "cluster.zero_stage", note="several devices share a model by FSDP2 without further settings", harmless=True
    ),
    "do_train do_predict": needless("the verb says what is done"),
    "push_to_hub hub_model_id hub_strategy hub_token": NO_UPLOAD,
    "neftune_noise_alpha": here("train.neftune_noise_alpha", "offline trainers only"),
    "label_names include_num_input_tokens_seen include_tokens_per_second": STEP_LOG,
    "trust_remote_code": NO_REMOTE_CODE,
}

DEFAULTS: dict[str, str] = {  # of TrainingArguments, where they differ from ours
    "learning_rate": "5e-5",
    "lr_scheduler_type": "linear",
    "num_train_epochs": "3",
    "per_device_train_batch_size": "8",
    "adam_beta2": "0.999",
    "save_steps": "500",
    "seed": "42",
}

ADAPTERS: Table = {
    "lora_r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "lora_dropout": "model.lora_dropout",
    "load_in_4bit": "model.load_in_4bit",
    "load_in_8bit": absent("frozen weights have 4 bits, with model.load_in_4bit, or all of them"),
    "bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_quant_storage use_bnb_nested_quant": needless(
        "model.load_in_4bit is NF4 with double quantisation"
    ),
    "use_rslora": "model.use_rslora",
    "use_dora": "model.use_dora",
    "lora_modules_to_save lora_target_parameters": absent("only adapters of linear layers are trained"),
    "lora_task_type": needless("it follows from the verb"),
}
