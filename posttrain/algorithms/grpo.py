"""Group-relative policy optimisation (arXiv:2402.03300): a completion is compared with others of the same prompt.

The advantage is the reward minus the mean of its group, divided by the standard deviation of the group; there is no
critic. Dr. GRPO (arXiv:2503.20783) is `scale_by_std: false` with `loss_aggregation: fixed_length`; DAPO
(arXiv:2503.14476) is a larger `clip_high` with rollout.dynamic_sampling and reward.overlong_tokens. GSPO, GMPO,
CISPO and SAPO change what is done with the ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.algorithms.base import groups, register
from posttrain.algorithms.policy import PolicyGradient, as_stream, completion_means, standardize
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.ops import Doubles, bounded_exp, discounted
from posttrain.core.types import Ints, MicroBatch, Sample


class Grouped(PolicyGradient):
    """Compares the completions of one prompt (`group_advantages`); all tokens of a completion get one advantage.

    With `credit` by turns, all tokens of a turn get one: rewards from this turn on are compared with those of the same
    turn of other conversations, or with those of replies to the same state (GiGPO, arXiv:2505.10978, eq. 6-8).
    """

    compares_turns = True

    def min_samples_per_prompt(self) -> int:
        return 2

    def check(self) -> None:
        super().check()
        if self.config.step_group_weight != 1 and self.config.credit != "step_group":
            raise UsageError(
                f"algo.step_group_weight is {self.config.step_group_weight}, but algo.credit is {self.config.credit}: "
                "set algo.credit to step_group, or leave it out"
            )

    def compute_advantages(self, samples: list[Sample]) -> None:
        credit = self.config.credit
        whole = np.zeros(len(samples)) if credit == "turn" else self.completion_advantages(samples)
        for sample, advantage in zip(samples, whole, strict=True):
            sample.advantages = as_stream(sample, advantage)
        if credit != "conversation":
            for group in groups(samples):
                self.add_turn_advantages(group)

    def add_turn_advantages(self, group: list[Sample]) -> None:
        """Add to each turn's tokens how its rewards from there on compare with those of the turns like it."""
        by_turn = self.config.credit == "turn"
        alike: dict[object, list[tuple[Sample, Ints, float]]] = {}
        for sample in group:
            for number, (tokens, earned, state) in enumerate(self.turn_returns(sample)):
                alike.setdefault(number if by_turn else state, []).append((sample, tokens, earned))
        weight = 1.0 if by_turn else self.config.step_group_weight
        for turns in alike.values():
            gains = self.group_advantages(np.array([earned for _, _, earned in turns]))
            for (sample, tokens, _), gain in zip(turns, gains, strict=True):
                assert sample.advantages is not None
                sample.advantages[tokens] += np.float32(weight * gain)

    def turn_returns(self, sample: Sample) -> list[tuple[Ints, float, object]]:
        """Return the tokens of each turn, the discounted rewards from it on, and the state that it replied to."""
        per_token = self.token_rewards(sample, 0.0)  # the KL, if it is in the reward
        places = np.flatnonzero(sample.mask).astype(np.int32)
        first_of_all = int(places[0]) if len(places) else len(sample)
        turns = sample.turns or ((first_of_all, len(sample), 0.0, ""),)
        own = [reward for _, _, reward, _ in turns]
        own[-1] += sample.reward - sum(own)  # what no turn earned alone: of reward functions, for example
        inside = [places[(places >= first) & (places < end)] for first, end, _, _ in turns]
        kl = [float(per_token[np.searchsorted(places, tokens)].sum()) for tokens in inside]
        returns = discounted(np.array(own) + kl, self.config.turn_discount)
        states = [state or sample.tokens[:first].tobytes() for first, _, _, state in turns]
        return [(tokens, float(earned), state) for tokens, earned, state in zip(inside, returns, states, strict=True)]

    def completion_advantages(self, samples: list[Sample]) -> Doubles:
        """Return the advantage of each completion of the batch."""
        rewards = [np.array([self.total_reward(sample) for sample in group]) for group in groups(samples)]
        return np.concatenate([self.group_advantages(of_group) for of_group in rewards])

    def group_advantages(self, rewards: Doubles) -> Doubles:
        """Return the advantage of each completion of a group."""
        raise NotImplementedError


@register("grpo", help="reinforcement learning with group-relative advantages; also Dr. GRPO and DAPO")
class GRPO(Grouped):
    """Measures how many standard deviations a reward is above the mean of its group."""

    @dataclass(kw_only=True, slots=True)
    class Config(Grouped.Config):
        scale_by_std: bool = True
        """Divide advantages by the group's (unbiased) standard deviation; off in Dr. GRPO."""
        std_epsilon: float = 1e-6
        """Constant added to the standard deviation."""
        std_over: Literal["group", "batch"] = "group"
        """Which rewards the standard deviation is taken over: the group's, or all of the batch."""
        multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
        """sum_then_normalize: the weighted sum of all rewards is compared within the group; normalize_then_sum: each
        reward is standardised within the group, then their weighted sum over the batch (GDPO)."""
        group_advantage: Literal["mean", "length_weighted_mean", "best_minus_second"] = "mean"
        """What a reward is compared with: the group's mean; its mean weighted by the completions' lengths (OPO); or,
        for the best completion alone, the second best reward (Pass@k)."""

    config: Config

    def check(self) -> None:
        super().check()
        config = self.config
        by_batch = config.std_over == "batch" or config.multi_objective_aggregation == "normalize_then_sum"
        if by_batch and config.credit != "conversation":
            raise UsageError(
                f"algo.credit {config.credit} compares turns within a group: leave out algo.std_over batch and "
                "algo.multi_objective_aggregation normalize_then_sum"
            )
        decoupled = config.multi_objective_aggregation == "normalize_then_sum"
        if config.group_advantage != "mean" and (decoupled or config.credit != "conversation"):
            raise UsageError(
                f"algo.group_advantage is {config.group_advantage}: it is for the sum of rewards of whole "
                "completions. Leave out algo.multi_objective_aggregation normalize_then_sum, and set algo.credit to "
                "conversation"
            )
        if config.multi_objective_aggregation == "normalize_then_sum" and (
            not config.scale_by_std or config.std_over == "batch" or (config.kl_coef and config.kl_in == "reward")
        ):
            raise UsageError(
                "algo.multi_objective_aggregation normalize_then_sum standardises each reward within its group, "
                "without the KL: leave out algo.scale_by_std and algo.std_over, and set algo.kl_in to loss"
            )

    def group_advantages(self, rewards: Doubles) -> Doubles:
        if self.config.scale_by_std and self.config.std_over == "group":
            return standardize(rewards, self.config.std_epsilon)
        return rewards - rewards.mean() if np.ptp(rewards) else np.zeros(len(rewards))

    def completion_advantages(self, samples: list[Sample]) -> Doubles:
        config = self.config
        if config.multi_objective_aggregation == "normalize_then_sum":
            parts = [decoupled_advantages(group, config.std_epsilon) for group in groups(samples)]
            return standardize(np.concatenate(parts), config.std_epsilon)
        if config.group_advantage == "mean":
            advantages = super().completion_advantages(samples)
        else:
            advantages = np.concatenate([self.compared_advantages(group) for group in groups(samples)])
        if config.scale_by_std and config.std_over == "batch" and len(samples) > 1:
            rewards = [self.total_reward(sample) for sample in samples]
            advantages = advantages / (np.std(rewards, ddof=1) + config.std_epsilon)
        return advantages

    def compared_advantages(self, group: list[Sample]) -> Doubles:
        """Return the advantages of a group over another baseline than its mean (arXiv:2505.23585, 2503.19595)."""
        config, rewards = self.config, np.array([self.total_reward(sample) for sample in group])
        if len(rewards) < 2 or np.ptp(rewards) == 0:
            return np.zeros(len(rewards))
        if config.group_advantage == "length_weighted_mean":
            lengths = np.array([max(1, int(sample.mask.sum())) for sample in group], dtype=np.float64)
            found = rewards - (lengths * rewards).sum() / lengths.sum()
        else:
            best, found = int(rewards.argmax()), np.zeros(len(rewards))
            found[best] = rewards[best] - np.delete(rewards, best).max()
        scaled = config.scale_by_std and config.std_over == "group"
        return found / (rewards.std(ddof=1) + config.std_epsilon) if scaled else found


@register("gspo", help="GRPO with one importance ratio per completion; more stable for mixtures of experts")
class GSPO(GRPO):
    """Uses one ratio per completion, the geometric mean of its tokens' ratios (arXiv:2507.18071, eq. 5 and 7)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        clip_low: float = 3e-4
        """Lower clip bound: the ratio is clipped to at least 1 - clip_low (far smaller than for tokens)."""
        clip_high: float = 4e-4
        """Upper clip bound: the ratio is clipped to at most 1 + clip_high."""
        loss_aggregation: Literal["token_mean", "sample_mean", "fixed_length"] = "sample_mean"
        """token_mean: mean over all tokens; sample_mean: mean over each completion's tokens, then over completions;
        fixed_length: sum over each completion's tokens divided by rollout.max_tokens, then mean over completions."""

    config: Config

    separable = False

    def ratio(self, log_ratio: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return bounded_exp(completion_means(log_ratio, batch))[batch.sample_of[batch.counted]]


@register("gmpo", help="GRPO that maximises the geometric mean of clipped token ratios; less sensitive to outliers")
class GMPO(GSPO):
    """Clips the log-ratio of every token, then uses their mean as one ratio per completion (arXiv:2507.20673)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GSPO.Config):
        clip_low: float = 0.4
        """Lower clip bound: the log of a token's ratio is clipped to at least -clip_low."""
        clip_high: float = 0.4
        """Upper clip bound: the log of a token's ratio is clipped to at most clip_high."""

    config: Config

    def check(self) -> None:
        super().check()
        refuse_dual_clip(self.name, self.config.dual_clip)

    def policy_terms(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_ratio, low, high = logprobs - old, self.config.clip_low, self.config.clip_high
        clipped = log_ratio.clamp(-low, high) if low or high else log_ratio
        gains = advantages.sign()
        dropped = gains * clipped < gains * log_ratio
        ratio = self.ratio(torch.where(dropped, clipped, log_ratio), batch)
        return -ratio * advantages, dropped


@register("cispo", help="GRPO that clips importance weights instead of dropping gradients")
class CISPO(GRPO):
    """Uses the clipped ratio as a constant weight, so that no token loses its gradient (arXiv:2506.13585, eq. 4)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        clip_low: float = 1.0
        """Lower clip bound: the weight is clipped to at least 1 - clip_low; 1: no lower bound, as in the paper."""
        clip_high: float = 4.0
        """Upper clip bound: the weight is clipped to at most 1 + clip_high."""

    config: Config

    def check(self) -> None:
        super().check()
        refuse_dual_clip(self.name, self.config.dual_clip)

    def surrogate(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.clip(ratio.detach())
        return -weight * advantages * logprobs, weight != ratio


@register("sapo", help="GRPO with a smooth gate on the ratio instead of clipping (soft adaptive policy optimisation)")
class SAPO(GRPO):
    """Weights a token's gradient by a gate that falls off smoothly around a ratio of 1 (arXiv:2511.20347, eq. 5-6)."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        clip_low: float = 0.0
        """Not used: the gate takes the place of clipping."""
        clip_high: float = 0.0
        """Not used: the gate takes the place of clipping."""
        temperature_positive: float = 1.0
        """Temperature of the gate for positive advantages; higher: the gate closes nearer to a ratio of 1."""
        temperature_negative: float = 1.05
        """Temperature of the gate for negative advantages."""
        loss_aggregation: Literal["token_mean", "sample_mean", "fixed_length"] = "sample_mean"
        """token_mean: mean over all tokens; sample_mean: mean over each completion's tokens, then over completions;
        fixed_length: sum over each completion's tokens divided by rollout.max_tokens, then mean over completions."""

    config: Config

    def check(self) -> None:
        super().check()
        refuse_dual_clip(self.name, self.config.dual_clip)
        for name in ("clip_low", "clip_high"):
            if value := getattr(self.config, name):
                raise UsageError(
                    f"algo.{name} is {value}, but sapo has a smooth gate instead of bounds: leave it out, and set "
                    "algo.temperature_positive and algo.temperature_negative"
                )
        for name in ("temperature_positive", "temperature_negative"):
            if not 0 < (value := getattr(self.config, name)) < math.inf:
                raise UsageError(f"algo.{name} is {value}: it must be above 0")

    def surrogate(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positive, negative = self.config.temperature_positive, self.config.temperature_negative
        sharpness = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
        gate = torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness
        return -gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


def decoupled_advantages(group: list[Sample], epsilon: float) -> Doubles:
    """Return the weighted sum of rewards that are standardised one by one within the group (arXiv:2601.05242)."""
    assert all(sample.reward_terms for sample in group), "rewards are not known one by one"
    weights, values = np.moveaxis(np.array([sample.reward_terms for sample in group]), 2, 0)
    return np.sum([w * standardize_known(v, epsilon) for w, v in zip(weights[0], values.T, strict=True)], axis=0)


def standardize_known(values: Doubles, epsilon: float) -> Doubles:
    """Standardise the values of the completions that a reward applies to; 0 for others (NaN)."""
    result, known = np.zeros(len(values)), ~np.isnan(values)
    result[known] = standardize(values[known], epsilon)
    return result


def refuse_dual_clip(verb: str, dual_clip: float) -> None:
    """Raise UsageError if it is set where the loss has no ratio that it could bound."""
    if dual_clip:
        raise UsageError(
            f"algo.dual_clip is {dual_clip}, but the loss of {verb} is bounded in its own way: leave it out"
        )
