"""Proximal policy optimisation (arXiv:1707.06347) with a critic, in the form that RLHF gave it (arXiv:2203.02155).

The critic is a model of its own, or a second head on the policy (`share_critic`). Its values, and the advantages
computed from them, are those before the batch's first update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.algorithms.base import CriticSettings, register
from posttrain.algorithms.policy import PolicyGradient, as_stream, check_bounds, token_mean, whiten
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.ops import Doubles, gae
from posttrain.core.types import Loss, Metrics, MicroBatch, Outputs, Sample

SEED_OF_DRAW = 0x9F_99_06  # numpy's generators of (seed, step) and of (seed, step, 0), the first shuffle, are the same


@register("ppo", help="proximal policy optimisation with a critic, for reward models")
class PPO(PolicyGradient):
    """Trains the policy on the difference between rewards and what a critic predicts at each token."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyGradient.Config):
        kl_coef: float = 0.02
        """Weight of the KL penalty to the reference model; 0: no penalty and no reference model."""
        kl_in: Literal["loss", "reward"] = "reward"
        """Where the KL penalty is applied: added to the loss, or subtracted from the reward of each token."""
        gamma: float = 1.0
        """Discount factor per token."""
        gae_lambda: float = 0.95
        """Lambda of generalised advantage estimation: 1 uses the rewards to go, 0 the critic's next value."""
        whiten_advantages: bool = True
        """Standardise advantages over all tokens of the batch."""
        value_clip: float = 0.2
        """Clip values to this distance from those before the batch's first update; 0: no clipping."""
        critic: str = ""
        """Path of the model that the critic starts from; empty: the first reward model, or else the policy with a new
        head."""
        critic_learning_rate: float = 9e-6
        """Learning rate of the critic."""
        resample_by_reward: Literal["none", "power", "best_and_worst", "best_and_random"] = "none"
        """Draw the completions to train on from the batch, with replacement (PF-PPO): power: with probability
        proportional to abs(reward) to the power of algo.resample_power; best_and_worst: only those with the highest and
        the lowest reward of the batch; best_and_random: those with the highest reward 4 times as often as others."""
        resample_power: float = 2.0
        """Exponent of the rewards, with algo.resample_by_reward power."""
        freeze_actor_steps: int = 0
        """Train only the critic during the first N steps."""
        share_critic: bool = False
        """Make the critic a second head on the policy instead of a model of its own."""
        value_loss_coef: float = 1.0
        """Weight of the value loss in the loss of policy and critic; needs algo.share_critic."""
        pretrain_data: tuple[str, ...] = ()
        """Files of texts whose language modelling loss is added to the policy's, against forgetting (PPO-ptx)."""
        pretrain_coef: tuple[float, ...] = (1.0,)
        """Weight of the loss on algo.pretrain_data: one for all files together, or one per file."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = PolicyGradient.defaults | {"rollout.samples_per_prompt": 1}

    def check(self) -> None:
        config = self.config
        PolicyGradient.check(self)
        check_bounds(0, 1, gamma=config.gamma, gae_lambda=config.gae_lambda)
        check_bounds(0, value_clip=config.value_clip, value_loss_coef=config.value_loss_coef)
        check_bounds(0, critic_learning_rate=config.critic_learning_rate, freeze_actor_steps=config.freeze_actor_steps)
        check_bounds(0, resample_power=config.resample_power)
        if config.resample_power != 2.0 and config.resample_by_reward != "power":
            raise UsageError(
                f"algo.resample_power is {config.resample_power}, but algo.resample_by_reward is "
                f"{config.resample_by_reward}: set it to power, or leave it out"
            )
        if config.share_critic and not config.value_loss_coef:
            raise UsageError("algo.share_critic is set, but algo.value_loss_coef is 0: the critic would not be trained")
        if config.share_critic and config.critic:
            raise UsageError(
                f"algo.share_critic makes the critic a part of the policy, but algo.critic is {config.critic}: leave "
                "out one of them"
            )
        if config.share_critic and config.freeze_actor_steps:
            raise UsageError(
                f"algo.freeze_actor_steps is {config.freeze_actor_steps}, but with algo.share_critic policy and critic "
                "cannot be trained separately: leave out one of them"
            )
        if len(config.pretrain_coef) not in (1, max(1, len(config.pretrain_data))):
            raise UsageError(
                f"algo.pretrain_coef has {len(config.pretrain_coef)} numbers for {len(config.pretrain_data)} files in "
                "algo.pretrain_data. Give one for all files, or one per file."
            )
        for coef in config.pretrain_coef:
            check_bounds(0, pretrain_coef=coef)

    def trained_samples(self, samples: list[Sample], seed: tuple[int, ...]) -> list[Sample]:
        """Draw as many completions as there are, by their rewards before the KL (arXiv:2409.06957, as in verl)."""
        known = super().trained_samples(samples, seed)
        if self.config.resample_by_reward == "none" or not known:
            return known
        weights = self.resampling_weights(np.array([sample.reward for sample in known]))
        if not weights.sum():  # all rewards are 0
            return known
        own = (seed[0] ^ SEED_OF_DRAW, *seed[1:])
        drawn = np.random.default_rng(own).choice(len(known), size=len(known), p=weights / weights.sum())
        return [known[index] for index in drawn]

    def resampling_weights(self, rewards: Doubles) -> Doubles:
        """Return the weight of each completion in the draw."""
        kind, best = self.config.resample_by_reward, rewards == rewards.max()
        if kind == "power":
            return np.abs(rewards) ** self.config.resample_power
        if kind == "best_and_worst":
            return (best | (rewards == rewards.min())).astype(np.float64)
        return np.where(best, 0.4, 0.1)

    def needs(self) -> set[str]:
        return super().needs() | {"values"}

    def outputs(self) -> set[str]:
        return super().outputs() | ({"values"} if self.config.share_critic else set())

    def critic(self) -> CriticSettings | None:
        if self.config.share_critic:
            return None
        config = self.config
        return CriticSettings(path=config.critic, learning_rate=config.critic_learning_rate, loss=self.critic_loss)

    def has_gradient(self, sample: Sample) -> bool:
        return self.config.share_critic or super().has_gradient(sample)

    def pretrain_sources(self) -> list[tuple[tuple[str, ...], float]]:
        files, coefs = self.config.pretrain_data, self.config.pretrain_coef
        if not files or len(coefs) == 1:
            return [(files, coefs[0])] if files else []
        return [((file,), coef) for file, coef in zip(files, coefs, strict=True)]

    def policy_frozen(self, step: int) -> bool:
        return step <= self.config.freeze_actor_steps

    def compute_advantages(self, samples: list[Sample]) -> None:
        credits = []
        for sample in samples:
            assert sample.values is not None
            values = sample.values[sample.mask].astype("float64")
            rewards = self.token_rewards(sample, sample.reward)
            credits.append(gae(rewards, values, self.config.gamma, self.config.gae_lambda))
            sample.returns = as_stream(sample, credits[-1] + values)
        for sample, credit in zip(samples, whiten(credits) if self.config.whiten_advantages else credits, strict=True):
            sample.advantages = as_stream(sample, credit)

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        loss = super().loss(out, batch)
        if self.config.share_critic:
            errors, metrics = self.value_errors(out, batch)
            loss.total = loss.total + self.config.value_loss_coef * self.aggregate(errors, batch)
            loss.metrics |= metrics
        return loss

    def critic_loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        """Return a sum over tokens, whatever the policy's loss is averaged over."""
        errors, metrics = self.value_errors(out, batch)
        return Loss(total=errors.sum(), metrics=metrics)

    def value_errors(self, out: Outputs, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Return half the squared error at each token that counts: the larger of the unclipped and the clipped one."""
        assert out.values is not None and batch.values is not None and batch.returns is not None
        values, old, returns = (stream[batch.counted] for stream in (out.values, batch.values, batch.returns))
        free = held = (values - returns).square()
        if self.config.value_clip:
            clip, moved = self.config.value_clip, values - old
            clipped = (old + moved.clamp(-clip, clip) - returns).square()
            held = torch.where(moved.abs() > clip, clipped, free)  # not by rounding: old + (values - old) is not values
        metrics: Metrics = {
            "value": token_mean(values.detach()),
            "return": token_mean(returns),
            "value_error": token_mean(free.detach()),
            "value_clipped": token_mean((held > free).to(values.dtype)),
        }
        return torch.max(free, held) / 2, metrics

    def pretrain_loss(self, out: Outputs, batch: MicroBatch, weight: float) -> Loss:
        assert out.logprobs is not None
        nll = -out.logprobs[batch.counted].sum()
        return Loss(total=weight * nll, metrics={"pretrain_nll": nll.detach()})
