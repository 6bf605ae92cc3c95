"""MindFormers' YAML files for fine-tuning and pretraining, and the flags of run_mindformer.py."""

from __future__ import annotations

from typing import Any

from posttrain.config.foreign.huggingface import STEP_LOG
from posttrain.config.foreign.meanings import (
    Found,
    Given,
    Library,
    Meaning,
    Table,
    absent,
    chosen,
    here,
    if_true,
    items,
    made,
    needless,
    number,
    positive_only,
    sequence_parallel,
    truth,
    unrelated,
)
from posttrain.config.foreign.mindrlhf import MINDSPORE, SHAPE, STRATEGY, original
from posttrain.config.foreign.mindspeed import HF_ONLY, PACKED_PASSES

SCHEDULES = {
    "cosinewithwarmuplr": "cosine",
    "linearwithwarmuplr": "linear",
    "constantwarmuplr": "constant",
}


def examples(value: Any, given: Given) -> Found | None:
    """Multiply the examples of a micro-batch by the copies of the model, and by the micro-batches of a pipeline."""
    stages = number(given.get("parallel_config.pipeline_stage", "1")) or 1
    names = ["parallel_config.data_parallel", "micro_batch_interleave_num", "runner_config.gradient_accumulation_steps"]
    names += ["parallel_config.micro_batch_num"] * (stages > 1)
    sizes = [number(value), *(number(given.get(name, "1")) for name in names)]
    total = 1.0
    for size in sizes:
        if not size:
            return None
        total *= size
    return {"train.batch_size": f"{total:g}"}


def devices(value: Any, given: Given) -> Found:
    """All devices: copies of the model times what one copy is divided among."""
    names = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")
    total = 1.0
    for name in names:
        total *= number(given.get(f"parallel_config.{name}", "1")) or 1
    return {"cluster.devices": f"{total:g}"}


def last_rate(value: Any, given: Given) -> Found | None:
    low, peak = number(value), number(given.get("lr_schedule.learning_rate"))
    return {"train.min_lr_ratio": f"{low / peak:g}"} if low is not None and peak else None


def betas(value: Any, given: Given) -> Found:
    return dict(zip(("train.adam_beta1", "train.adam_beta2"), items(value), strict=False))


def saving(value: Any, given: Given) -> Found:
    """Find the callback that saves among the list of callbacks."""
    for entry in value if isinstance(value, list) else []:
        if isinstance(entry, dict) and entry.get("type") in ("CheckpointMonitor", "CheckpointMointor"):
            steps, count = entry.get("save_checkpoint_steps"), entry.get("keep_checkpoint_max")
            found = {"save.every_steps": steps, "save.max_checkpoints": count}
            return {option: str(number_) for option, number_ in found.items() if number_}
    return {}


TRAINING: Table = {
    "seed": here("seed"),
    "output_dir": here("output_dir"),
    "load_checkpoint": here("model.path", HF_ONLY),
    "run_mode": Meaning(note="not an option: the verb here", verbs={"finetune": ("sft",), "train": ("pretrain",)}),
    "auto_trans_ckpt only_save_strategy src_strategy_path_or_dir load_ckpt_format use_parallel": STRATEGY,
    "resume_training": if_true({"resume": "true"}, note="the run in output_dir"),
    "runner_config.epochs": "train.epochs",
    "runner_config.batch_size": made(
        "train.batch_size", by=examples, note="times data_parallel, and micro_batch_num of a pipeline"
    ),
    "runner_config.gradient_accumulation_steps": needless("part of train.batch_size"),
    "runner_config.*": MINDSPORE,
    "runner_wrapper.scale_sense.* runner_wrapper.type": needless("bfloat16 needs no loss scale"),
    "runner_wrapper.use_clip_grad": made(
        "train.max_grad_norm",
        by=lambda value, given: (
            {"train.max_grad_norm": given.get("runner_wrapper.max_grad_norm", "1.0")}
            if truth(value)
            else {"train.max_grad_norm": "0"}
        ),
        note="1.0 unless runner_wrapper.max_grad_norm is given",
    ),
    "runner_wrapper.max_grad_norm": needless("part of train.max_grad_norm"),
    "optimizer.type": absent("the optimizer is AdamW with float32 master weights", "adamw", "fp32stateadamweightdecay"),
    "optimizer.betas": made("train.adam_beta1", "train.adam_beta2", by=betas),
    "optimizer.eps": absent("AdamW's epsilon is fixed", "1e-8", "1.e-8", "1e-08", "1.0e-8"),
    "optimizer.learning_rate": needless("lr_schedule has the rate"),
    "optimizer.weight_decay": "train.weight_decay",
    "lr_schedule.type": chosen("train.lr_scheduler", SCHEDULES, note="cosine, linear or constant"),
    "lr_schedule.learning_rate": "train.learning_rate",
    "lr_schedule.lr_end": made("train.min_lr_ratio", by=last_rate, note="as a part of the peak"),
    "lr_schedule.warmup_ratio": "train.warmup_ratio",
    "lr_schedule.warmup_steps": "train.warmup_steps",
    "lr_schedule.total_steps lr_schedule.warmup_lr_init": needless("the schedule lasts as long as the run, from 0"),
    "train_dataset.data_loader.dataset_dir train_data": made(
        "data.train", by=original, note="the original file, not the mindrecord made of it"
    ),
    "train_dataset.data_loader.shuffle": here("data.shuffle"),
    "train_dataset.* train_dataset_task.* eval_dataset.* eval_dataset_task.*": needless(
        "data are read, shuffled and batched by themselves"
    ),
    "do_eval eval_epoch_interval metric.* eval_callbacks": needless(
        "data.eval and eval.every_steps turn evaluation on"
    ),
    "eval_step_interval": positive_only("eval.every_steps", "-1 there is 0 here: only at the end"),
    "parallel_config.model_parallel": "cluster.tensor_parallel_size",
    "parallel_config.data_parallel": made("cluster.devices", by=devices, note="all devices together"),
    "parallel_config.use_seq_parallel": sequence_parallel("parallel_config.model_parallel"),
    "parallel_config.context_parallel": "cluster.context_parallel_size",
    "parallel_config.expert_parallel": "cluster.expert_parallel_size",
    "parallel_config.pipeline_stage": "cluster.pipeline_parallel_size",
    "parallel_config.micro_batch_num micro_batch_interleave_num": PACKED_PASSES,
    "parallel_config.* parallel.*": STRATEGY,
    "recompute_config.recompute": "model.gradient_checkpointing",
    "recompute_config.*": needless("model.gradient_checkpointing has one form"),
    "callbacks": made("save.every_steps", "save.max_checkpoints", by=saving, note="of CheckpointMonitor"),
    "context.* moe_config.* swap_config.*": MINDSPORE,
    "model.model_config.seq_length": "data.max_length",
    "model.model_config.checkpoint_name_or_path": needless("load_checkpoint names the weights"),
    "model.* trainer.* processor.*": SHAPE,
    "profile profile_* init_start_profile": unrelated("set train.profile_steps by hand"),
    "auto_tune filepath_prefix autotune_per_step remote_save_url layer_scale layer_decay lr_scale_factor": MINDSPORE,
    "print_separate_loss log_interval": STEP_LOG,
}
MINDFORMERS = Library(
    "MindFormers",
    ((("sft", "pretrain"), TRAINING),),
    {"sft": "finetune", "pretrain": "train"},
    defaults=((("sft", "pretrain"), {"lr_schedule.lr_end": "0", "runner_wrapper.use_clip_grad": "False"}),),
)
