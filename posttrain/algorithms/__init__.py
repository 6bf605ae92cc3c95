"""Every algorithm is imported here, so that ALGORITHMS is full."""

from posttrain.algorithms import distill, dpo, grpo, kto, ppo, preference, process_reward, reinforce, reward, rloo, sft
from posttrain.algorithms.base import ALGORITHMS, Algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "distill",
    "dpo",
    "grpo",
    "kto",
    "ppo",
    "preference",
    "process_reward",
    "reinforce",
    "reward",
    "rloo",
    "sft",
]
