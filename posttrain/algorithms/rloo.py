"""REINFORCE, leave one out (arXiv:2402.14740): the other completions of a prompt are the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.algorithms.base import register
from posttrain.algorithms.grpo import Grouped
from posttrain.core.ops import Doubles


@register("rloo", help="reinforcement learning: an answer against the mean of the others to its prompt")
class RLOO(Grouped):
    """Subtracts the mean reward of the other completions of the same prompt."""

    @dataclass(kw_only=True, slots=True)
    class Config(Grouped.Config):
        kl: float = 0.05
        """Weight of the KL to the reference model; 0 loads no reference model."""
        kl_in: Literal["loss", "reward"] = "reward"
        """Where the KL goes: into the loss, or taken off the reward of each token."""

    config: Config

    def group_advantages(self, rewards: Doubles) -> Doubles:
        if len(rewards) < 2 or np.ptp(rewards) == 0:
            return np.zeros(len(rewards))
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return rewards - others
