"""What all policy gradients share: the clipped ratio, the KL to the reference, the sampler's importance weights.

The gradient is that of the log-probability of tokens the policy drew itself, weighted by their advantage. Three sets of
log-probabilities meet in the loss: the sampler's (`logprobs`), the trainer's before the first update on the batch
(`old_logprobs`; with one update a batch they are those of the loss's own forward pass), and the current ones. The ratio
that is clipped is current / old; old / sampler, cut off at `importance_cap`, mends what sampler and trainer disagree
about (arXiv:2503.14286).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from posttrain.algorithms.base import Algorithm, groups
from posttrain.core.errors import UsageError
from posttrain.core.ops import Doubles, bounded_exp, kl_estimate
from posttrain.core.types import Batch, Drawing, Floats, Loss, Outputs, Request, Sample, Unit

RENEWED = "every"  # algo.reference every:N


class PolicyGradient(Algorithm):
    """A subclass says what an answer's tokens are credited with (`credit`) and may bend ratio and surrogate."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
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
        epochs_per_batch: int = 1
        """Passes over a batch of answers."""
        mini_batch_size: int = 0
        """Answers an optimizer step sees; 0: all of the batch."""
        shuffle_mini_batch: bool = True
        """Draw mini-batches in random order."""

    rows = "prompt"
    online = True
    separable = True
    greedy_baseline: ClassVar[bool] = False
    """Wants the reward of the greedy answer to the same prompt in `sample.baseline`."""
    defaults: ClassVar[dict[str, Any]] = {"update.learning_rate": 1e-6, "update.schedule": "constant"}

    max_answer_tokens: int = 0  # the run's, for average: length
    drawing: Drawing = Drawing()  # the run's: what the sampler drew from

    def __init__(self, config: Algorithm.Config) -> None:
        super().__init__(config)
        self.kl_weight: float = self.config.kl  # adapted if there is a target
        self.answer_kl = 0.0  # of the batch that was scored last
        self.unit: Unit = "token" if self.config.average == "token" else "sample"  # type: ignore[misc]

    def check(self) -> None:
        config = self.config
        check_bounds(0, 1, clip_low=config.clip_low)  # a ratio is never below 0
        check_bounds(0, clip_high=config.clip_high, entropy=config.entropy, importance_cap=config.importance_cap)
        check_bounds(0, kl=config.kl, kl_target=config.kl_target[0], mini_batch_size=config.mini_batch_size)
        check_bounds(1, epochs_per_batch=config.epochs_per_batch, kl_target=config.kl_target[1])
        for name, value in {"reference": config.reference, "kl_target": config.kl_target[0]}.items():
            if value and not config.kl:
                raise UsageError(f"algo.{name} is {value} but algo.kl is 0: give the KL a weight, or leave it out")
        if config.reference.startswith(f"{RENEWED}:") and not self.renewal():
            raise UsageError(
                f"algo.reference is {config.reference}: after {RENEWED}: comes a number of steps, at least 1, as "
                f"{RENEWED}:50"
            )
        if config.kl and config.kl_in == "loss" and config.kl_estimator == "k1":
            raise UsageError(
                "algo.kl_estimator k1 has no gradient on average when it is in the loss: choose k2 or k3, or set "
                "algo.kl_in to reward"
            )

    def several_updates(self) -> bool:
        """Whether the policy has moved on before the last update on a batch, so that old log-probabilities matter."""
        return self.config.epochs_per_batch > 1 or self.config.mini_batch_size > 0

    def fewest_samples(self) -> int:
        """Answers to a prompt that it takes to tell a good one from a bad one."""
        return 1

    def needs(self) -> set[str]:
        wanted = {"ref_logprobs"} if self.config.kl else set()
        return wanted | ({"old_logprobs"} if self.several_updates() else set())

    def reference(self) -> str:
        return "" if self.renewal() else self.config.reference

    def renewal(self) -> int:
        word, colon, steps = self.config.reference.partition(":")
        return int(steps) if (word, colon) == (RENEWED, ":") and steps.isdigit() else 0

    def outputs(self) -> set[str]:
        return {"logprobs", "entropy"}

    def request(self, token_id: Callable[[str], int]) -> Request:
        names = frozenset(self.outputs())
        return Request(names=names, drawing=self.drawing, entropy_gradient=self.config.entropy > 0)

    def estimator(self) -> str:
        """Of the KL: k3 pulls towards the reference only from the loss, k1 only from the reward."""
        if self.config.kl_estimator != "auto":
            return self.config.kl_estimator
        return "k3" if self.config.kl_in == "loss" else "k1"

    # Credit, on the controller

    def score(self, samples: list[Sample]) -> list[Sample]:
        if self.config.kl_target[0]:
            self.answer_kl = float(np.mean([kl_of(sample, "k1").sum() for sample in samples]))
        self.credit(samples)
        return samples

    def credit(self, samples: list[Sample]) -> None:
        """Write `advantages` into the samples; groups are neighbours."""
        raise NotImplementedError

    def rewards_of(self, sample: Sample, reward: float) -> Doubles:
        """Reward of each token that counts: `reward` at the last, and with kl_in: reward the KL taken off each."""
        rewards = np.zeros(int(sample.mask.sum()))
        if self.config.kl and self.config.kl_in == "reward":
            rewards -= self.kl_weight * kl_of(sample, self.estimator())
        if len(rewards):
            rewards[-1] += reward
        return rewards

    def total_reward(self, sample: Sample) -> float:
        """The answer's reward, and with kl_in: reward all its KL taken off. Counts even where no token does."""
        return sample.reward + float(self.rewards_of(sample, 0.0).sum())

    # The loss, on the worker

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        """All streams are cut to the tokens that count, [M]."""
        assert out.logprobs is not None and out.entropy is not None
        assert batch.advantages is not None and batch.logprobs is not None
        where = batch.counted
        logprobs, entropy, sampled = out.logprobs[where], out.entropy[where], batch.logprobs[where]
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[where]
        per_token, clipped = self.surrogate(self.ratio(logprobs - old, batch), logprobs, batch.advantages[where])
        if self.config.importance_cap:
            per_token = per_token * self.ratio(old - sampled, batch).clamp(max=self.config.importance_cap)
        metrics = {"clipped": mean(clipped.to(logprobs.dtype)), "entropy": mean(entropy.detach())}
        if self.config.kl:
            assert batch.ref_logprobs is not None
            log_ratio = logprobs - batch.ref_logprobs[where]
            metrics["kl"] = mean(kl_estimate(log_ratio.detach(), "k3"))  # whatever is trained on: it means one thing
            if self.config.kl_in == "loss":
                per_token = per_token + self.kl_weight * kl_estimate(log_ratio, self.estimator())
        if self.config.entropy:
            per_token = per_token - self.config.entropy * entropy
        return Loss(total=self.summed(per_token, batch), metrics=metrics | mismatch(old - sampled))

    def ratio(self, log_ratio: torch.Tensor, batch: Batch) -> torch.Tensor:
        """How much likelier each token has become."""
        return bounded_exp(log_ratio)

    def hold(self, ratio: torch.Tensor) -> torch.Tensor:
        """The ratio within its bounds, if there are any."""
        low, high = self.config.clip_low, self.config.clip_high
        return ratio.clamp(1 - low, 1 + high) if low or high else ratio

    def surrogate(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is minimised at each token, and where the bounds have stopped it (arXiv:1707.06347, eq. 7)."""
        free, held = ratio * advantages, self.hold(ratio) * advantages
        return -torch.min(free, held), held < free

    def summed(self, per_token: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The sum over the unit that `average` asks for."""
        if self.config.average == "token":
            return per_token.sum()
        if self.config.average == "length":
            assert self.max_answer_tokens, "the run says how long an answer may be"
            return per_token.sum() / self.max_answer_tokens
        return (per_token / batch.counts()[batch.sample_of[batch.counted]]).sum()

    # What changes from step to step besides weights

    def moves(self, sample: Sample) -> bool:
        """Whether a sample has any gradient: one whose advantages are all 0 need not be computed."""
        assert sample.advantages is not None
        held = bool(self.config.kl) and self.config.kl_in == "loss"
        return held or bool(self.config.entropy) or bool(np.any(sample.advantages))

    def has_critic(self) -> bool:
        """Whether a model of its own judges states; `critic_loss` is then its loss."""
        return False

    def actor_frozen(self, step: int) -> bool:
        """Whether only the critic learns at this step (from 1)."""
        return False

    def pretrain_files(self) -> tuple[str, ...]:
        """Texts whose loss, `pretrain_loss`, is mixed in."""
        return ()

    def observe(self, metrics: dict[str, float], samples: int) -> None:
        """After each step, with its metrics and number of answers: adapt the KL's weight (arXiv:1909.08593, eq. 3)."""
        target, horizon = self.config.kl_target
        if target:
            error = float(np.clip(self.answer_kl / target - 1, -0.2, 0.2))
            self.kl_weight *= 1 + error * min(1.0, samples / horizon)

    def state(self) -> dict[str, float]:
        return {"kl_weight": self.kl_weight}

    def load_state(self, state: dict[str, float]) -> None:
        self.kl_weight = state["kl_weight"]


def mean(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A metric that is a mean over the tokens that count, whatever the unit of the loss."""
    return per_token.sum(), torch.tensor(float(len(per_token)), device=per_token.device)


def mismatch(gap: torch.Tensor) -> dict[str, Any]:
    """How far the trainer's log-probabilities are from the sampler's: at equal weights 1, 0, 1 and 1 if all is well."""
    gap = gap.detach()
    none = gap.new_zeros(1)  # a pack may have no token that counts
    return {
        "sampler_ratio": mean(bounded_exp(gap)),
        "sampler_kl": mean(kl_estimate(-gap, "k3")),  # KL(sampler || trainer): the sampler drew the tokens
        "largest_sampler_ratio": torch.cat([bounded_exp(gap), none]).max(),
        "largest_sampler_ratio_inverse": torch.cat([bounded_exp(-gap), none]).max(),
    }


def kl_of(sample: Sample, estimator: str) -> Doubles:
    """The KL to the reference at each token that counts, by the policy that drew it."""
    drawn = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
    assert drawn is not None and sample.ref_logprobs is not None
    log_ratio = (drawn.astype(np.float64) - sample.ref_logprobs)[sample.mask]
    return kl_estimate(torch.from_numpy(log_ratio), estimator).numpy()


def standardized(values: Doubles, epsilon: float = 1e-6) -> Doubles:
    """Minus the mean, over the unbiased standard deviation; exactly 0 where nothing differs."""
    if len(values) < 2 or np.ptp(values) == 0:
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + epsilon)


def whitened(credits: Sequence[Doubles]) -> list[Doubles]:
    """The same numbers, standardized over all tokens of the batch."""
    lengths = [len(credit) for credit in credits]
    return np.split(standardized(np.concatenate(credits)), np.cumsum(lengths)[:-1])


def placed(sample: Sample, per_token: Doubles | float) -> Floats:
    """A number for each token that counts (or one for all of them) as a stream; 0 elsewhere."""
    stream = np.zeros(len(sample), dtype=np.float32)
    stream[sample.mask] = per_token
    return stream


def check_bounds(low: float, high: float = math.inf, **options: float) -> None:
    """Raise UsageError for the first of these options that is outside."""
    bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    for name, value in options.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise UsageError(f"algo.{name} is {value}: it must be {bounds}")


__all__ = ["PolicyGradient", "check_bounds", "groups", "kl_of", "mismatch", "placed", "standardized", "whitened"]
