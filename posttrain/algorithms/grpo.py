"""Group-relative policy optimisation (arXiv:2402.03300): an answer is judged against others to the same prompt.

Credit is the reward minus the mean of its group, over their standard deviation; no critic. Dr. GRPO (arXiv:2503.20783)
is `scale_by_std: false` with `average: length`; DAPO (arXiv:2503.14476) is a larger `clip_high` with
rollout.dynamic_sampling and rewards.overlong. GSPO and CISPO do something else with the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from posttrain.algorithms.base import groups, register
from posttrain.algorithms.policy import PolicyGradient, placed, standardized
from posttrain.core.ops import Doubles, bounded_exp
from posttrain.core.types import Batch, Sample


class Grouped(PolicyGradient):
    """Answers of one prompt compete with each other; `gains` says how. All tokens of an answer get the same credit."""

    def fewest_samples(self) -> int:
        return 2

    def credit(self, samples: list[Sample]) -> None:
        for group in groups(samples):
            rewards = np.array([self.total_reward(sample) for sample in group])
            for sample, gain in zip(group, self.gains(rewards), strict=True):
                sample.advantages = placed(sample, gain)

    def gains(self, rewards: Doubles) -> Doubles:
        """Credit of each answer of a group."""
        raise NotImplementedError


@register("grpo")
class GRPO(Grouped):
    """How many standard deviations an answer is above the mean of its group."""

    @dataclass(kw_only=True, slots=True)
    class Config(Grouped.Config):
        scale_by_std: bool = True
        """Divide by the group's (unbiased) standard deviation; false is Dr. GRPO."""
        std_epsilon: float = 1e-6
        """Added to the standard deviation."""

    def gains(self, rewards: Doubles) -> Doubles:
        if self.config.scale_by_std:
            return standardized(rewards, self.config.std_epsilon)
        return rewards - rewards.mean() if np.ptp(rewards) else np.zeros(len(rewards))


@register("gspo")
class GSPO(GRPO):
    """One ratio an answer, the geometric mean of its tokens' (arXiv:2507.18071, eq. 5 and 7)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        clip_low: float = 3e-4
        """The ratio is held above 1 - clip_low; a mean over tokens moves far less than the ratio of one token."""
        clip_high: float = 4e-4
        """The ratio is held below 1 + clip_high."""
        average: Literal["token", "sample", "length"] = "sample"
        """sample: mean over answers; token: a longer answer weighs more; length: over rollout.max_tokens."""

    separable = False

    def ratio(self, log_ratio: torch.Tensor, batch: Batch) -> torch.Tensor:
        sample_of = batch.sample_of[batch.counted]
        sums = log_ratio.new_zeros(len(batch.lengths)).index_add(0, sample_of, log_ratio)
        return bounded_exp(sums / batch.counts())[sample_of]


@register("cispo")
class CISPO(GRPO):
    """The clipped ratio is a constant weight, so that no token loses its gradient (arXiv:2506.13585, eq. 4)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        clip_low: float = 1.0
        """The weight is held above 1 - clip_low; 1: no lower bound, as in the paper."""
        clip_high: float = 4.0
        """The weight is held below 1 + clip_high."""

    def surrogate(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.hold(ratio.detach())
        return -weight * advantages * logprobs, weight != ratio
