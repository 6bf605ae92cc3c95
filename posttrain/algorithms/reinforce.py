"""REINFORCE with what makes it stable: REINFORCE++ (arXiv:2501.03262) and ReMax (arXiv:2310.10505). No critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.algorithms.base import groups, register
from posttrain.algorithms.policy import PolicyGradient, as_stream, check_bounds, whiten
from posttrain.core.ops import discounted
from posttrain.core.types import Sample


class RewardToGo(PolicyGradient):
    """Credits a token with the rewards that follow it, the KL of each token included."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyGradient.Config):
        kl_coef: float = 0.01
        """Weight of the KL penalty to the reference model; 0: no penalty and no reference model."""
        kl_in: Literal["loss", "reward"] = "reward"
        """Where the KL penalty is applied: added to the loss, or subtracted from the reward of each token."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = PolicyGradient.defaults | {"rollout.samples_per_prompt": 1}


@register("reinforce", help="REINFORCE++: advantages standardised over the batch; one completion per prompt is enough")
class Reinforce(RewardToGo):
    """Standardizes rewards to go over all tokens of the batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(RewardToGo.Config):
        gamma: float = 1.0
        """Discount factor per token."""
        baseline: bool = False
        """Subtract the mean reward of the prompt's completions first; needs rollout.samples_per_prompt above 1."""

    config: Config

    def check(self) -> None:
        PolicyGradient.check(self)
        check_bounds(0, 1, gamma=self.config.gamma)

    def min_samples_per_prompt(self) -> int:
        return 2 if self.config.baseline else 1

    def compute_advantages(self, samples: list[Sample]) -> None:
        credits = []
        for group in groups(samples):
            mean = float(np.mean([sample.reward for sample in group])) if self.config.baseline else 0.0
            credits += [discounted(self.token_rewards(s, s.reward - mean), self.config.gamma) for s in group]
        for sample, credit in zip(samples, whiten(credits), strict=True):
            sample.advantages = as_stream(sample, credit)


@register("remax", help="reinforcement learning; the baseline is the reward of the greedy completion (ReMax)")
class ReMax(RewardToGo):
    """Subtracts the reward of the greedy completion of the same prompt (eq. 6)."""

    greedy_baseline = True

    def compute_advantages(self, samples: list[Sample]) -> None:
        for sample in samples:
            to_go = discounted(self.token_rewards(sample, sample.reward), 1.0)
            sample.advantages = as_stream(sample, to_go - sample.baseline)
