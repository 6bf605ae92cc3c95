"""On-policy distillation: the student generates, and a teacher's distribution teaches it token by token.

Two forms. `divergence` minimises the divergence of the two next-token distributions at every token of the student's own
completions (GKD, arXiv:2306.13649); it is computed where the logits are. `policy_gradient` gives each token the reward
log(teacher / student), whose expectation is minus the reverse KL; it needs only the teacher's log-probabilities of the
sampled tokens. Both can be mixed with rewards, whose advantages are those of GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.algorithms.base import register
from posttrain.algorithms.distill import check_divergence
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.policy import as_stream, bounded_kl, check_bounds, token_kl, token_mean
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.ops import discounted, kl_estimate
from posttrain.core.types import ForwardRequest, Loss, MicroBatch, Outputs, Sample


@register("opd", help="on-policy distillation: the student generates, a teacher's distribution teaches every token")
class OPD(GRPO):
    """Minimises the divergence from a teacher on the student's own completions, alone or beside rewards."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        teacher: str = ""
        """Required. Path of the teacher model; it must have the student's vocabulary."""
        objective: Literal["divergence", "policy_gradient"] = "divergence"
        """divergence: minimise the divergence over the vocabulary at every token; policy_gradient: give every token the
        reward log(teacher / student) of its own probability."""
        divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
        """reverse_kl: KL(student || teacher), mode-seeking; forward_kl: KL(teacher || student); jsd: generalised
        Jensen-Shannon divergence, between the two."""
        jsd_beta: float = 0.5
        """Weight of the teacher in the mixture distribution of jsd."""
        temperature: float = 1.0
        """Temperature of the teacher's and the student's distributions in the divergence."""
        divergence_top_k: int = 0
        """Compare the teacher's N likeliest tokens and all others as one; 0: the whole vocabulary."""
        divergence_clip: float = 0.0
        """Clip the divergence of a token, or its log(teacher / student), to at most this size; 0: no bound."""
        distill_coef: float = 1.0
        """Weight of the divergence from the teacher."""
        reward_coef: float = 0.0
        """Weight of the rewards' advantages; 0: rewards, if there are any, are only measured."""
        gamma: float = 0.0
        """Discount factor per token of log(teacher / student) in policy_gradient; 0: a token gets only its own."""

        def needs_reward(self) -> bool:
            return self.reward_coef > 0

    config: Config

    defaults: ClassVar[dict[str, Any]] = GRPO.defaults | {
        "train.learning_rate": 1e-5,
        "rollout.samples_per_prompt": 1,
    }

    def check(self) -> None:
        super().check()
        config = self.config
        check_divergence(config.teacher, config.jsd_beta, config.temperature, config.divergence_top_k)
        check_bounds(0, distill_coef=config.distill_coef, reward_coef=config.reward_coef)
        check_bounds(0, divergence_clip=config.divergence_clip)
        check_bounds(0, 1, gamma=config.gamma)
        if config.kl_coef:
            raise UsageError(
                f"algo.kl_coef is {config.kl_coef}, but opd has a teacher in the place of a reference: leave it out; "
                "algo.distill_coef is the weight of the teacher"
            )
        if not config.distill_coef:
            raise UsageError("algo.distill_coef is 0, so that the teacher would not be used: train with posttrain grpo")
        if config.objective == "divergence" and not config.reward_coef and self.has_entropy_bonus():
            raise UsageError(
                f"algo.entropy_coef is {config.entropy_coef}, algo.entropy_target {config.entropy_target}, but "
                "the loss is the divergence alone: leave them out, or set algo.reward_coef"
            )
        if config.objective == "policy_gradient":
            given = {"divergence": "reverse_kl", "temperature": 1.0, "divergence_top_k": 0}
            for name, default in given.items():
                if (value := getattr(config, name)) != default:
                    raise UsageError(
                        f"algo.{name} is {value}, but algo.objective policy_gradient reads the sampled token's "
                        "probability alone: leave it out, or set algo.objective to divergence"
                    )
        elif config.gamma:
            raise UsageError(
                f"algo.gamma is {config.gamma}, but algo.objective divergence has no rewards of tokens: leave it out, "
                "or set algo.objective to policy_gradient"
            )

    def min_samples_per_prompt(self) -> int:
        return 2 if self.config.reward_coef else 1

    def needs(self) -> set[str]:
        return super().needs() | ({"ref_logprobs"} if self.by_policy_gradient else set())

    @property
    def by_policy_gradient(self) -> bool:
        return self.config.objective == "policy_gradient"

    def reference_path(self) -> str:
        """Return the teacher, if only its log-probabilities of the sampled tokens are needed."""
        return self.config.teacher if self.by_policy_gradient else ""

    def teacher_path(self) -> str:
        return "" if self.by_policy_gradient else self.config.teacher

    def outputs(self) -> set[str]:
        if self.by_policy_gradient:
            return super().outputs()
        return {"divergence"} | (super().outputs() if self.config.reward_coef else set())

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        config = self.config
        return replace(
            super().forward_request(token_id),
            divergence=config.divergence,
            jsd_beta=config.jsd_beta,
            temperature=config.temperature,
            divergence_top_k=config.divergence_top_k,
        )

    def compute_advantages(self, samples: list[Sample]) -> None:
        super().compute_advantages(samples)
        config = self.config
        for sample in samples:
            assert sample.advantages is not None
            sample.advantages = sample.advantages * np.float32(config.reward_coef)
            if self.by_policy_gradient:
                gain = -bounded_kl(token_kl(sample, "k1"), config.divergence_clip)
                sample.advantages += as_stream(sample, config.distill_coef * discounted(gain, config.gamma))

    def has_gradient(self, sample: Sample) -> bool:
        return not self.by_policy_gradient or super().has_gradient(sample)

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        if self.by_policy_gradient:
            assert out.logprobs is not None and batch.ref_logprobs is not None
            loss = super().loss(out, batch)
            log_ratio = (out.logprobs.detach() - batch.ref_logprobs)[batch.counted]
            loss.metrics["divergence"] = token_mean(kl_estimate(log_ratio, "k3"))
            return loss
        assert out.divergence is not None
        divergence = out.divergence[batch.counted]
        taught = divergence.clamp(max=self.config.divergence_clip or math.inf)
        total = self.config.distill_coef * self.aggregate(taught, batch)
        loss = super().loss(out, batch) if self.config.reward_coef else Loss(total=torch.zeros_like(total))
        loss.total = loss.total + total
        loss.metrics["divergence"] = token_mean(divergence.detach())
        return loss
