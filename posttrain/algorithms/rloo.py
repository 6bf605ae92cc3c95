"""REINFORCE, leave one out (arXiv:2402.14740): the other completions of a prompt are the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.algorithms.base import register
from posttrain.algorithms.grpo import Grouped
from posttrain.algorithms.policy import standardize
from posttrain.core.errors import UsageError
from posttrain.core.ops import Doubles
from posttrain.core.types import Sample


@register(
    "rloo",
    help="reinforcement learning; the baseline is the mean reward of the prompt's other completions (leave one out)",
)
class RLOO(Grouped):
    """Subtracts the mean reward of the other completions of the same prompt."""

    @dataclass(kw_only=True, slots=True)
    class Config(Grouped.Config):
        kl_coef: float = 0.05
        """Weight of the KL penalty to the reference model; 0: no penalty and no reference model."""
        kl_in: Literal["loss", "reward"] = "reward"
        """Where the KL penalty is applied: added to the loss, or subtracted from the reward of each token."""
        normalize_advantages: bool = False
        """Standardise the advantages over all completions of the batch."""

    config: Config

    def check(self) -> None:
        super().check()
        if self.config.normalize_advantages and self.config.credit != "conversation":
            raise UsageError(
                f"algo.normalize_advantages standardises one advantage per completion, and algo.credit is "
                f"{self.config.credit}: leave out one of them"
            )

    def completion_advantages(self, samples: list[Sample]) -> Doubles:
        advantages = super().completion_advantages(samples)
        return standardize(advantages) if self.config.normalize_advantages else advantages

    def group_advantages(self, rewards: Doubles) -> Doubles:
        if len(rewards) < 2 or np.ptp(rewards) == 0:
            return np.zeros(len(rewards))
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return rewards - others
