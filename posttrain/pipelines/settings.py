"""Options of the pipelines that are verbs: sections named after the stages, and those of the trainer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import read_args
from posttrain.config.sections import (
    ClusterConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    RewardFunctionsConfig,
    SaveConfig,
    TrainConfig,
)
from posttrain.config.verbs import PIPELINES
from posttrain.inference.model import CONDITION


@dataclass(kw_only=True, slots=True)
class GenerateConfig:
    """How completions are generated in each iteration."""

    samples_per_prompt: int = 16
    """Completions per prompt. 0, for conditional-sft only: use the completions in the data."""
    max_tokens: int = 512
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this."""
    top_k: int = 0
    """Sample only from this many of the most likely tokens; 0: from all."""
    min_p: float = 0.0
    """Sample only tokens at least this many times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1: lower the probability of tokens that occurred before."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the end-of-turn token."""
    batch_size: int = 512
    """Completions generated and written at a time; each device has a batch of its own."""
    engine: Literal["local", "vllm"] = "local"
    """What generates: the local engine or vLLM."""
    vllm_options: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM by its own names, as JSON: {"gpu_memory_utilization": 0.4, "max_num_seqs": 256}."""


@dataclass(kw_only=True, slots=True)
class PipelineRewardConfig(RewardFunctionsConfig):
    """What scores completions, and its limits."""

    model_chat_template: str = ""
    """Chat template for reward models, instead of their own."""


@dataclass(kw_only=True, slots=True)
class PipelineEvalConfig:
    """How models are evaluated on data.eval, before the first and after every iteration."""

    samples_per_prompt: int = 1
    """Completions per prompt of data.eval."""
    temperature: float = 0.0
    """Temperature of evaluation; 0 takes the most likely token."""


@dataclass(kw_only=True, slots=True)
class PipelineConfig:
    """Options of every pipeline."""

    iterations: int = 3
    """Number of times to generate, score, select and train."""
    prompts_per_iteration: int = 0
    """Number of prompts per iteration; each iteration takes the next ones of the data, after the last the first again.
    0: all prompts in every iteration."""
    condition_template: str = CONDITION
    """How conditional-sft writes a reward into a prompt."""
    output_dir: str = ""
    """Run directory; empty: the newest runs/<verb>-NNN if this command is unfinished there, else the next free one."""
    seed: int = 0
    """Seed of generation, data order and initialisation."""
    resume: bool = False
    """Continue with the configuration saved in the run directory."""
    quiet: bool = False
    """Print only one line per stage."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    reward: PipelineRewardConfig = field(default_factory=PipelineRewardConfig)
    eval: PipelineEvalConfig = field(default_factory=PipelineEvalConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    algo: Any = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What differs between pipelines: the trainer, how examples are selected, and defaults."""

    trainer: str
    method: str  # of selection
    defaults: dict[str, Any] = field(default_factory=dict)
    min_samples_per_prompt: int = 2  # completions per prompt

    @property
    def conditional(self) -> bool:
        return self.method == "condition"


RECIPES = {
    "rejection-sampling": Recipe(
        "sft", "best-of-n", {"train.learning_rate": 2e-6, "train.lr_scheduler": "constant", "generate.temperature": 0.9}
    ),
    "iterative-dpo": Recipe("dpo", "pairs", {"train.learning_rate": 5e-7, "iterations": 5}),
    "conditional-sft": Recipe(
        "sft", "condition", {"train.learning_rate": 1e-5, "iterations": 1}, min_samples_per_prompt=0
    ),
}


def parse_pipeline(verb: str, args: list[str]) -> PipelineConfig:
    """Read the command line: `[CONFIG.yaml] --section.option value ...`."""
    return read_args(verb, f"{PIPELINES[verb]}.", pipeline_defaults(verb), args)


def pipeline_defaults(verb: str) -> PipelineConfig:
    """Return the defaults of a pipeline."""
    recipe = RECIPES[verb]
    algorithm = ALGORITHMS[recipe.trainer]
    own = [("algo", algorithm.Config, field(default_factory=algorithm.Config))]
    config: PipelineConfig = dataclasses.make_dataclass("Config", own, bases=(PipelineConfig,), kw_only=True)()
    for key, value in recipe.defaults.items():
        section, _, option = key.rpartition(".")
        setattr(getattr(config, section) if section else config, option, value)
    return config
