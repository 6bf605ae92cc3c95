"""Proximal policy optimisation (arXiv:1707.06347) with a critic, in the form that RLHF gave it (arXiv:2203.02155).

The critic is a model of its own, or a second head on the policy (`shared_trunk`). Its values, and the advantages
computed from them, are those before the batch's first update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.algorithms.base import CriticSettings, register
from posttrain.algorithms.policy import PolicyGradient, as_stream, check_bounds, token_mean, whiten
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.ops import gae
from posttrain.core.types import Loss, Metrics, MicroBatch, Outputs, Sample


@register("ppo", help="proximal policy optimisation with a critic, for reward models")
class PPO(PolicyGradient):
    """Trains the policy on the difference between rewards and what a critic predicts at each token."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyGradient.Config):
        kl: float = 0.02
        """Weight of the KL to the reference model; 0 loads no reference model."""
        kl_in: Literal["loss", "reward"] = "reward"
        """Where the KL goes: into the loss, or taken off the reward of each token."""
        gamma: float = 1.0
        """How much less a reward counts for each token it comes later."""
        gae_lambda: float = 0.95
        """1: trust rewards alone; 0: trust the critic's next value alone."""
        whiten: bool = True
        """Standardize advantages over all tokens of the batch."""
        value_clip: float = 0.2
        """How far a value may move from the one before the batch's first update; 0: as far as it likes."""
        critic: str = ""
        """Where the critic starts; empty: at the first reward model, or else at the policy with a new head."""
        critic_learning_rate: float = 9e-6
        """The critic's own learning rate."""
        freeze_actor_steps: int = 0
        """Train the critic alone for so many steps first."""
        shared_trunk: float = 0.0
        """The critic is a second head on the policy, its loss with this weight; 0: a model of its own."""
        pretrain_data: tuple[str, ...] = ()
        """Texts whose loss is mixed in, against forgetting (PPO-ptx), with its weight: texts.jsonl:0.05 (else 1)."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = PolicyGradient.defaults | {"rollout.samples_per_prompt": 1}

    def check(self) -> None:
        config = self.config
        PolicyGradient.check(self)
        check_bounds(0, 1, gamma=config.gamma, gae_lambda=config.gae_lambda)
        check_bounds(0, value_clip=config.value_clip, shared_trunk=config.shared_trunk)
        check_bounds(0, critic_learning_rate=config.critic_learning_rate, freeze_actor_steps=config.freeze_actor_steps)
        if config.shared_trunk and config.critic:
            raise UsageError(f"algo.shared_trunk leaves no room for algo.critic {config.critic}: keep one of them")
        if config.shared_trunk and config.freeze_actor_steps:
            raise UsageError(
                f"algo.freeze_actor_steps is {config.freeze_actor_steps}, but with algo.shared_trunk policy and critic "
                "cannot be trained apart: keep one of them"
            )

    def needs(self) -> set[str]:
        return super().needs() | {"values"}

    def outputs(self) -> set[str]:
        return super().outputs() | ({"values"} if self.config.shared_trunk else set())

    def critic(self) -> CriticSettings | None:
        if self.config.shared_trunk:
            return None
        config = self.config
        return CriticSettings(path=config.critic, learning_rate=config.critic_learning_rate, loss=self.critic_loss)

    def has_gradient(self, sample: Sample) -> bool:
        return bool(self.config.shared_trunk) or super().has_gradient(sample)

    def pretrain_files(self) -> tuple[str, ...]:
        return self.config.pretrain_data

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
        for sample, credit in zip(samples, whiten(credits) if self.config.whiten else credits, strict=True):
            sample.advantages = as_stream(sample, credit)

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        loss = super().loss(out, batch)
        if self.config.shared_trunk:
            errors, metrics = self.value_errors(out, batch)
            loss.total = loss.total + self.config.shared_trunk * self.aggregate(errors, batch)
            loss.metrics |= metrics
        return loss

    def critic_loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        """Returns a sum over tokens, whatever the policy's loss is averaged over."""
        errors, metrics = self.value_errors(out, batch)
        return Loss(total=errors.sum(), metrics=metrics)

    def value_errors(self, out: Outputs, batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Returns half the squared error at each token that counts: the larger of the unclipped and the clipped one."""
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
