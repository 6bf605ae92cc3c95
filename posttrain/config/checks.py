"""Conditions that must hold between the values of options, checked before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from posttrain.config.sections import INFLIGHT, LAYOUT_KEYS, ONLINE_PARTS, ROLES, Config, OnlineConfig, value_of
from posttrain.core.errors import UsageError

Refuse = Callable[[bool, str], None]
"""Raises UsageError with the message if the first argument is true."""
BELOW_ONE = math.nextafter(1.0, 0.0)


def check(config: Config, *, data: bool = True) -> Config:
    """Raise UsageError for settings that cannot work, alone or together. `data`: whether training data is required."""

    def refuse(problem: bool, message: str) -> None:
        if problem:
            raise UsageError(message)

    model, source, train, report_to = config.model, config.data, config.train, config.log.report_to
    refuse(
        "wandb" in report_to and not config.log.wandb_project,
        "log.report_to has wandb, but log.wandb_project is not set. Name the project: --log.wandb_project NAME",
    )
    refuse(
        bool(config.log.wandb_project) and "wandb" not in report_to,
        f"log.wandb_project is {config.log.wandb_project}, but log.report_to does not have wandb. "
        "Add --log.report_to wandb.",
    )
    refuse(not model.path, "model.path is not set. Give a model directory, a Hugging Face name or pico: --model pico")
    refuse(data and not source.train, "data.train is not set. Name the files to train on: --data examples.jsonl")
    refuse(
        model.load_in_4bit and not model.lora_rank,
        "model.load_in_4bit freezes the weights, so there is nothing to train. Train adapters: --model.lora_rank 16",
    )
    check_data(config, refuse)
    for key, low, high in (
        ("train.max_steps", 0, None),
        ("seed", 0, 2**63 - 1),
        ("train.batch_size", 1, None),
        ("train.micro_batch_tokens", 1, None),
        ("train.learning_rate", 0, None),
        ("train.min_lr_ratio", 0, 1),
        ("train.warmup_steps", 0, None),
        ("train.warmup_ratio", 0, 1),
        ("train.weight_decay", 0, None),
        ("train.adam_beta1", 0, BELOW_ONE),
        ("train.adam_beta2", 0, BELOW_ONE),
        ("train.max_grad_norm", 0, None),
        ("train.ema_decay", 0, 0.999999),
        ("data.max_length", 2, None),
        ("data.max_examples", 0, None),
        ("model.lora_rank", 0, None),
        ("model.lora_dropout", 0, 0.999999),
        ("model.router_aux_loss_coef", 0, None),
        ("eval.every_steps", 0, None),
        ("save.every_steps", 0, None),
        ("save.max_checkpoints", 1, None),
        ("save.max_gigabytes", 0, None),
    ):
        refuse(*outside(config, key, low, high))
    refuse(
        bool(train.warmup_steps and train.warmup_ratio),
        f"train.warmup_steps is {train.warmup_steps} and train.warmup_ratio is {train.warmup_ratio}; set one of them.",
    )
    refuse(
        not train.max_steps and not 0 < train.epochs < math.inf,
        f"train.epochs is {train.epochs}; it must be above 0, and finite.",
    )
    check_cluster(config, refuse)
    idle = [] if isinstance(config, OnlineConfig) else [o for o in config.cluster.offload if o in ONLINE_PARTS]
    refuse(
        bool(idle),
        f"cluster.offload is {' '.join(config.cluster.offload)}, but offline training has no phase without "
        f"{' and '.join(idle)}. cluster.offload parameters keeps weights, gradients and optimizer in host memory.",
    )
    if isinstance(config, OnlineConfig):
        check_online(config, refuse)
    return config


def check_data(config: Config, refuse: Refuse) -> None:
    """What must hold between the options of the section data."""
    data, every = config.data, config.eval.every_steps
    refuse(
        bool(data.weights) and len(data.weights) != len(data.train),
        f"data.weights has {len(data.weights)} numbers for {len(data.train)} sources in data.train. Give one per "
        "source, or none.",
    )
    refuse(
        not all(0 < weight < math.inf for weight in data.weights),
        f"data.weights is {' '.join(map(str, data.weights))}; every weight must be above 0, and finite.",
    )
    refuse(*outside(config, "data.eval_fraction", 0, BELOW_ONE))
    refuse(
        bool(data.eval and data.eval_fraction),
        f"data.eval names files and data.eval_fraction is {data.eval_fraction}; set one of them.",
    )
    refuse(
        bool(every and not data.eval and not data.eval_fraction),
        f"eval.every_steps is {every} but there is nothing to evaluate on. Set data.eval or data.eval_fraction.",
    )


def launched_size() -> int:
    """Processes that torchrun or srun started together, this one among them; 1 if neither did."""
    for size, rank in (("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")):
        if size in os.environ and rank in os.environ:
            return int(os.environ[size])
    return 1


def check_cluster(config: Config, refuse: Refuse) -> None:
    """Layouts that cannot be, and roles that are not there."""
    cluster = config.cluster
    if launched_size() > 1:
        cluster.devices = launched_size()
        refuse(
            bool(cluster.ray),
            f"cluster.ray is {cluster.ray}, but torchrun or srun started {launched_size()} processes. Use one of them.",
        )
    roles = ROLES if isinstance(config, OnlineConfig) else ("actor", "reference")
    refuse(*outside(config, "cluster.devices", 1, None))
    for entry in cluster.layout:
        key, equals, value = entry.partition("=")
        role, dot, name = key.rpartition(".")
        bad = f"cluster.layout has {entry!r}; it must be [role.]key=value with a key of {', '.join(LAYOUT_KEYS)}"
        refuse(not equals or name not in LAYOUT_KEYS, f"{bad}.")
        refuse(bool(dot) and role.partition("-")[0] not in roles, f"{bad}, and a role of {', '.join(roles)}.")
        joins = name == "devices" and value in roles and value != role
        refuse(not joins and not value.isdigit(), f"{bad} and a whole number.")
        refuse(
            name == "devices" and role in ("", "actor"),
            f"cluster.layout has {entry!r}: the actor has the devices that cluster.devices leaves it.",
        )
        refuse(value.isdigit() and int(value) < (2 if name == "zero" else 1), f"{bad}; {value} is too small.")
        refuse(name == "zero" and int(value) > 3, f"{bad}; zero is 2 or 3.")
        refuse(
            name in ("cp", "ep") and role == "rollout",
            f"cluster.layout has {entry!r}: answers are made by whole models, or by an engine that divides its own.",
        )
        joined = cluster.entry(value, "devices") if joins else ""
        refuse(joined in roles, f"{bad}; {value} has no devices of its own to share.")
    left = cluster.devices - sum(map(int, cluster.own_devices().values()))
    refuse(
        left < 1,
        f"cluster.devices is {cluster.devices}, but roles of cluster.layout take {cluster.devices - left}, and the "
        "actor needs one too.",
    )
    named = [entry.partition("=")[0].rpartition(".")[0] for entry in cluster.layout]
    for role in dict.fromkeys((*roles, *cluster.own_devices(), *filter(None, named))):
        found = cluster.of(role)
        refuse(
            bool(found.devices % found.alike),
            f"cluster.layout: {role} has {found.devices} devices, which tp={found.tensor_parallel}"
            + f" times cp={found.context_parallel}" * (found.context_parallel > 1)
            + " does not divide.",
        )
        ranks = found.devices // found.tensor_parallel
        refuse(
            found.expert_parallel not in (1, ranks),
            f"cluster.layout: ep is {found.expert_parallel} for {role}; it must be {ranks}, the devices among which "
            "FSDP divides the rest of the model, or be left out.",
        )
    restarts, seconds = cluster.limits
    refuse(
        restarts < 0 or not 0 < seconds < math.inf,
        f"cluster.limits is {list(cluster.limits)}; it must be a number of restarts and seconds above 0.",
    )


def check_online(config: OnlineConfig, refuse: Refuse) -> None:
    """The same for the sections of trainers that generate."""
    rollout, rewards = config.rollout, config.rewards
    options = [entry for entry in rollout.engine[1:] if entry != INFLIGHT]
    names = "the names of verifiers, FILE.py:FUNCTION, model:PATH or http://..."
    judged = config.reward or rollout.environment
    refuse(not judged, f"reward is not set: what judges answers? Give {names}: --reward gsm8k")
    refuse(
        bool(rewards.weights) and len(rewards.weights) != len(config.reward),
        f"rewards.weights has {len(rewards.weights)} numbers for {len(config.reward)} rewards. Give one each, or none.",
    )
    refuse(
        bool(rollout.replay and (rollout.ahead or rollout.dynamic_sampling or rollout.environment)),
        "rollout.replay takes recorded answers as they are: leave out rollout.ahead, rollout.dynamic_sampling and "
        "rollout.environment.",
    )
    refuse(
        not (0 <= rewards.overlong[0] <= rollout.max_tokens and 0 <= rewards.overlong[1] < math.inf),
        f"rewards.overlong is {list(rewards.overlong)}; it must be a number of tokens up to rollout.max_tokens = "
        f"{rollout.max_tokens}, and a penalty of at least 0.",
    )
    refuse(
        not all(0.01 <= limit < math.inf for limit in rewards.limits[:2]) or not 0 <= rewards.limits[2] <= 1,
        f"rewards.limits is {list(rewards.limits)}; it must be seconds and GiB, each at least 0.01, and the part of a "
        "batch that may fail, from 0 to 1.",
    )
    refuse(
        rollout.engine[:1] not in (("local",), ("vllm",)) or not all("=" in entry for entry in options),
        f"rollout.engine is {' '.join(rollout.engine)!r}; it must be local, or vllm and its options as name=value.",
    )
    refuse(
        rollout.inflight and not (rollout.ahead and "rollout" in config.cluster.own_devices()),
        "rollout.engine has inflight, but answers are not made while the model learns: set --rollout.ahead 1 and "
        "--cluster.layout rollout.devices=N.",
    )
    refuse(
        rollout.engine[0] == "local" and config.cluster.of("rollout").tensor_parallel > 1,
        "cluster.layout has rollout.tp, but the local engine keeps a whole model on each device. Leave it out, or take "
        "--rollout.engine vllm.",
    )
    refuse(
        rollout.engine[0] == "local" and bool(options),
        f"rollout.engine local has no options of its own, but got {' '.join(options)}.",
    )
    for key, low, high in (
        ("rollout.samples_per_prompt", 1, None),
        ("rollout.max_tokens", 1, None),
        ("rollout.temperature", 1e-3, None),
        ("rollout.top_p", 1e-6, 1),
        ("rollout.top_k", 0, None),
        ("rollout.min_p", 0, 1),
        ("rollout.ahead", 0, None),
        ("rollout.dynamic_sampling", 0, None),
        ("rollout.max_mismatch", 0, None),
        ("rewards.workers", 1, None),
        ("rewards.clip", 0, None),
        ("eval.samples_per_prompt", 1, None),
        ("eval.temperature", 0, None),
        ("eval.max_examples", 0, None),
    ):
        refuse(*outside(config, key, low, high))


def outside(config: Config, key: str, low: float, high: float | None) -> tuple[bool, str]:
    """Whether a number is out of its bounds, and the message for that case."""
    value = value_of(config, key)
    above = "below 1" if high == BELOW_ONE else f"at most {high}"
    bounds = f"at least {low}" if high is None else f"at least {low} and {above}"
    inside = math.isfinite(value) and value >= low and (high is None or value <= high)
    return not inside, f"{key} is {value}; it must be {bounds}."
