"""Every algorithm is imported here, so that ALGORITHMS is full."""

from posttrain.algos import distill, dpo, kto, preference, process_reward, reward, sft
from posttrain.algos.base import ALGORITHMS, Algorithm

__all__ = ["ALGORITHMS", "Algorithm", "distill", "dpo", "kto", "preference", "process_reward", "reward", "sft"]
