"""What all policy gradients share: the clipped ratio, the KL to the reference, the sampler's importance weights.

The gradient is that of the log-probability of tokens the policy sampled, weighted by their advantage. Three sets of
log-probabilities meet in the loss: the sampler's (`logprobs`), the trainer's before the first update on the batch
(`old_logprobs`; with one update per batch they are those of the loss's own forward pass), and the current ones. The
ratio that is clipped is current / old; old / sampler, truncated at `importance_cap`, corrects for the difference
between sampler and trainer (arXiv:2503.14286).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.algorithms.base import OnlineAlgorithm, RolloutSettings
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.ops import Doubles, bounded_exp, kl_estimate
from posttrain.core.types import Floats, ForwardRequest, Loss, Metrics, MicroBatch, Outputs, Sample, Unit

RENEWED = "every"  # algo.reference every:N


class PolicyGradient(OnlineAlgorithm):
    """A subclass computes the advantages of tokens (`compute_advantages`) and may change ratio and surrogate."""

    @dataclass(kw_only=True, slots=True)
    class Config(OnlineAlgorithm.Config):
        clip_low: float = 0.2
        """The ratio is held above 1 - clip_low; 0 with clip_high 0: no clipping."""
        clip_high: float = 0.2
        """The ratio is held below 1 + clip_high; raise it alone for DAPO's clip-higher."""
        kl: float = 0.0
        """Weight of the KL to the reference model; 0 loads no reference model."""
        kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
        """With d = log(policy / reference): k1 is d, k2 d^2 / 2, k3 exp(-d) - 1 + d. auto: k3 in loss, k1 in reward."""
        kl_in: Literal["loss", "reward"] = "loss"
        """Where the KL goes: into the loss, or taken off the reward of each token."""
        kl_target: tuple[float, int] = (0.0, 10_000)
        """Adapt the weight to this KL of an answer, by a fifth over so many answers; 0 and any: a fixed weight."""
        reference: str = ""
        """Path of the reference model; empty: the policy at the start; every:50: the policy after each 50th step."""
        entropy: float = 0.0
        """Weight of an entropy bonus."""
        average: Literal["token", "sample", "length"] = "token"
        """token: mean over all tokens; sample: over each answer, then over answers; length: over rollout.max_tokens."""
        importance_cap: float = 2.0
        """Largest weight that corrects for sampler and trainer disagreeing; 0: no correction."""

    config: Config

    separable = True
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-6, "train.lr_scheduler": "constant"}

    def __init__(self, config: Config, rollout: RolloutSettings = RolloutSettings()) -> None:  # noqa: B008  frozen
        super().__init__(config, rollout)
        self.kl_weight = config.kl  # adapted if there is a target
        self.completion_kl = 0.0  # mean over the completions of the last batch

    def check(self) -> None:
        config = self.config
        check_bounds(0, 1, clip_low=config.clip_low)  # a ratio is never below 0
        check_bounds(0, clip_high=config.clip_high, entropy=config.entropy, importance_cap=config.importance_cap)
        check_bounds(0, kl=config.kl, kl_target=config.kl_target[0], mini_batch_size=config.mini_batch_size)
        check_bounds(1, epochs_per_batch=config.epochs_per_batch, kl_target=config.kl_target[1])
        for name, value in {"reference": config.reference, "kl_target": config.kl_target[0]}.items():
            if value and not config.kl:
                raise UsageError(f"algo.{name} is {value} but algo.kl is 0: give the KL a weight, or leave it out")
        if config.reference.startswith(f"{RENEWED}:") and not self.reference_sync_steps():
            raise UsageError(
                f"algo.reference is {config.reference}: after {RENEWED}: comes a number of steps, at least 1, as "
                f"{RENEWED}:50"
            )
        if config.kl and config.kl_in == "loss" and config.kl_estimator == "k1":
            raise UsageError(
                "algo.kl_estimator k1 has no gradient on average when it is in the loss: choose k2 or k3, or set "
                "algo.kl_in to reward"
            )

    @property
    def unit(self) -> Unit:
        return "token" if self.config.average == "token" else "sample"

    def needs(self) -> set[str]:
        wanted = {"ref_logprobs"} if self.config.kl else set()
        return wanted | ({"old_logprobs"} if self.several_updates() else set())

    def reference_path(self) -> str:
        return "" if self.reference_sync_steps() else self.config.reference

    def reference_sync_steps(self) -> int:
        word, colon, steps = self.config.reference.partition(":")
        return int(steps) if (word, colon) == (RENEWED, ":") and steps.isdigit() else 0

    def outputs(self) -> set[str]:
        return {"logprobs", "entropy"}

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        return replace(super().forward_request(token_id), entropy_gradient=self.config.entropy > 0)

    def estimator(self) -> str:
        """Returns the KL estimator: k3 pulls towards the reference only from the loss, k1 only from the reward."""
        if self.config.kl_estimator != "auto":
            return self.config.kl_estimator
        return "k3" if self.config.kl_in == "loss" else "k1"

    # Credit, on the controller

    def assign_credit(self, samples: list[Sample]) -> list[Sample]:
        if self.config.kl_target[0]:
            self.completion_kl = float(np.mean([token_kl(sample, "k1").sum() for sample in samples]))
        self.compute_advantages(samples)
        return samples

    def compute_advantages(self, samples: list[Sample]) -> None:
        """Write `advantages` into the samples; the samples of a group are next to each other."""
        raise NotImplementedError

    def token_rewards(self, sample: Sample, reward: float) -> Doubles:
        """Returns the reward of each token that counts: `reward` at the last; with kl_in: reward minus its KL."""
        rewards = np.zeros(int(sample.mask.sum()))
        if self.config.kl and self.config.kl_in == "reward":
            rewards -= self.kl_weight * token_kl(sample, self.estimator())
        if len(rewards):
            rewards[-1] += reward
        return rewards

    def total_reward(self, sample: Sample) -> float:
        """Returns the completion's reward, with kl_in: reward minus its KL; also where no token of it counts."""
        return sample.reward + float(self.token_rewards(sample, 0.0).sum())

    # The loss, on the worker

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        """All streams are reduced to the tokens that count, [M]."""
        assert out.logprobs is not None and out.entropy is not None
        assert batch.advantages is not None and batch.logprobs is not None
        where = batch.counted
        logprobs, entropy, sampled = out.logprobs[where], out.entropy[where], batch.logprobs[where]
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[where]
        per_token, clipped = self.surrogate(self.ratio(logprobs - old, batch), logprobs, batch.advantages[where])
        if self.config.importance_cap:
            per_token = per_token * self.ratio(old - sampled, batch).clamp(max=self.config.importance_cap)
        metrics: Metrics = {
            "clipped": token_mean(clipped.to(logprobs.dtype)),
            "entropy": token_mean(entropy.detach()),
        }
        if self.config.kl:
            assert batch.ref_logprobs is not None
            log_ratio = logprobs - batch.ref_logprobs[where]
            metrics["kl"] = token_mean(kl_estimate(log_ratio.detach(), "k3"))  # whichever estimator is trained on
            if self.config.kl_in == "loss":
                per_token = per_token + self.kl_weight * kl_estimate(log_ratio, self.estimator())
        if self.config.entropy:
            per_token = per_token - self.config.entropy * entropy
        return Loss(total=self.aggregate(per_token, batch), metrics=metrics | sampler_mismatch(old - sampled))

    def ratio(self, log_ratio: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Returns the probability ratio of each token."""
        return bounded_exp(log_ratio)

    def clip(self, ratio: torch.Tensor) -> torch.Tensor:
        """Clips the ratio to its bounds, if there are any."""
        low, high = self.config.clip_low, self.config.clip_high
        return ratio.clamp(1 - low, 1 + high) if low or high else ratio

    def surrogate(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what is minimised at each token, and where it is clipped (arXiv:1707.06347, eq. 7)."""
        unclipped, clipped = ratio * advantages, self.clip(ratio) * advantages
        return -torch.min(unclipped, clipped), clipped < unclipped

    def aggregate(self, per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Returns the sum over the unit of the loss."""
        if self.config.average == "token":
            return per_token.sum()
        if self.config.average == "length":
            longest = self.rollout.max_completion_tokens
            assert longest, "constructed without the run's RolloutSettings"
            return per_token.sum() / longest
        return (per_token / batch.counts()[batch.sample_of[batch.counted]]).sum()

    def has_gradient(self, sample: Sample) -> bool:
        """A sample whose advantages are all 0 has none, unless KL or entropy are in the loss."""
        assert sample.advantages is not None
        kl_in_loss = bool(self.config.kl) and self.config.kl_in == "loss"
        return kl_in_loss or bool(self.config.entropy) or bool(np.any(sample.advantages))

    # What changes from step to step besides weights

    def after_step(self, metrics: dict[str, float], samples: int) -> None:
        """Adapts the weight of the KL (arXiv:1909.08593, eq. 3)."""
        target, horizon = self.config.kl_target
        if target:
            error = float(np.clip(self.completion_kl / target - 1, -0.2, 0.2))
            self.kl_weight *= 1 + error * min(1.0, samples / horizon)

    def state(self) -> dict[str, float]:
        return {"kl_weight": self.kl_weight}

    def load_state(self, state: dict[str, float]) -> None:
        self.kl_weight = state["kl_weight"]


def token_mean(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a metric that is a mean over the tokens that count, whatever the unit of the loss: (sum, count)."""
    return per_token.sum(), torch.tensor(float(len(per_token)), device=per_token.device)


def sampler_mismatch(gap: torch.Tensor) -> Metrics:
    """Measures how far the trainer's log-probabilities are from the sampler's; ideally 1, 0, 1 and 1."""
    gap = gap.detach()
    none = gap.new_zeros(1)  # a micro-batch may have no token that counts
    return {
        "sampler_ratio": token_mean(bounded_exp(gap)),
        "sampler_kl": token_mean(kl_estimate(-gap, "k3")),  # KL(sampler || trainer): the tokens are the sampler's
        "largest_sampler_ratio": torch.cat([bounded_exp(gap), none]).max(),
        "largest_sampler_ratio_inverse": torch.cat([bounded_exp(-gap), none]).max(),
    }


def token_kl(sample: Sample, estimator: str) -> Doubles:
    """Estimates the KL of the sampling policy to the reference at each token that counts."""
    policy = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
    assert policy is not None and sample.ref_logprobs is not None
    log_ratio = (policy.astype(np.float64) - sample.ref_logprobs)[sample.mask]
    return kl_estimate(torch.from_numpy(log_ratio), estimator).numpy()


def standardize(values: Doubles, epsilon: float = 1e-6) -> Doubles:
    """Subtracts the mean and divides by the unbiased standard deviation; exactly 0 where all values are equal."""
    if len(values) < 2 or np.ptp(values) == 0:
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + epsilon)


def whiten(credits: Sequence[Doubles]) -> list[Doubles]:
    """Standardizes the numbers of all samples over all tokens of the batch."""
    lengths = [len(credit) for credit in credits]
    return np.split(standardize(np.concatenate(credits)), np.cumsum(lengths)[:-1])


def as_stream(sample: Sample, per_token: Doubles | float) -> Floats:
    """Turns one number per token that counts (or one for all of them) into a stream of the sample; 0 elsewhere."""
    stream = np.zeros(len(sample), dtype=np.float32)
    stream[sample.mask] = per_token
    return stream


def check_bounds(low: float, high: float = math.inf, **options: float) -> None:
    """Raise UsageError for the first of these options that is out of bounds."""
    bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    for name, value in options.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise UsageError(f"algo.{name} is {value}: it must be {bounds}")
