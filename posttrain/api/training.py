"""The training functions: one per algorithm and pipeline. They load PyTorch when they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from posttrain.api.options import (
    ConfigFile,
    Data,
    Model,
    OnlineOptions,
    PipelineOptions,
    Reward,
    TrainingOptions,
    documented,
)

if TYPE_CHECKING:
    from posttrain.pipelines.recipes import PipelineResult
    from posttrain.train.run import Result


def train_verb(
    verb: str, model: Model | None, data: Data | None, config: ConfigFile | None, options: Mapping[str, Any]
) -> Result:
    """Train like `posttrain VERB`, with restarts after a lost worker."""
    from posttrain.api.arguments import prepare_run
    from posttrain.train.launch import train_from

    return train_from(verb, *prepare_run(verb, {"config": config, "model": model, "data": data, **options}))


def registered_function(verb: str) -> Callable[..., Result]:
    """Return the function of an algorithm that the user has registered."""
    from posttrain.algorithms import ALGORITHMS

    def train(
        model: Model | None = None, data: Data | None = None, *, config: ConfigFile | None = None, **options: Any
    ) -> Result:
        return train_verb(verb, model, data, config, options)

    train.__name__, train.__doc__ = verb, f"{ALGORITHMS[verb].help}."
    return documented(OnlineOptions if ALGORITHMS[verb].online else TrainingOptions)(train)


# Trained on given examples


@documented(TrainingOptions)
def sft(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Fine-tune on conversations: cross-entropy of the assistant's tokens (supervised fine-tuning)."""
    return train_verb("sft", model, data, config, options)


@documented(TrainingOptions)
def pretrain(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Continue pretraining on plain text: cross-entropy of all tokens."""
    return train_verb("pretrain", model, data, config, options)


@documented(TrainingOptions)
def reward(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Train a reward model on pairs of a better and a worse completion."""
    return train_verb("reward", model, data, config, options)


@documented(TrainingOptions)
def prm(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Train a process reward model on completions that are labelled step by step."""
    return train_verb("prm", model, data, config, options)


@documented(TrainingOptions)
def dpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Train on preference pairs by direct preference optimisation (DPO); also IPO, cDPO, hinge and robust losses."""
    return train_verb("dpo", model, data, config, options)


@documented(TrainingOptions)
def kto(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Train on single completions that are labelled good or bad (KTO)."""
    return train_verb("kto", model, data, config, options)


@documented(TrainingOptions)
def simpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Train on preference pairs without a reference model, with length-normalised rewards (SimPO)."""
    return train_verb("simpo", model, data, config, options)


@documented(TrainingOptions)
def orpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Fine-tune and train on preference pairs in one loss, by odds ratio (ORPO)."""
    return train_verb("orpo", model, data, config, options)


@documented(TrainingOptions)
def cpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Train on preference pairs without a reference model (contrastive preference optimisation, CPO)."""
    return train_verb("cpo", model, data, config, options)


@documented(TrainingOptions)
def distill(
    model: Model | None = None,
    data: Data | None = None,
    *,
    config: ConfigFile | None = None,
    **options: Unpack[TrainingOptions],
) -> Result:
    """Train a student on the next-token distribution of a teacher: `algo={"teacher": PATH}`."""
    return train_verb("distill", model, data, config, options)


# Trained on the policy's own completions


@documented(OnlineOptions)
def grpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by group-relative policy optimisation (GRPO); with other options of `algo` also Dr. GRPO and DAPO."""
    return train_verb("grpo", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def gspo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by GRPO with one importance ratio per completion instead of per token (GSPO)."""
    return train_verb("gspo", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def gmpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by GRPO with the geometric mean of clipped token ratios (GMPO)."""
    return train_verb("gmpo", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def cispo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by GRPO with clipped importance weights, which keep the gradient of every token (CISPO)."""
    return train_verb("cispo", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def opd(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train a student on its own completions with a teacher's distribution: `algo={"teacher": PATH}`."""
    return train_verb("opd", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def sapo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by GRPO with a smooth gate on the ratio instead of clipping (SAPO)."""
    return train_verb("sapo", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def rloo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by REINFORCE with the mean reward of a prompt's other completions as baseline (RLOO)."""
    return train_verb("rloo", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def reinforce(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by REINFORCE++: advantages are normalised over the batch; one completion per prompt is enough."""
    return train_verb("reinforce", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def remax(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by REINFORCE with the reward of the greedy completion as baseline (ReMax)."""
    return train_verb("remax", model, data, config, {"reward": reward, **options})


@documented(OnlineOptions)
def ppo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[OnlineOptions],
) -> Result:
    """Train by proximal policy optimisation (PPO) with a critic."""
    return train_verb("ppo", model, data, config, {"reward": reward, **options})


# Pipelines


def run_pipeline(
    verb: str,
    model: Model | None,
    data: Data | None,
    reward: Reward | None,
    config: ConfigFile | None,
    options: Mapping[str, Any],
) -> PipelineResult:
    """Run like `posttrain VERB`; the same call continues a pipeline that was stopped."""
    from posttrain.api.arguments import prepare_pipeline
    from posttrain.core.logging import quiet_libraries
    from posttrain.pipelines.recipes import run_from

    quiet_libraries()
    given = {"config": config, "model": model, "data": data, "reward": reward, **options}
    return run_from(verb, prepare_pipeline(verb, given))


@documented(PipelineOptions)
def rejection_sampling(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[PipelineOptions],
) -> PipelineResult:
    """Generate completions, keep the best of each prompt and fine-tune on them, in several iterations."""
    return run_pipeline("rejection-sampling", model, data, reward, config, options)


@documented(PipelineOptions)
def iterative_dpo(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[PipelineOptions],
) -> PipelineResult:
    """Generate completions, pair the best with the worst of each prompt and train DPO, in iterations."""
    return run_pipeline("iterative-dpo", model, data, reward, config, options)


@documented(PipelineOptions)
def conditional_sft(
    model: Model | None = None,
    data: Data | None = None,
    *,
    reward: Reward | None = None,
    config: ConfigFile | None = None,
    **options: Unpack[PipelineOptions],
) -> PipelineResult:
    """Fine-tune on completions whose prompts state their reward; then a prompt can ask for a high one."""
    return run_pipeline("conditional-sft", model, data, reward, config, options)
