"""Group-relative policy optimisation (arXiv:2402.03300): a completion is compared with others of the same prompt.

The advantage is the reward minus the mean of its group, over their standard deviation; no critic. Dr. GRPO
(arXiv:2503.20783) is `scale_by_std: false` with `average: length`; DAPO (arXiv:2503.14476) is a larger `clip_high` with
rollout.dynamic_sampling and reward.overlong_tokens. GSPO and CISPO change what is done with the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.algorithms.base import groups, register
from posttrain.algorithms.policy import PolicyGradient, as_stream, standardize
from posttrain.core.lazy import torch
from posttrain.core.ops import Doubles, bounded_exp
from posttrain.core.types import MicroBatch, Sample


class Grouped(PolicyGradient):
    """Compares the completions of one prompt (`group_advantages`); all tokens of a completion get one advantage."""

    def min_samples_per_prompt(self) -> int:
        return 2

    def compute_advantages(self, samples: list[Sample]) -> None:
        for group in groups(samples):
            rewards = np.array([self.total_reward(sample) for sample in group])
            for sample, advantage in zip(group, self.group_advantages(rewards), strict=True):
                sample.advantages = as_stream(sample, advantage)

    def group_advantages(self, rewards: Doubles) -> Doubles:
        """Returns the advantage of each completion of a group."""
        raise NotImplementedError


@register("grpo", help="reinforcement learning: answers to one prompt compete; also Dr. GRPO and DAPO")
class GRPO(Grouped):
    """Measures how many standard deviations a reward is above the mean of its group."""

    @dataclass(kw_only=True, slots=True)
    class Config(Grouped.Config):
        scale_by_std: bool = True
        """Divide by the group's (unbiased) standard deviation; false is Dr. GRPO."""
        std_epsilon: float = 1e-6
        """Added to the standard deviation."""

    config: Config

    def group_advantages(self, rewards: Doubles) -> Doubles:
        if self.config.scale_by_std:
            return standardize(rewards, self.config.std_epsilon)
        return rewards - rewards.mean() if np.ptp(rewards) else np.zeros(len(rewards))


@register("gspo", help="GRPO with one ratio for a whole answer; steadier for mixtures of experts")
class GSPO(GRPO):
    """Uses one ratio per completion, the geometric mean of its tokens' (arXiv:2507.18071, eq. 5 and 7)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        clip_low: float = 3e-4
        """The ratio is held above 1 - clip_low; a mean over tokens moves far less than the ratio of one token."""
        clip_high: float = 4e-4
        """The ratio is held below 1 + clip_high."""
        average: Literal["token", "sample", "length"] = "sample"
        """sample: mean over answers; token: a longer answer weighs more; length: over rollout.max_tokens."""

    config: Config

    separable = False

    def ratio(self, log_ratio: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        sample_of = batch.sample_of[batch.counted]
        sums = log_ratio.new_zeros(len(batch.lengths)).index_add(0, sample_of, log_ratio)
        return bounded_exp(sums / batch.counts())[sample_of]


@register("cispo", help="GRPO that clips the weight of a token, never its gradient")
class CISPO(GRPO):
    """Uses the clipped ratio as a constant weight, so that no token loses its gradient (arXiv:2506.13585, eq. 4)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        clip_low: float = 1.0
        """The weight is held above 1 - clip_low; 1: no lower bound, as in the paper."""
        clip_high: float = 4.0
        """The weight is held below 1 + clip_high."""

    config: Config

    def surrogate(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.clip(ratio.detach())
        return -weight * advantages * logprobs, weight != ratio
