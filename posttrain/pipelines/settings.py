"""Options of the pipelines that are commands: sections named after the stages, and those of the trainer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import read_args, read_mapping
from posttrain.config.sections import ClusterConfig, DataConfig, LogConfig, ModelConfig, SaveConfig, TrainConfig
from posttrain.config.verbs import PIPELINES
from posttrain.inference.model import CONDITION


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    n: int = 16
    """Answers to each prompt; conditional-sft takes 0, too: the answers that the data has."""
    max_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 1.0
    """Above 1: more varied answers, below 1: less."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Draw only from so many of the likeliest tokens; 0: from all."""
    min_p: float = 0.0
    """Draw only tokens at least this times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1: less likely what was there."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides its end."""
    batch: int = 512
    """Answers made and written at a time; each worker (cluster.devices) has a batch of its own."""
    engine: Literal["local", "vllm"] = "local"
    """What generates: the local engine or vLLM."""
    vllm_options: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM by its own names, as JSON: {"gpu_memory_utilization": 0.4, "max_num_seqs": 256}."""


@dataclass(kw_only=True, slots=True)
class ScoreConfig:
    weights: tuple[float, ...] = ()
    """Weight of each reward; empty: 1 each."""
    timeout_seconds: float = 10.0
    """For one answer."""
    memory_gib: float = 2.0
    """Of one process."""
    workers: int = 2
    """Processes for functions."""
    max_failure_rate: float = 0.1
    """Part of the answers that may fail."""
    template: str = ""
    """Chat template of reward models, instead of their own."""


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    n: int = 1
    """Answers to each prompt of data.eval."""
    temperature: float = 0.0
    """0 takes the likeliest token."""


@dataclass(kw_only=True, slots=True)
class PipelineConfig:
    """What every pipeline takes."""

    iterations: int = 3
    """How often to generate, score, select and train."""
    prompts: int = 0
    """Prompts of an iteration, going round through the data; 0: all of them, every time."""
    reward: tuple[str, ...] = ()
    """What judges answers: names of verifiers, FILE.py:FUNCTION, model:PATH, http://..."""
    condition_template: str = CONDITION
    """How prompts say what their answer is worth, for conditional-sft."""
    output_dir: str = ""
    """Folder. Default: the next free runs/<verb>-NNN, or the last one if this very command was not done there."""
    seed: int = 0
    """Decides answers, order and initialisation."""
    resume: bool = False
    """Go on with the folder's own configuration."""
    quiet: bool = False
    """Print a line a stage, and no more."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    algo: Any = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What tells one pipeline from another."""

    trainer: str
    method: str  # of selection
    defaults: dict[str, Any] = field(default_factory=dict)
    fewest: int = 2  # answers to a prompt

    @property
    def conditional(self) -> bool:
        return self.method == "condition"


RECIPES = {
    "rejection-sampling": Recipe(
        "sft", "best-of-n", {"train.learning_rate": 2e-6, "train.lr_scheduler": "constant", "generate.temperature": 0.9}
    ),
    "iterative-dpo": Recipe("dpo", "pairs", {"train.learning_rate": 5e-7, "iterations": 5}),
    "conditional-sft": Recipe("sft", "condition", {"train.learning_rate": 1e-5, "iterations": 1}, fewest=0),
}


def parse(verb: str, args: list[str]) -> PipelineConfig:
    """`[CONFIG.yaml] --section.option value ...`."""
    return read_args(verb, f"{PIPELINES[verb]}.", start_of(verb), args)


def start_of(verb: str) -> PipelineConfig:
    """The defaults."""
    recipe = RECIPES[verb]
    algorithm = ALGORITHMS[recipe.trainer]
    own = [("algo", algorithm.Config, field(default_factory=algorithm.Config))]
    config: PipelineConfig = dataclasses.make_dataclass("Config", own, bases=(PipelineConfig,), kw_only=True)()
    for key, value in recipe.defaults.items():
        section, _, option = key.rpartition(".")
        setattr(getattr(config, section) if section else config, option, value)
    return config


def from_options(verb: str, options: dict[str, Any]) -> PipelineConfig:
    """The same from Python: {"model": {"path": "pico"}, "iterations": 2}."""
    return read_mapping(verb, f"{PIPELINES[verb]}.", start_of(verb), options)
