"""Conditions that must hold between the values of options, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable
from typing import Any

from posttrain.config.sections import (
    ONLINE_PARTS,
    ROLES,
    ClusterConfig,
    Config,
    EvalConfig,
    OnlineClusterConfig,
    OnlineConfig,
    option_value,
)
from posttrain.core.errors import UsageError

Refuse = Callable[[bool, str], None]
"""Raises UsageError with the message if the first argument is true."""
SHARED_SIZES = (
    *("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "replicate_size"),
    *("pipeline_parallel_size", "virtual_pipeline_parallel_size"),
    "rollout_tensor_parallel_size",
)
FREEZING = ("freeze_layers", "trainable_layers", "frozen_parameters", "trainable_parameters")
BELOW_ONE = math.nextafter(1.0, 0.0)
BOUNDS: tuple[tuple[str, float, float | None], ...] = (
    ("train.max_steps", 0, None),
    ("seed", 0, 2**63 - 1),
    ("train.batch_size", 1, None),
    ("train.micro_batch_tokens", 1, None),
    ("train.learning_rate", 0, None),
    ("train.min_lr_ratio", 0, 1),
    ("train.lr_decay_steps", 0, None),
    ("log.communication_every_steps", 0, None),
    ("train.warmup_steps", 0, None),
    ("train.warmup_ratio", 0, 1),
    ("train.weight_decay", 0, None),
    ("train.adam_beta1", 0, BELOW_ONE),
    ("train.adam_beta2", 0, BELOW_ONE),
    ("train.max_grad_norm", 0, None),
    ("train.ema_decay", 0, 0.999999),
    ("train.neftune_noise_alpha", 0, None),
    ("train.profile_steps", 0, None),
    ("model.freeze_layers", 0, None),
    ("data.max_length", 2, None),
    ("data.max_examples", 0, None),
    ("data.max_mixture_examples", 0, None),
    ("model.lora_rank", 0, None),
    ("model.lora_dropout", 0, 0.999999),
    ("model.router_aux_loss_coef", 0, None),
    ("eval.every_steps", 0, None),
    ("eval.num_fewshot", -1, None),
    ("eval.max_task_examples", 0, None),
    ("eval.early_stopping_patience", 0, None),
    ("eval.early_stopping_threshold", 0, None),
    ("save.every_steps", 0, None),
    ("log.completions_every_steps", 0, None),
    ("save.max_checkpoints", 1, None),
    ("save.max_gigabytes", 0, None),
)
"""Option, lowest and highest value; None: no highest value."""
ONLINE_BOUNDS: tuple[tuple[str, float, float | None], ...] = (
    ("rollout.samples_per_prompt", 1, None),
    ("rollout.max_tokens", 1, None),
    ("rollout.temperature", 1e-3, None),
    ("rollout.top_p", 1e-6, 1),
    ("rollout.top_k", 0, None),
    ("rollout.speculative_tokens", 0, None),
    ("rollout.speculative_max_sequences", 1, None),
    ("rollout.min_p", 0, 1),
    ("rollout.ahead", 0, None),
    ("rollout.partial_prompts", 0, None),
    ("rollout.partial_tokens", 1, None),
    ("rollout.max_staleness", 0, None),
    ("rollout.prompts_per_stage", 0, None),
    ("rollout.dynamic_sampling_max_batches", 1, None),
    ("rollout.skip_epochs", 0, None),
    ("rollout.replay_max_age", 0, None),
    ("rollout.max_mismatch", 0, None),
    ("rollout.environment_workers", 0, None),
    ("rollout.max_concurrent_episodes", 0, None),
    ("rollout.max_turns", 0, None),
    ("rollout.episode_timeout_seconds", 0, None),
    ("rollout.agent_workers", 1, None),
    ("rollout.agent_timeout_seconds", 0.01, None),
    ("reward.timeout_seconds", 0.01, None),
    ("reward.memory_gib", 0.01, None),
    ("reward.max_failure_rate", 0, 1),
    ("reward.workers", 1, None),
    ("reward.clip", 0, None),
    ("reward.overlong_penalty", 0, None),
    ("eval.samples_per_prompt", 1, None),
    ("eval.temperature", 0, None),
    ("eval.max_examples", 0, None),
)
"""The same for options of online trainers."""


def check(config: Config, *, data: bool = True) -> Config:
    """Raise UsageError for settings that cannot work, alone or together. `data`: whether training data is required."""

    def refuse(problem: bool, message: str) -> None:
        if problem:
            raise UsageError(message)

    model, source, train = config.model, config.data, config.train
    if launched_size() > 1:  # torchrun and srun decide the number of devices, which the checks below read
        config.cluster.devices = launched_size()
    check_trackers(config, refuse)
    refuse(not model.path, "model.path is not set. Give a model directory, a Hugging Face name or pico: --model pico")
    refuse(data and not source.train, "data.train is not set. Name the files to train on: --data examples.jsonl")
    refuse(
        model.load_in_4bit and not model.lora_rank,
        "model.load_in_4bit freezes the weights, so there is nothing to train. Train adapters: --model.lora_rank 16",
    )
    refuse(
        train.fp8 and bool(model.lora_rank),
        "train.fp8 is for layers without adapters, but model.lora_rank is set. Leave one of them out.",
    )
    refuse(
        bool(train.profile_steps) and not all(0 <= rank < config.cluster.devices for rank in train.profile_ranks),
        f"train.profile_ranks is {train.profile_ranks}; ranks count from 0, and cluster.devices is "
        f"{config.cluster.devices}.",
    )
    refuse(
        train.fp8 and config.cluster.devices > 1,
        f"train.fp8 is for one device, but cluster.devices is {config.cluster.devices}. Leave train.fp8 out.",
    )
    check_weights(config, refuse)
    check_data(config, refuse)
    check_evaluation(config, refuse)
    for key, low, high in BOUNDS:
        refuse(*outside(config, key, low, high))
    check_schedule(config, refuse)
    check_cluster(config, refuse)
    check_optimizer(config, refuse)
    check_divided_model(config, refuse)
    check_noise_and_frozen_weights(config, refuse)
    idle = [] if isinstance(config, OnlineConfig) else [o for o in config.cluster.offload if o in ONLINE_PARTS]
    refuse(
        bool(idle),
        f"cluster.offload is {' '.join(config.cluster.offload)}, but offline training has no phase without "
        f"{' and '.join(idle)}. cluster.offload parameters keeps weights, gradients and optimizer in host memory.",
    )
    if isinstance(config, OnlineConfig):
        check_online(config, refuse)
    return config


def check_schedule(config: Config, refuse: Refuse) -> None:
    """Refuse warm-up, decay and epochs that contradict each other."""
    train = config.train
    refuse(
        bool(train.warmup_steps and train.warmup_ratio),
        f"train.warmup_steps is {train.warmup_steps} and train.warmup_ratio is {train.warmup_ratio}; set one of them.",
    )
    refuse(
        bool(train.lr_decay_steps) and train.lr_scheduler == "constant",
        f"train.lr_decay_steps is {train.lr_decay_steps}, but train.lr_scheduler is constant: choose cosine or linear, "
        "or leave it out.",
    )
    refuse(
        0 < train.lr_decay_steps <= train.warmup_steps,
        f"train.lr_decay_steps is {train.lr_decay_steps}: it must be larger than train.warmup_steps, "
        f"{train.warmup_steps}.",
    )
    refuse(
        not train.max_steps and not 0 < train.epochs < math.inf,
        f"train.epochs is {train.epochs}; it must be above 0, and finite.",
    )


def check_trackers(config: Config, refuse: Refuse) -> None:
    """Refuse names and directories of trackers that are not used."""
    log, named = config.log, [tracker for tracker in config.log.report_to if tracker != "tensorboard"]
    for name in ("project", "run_name", "group", "tracker_dir"):
        value = getattr(log, name)
        refuse(
            bool(value) and not named,
            f"log.{name} is {value}, but log.report_to names no tracker that has it. Add --log.report_to wandb, "
            "trackio, mlflow or swanlab.",
        )
    refuse(
        bool(log.tensorboard_dir) and "tensorboard" not in log.report_to,
        f"log.tensorboard_dir is {log.tensorboard_dir}, but log.report_to does not have tensorboard. "
        "Add --log.report_to tensorboard.",
    )
    refuse(
        bool(log.prometheus_file) and not log.prometheus_file.endswith(".prom"),
        f"log.prometheus_file is {log.prometheus_file}; node_exporter reads files whose names end in .prom.",
    )


def check_evaluation(config: Config, refuse: Refuse) -> None:
    """Raise UsageError for options of evaluation that conflict or have no effect."""
    evaluation, source = config.eval, config.data
    refuse(
        bool(evaluation.harness) and not evaluation.tasks,
        f"eval.harness is {evaluation.harness}, but eval.tasks is not set. Name its tasks: --eval.tasks gsm8k",
    )
    harness = (
        ("tasks", "lm-eval or inspect-ai", bool(evaluation.harness)),
        ("max_task_examples", "lm-eval or inspect-ai", bool(evaluation.harness)),
        ("num_fewshot", "lm-eval", evaluation.harness == "lm-eval"),
        ("apply_chat_template", "lm-eval", evaluation.harness == "lm-eval"),
    )
    for name, needed, has_effect in harness:
        changed = getattr(evaluation, name) != getattr(EvalConfig(), name)
        refuse(changed and not has_effect, f"eval.{name} has no effect without eval.harness {needed}. Set it, too.")
    measured = bool(source.eval or source.eval_fraction or evaluation.harness)
    for name in ("metric_for_best_model", "early_stopping_patience"):
        refuse(
            bool(getattr(evaluation, name)) and not measured,
            f"eval.{name} is set, but nothing is evaluated. Set data.eval, data.eval_fraction or eval.harness.",
        )
    refuse(
        bool(evaluation.early_stopping_patience) and not evaluation.every_steps,
        "eval.early_stopping_patience counts evaluations, but eval.every_steps is 0. Set the steps between them.",
    )
    refuse(
        bool(evaluation.early_stopping_threshold) and not evaluation.early_stopping_patience,
        "eval.early_stopping_threshold has no effect without eval.early_stopping_patience. Set it, too.",
    )


def check_weights(config: Config, refuse: Refuse) -> None:
    """Check what must hold between adapters and frozen weights."""
    model = config.model
    for name, default in (("use_dora", False), ("use_rslora", False), ("lora_init", "zeros")):
        value = getattr(model, name)
        refuse(
            value != default and not model.lora_rank,
            f"model.{name} is of adapters, but model.lora_rank is 0. Train adapters: --model.lora_rank 16",
        )
    refuse(
        model.use_dora and model.lora_init != "zeros",
        f"model.use_dora and model.lora_init {model.lora_init} both change how the weights begin; leave out "
        "one of them.",
    )
    refuse(
        model.load_in_4bit and model.lora_init != "zeros",
        f"model.lora_init {model.lora_init} needs the weights themselves, which model.load_in_4bit rounds; leave out "
        "one of them.",
    )
    for name in FREEZING:
        value = getattr(model, name)
        refuse(
            bool(value) and bool(model.lora_rank),
            f"model.{name} chooses among the weights, but with model.lora_rank {model.lora_rank} only adapters are "
            "trained, of the modules in model.lora_target_modules. Leave out one of them.",
        )
    for name in ("frozen_parameters", "trainable_parameters"):
        for pattern in getattr(model, name):
            try:
                re.compile(pattern)
            except re.error as error:
                refuse(True, f"model.{name}: {pattern!r} is not a regular expression: {error}")


def check_optimizer(config: Config, refuse: Refuse) -> None:
    """Refuse optimizers whose states cannot be where the options put them."""
    model, train, cluster = config.model, config.train, config.cluster
    divided = divides_model(cluster)
    refuse(
        train.optimizer != "adamw" and divided,
        f"train.optimizer is {train.optimizer}, whose states are of whole matrices, but the model is divided among "
        "devices (cluster.devices, cluster.offload parameters). Use adamw, or one device.",
    )
    refuse(
        train.optimizer != "adamw" and "moments" in cluster.offload,
        f"train.optimizer is {train.optimizer}, but cluster.offload moments is of adamw; leave out one of them.",
    )
    refuse(
        "activations" in cluster.offload and not model.gradient_checkpointing,
        "cluster.offload activations needs model.gradient_checkpointing: it moves the inputs of layers. To move all "
        "activations would take longer than to compute them again. Set --model.gradient_checkpointing.",
    )
    refuse(
        train.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None,
        "train.optimizer adamw_8bit needs bitsandbytes: pip install bitsandbytes",
    )
    if train.optimizer == "schedule_free":
        check_schedule_free(config, refuse)


def divides_model(cluster: ClusterConfig) -> bool:
    """Whether a device holds only a part of each weight that is trained."""
    return max(cluster.of(role).devices for role in ("actor", "critic")) > 1 or "parameters" in cluster.offload


def check_divided_model(config: Config, refuse: Refuse) -> None:
    """Refuse kinds of adapters that need whole matrices where the model is divided among devices."""
    model, divided = config.model, divides_model(config.cluster)
    refuse(
        model.use_dora and divided,
        "model.use_dora needs the lengths of whole rows, but the model is divided among devices (cluster.devices, "
        "cluster.offload parameters). Leave it out, or use one device.",
    )
    refuse(
        model.lora_init != "zeros" and divided,
        f"model.lora_init {model.lora_init} needs whole matrices, but the model is divided among devices "
        "(cluster.devices, cluster.offload parameters). Leave it out, or use one device.",
    )


def check_noise_and_frozen_weights(config: Config, refuse: Refuse) -> None:
    """Refuse noise on embeddings and frozen layers where samples or layers are divided."""
    model, train, cluster = config.model, config.train, config.cluster
    refuse(
        bool(train.neftune_noise_alpha) and isinstance(config, OnlineConfig),
        f"train.neftune_noise_alpha is {train.neftune_noise_alpha}: noise would change the log-probabilities of "
        "completions that were sampled without it. It is for offline trainers; leave it out.",
    )
    refuse(
        bool(cluster.ulysses_degree) and cluster.context_parallel_size % max(1, cluster.ulysses_degree) != 0,
        f"cluster.ulysses_degree is {cluster.ulysses_degree}, which does not divide cluster.context_parallel_size "
        f"{cluster.context_parallel_size}: it is the part of these devices that exchange heads. Set it to 0 to let the "
        "model's heads decide.",
    )
    divisions = ("context_parallel_size", "pipeline_parallel_size", "sequence_parallel")
    divided_by = [name for name in divisions if getattr(cluster, name) > 1 or getattr(cluster, name) is True]
    refuse(
        bool(train.neftune_noise_alpha) and bool(divided_by),
        f"train.neftune_noise_alpha does not combine with cluster.{''.join(divided_by[:1])}; leave out one of them.",
    )
    frozen = [name for name in FREEZING if getattr(model, name)]
    refuse(
        bool(frozen) and cluster.pipeline_parallel_size > 1,
        f"model.{frozen[0] if frozen else ''} chooses among the layers of a whole model, but with "
        "cluster.pipeline_parallel_size a device has a part of them. Leave out one of them.",
    )


def check_schedule_free(config: Config, refuse: Refuse) -> None:
    """Refuse what has no meaning where gradients are taken at one point and the model is saved at another."""
    train = config.train
    refuse(
        isinstance(config, OnlineConfig),
        "train.optimizer schedule_free is for offline trainers: an online trainer's engine would generate with other "
        "weights than those that are saved. Use adamw.",
    )
    refuse(
        train.lr_scheduler != "constant",
        f"train.optimizer schedule_free needs a constant learning rate, but train.lr_scheduler is "
        f"{train.lr_scheduler}. Set train.lr_scheduler constant; a warm-up is possible.",
    )
    refuse(
        bool(train.ema_decay),
        f"train.ema_decay is {train.ema_decay}, but train.optimizer schedule_free averages the weights itself; leave "
        "out train.ema_decay.",
    )
    refuse(not train.adam_beta1, "train.optimizer schedule_free needs train.adam_beta1 above 0, usually 0.9.")


def check_data(config: Config, refuse: Refuse) -> None:
    """Check what must hold between the options of the section data."""
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
        bool(every and not data.eval and not data.eval_fraction and not config.eval.harness),
        f"eval.every_steps is {every} but there is nothing to evaluate on. Set data.eval or data.eval_fraction, or "
        "eval.harness.",
    )


def launched_size() -> int:
    """Return the number of processes that torchrun or srun started together; 1 if neither started this one."""
    for size, rank in (("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")):
        if size in os.environ and rank in os.environ:
            return int(os.environ[size])
    return 1


def check_cluster(config: Config, refuse: Refuse) -> None:
    """Refuse numbers of devices that cannot be divided as the options say."""
    cluster = config.cluster
    refuse(
        bool(cluster.ray_address) and launched_size() > 1,
        f"cluster.ray_address is {cluster.ray_address}, but torchrun or srun started {launched_size()} processes. "
        "Use one of them.",
    )
    refuse(*outside(config, "cluster.devices", 1, None))
    for entry in dataclasses.fields(cluster):
        if entry.name.endswith(("_devices", "_size")):
            lowest = 1 if entry.name in SHARED_SIZES else 0
            for value in as_tuple(getattr(cluster, entry.name)):
                refuse(value < lowest, f"cluster.{entry.name} is {value}; it must be at least {lowest}.")
    refuse(*outside(config, "cluster.max_restarts", 0, None))
    refuse(
        not 0 < cluster.worker_timeout_seconds < math.inf,
        f"cluster.worker_timeout_seconds is {cluster.worker_timeout_seconds}; it must be above 0, and finite.",
    )
    own = cluster.own_devices()
    taken = sum(own.values())
    refuse(
        cluster.devices - taken < 1,
        f"cluster.devices is {cluster.devices}, but {' and '.join(own)} take {taken} of them, and the policy needs one "
        "too. Raise cluster.devices, or lower theirs.",
    )
    check_pipeline(config, refuse)
    divided = [cluster.of(role).tensor_parallel for role in ("actor", *own) if role != "rollout"]
    refuse(
        cluster.sequence_parallel and max(divided) == 1,
        "cluster.sequence_parallel divides activations among tensor-parallel devices, but "
        "cluster.tensor_parallel_size is 1: set it to 2 or more, or leave sequence_parallel out. Samples that are too "
        "long for one device are for cluster.context_parallel_size.",
    )
    roles = ROLES if isinstance(cluster, OnlineClusterConfig) else ("actor", "reference")
    for role in dict.fromkeys((*roles, *own, *indexed_rewards(cluster))):
        check_role(config, role, refuse)


def check_pipeline(config: Config, refuse: Refuse) -> None:
    """Refuse settings that pipeline stages cannot be combined with."""
    cluster, model = config.cluster, config.model
    virtual, listed = cluster.virtual_pipeline_parallel_size, cluster.pipeline_layers_per_stage
    divided = cluster.pipeline_parallel_size > 1
    refuse(
        not divided and (virtual > 1 or bool(listed) or cluster.pipeline_schedule != "1f1b"),
        "cluster.pipeline_parallel_size is 1, so that there are no stages: leave out cluster.pipeline_schedule, "
        "cluster.virtual_pipeline_parallel_size and cluster.pipeline_layers_per_stage, or set it to 2 or more.",
    )
    refuse(
        virtual > 1 and cluster.pipeline_schedule == "1f1b",
        f"cluster.virtual_pipeline_parallel_size is {virtual}, but cluster.pipeline_schedule 1f1b has one stage per "
        "device. Set --cluster.pipeline_schedule interleaved.",
    )
    refuse(
        virtual == 1 and cluster.pipeline_schedule == "interleaved",
        "cluster.pipeline_schedule interleaved needs several stages per device: set "
        "--cluster.virtual_pipeline_parallel_size 2.",
    )
    refuse(
        divided and "parameters" in cluster.offload,
        "cluster.offload parameters and cluster.pipeline_parallel_size cannot be combined: every micro-batch in flight "
        "would move the layers of a stage to the device again. Remove one of them.",
    )
    roles = ("actor", *(role for role in ROLES if role != "rollout"))
    refuse(
        bool(model.router_aux_loss_coef) and any(cluster.pipeline_of(role)[0] > 1 for role in roles),
        f"model.router_aux_loss_coef {model.router_aux_loss_coef} and cluster.pipeline_parallel_size cannot be "
        "combined: the balance loss is an average over the layers of all stages. Remove one of them.",
    )
    refuse(
        divided and isinstance(config, OnlineConfig) and config.rollout.router_replay,
        "rollout.router_replay and cluster.pipeline_parallel_size cannot be combined: the experts are recorded for all "
        "layers together. Remove one of them.",
    )


def check_role(config: Config, role: str, refuse: Refuse) -> None:
    """Check what must hold between the devices of a role and how its model is divided."""
    cluster, found = config.cluster, config.cluster.of(role)
    prefix = "cluster." if role == "actor" else f"cluster.{role.partition('-')[0]}_"
    shared, devices = cluster.option(role, "colocate_with", "actor"), cluster.option(role, "devices", 0)
    refuse(
        bool(devices) and shared != "actor",
        f"{prefix}devices is {devices} and {prefix}colocate_with is {shared}; set one of them.",
    )
    refuse(
        shared != "actor" and shared not in cluster.own_devices(),
        f"{prefix}colocate_with is {shared}, which has no devices of its own: set cluster.{shared}_devices.",
    )
    sizes = found.tensor_parallel, found.context_parallel, found.expert_parallel, found.replicate
    problem = division_problem(role, found.devices, *sizes, found.pipeline_parallel, prefix=prefix)
    refuse(bool(problem), problem)


def division_problem(
    role: str,
    devices: int,
    tensor: int,
    context: int,
    experts: int,
    replicate: int,
    pipeline: int = 1,
    *,
    prefix: str = "cluster.",
) -> str:
    """Return why these sizes do not divide the number of devices; empty if they do. parallel.layouts uses it too."""
    if devices % pipeline:
        return f"{role} has {devices} devices, which {prefix}pipeline_parallel_size {pipeline} does not divide."
    if pipeline > 1:
        role, devices = f"each pipeline stage of {role}", devices // pipeline
    if devices % (tensor * context):
        split = f"{prefix}tensor_parallel_size {tensor}"
        split += f" times {prefix}context_parallel_size {context}" * (context > 1)
        return f"{role} has {devices} devices, which {split} does not divide."
    if devices % (tensor * context * replicate):
        return (
            f"cluster.replicate_size is {replicate}, which does not divide the {devices // (tensor * context)} parts "
            f"that the samples of {role} are divided into."
        )
    ranks = devices // tensor // replicate
    if ranks % experts:
        return (
            f"{prefix}expert_parallel_size is {experts}; it must divide {ranks}, the devices among which FSDP divides "
            f"the rest of the model of {role}."
        )
    return ""


def indexed_rewards(cluster: ClusterConfig) -> list[str]:
    """Return the roles reward-N of reward models that have options of their own."""
    if not isinstance(cluster, OnlineClusterConfig):
        return []
    lists = [value for entry in dataclasses.fields(cluster) if isinstance(value := getattr(cluster, entry.name), tuple)]
    own = [value for value in lists if value is not cluster.offload]
    return [f"reward-{index}" for index in range(max(map(len, own), default=0))]


def check_online(config: OnlineConfig, refuse: Refuse) -> None:
    """Check what must hold between the options of online trainers."""
    rollout, cluster = config.rollout, config.cluster
    refuse(
        "policy" in cluster.offload and bool(rollout.ahead),
        f"cluster.offload policy moves the policy while others work, but with rollout.ahead {rollout.ahead} it "
        "trains meanwhile: leave out one of them.",
    )
    programs = {"environment": rollout.environment, "agent": rollout.agent, "tools": " ".join(rollout.tools)}
    given = [f"rollout.{name} is {value}" for name, value in programs.items() if value]
    refuse(len(given) > 1, f"{' and '.join(given)}; set one of them.")
    check_prompt_choice(config, refuse)
    check_reward(config, refuse)
    check_batches(config, refuse)
    check_partial(config, refuse)
    check_engine(config, refuse)
    check_reward_devices(config, refuse)
    for key, low, high in ONLINE_BOUNDS:
        refuse(*outside(config, key, low, high))
    refuse(*outside(config, "reward.overlong_tokens", 0, rollout.max_tokens))


def check_prompt_choice(config: OnlineConfig, refuse: Refuse) -> None:
    """Check what must hold where groups or prompts are chosen by earlier rewards."""
    rollout = config.rollout
    chooses = rollout.skip_epochs > 0 or rollout.prompt_sampling == "difficulty"
    named = "rollout.skip_epochs" if rollout.skip_epochs else "rollout.prompt_sampling difficulty"
    refuse(
        rollout.replay_max_age > 0 and (rollout.samples_per_prompt < 2 or bool(rollout.replay)),
        "rollout.replay_max_age replaces groups by earlier ones: set rollout.samples_per_prompt to 2 or more, and "
        "leave out rollout.replay.",
    )
    refuse(
        chooses and rollout.samples_per_prompt < 2,
        f"{named} compares completions of a prompt: set rollout.samples_per_prompt to 2 or more, not 1.",
    )
    refuse(
        chooses and bool(rollout.replay),
        f"{named} chooses prompts, but rollout.replay takes recorded completions: leave out one of them.",
    )


def check_reward(config: OnlineConfig, refuse: Refuse) -> None:
    """Check what must hold between rewards, their bounds and how credit is assigned."""
    rollout, reward = config.rollout, config.reward
    credit = getattr(config.algo, "credit", "conversation")
    refuse(
        credit != "conversation" and (reward.clips or reward.normalize == "running"),
        f"algo.credit {credit} divides the reward into those of turns, as they are: leave out reward.clip, "
        "reward.clip_min, reward.clip_max and reward.normalize running.",
    )
    bounds = {"reward.clip_min": reward.clip_min, "reward.clip_max": reward.clip_max}
    for name, bound in bounds.items():
        refuse(bound is not None and not math.isfinite(bound), f"{name} is {bound}: it must be a finite number.")
        refuse(
            bound is not None and reward.clip > 0,
            f"reward.clip is {reward.clip:g} and {name} {bound}: reward.clip is both bounds. Leave out one of them.",
        )
    lowest, highest = reward.clip_bounds
    refuse(
        lowest >= highest,
        f"reward.clip_min is {lowest:g}, not below reward.clip_max, {highest:g}: all rewards would be equal.",
    )
    kinds = "a verifier by name, FILE.py:FUNCTION, judge:RUBRIC.yaml, model:PATH or http://..."
    refuse(
        config.algo is not None
        and config.algo.needs_reward()
        and not (reward.functions or rollout.environment or rollout.agent),
        f"reward.functions is not set: what scores completions? Give {kinds}: --reward gsm8k",
    )
    refuse(
        bool(reward.weights) and len(reward.weights) != len(reward.functions),
        f"reward.weights has {len(reward.weights)} numbers for {len(reward.functions)} rewards. Give one each.",
    )


def check_batches(config: OnlineConfig, refuse: Refuse) -> None:
    """Check what must hold where batches are replayed, divided into parts or generated during training."""
    rollout, cluster = config.rollout, config.cluster
    has_turns = bool(rollout.environment or rollout.agent or rollout.tools)
    refuse(
        bool(rollout.replay and (rollout.ahead or rollout.dynamic_sampling or has_turns)),
        "rollout.replay takes recorded completions as they are: leave out rollout.ahead, rollout.dynamic_sampling, "
        "rollout.environment, rollout.tools and rollout.agent.",
    )
    refuse(
        bool(rollout.prompts_per_stage and (rollout.ahead or rollout.replay)),
        "rollout.prompts_per_stage overlaps the stages of a batch that is generated with the current weights: leave it "
        "out with rollout.ahead and rollout.replay.",
    )
    refuse(
        bool(rollout.prompts_per_stage) and "policy" in cluster.offload,
        "cluster.offload policy moves the policy away while others work, but with rollout.prompts_per_stage it works "
        "meanwhile: leave out one of them.",
    )
    refuse(
        rollout.inflight_updates and not (rollout.ahead and cluster.rollout_devices),
        "rollout.inflight_updates is set, but completions are not generated during training: set --rollout.ahead 1 and "
        "--cluster.rollout_devices N.",
    )


def check_engine(config: OnlineConfig, refuse: Refuse) -> None:
    """Refuse options that the chosen engine does not have."""
    rollout, cluster = config.rollout, config.cluster
    refuse(
        rollout.router_replay and (rollout.engine == "vllm" or bool(rollout.replay)),
        "rollout.router_replay needs the experts that the local engine records while it samples: leave it out with "
        "rollout.engine vllm and with rollout.replay.",
    )
    refuse(
        rollout.engine == "vllm" and config.model.use_dora,
        "model.use_dora: vLLM has no DoRA adapters. Use rollout.engine local, or plain LoRA.",
    )
    refuse(
        rollout.engine == "vllm" and rollout.quantization != "none",
        "rollout.quantization is an option of the local engine: leave it out with rollout.engine vllm.",
    )
    refuse(
        rollout.engine == "vllm" and rollout.kv_cache_dtype != "auto",
        "rollout.kv_cache_dtype is of the local engine. Leave it out, and set kv_cache_dtype in rollout.vllm_options.",
    )
    refuse(
        rollout.engine == "vllm" and rollout.speculative_tokens > 0,
        "rollout.speculative_tokens is of the local engine. Leave it out, and set speculative_config in "
        "rollout.vllm_options.",
    )
    refuse(
        rollout.engine == "local" and bool(rollout.vllm_options),
        "rollout.vllm_options is set, but rollout.engine is local. Leave it out, or set --rollout.engine vllm.",
    )
    refuse(
        rollout.engine == "local" and cluster.rollout_tensor_parallel_size > 1,
        f"cluster.rollout_tensor_parallel_size is {cluster.rollout_tensor_parallel_size}, but the local engine keeps a "
        "whole model on each device. Leave it out, or set --rollout.engine vllm.",
    )


def check_reward_devices(config: OnlineConfig, refuse: Refuse) -> None:
    """Refuse more devices or parallel sizes of reward models than there are rewards."""
    cluster, reward = config.cluster, config.reward
    sizes = [f"{kind}_parallel_size" for kind in ("tensor", "context", "pipeline", "expert")]
    for name in ("devices", "colocate_with", *sizes):
        values = getattr(cluster, f"reward_{name}")
        refuse(
            len(values) > max(1, len(reward.functions)),
            f"cluster.reward_{name} has {len(values)} values for {len(reward.functions)} rewards. Give one for all, or "
            "one each.",
        )


def check_partial(config: OnlineConfig, refuse: Refuse) -> None:
    """Check what must hold between the options of partial rollouts and others."""
    rollout, batch_size = config.rollout, config.train.batch_size
    conflicts = {
        "rollout.engine vllm": rollout.engine == "vllm",
        "rollout.inflight_updates": rollout.inflight_updates,
        "rollout.dynamic_sampling": rollout.dynamic_sampling,
        "rollout.environment": bool(rollout.environment),
        "rollout.agent": bool(rollout.agent),
        "rollout.tools": bool(rollout.tools),
        "algo.student_fraction": getattr(config.algo, "student_fraction", 1.0) < 1.0,
        "rollout.replay": bool(rollout.replay),
        "rollout.prompts_per_stage": bool(rollout.prompts_per_stage),
        "rollout.router_replay": rollout.router_replay,
    }
    for name, is_set in conflicts.items():
        refuse(
            bool(rollout.partial_prompts) and is_set,
            f"rollout.partial_prompts carries completions over to the next step, which {name} does not support: leave "
            "out one of them.",
        )
    refuse(
        rollout.partial_prompts > batch_size,
        f"rollout.partial_prompts is {rollout.partial_prompts}, more than train.batch_size {batch_size}: a step could "
        "not train on all prompts that rollout.max_staleness says are due. Lower it.",
    )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a list option as it is, another value as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)


def outside(config: Config, key: str, low: float, high: float | None) -> tuple[bool, str]:
    """Return whether a number is out of its bounds, and the message for that case."""
    value = option_value(config, key)
    above = "below 1" if high == BELOW_ONE else f"at most {high}"
    bounds = f"at least {low}" if high is None else f"at least {low} and {above}"
    bounds = bounds if math.isfinite(value) or high is not None else f"finite and {bounds}"
    inside = math.isfinite(value) and value >= low and (high is None or value <= high)
    return not inside, f"{key} is {value}; it must be {bounds}."
