"""The options of training as dataclasses in two levels, `section.option`; the string below a field is its help text.

checks.py holds the conditions between values, parsing.py reads them, renames.py knows their previous names. A section
whose class has `main` may be given by its bare name: `--model X` is `--model.path X`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import yaml

ROLES = ("actor", "critic", "reference", "reward", "rollout")
LAYOUT_KEYS = ("devices", "tp", "cp", "ep", "zero")
INFLIGHT = "inflight"  # among rollout.engine
ONLINE_PARTS = ("critic", "reward", "optimizer")  # of cluster.offload: at rest in some phase of the online loop alone


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model to train and how it is loaded."""

    main: ClassVar[str] = "path"

    path: str = ""
    """Required. Model directory, Hugging Face name, run directory (newest valid checkpoint) or `pico`, a toy model."""
    tokenizer: str = ""
    """Directory or Hugging Face name of the tokenizer; empty: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: float32 on CPU, bfloat16 with float32 master weights on an accelerator. float16 also
    keeps master weights and scales the loss, for devices without bfloat16."""
    lora_rank: int = 0
    """Rank of LoRA adapters to train instead of the weights; 0 trains all weights."""
    lora_alpha: float = 16.0
    """Adapter outputs are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout in front of the adapters (the model's own dropout is always off)."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get an adapter; all-linear: every linear layer except the head."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (QLoRA); needs lora_rank and the package bitsandbytes."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The examples to train and to evaluate on."""

    main: ClassVar[str] = "train"

    train: tuple[str, ...] = ()
    """Required. Files, directories, globs or dataset names to train on."""
    weights: tuple[float, ...] = ()
    """Mix the training sources by these weights, one per source; empty: read them one after the other."""
    eval: tuple[str, ...] = ()
    """Files to evaluate on."""
    eval_fraction: float = 0.0
    """Share of the training examples to hold out for evaluation, instead of data.eval."""
    repeat: bool = False
    """With data.weights: restart a source when it is used up, instead of ending the epoch there."""
    max_examples: int = 0
    """Use only this many examples of the training files (of each source, with data.weights); 0: all."""
    on_bad_example: Literal["stop", "quarantine"] = "stop"
    """stop: an unusable example ends the run before it starts; quarantine: it is written to a file and counted."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the files by our names, as JSON: {"prompt": "question", "response": "answer"}."""
    chat_template: str = ""
    """Chat template by name (chatml, llama3, qwen_r1 ...), file, or text with {} such as "Human: {}\\nAssistant: "."""
    max_length: int = 2048
    """Longest sequence in tokens; data.on_overlong decides what happens to longer ones."""
    on_overlong: Literal["truncate", "drop", "error"] = "truncate"
    """truncate: cut the end (plain text is split, so nothing is lost); drop: leave the example out and count it."""
    shuffle: bool = True
    """Draw a new order of the examples in every epoch, determined by the seed."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The optimizer, its schedule and the batch."""

    max_steps: int = 0
    """Number of optimizer steps (for online trainers: of rollout batches); 0: as many as train.epochs needs."""
    epochs: float = 1.0
    """Passes over the training examples when train.max_steps is 0."""
    batch_size: int = 32
    """Examples per step: conversations, preference pairs, or prompts for online trainers."""
    micro_batch_tokens: int = 8192
    """Tokens per forward pass on one device; bounds memory and does not change the result."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the cosine or linear schedule, as a fraction of the peak."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    warmup_ratio: float = 0.0
    """Warm-up as a fraction of all steps, instead of train.warmup_steps."""
    weight_decay: float = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    adam_beta1: float = 0.9
    """AdamW's decay rate of the average of gradients."""
    adam_beta2: float = 0.95
    """AdamW's decay rate of the average of squared gradients."""
    max_grad_norm: float = 1.0
    """Scale gradients down to this norm; 0: no clipping."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights with this decay, such as 0.992; `posttrain export --ema`
    exports it."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """When to evaluate."""

    every_steps: int = 0
    """Steps between evaluations; 0: only at the end, if there is evaluation data."""


@dataclass(kw_only=True, slots=True)
class SaveConfig:
    """When to save and which checkpoints to keep."""

    every_steps: int = 200
    """Steps between checkpoints; 0: save only at the end and when the run is stopped."""
    max_checkpoints: int = 3
    """Number of checkpoints to keep; the best and the newest valid one are never deleted."""
    max_gigabytes: float = 0.0
    """Delete old checkpoints beyond this total size; 0: no limit."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Where metrics are logged besides metrics.jsonl."""

    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Further places for metrics: tensorboard (files in the run directory), wandb (Weights & Biases)."""
    wandb_project: str = ""
    """Weights & Biases project; required with log.report_to wandb."""


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
    max_examples: int = 0
    """Evaluate on this many examples only; 0: all."""


@dataclass(kw_only=True, slots=True)
class Config:
    """What every trainer takes. `algo` holds the options of the algorithm itself."""

    output_dir: str = ""
    """Run directory; empty: the next free runs/<verb>-NNN."""
    seed: int = 0
    """Seed of data order, initialisation, sampling and dropout."""
    resume: bool = False
    """Continue from the newest valid checkpoint of the run directory."""
    quiet: bool = False
    """Print only warnings, errors and the last line."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
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
