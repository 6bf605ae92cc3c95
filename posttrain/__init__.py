"""posttrain: everything after pretraining.

Every training verb of the command line is a function here, with the same options:

    import posttrain

    result = posttrain.sft("pico", "examples.jsonl", max_steps=20)
    result = posttrain.grpo(result.output_dir, prompts, reward=my_function, max_tokens=64)

`help(posttrain.grpo)` lists the arguments. Importing the package loads neither PyTorch nor transformers.
"""

from __future__ import annotations

from typing import Any

# Loaded before the function `convert` takes its name: the import system sets the attribute when a package is loaded.
import posttrain.convert  # noqa: F401
from posttrain.api.runs import SavedRun, load_run
from posttrain.api.tools import (
    Evaluation,
    convert,
    evaluate,
    export,
    generate,
    merge,
    mix_data,
    plot,
    score,
    select,
    split_data,
)
from posttrain.api.trainers import (
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    OPDTrainer,
    PPOTrainer,
    RewardTrainer,
    SFTTrainer,
)
from posttrain.api.training import (
    cispo,
    conditional_sft,
    cpo,
    distill,
    dpo,
    gmpo,
    grpo,
    gspo,
    iterative_dpo,
    kto,
    opd,
    orpo,
    ppo,
    pretrain,
    prm,
    registered_function,
    reinforce,
    rejection_sampling,
    remax,
    reward,
    rloo,
    sapo,
    sft,
    simpo,
)
from posttrain.core.errors import PosttrainError, Stopped, UsageError
from posttrain.train.callbacks import Callback, EarlyStopping, TrainingState

__version__ = "0.2.0"

__all__ = [
    "Callback",
    "DPOTrainer",
    "EarlyStopping",
    "Evaluation",
    "GRPOTrainer",
    "KTOTrainer",
    "OPDTrainer",
    "PPOTrainer",
    "PosttrainError",
    "RewardTrainer",
    "SFTTrainer",
    "SavedRun",
    "Stopped",
    "TrainingState",
    "UsageError",
    "cispo",
    "conditional_sft",
    "convert",
    "cpo",
    "distill",
    "dpo",
    "evaluate",
    "export",
    "generate",
    "gmpo",
    "grpo",
    "gspo",
    "iterative_dpo",
    "kto",
    "load_run",
    "merge",
    "mix_data",
    "opd",
    "orpo",
    "plot",
    "ppo",
    "pretrain",
    "prm",
    "reinforce",
    "rejection_sampling",
    "remax",
    "reward",
    "rloo",
    "sapo",
    "score",
    "select",
    "sft",
    "simpo",
    "split_data",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Return a function for an algorithm that the user has registered."""
    from posttrain.algorithms import ALGORITHMS

    if name in ALGORITHMS:
        return registered_function(name)
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
