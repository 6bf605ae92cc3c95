"""The configuration: dataclasses in two levels, and what must hold between their values; options.py reads them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import yaml

from posttrain.core.errors import UsageError

Schedule = Literal["cosine", "linear", "constant"]
ROLES = ("actor", "critic", "reference", "reward", "rollout")
LAYOUT_KEYS = ("devices", "tp", "cp", "ep", "zero")
INFLIGHT = "inflight"  # among rollout.engine
ONLINE_PARTS = ("critic", "reward", "optimizer")  # of cluster.offload: at rest in some phase of the online loop alone


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = ""
    """Needed. Folder, hub name, run folder (its newest valid checkpoint) or `pico`, the built-in toy."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer, if not the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. auto: float32 on a CPU; bfloat16 with float32 masters on an accelerator. float16 is for
    devices without bfloat16: with masters too, and a loss scale, so that small gradients survive."""
    lora_rank: int = 0
    """Train adapters of this rank instead of the weights; 0 trains the weights."""
    lora_alpha: float = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout in front of the adapters. (The model's own dropout is always off.)"""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of modules that get an adapter."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (QLoRA); needs lora_rank and the package bitsandbytes."""
    router_loss: float = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    train: tuple[str, ...] = ()
    """Needed. Files, folders, globs or hub names to train on; with weights to mix them: a.jsonl:0.7 b.parquet:0.3."""
    eval: tuple[str, ...] = ()
    """Files to evaluate on; or a number below 1: so large a part of the training rows is set aside for it."""
    repeat: bool = False
    """When mixing by weights: start a source again when it runs out, instead of ending the epoch there."""
    max_rows: int | None = None
    """Take only the first rows of the training files."""
    on_bad_row: Literal["stop", "quarantine"] = "stop"
    """stop: a row that cannot be used ends the run before it starts; quarantine: it is set aside and counted."""
    map_keys: str = ""
    """Columns under other names, as JSON: {"prompt": "question", "response": "answer"}."""
    template: str = ""
    """Chat template by name (chatml, llama3, qwen_r1 ...) or file; or text with {}, as "Human: {}\\nAssistant: "."""
    max_tokens: int = 2048
    """Longest sequence; data.on_long says what happens to longer ones."""
    on_long: Literal["truncate", "drop", "error"] = "truncate"
    """truncate: cut the end (text is split instead, so that nothing is lost); drop: leave the row out and count it."""
    shuffle: bool = True
    """A new order every epoch, decided by the seed."""

    @property
    def eval_fraction(self) -> float:
        """What data.eval says, if it is a number."""
        return (as_number(self.eval[0]) or 0.0) if len(self.eval) == 1 else 0.0

    @property
    def eval_files(self) -> tuple[str, ...]:
        return () if self.eval_fraction else self.eval


@dataclass(kw_only=True, slots=True)
class UpdateConfig:
    rows_per_step: int = 32
    """Data rows a step sees: conversations, preference pairs, or the prompts that reinforcement learning asks."""
    tokens_per_device: int = 8192
    """Tokens of one forward pass on a device: bounds memory, does not change the result."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    schedule: str = "cosine"
    """How the learning rate falls: cosine, linear, constant; cosine:0.05 ends at 0.05 of the peak (else at 0.1)."""
    warmup: float = 0.0
    """Steps of linear warm-up; below 1: as a part of all steps."""
    weight_decay: float = 0.0
    """Decoupled decay; never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging of gradients and of their squares."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    ema_decay: float = 0.0
    """Keep an average of the weights with this decay (0.992, say); `posttrain export --ema` takes it."""

    @property
    def shape(self) -> Schedule:
        """The schedule without its end."""
        return cast(Schedule, self.schedule.partition(":")[0])

    @property
    def min_lr_ratio(self) -> float:
        """Where the schedule ends, as a part of the peak."""
        end = self.schedule.partition(":")[2]
        return float(end) if end else 0.1


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    every: int = 0
    """Evaluate every so many steps; 0: only at the end, if there is evaluation data."""


@dataclass(kw_only=True, slots=True)
class SaveConfig:
    every: int = 200
    """Save every so many steps, at the end and when stopped; 0: only at the end and when stopped."""
    keep: int = 3
    """Keep so many checkpoints; the best and the newest valid one are never deleted."""
    keep_gigabytes: float = 0.0
    """Delete old checkpoints beyond this size in all; 0: no limit."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    to: tuple[str, ...] = ()
    """Log elsewhere too: `tensorboard` (files in the run folder), `wandb:PROJECT` (Weights & Biases)."""

    @property
    def tensorboard(self) -> bool:
        return "tensorboard" in self.to

    @property
    def wandb(self) -> str:
        """The project, or empty."""
        return next((place.removeprefix("wandb:") for place in self.to if place.startswith("wandb:")), "")


@dataclass(slots=True, frozen=True)
class RoleLayout:
    """Where a role's model lies and how it is divided."""

    place: str  # the role whose devices it is on: itself, where it has devices of its own, or `actor`
    devices: int
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    zero: int

    @property
    def alike(self) -> int:
        """Devices that see the same samples."""
        return self.tensor_parallel * self.context_parallel


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    devices: int = 1
    """Worker processes, one a device (on a CPU: with a share of its cores). Under torchrun or srun: theirs are used."""
    ray: str = ""
    """Place the workers on a Ray cluster: `auto`, or its address."""
    layout: tuple[str, ...] = ()
    """How models are divided, for all (`tp=2 cp=2 ep=8`) or for one role (`rollout.devices=4 reference.tp=2`)."""
    offload: tuple[Literal["reference", "critic", "reward", "optimizer", "parameters"], ...] = ()
    """Keep these in host memory while they are not used."""
    limits: tuple[int, float] = (0, 1800.0)
    """How often a run may go on by itself after it lost a worker, and the seconds that a wait for a worker may take."""

    def of(self, role: str) -> RoleLayout:
        """Layout of a role: actor, critic, reference, reward-N, rollout. What all share is called `actor`'s place."""
        found = {name: self.entry(role, name) for name in LAYOUT_KEYS}
        devices, own = found["devices"], self.own_devices()
        place = role if role in own else role.partition("-")[0]
        if devices in ROLES:  # those of another role
            other = self.of(devices)
            place, size = other.place, other.devices
        elif devices and role != "actor":
            size = int(devices)
        else:
            place, size = "actor", self.devices - sum(map(int, own.values()))
        zero = 3 if found["zero"] == "" else int(found["zero"])
        tensor, context, experts = (int(found[name] or 1) for name in ("tp", "cp", "ep"))
        return RoleLayout(place, size, tensor, context, experts, zero)

    def entry(self, role: str, key: str) -> str:
        """Of reward-0: its own, or that of all reward models, or that of all models."""
        names = [f"{role}.{key}", f"{role.partition('-')[0]}.{key}"]
        if key != "devices" and role != "rollout":  # engines divide a model in their own way
            names.append(key)
        written = dict(entry.partition("=")[::2] for entry in self.layout)
        return next((written[name] for name in names if name in written), "")

    def own_devices(self) -> dict[str, str]:
        """Role -> number of devices that only it (and who joins it) has."""
        written = dict(entry.partition("=")[::2] for entry in self.layout)
        return {
            key.partition(".")[0]: value
            for key, value in written.items()
            if key.endswith(".devices") and value.isdigit() and not key.startswith("actor.")
        }


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    samples_per_prompt: int = 8
    """Answers to each prompt of a step."""
    max_tokens: int = 512
    """Longest answer, in tokens; all turns together where there is an environment."""
    temperature: float = 1.0
    """Above 1: more varied answers, below 1: less. The trainer counts with it, and with the next three, too."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Draw only from so many of the likeliest tokens; 0: from all."""
    min_p: float = 0.0
    """Draw only tokens at least this times as likely as the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the end-of-turn token."""
    ahead: int = 0
    """Batches generated while training on earlier ones, with older weights; 0: always with the newest."""
    dynamic_sampling: int = 0
    """Replace groups of equal rewards by other prompts, asking at most so many batches a step (DAPO); 0: keep them."""
    environment: str = ""
    """Several turns: FILE.py:CLASS with start(row) and step(reply)."""
    replay: str = ""
    """Take answers from this run folder's records instead of generating them; they are scored again."""
    max_mismatch: float = 0.1
    """Stop when sampler and trainer disagree by this KL a token, three steps in a row; warn at a tenth."""
    engine: tuple[str, ...] = ("local",)
    """Who generates: `local`, or `vllm` and options of its own: `vllm gpu_memory_utilization=0.4 max_num_seqs=256`;
    with `inflight` new weights are taken in the middle of answers."""

    @property
    def inflight(self) -> bool:
        return INFLIGHT in self.engine[1:]


@dataclass(kw_only=True, slots=True)
class RewardsConfig:
    weights: tuple[float, ...] = ()
    """Weight of each reward; empty: 1 each."""
    limits: tuple[float, float, float] = (10.0, 2.0, 0.1)
    """Seconds and GiB for one answer, else it fails and is left out; the part of a batch that may fail."""
    workers: int = 2
    """Child processes that run reward functions."""
    clip: float = 0.0
    """Hold the sum of rewards between -clip and clip; 0: leave it."""
    normalize: Literal["none", "saved", "running"] = "none"
    """saved: reward models' scores relative to the mean and deviation saved with them; running: the sum of rewards
    divided by the deviation of all sums so far."""
    overlong: tuple[int, float] = (0, 1.0)
    """N and P: the last N tokens before rollout.max_tokens cost a penalty that grows from 0 to P (DAPO)."""

    @property
    def max_failure_rate(self) -> float:
        return self.limits[2]


@dataclass(kw_only=True, slots=True)
class OnlineEvalConfig(EvalConfig):
    samples_per_prompt: int = 1
    """Answers to each evaluation prompt: n of mean@n and pass@k."""
    temperature: float = 0.0
    """Temperature of evaluation; 0 takes the likeliest token."""
    max_rows: int | None = None
    """Evaluate on the first rows only."""


@dataclass(kw_only=True, slots=True)
class Config:
    """What every trainer takes. `algo` holds the options of the algorithm itself."""

    steps: int = 0
    """Optimizer steps; 0: as many as epochs need."""
    epochs: float = 1.0
    """Passes over the training rows when steps is 0."""
    out: str = ""
    """Run folder. Default: the next free runs/<verb>-NNN."""
    seed: int = 0
    """Decides order, initialisation and dropout."""
    resume: bool = False
    """Go on from the newest valid checkpoint of the run folder."""
    quiet: bool = False
    """Print nothing but warnings, errors and the last line."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    algo: Any = None


@dataclass(kw_only=True, slots=True)
class OnlineConfig(Config):
    """What every trainer takes that learns from its own answers."""

    reward: tuple[str, ...] = ()
    """Needed. What judges answers: names of verifiers (`posttrain rewards list`), FILE.py:FUNCTION, model:PATH, http://..."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    eval: OnlineEvalConfig = field(default_factory=OnlineEvalConfig)


def with_algorithm(algorithm: Any) -> Config:
    """The defaults of a verb: the common ones, changed as the algorithm (a class of posttrain.algorithms) asks."""
    base = OnlineConfig if algorithm.online else Config
    own = [("algo", algorithm.Config, field(default_factory=algorithm.Config))]
    config = dataclasses.make_dataclass("Config", own, bases=(base,), kw_only=True)()
    for key, value in algorithm.defaults.items():
        section, option = key.split(".")
        setattr(getattr(config, section), option, value)
    return config


def check(config: Config, *, data: bool = True) -> Config:
    """Settings that cannot work, alone or together, named with what resolves them."""

    def refuse(problem: bool, message: str) -> None:
        if problem:
            raise UsageError(message)

    model, rows, update = config.model, config.data, config.update
    for place in config.log.to:
        known = place == "tensorboard" or (place.startswith("wandb:") and place != "wandb:")
        refuse(not known, f"log.to is {place!r}; it must be tensorboard or wandb:PROJECT.")
    refuse(not model.path, "model.path is not set. Give a folder, a hub name, a run folder or pico: --model.path pico")
    refuse(data and not rows.train, "data.train is not set. Name the files to train on: --data.train rows.jsonl")
    refuse(
        model.load_in_4bit and not model.lora_rank,
        "model.load_in_4bit freezes the weights, so there is nothing to train. Add --model.lora_rank 16, say.",
    )
    for entry in rows.eval:
        number = as_number(entry)
        refuse(
            number is not None and not (0 < number < 1 and len(rows.eval) == 1),
            f"data.eval is {' '.join(rows.eval)}; it must be files, or one number above 0 and below 1.",
        )
    refuse(
        bool(config.eval.every and not rows.eval),
        f"eval.every is {config.eval.every} but there is nothing to evaluate on. Give data.eval files, or a part.",
    )
    shape, colon, end = update.schedule.partition(":")
    known = shape in get_args(Schedule) and not (colon and shape == "constant")
    refuse(
        not known or bool(colon and not 0 <= (-1 if (ratio := as_number(end)) is None else ratio) <= 1),
        f"update.schedule is {update.schedule!r}; it must be constant, or cosine or linear, with the part of the peak "
        "that is left at the end (from 0 to 1), as cosine:0.05.",
    )
    for key, low, high in (
        ("steps", 0, None),
        ("seed", 0, 2**63 - 1),
        ("update.rows_per_step", 1, None),
        ("update.tokens_per_device", 1, None),
        ("update.learning_rate", 0, None),
        ("update.warmup", 0, None),
        ("update.weight_decay", 0, None),
        ("update.max_grad_norm", 0, None),
        ("update.ema_decay", 0, 0.999999),
        ("data.max_tokens", 2, None),
        ("data.max_rows", 1, None),
        ("model.lora_rank", 0, None),
        ("model.lora_dropout", 0, 0.999999),
        ("model.router_loss", 0, None),
        ("eval.every", 0, None),
        ("save.every", 0, None),
        ("save.keep", 1, None),
        ("save.keep_gigabytes", 0, None),
    ):
        refuse(*outside(config, key, low, high))
    check_cluster(config, refuse)
    idle = [] if isinstance(config, OnlineConfig) else [o for o in config.cluster.offload if o in ONLINE_PARTS]
    refuse(
        bool(idle),
        f"cluster.offload is {' '.join(config.cluster.offload)}, but training on rows has no phase without "
        f"{' and '.join(idle)}. cluster.offload parameters keeps weights, gradients and optimizer in host memory.",
    )
    if isinstance(config, OnlineConfig):
        check_online(config, refuse)
    refuse(
        not all(0 <= beta < 1 for beta in update.betas),
        f"update.betas is {list(update.betas)}; both must be at least 0 and below 1.",
    )
    refuse(
        not config.steps and not 0 < config.epochs < math.inf,
        f"epochs is {config.epochs}; it must be above 0, and finite.",
    )
    return config


def launched_size() -> int:
    """Processes that torchrun or srun started together, this one among them; 1 if neither did."""
    for size, rank in (("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")):
        if size in os.environ and rank in os.environ:
            return int(os.environ[size])
    return 1


def check_cluster(config: Config, refuse: Callable[[bool, str], None]) -> None:
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


def check_online(config: OnlineConfig, refuse: Callable[[bool, str], None]) -> None:
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
        ("eval.max_rows", 1, None),
    ):
        refuse(*outside(config, key, low, high))


def as_number(text: str) -> float | None:
    """The number that a text is, if it is one."""
    try:
        return float(text)
    except ValueError:
        return None


def outside(config: Config, key: str, low: float, high: float | None) -> tuple[bool, str]:
    """Whether a number is out of its bounds, and what to say then."""
    value = value_of(config, key)
    if value is None:  # no limit
        return False, ""
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    inside = math.isfinite(value) and value >= low and (high is None or value <= high)
    return not inside, f"{key} is {value}; it must be {bounds}."


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def as_mapping(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain values, fit for YAML and for `from_mapping`."""
    plain = dataclasses.asdict(config)
    return {k: {a: listed(b) for a, b in v.items()} if isinstance(v, dict) else listed(v) for k, v in plain.items()}


def as_yaml(verb: str, config: Config) -> str:
    return yaml.safe_dump({"verb": verb} | as_mapping(config), sort_keys=False, allow_unicode=True)


def listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
