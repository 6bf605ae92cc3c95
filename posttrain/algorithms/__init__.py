"""All algorithms. Importing this package fills ALGORITHMS, in the order of the help text; it does not load PyTorch."""

# isort: off
from posttrain.algorithms import sft, reward, process_reward
from posttrain.algorithms import dpo, kto, simpo, orpo, cpo, distill
from posttrain.algorithms import grpo, rloo, reinforce, ppo, opd

# isort: on
from posttrain.algorithms.base import ALGORITHMS, Algorithm, OnlineAlgorithm, RolloutSettings, example_kind, register

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "OnlineAlgorithm",
    "RolloutSettings",
    "cpo",
    "distill",
    "dpo",
    "example_kind",
    "grpo",
    "kto",
    "opd",
    "orpo",
    "ppo",
    "process_reward",
    "register",
    "reinforce",
    "reward",
    "rloo",
    "sft",
    "simpo",
]
