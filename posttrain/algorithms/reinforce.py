"""REINFORCE with what makes it stable: REINFORCE++ (arXiv:2501.03262) and ReMax (arXiv:2310.10505). No critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.algorithms.base import groups, register
from posttrain.algorithms.policy import PolicyGradient, check_bounds, placed, whitened
from posttrain.core.ops import discounted
from posttrain.core.types import Sample


class RewardToGo(PolicyGradient):
    """A token is credited with what comes after it, the KL of each token included."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyGradient.Config):
        kl: float = 0.01
        """Weight of the KL to the reference model; 0 loads no reference model."""
        kl_in: Literal["loss", "reward"] = "reward"
        """Where the KL goes: into the loss, or taken off the reward of each token."""

    defaults: ClassVar[dict[str, Any]] = PolicyGradient.defaults | {"rollout.samples_per_prompt": 1}


@register("reinforce")
class Reinforce(RewardToGo):
    """REINFORCE++: rewards to go, standardized over all tokens of the batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(RewardToGo.Config):
        gamma: float = 1.0
        """How much less a reward counts for each token it comes later."""
        baseline: bool = False
        """First take the mean of the prompt's answers off each reward; wants several answers to a prompt."""

    def check(self) -> None:
        PolicyGradient.check(self)
        check_bounds(0, 1, gamma=self.config.gamma)

    def fewest_samples(self) -> int:
        return 2 if self.config.baseline else 1

    def credit(self, samples: list[Sample]) -> None:
        credits = []
        for group in groups(samples):
            usual = float(np.mean([sample.reward for sample in group])) if self.config.baseline else 0.0
            credits += [discounted(self.rewards_of(s, s.reward - usual), self.config.gamma) for s in group]
        for sample, credit in zip(samples, whitened(credits), strict=True):
            sample.advantages = placed(sample, credit)


@register("remax")
class ReMax(RewardToGo):
    """Credit is what an answer earns beyond the greedy answer to the same prompt (eq. 6)."""

    greedy_baseline = True

    def credit(self, samples: list[Sample]) -> None:
        for sample in samples:
            to_go = discounted(self.rewards_of(sample, sample.reward), 1.0)
            sample.advantages = placed(sample, to_go - sample.baseline)
