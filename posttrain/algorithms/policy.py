"""What all policy gradients share: the clipped ratio, the KL to the reference, the sampler's importance weights.

The gradient is that of the log-probability of tokens the policy sampled, weighted by their advantage. Three sets of
log-probabilities meet in the loss: the sampler's (`logprobs`), the trainer's before the first update on the batch
(`old_logprobs`; with one update per batch they are those of the loss's own forward pass), and the current ones. The
ratio that is clipped is current / old; old / sampler, truncated or masked at `importance_cap`, corrects for the
difference between sampler and trainer (arXiv:2503.14286).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from posttrain.algorithms.base import OnlineAlgorithm, RolloutSettings, check_reference_sync
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.ops import Doubles, bounded_exp, kl_estimate
from posttrain.core.types import Floats, ForwardRequest, Ints, Loss, Metrics, MicroBatch, Outputs, Sample, Unit

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]


class PolicyGradient(OnlineAlgorithm):
    """A subclass computes the advantages of tokens (`compute_advantages`) and may change ratio and surrogate."""

    @dataclass(kw_only=True, slots=True)
    class Config(OnlineAlgorithm.Config):
        clip_low: float = 0.2
        """Lower clip bound: the ratio is clipped to at least 1 - clip_low; no clipping if both bounds are 0."""
        clip_high: float = 0.2
        """Upper clip bound: the ratio is clipped to at most 1 + clip_high; DAPO's clip-higher raises only this one."""
        dual_clip: float = 0.0
        """Bound the loss of a token with negative advantage A at dual_clip times abs(A), where the ratio is large
        (dual-clip PPO; above 1, usually 3); 0: no bound."""
        off_policy_mask_threshold: float = 0.0
        """Leave tokens with negative advantage out of completions whose mean log(sampler / policy) is above this
        (DeepSeek-V3.2); 0: keep all."""
        kl_coef: float = 0.0
        """Weight of the KL penalty to the reference model; 0: no penalty and no reference model."""
        kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
        """With d = log(policy / reference), k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d; auto: k3 in the loss, k1 in the
        reward."""
        kl_in: Literal["loss", "reward"] = "loss"
        """Where the KL penalty is applied: added to the loss, or subtracted from the reward of each token."""
        kl_bias_correction: bool = False
        """Multiply k3 in the loss by the ratio of policy and old policy: its gradient is then unbiased, that of
        KL(policy || reference)."""
        kl_clip: float = 0.0
        """Clip the KL estimate of a token to at most this size (other libraries: 10); 0: no bound."""
        kl_target: float = 0.0
        """Adapt kl_coef until the KL per completion, in nats, reaches this target; 0: kl_coef is constant."""
        kl_horizon: int = 10_000
        """Number of completions over which kl_target changes kl_coef by at most 20 percent."""
        reference: str = ""
        """Path of the reference model; empty: the policy at the start of training."""
        reference_sync_steps: int = 0
        """Replace the reference model by the current policy every N steps; 0: never."""
        reference_mixup_alpha: float = 1.0
        """Share of the policy in the new reference, with algo.reference_sync_steps; the rest is the old reference."""
        top_entropy_fraction: float = 1.0
        """Train on this share of each completion's tokens: those where the policy's entropy is highest; 1: on all."""
        clip_cov_fraction: float = 0.0
        """Take this share of all tokens of the batch out of the loss, drawn from those with a covariance of
        log-probability and advantage between clip_cov_low and clip_cov_high (Clip-Cov); 0: none."""
        clip_cov_low: float = 1.0
        """Lower bound of the covariance of tokens that algo.clip_cov_fraction may take out."""
        clip_cov_high: float = 5.0
        """Upper bound of the covariance of tokens that algo.clip_cov_fraction may take out."""
        kl_cov_fraction: float = 0.0
        """Hold this share of all tokens of the batch, those with the largest covariance of log-probability and
        advantage, near the policy before the update (KL-Cov); needs several updates per batch; 0: none."""
        kl_cov_coef: float = 1.0
        """Weight of abs(log(policy / old policy)) at the tokens of algo.kl_cov_fraction."""
        entropy_coef: float = 0.0
        """Weight of the entropy bonus; its first value, if there is a target."""
        entropy_target: float = 0.0
        """Adapt the weight of the entropy bonus: raise it after steps whose entropy per token is at most this, lower it
        after others, and leave the bonus out then; 0: the weight is constant."""
        entropy_coef_delta: float = 0.005
        """By how much the weight of the entropy bonus is raised or lowered per step, with algo.entropy_target."""
        entropy_coef_max: float = 1.0
        """Largest weight of the entropy bonus, with algo.entropy_target."""
        credit: Literal["conversation", "turn", "step_group"] = "conversation"
        """What a turn is credited with: conversation: the whole reward; turn: the rewards from this turn on;
        step_group: the whole reward, and those from this turn on compared with replies to the same state (GiGPO)."""
        turn_discount: float = 1.0
        """Discount factor per turn of the rewards of later turns, where algo.credit compares turns (GiGPO: 0.95)."""
        step_group_weight: float = 1.0
        """Weight of the comparison of replies to the same state, with algo.credit step_group."""
        loss_aggregation: Literal["token_mean", "sample_mean", "fixed_length"] = "token_mean"
        """token_mean: mean over all tokens; sample_mean: mean over each completion's tokens, then over completions;
        fixed_length: sum over each completion's tokens divided by rollout.max_tokens, then mean over completions."""
        importance_mode: ImportanceMode = "token_truncate"
        """What is bounded: each token's importance weight, or the product over a completion; and whether weights out of
        bounds are set to the bound (truncate) or to 0 (mask). geometric_mask: tokens' weights, 0 in completions whose
        geometric mean is out of bounds."""
        importance_cap: float = 2.0
        """Upper bound of the importance weights that correct the mismatch between sampler and trainer; 0: no
        correction."""
        importance_floor: float = 0.0
        """Lower bound of the importance weights; 0: none."""

    config: Config

    separable = True
    compares_turns: ClassVar[bool] = False  # whether replies of one prompt's conversations can be compared
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-6, "train.lr_scheduler": "constant"}

    def __init__(self, config: Config, rollout: RolloutSettings = RolloutSettings()) -> None:  # noqa: B008  frozen
        super().__init__(config, rollout)
        self.kl_weight = config.kl_coef  # adapted if there is a target
        self.completion_kl = 0.0  # mean over the completions of the last batch
        self.entropy_weight = config.entropy_coef  # adapted if there is a target
        self.entropy_is_low = True  # at most the target in the last step
        self.batches = 0  # whose credit was assigned; seeds the choice of clip_cov_fraction

    def check(self) -> None:
        config = self.config
        check_bounds(0, 1, clip_low=config.clip_low)  # a ratio is never below 0
        check_bounds(0, clip_high=config.clip_high, entropy_coef=config.entropy_coef)
        check_bounds(0, importance_cap=config.importance_cap, mini_batch_size=config.mini_batch_size)
        check_bounds(0, importance_floor=config.importance_floor, kl_clip=config.kl_clip)
        check_bounds(0, entropy_target=config.entropy_target, entropy_coef_max=config.entropy_coef_max)
        check_bounds(0, entropy_coef_delta=config.entropy_coef_delta)
        check_bounds(0, off_policy_mask_threshold=config.off_policy_mask_threshold)
        self.check_choice_of_tokens()
        check_bounds(0, kl_coef=config.kl_coef, kl_target=config.kl_target)
        check_reference_sync(config.reference_sync_steps, config.reference_mixup_alpha)
        check_bounds(1, epochs_per_batch=config.epochs_per_batch, kl_horizon=config.kl_horizon)
        self.check_turns()
        if config.dual_clip and not 1 + config.clip_high < config.dual_clip < math.inf:
            raise UsageError(
                f"algo.dual_clip is {config.dual_clip}: it must be above 1 + algo.clip_high, {1 + config.clip_high:g}, "
                "or 0 for no bound"
            )
        self.check_importance()
        self.check_kl()

    def check_choice_of_tokens(self) -> None:
        """Raise UsageError if the options that choose tokens by entropy or covariance cannot work."""
        config = self.config
        check_bounds(0, 1, clip_cov_fraction=config.clip_cov_fraction, top_entropy_fraction=config.top_entropy_fraction)
        if not config.top_entropy_fraction:
            raise UsageError("algo.top_entropy_fraction is 0: no token would be left; it must be above 0")
        check_bounds(0, 1, kl_cov_fraction=config.kl_cov_fraction)
        check_bounds(0, kl_cov_coef=config.kl_cov_coef)
        if config.kl_cov_fraction and not self.several_updates():
            raise UsageError(
                f"algo.kl_cov_fraction is {config.kl_cov_fraction}, but its penalty has no gradient in the first "
                "update on a batch, and there is only one: set algo.mini_batch_size or algo.epochs_per_batch"
            )
        if config.clip_cov_low >= config.clip_cov_high:
            raise UsageError(
                f"algo.clip_cov_low is {config.clip_cov_low}, not below algo.clip_cov_high, {config.clip_cov_high}"
            )

    def check_turns(self) -> None:
        """Raise UsageError if credit over turns cannot work with this algorithm."""
        config = self.config
        check_bounds(0, 1, turn_discount=config.turn_discount)
        check_bounds(0, step_group_weight=config.step_group_weight)
        if not self.compares_turns and (config.credit == "step_group" or config.turn_discount != 1):
            given = "credit is step_group" if config.credit == "step_group" else "turn_discount is set"
            raise UsageError(
                f"algo.{given}, but {self.name} does not compare the turns of a prompt's conversations: leave it out, "
                "or choose grpo, gspo, gmpo, cispo, sapo or rloo"
            )

    def check_importance(self) -> None:
        """Raise UsageError if bounds of importance weights contradict each other or have no effect."""
        config = self.config
        if config.importance_cap and config.importance_floor > config.importance_cap:
            raise UsageError(
                f"algo.importance_floor is {config.importance_floor}, above algo.importance_cap, "
                f"{config.importance_cap}: no weight is between them"
            )
        for name in ("importance_floor", "importance_mode"):
            if (value := getattr(config, name)) not in (0.0, "token_truncate") and not config.importance_cap:
                raise UsageError(
                    f"algo.{name} is {value}, but algo.importance_cap is 0, which turns the correction off: set "
                    "algo.importance_cap, or leave it out"
                )

    def check_kl(self) -> None:
        """Raise UsageError if options of the KL to the reference have no effect or no gradient."""
        config = self.config
        for name in ("reference", "reference_sync_steps", "kl_target", "kl_bias_correction", "kl_clip"):
            if (value := getattr(config, name)) and not config.kl_coef:
                raise UsageError(f"algo.{name} is {value}, but algo.kl_coef is 0: set algo.kl_coef, or leave it out")
        if config.kl_coef and config.kl_in == "loss" and config.kl_estimator == "k1":
            raise UsageError(
                "algo.kl_estimator k1 has no gradient on average when it is in the loss: choose k2 or k3, or set "
                "algo.kl_in to reward"
            )
        if config.kl_bias_correction and (config.kl_in == "reward" or config.kl_estimator == "k2"):
            raise UsageError(
                "algo.kl_bias_correction is for k3 in the loss (the gradient of k1 in the reward is unbiased already): "
                "set algo.kl_in to loss and algo.kl_estimator to k3, or leave it out"
            )

    def is_separable(self) -> bool:
        """Whether no sum over a completion's log-probabilities is in the loss of its tokens."""
        by_sequence = self.config.importance_cap > 0 and not self.config.importance_mode.startswith("token_")
        ranked = self.config.top_entropy_fraction < 1
        return self.separable and not by_sequence and not ranked and not self.config.off_policy_mask_threshold

    @property
    def unit(self) -> Unit:
        return "token" if self.config.loss_aggregation == "token_mean" else "sample"

    def needs(self) -> set[str]:
        wanted = {"ref_logprobs"} if self.config.kl_coef else set()
        return wanted | ({"old_logprobs"} if self.several_updates() else set())

    def reference_path(self) -> str:
        return self.config.reference

    def reference_sync_steps(self) -> int:
        return self.config.reference_sync_steps

    def reference_mixup_alpha(self) -> float:
        return self.config.reference_mixup_alpha

    def outputs(self) -> set[str]:
        return {"logprobs", "entropy"}

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        return replace(super().forward_request(token_id), entropy_gradient=self.has_entropy_bonus())

    def estimator(self) -> str:
        """Return the KL estimator: k3 pulls towards the reference only from the loss, k1 only from the reward."""
        if self.config.kl_estimator != "auto":
            return self.config.kl_estimator
        return "k3" if self.config.kl_in == "loss" else "k1"

    def has_entropy_bonus(self) -> bool:
        return self.config.entropy_coef > 0 or self.config.entropy_target > 0

    # Credit, on the controller

    def assign_credit(self, samples: list[Sample]) -> list[Sample]:
        if self.config.kl_target:
            self.completion_kl = float(np.mean([token_kl(sample, "k1").sum() for sample in samples]))
        self.compute_advantages(samples)
        trained = [sample for sample in samples if self.is_trained_on(sample)]
        if self.config.kl_cov_fraction:
            penalize_by_covariance(trained, self.config.kl_cov_fraction)
        if self.config.clip_cov_fraction:
            drop_by_covariance(trained, self.config, self.batches)
        self.batches += 1
        return samples

    def compute_advantages(self, samples: list[Sample]) -> None:
        """Write `advantages` into the samples; the samples of a group are next to each other."""
        raise NotImplementedError

    def token_rewards(self, sample: Sample, reward: float) -> Doubles:
        """Return the reward of each token that counts: `reward` at the last; with kl_in: reward minus its KL.

        With `credit: turn` the reward of a turn is at its last token, and what is left of `reward` at the last of all;
        where turns are compared, that is done instead.
        """
        rewards = np.zeros(int(sample.mask.sum()))
        if self.config.kl_coef and self.config.kl_in == "reward":
            rewards -= self.kl_weight * bounded_kl(token_kl(sample, self.estimator()), self.config.kl_clip)
        if len(rewards):
            by_turn = self.config.credit == "turn" and not self.compares_turns
            for tokens, earned in turn_rewards(sample) if by_turn else ():
                rewards[tokens[-1]] += earned
                reward -= earned
            rewards[-1] += reward
        return rewards

    def total_reward(self, sample: Sample) -> float:
        """Return the completion's reward, with kl_in: reward minus its KL; also where no token of it counts."""
        return sample.reward + float(self.token_rewards(sample, 0.0).sum())

    # The loss, on the worker

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        """Compute the loss; all streams are reduced to the tokens that count, [M]."""
        assert out.logprobs is not None and out.entropy is not None
        assert batch.advantages is not None and batch.logprobs is not None
        where = batch.counted
        logprobs, entropy, sampled = out.logprobs[where], out.entropy[where], batch.logprobs[where]
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[where]
        advantages = batch.advantages[where]
        per_token, clipped = self.policy_terms(logprobs, old, advantages, batch)
        metrics: Metrics = {}
        if self.config.top_entropy_fraction < 1:
            chosen = highest_of_completion(entropy.detach(), self.config.top_entropy_fraction, batch)
            per_token = per_token * chosen
        if self.config.off_policy_mask_threshold:
            drift = completion_means(sampled - logprobs.detach(), batch)[batch.sample_of[where]]
            masked = (advantages < 0) & (drift > self.config.off_policy_mask_threshold)
            per_token = per_token.masked_fill(masked, 0.0)
            metrics["off_policy_masked"] = token_mean(masked.to(logprobs.dtype))
        if self.config.importance_cap:
            weights = self.importance_weights(old - sampled, batch)
            per_token = per_token * weights
            if self.config.importance_mode.endswith("mask"):
                metrics["importance_masked"] = token_mean((weights == 0).to(logprobs.dtype))
        if self.config.kl_cov_fraction:
            assert batch.penalties is not None
            per_token = per_token + self.config.kl_cov_coef * batch.penalties[where] * (logprobs - old).abs()
        metrics["clipped"] = token_mean(clipped.to(logprobs.dtype))
        metrics["entropy"] = token_mean(entropy.detach())
        if self.config.kl_coef:
            assert batch.ref_logprobs is not None
            log_ratio = logprobs - batch.ref_logprobs[where]
            metrics["kl"] = token_mean(kl_estimate(log_ratio.detach(), "k3"))  # whichever estimator is trained on
            if self.config.kl_in == "loss":
                per_token = per_token + self.kl_weight * self.kl_terms(log_ratio, logprobs - old)
        if self.has_entropy_bonus() and self.entropy_is_low:
            per_token = per_token - self.entropy_weight * entropy
        stale = (batch.staleness > 0)[batch.sample_of[where]]
        return Loss(total=self.aggregate(per_token, batch), metrics=metrics | sampler_mismatch(old - sampled, stale))

    def policy_terms(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is minimised at each token before weights, KL and entropy, and where it is clipped."""
        return self.surrogate(self.ratio(logprobs - old, batch), logprobs, advantages)

    def importance_weights(self, gap: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return constants that correct the mismatch of sampler and trainer; `gap`: log(trainer / sampler), [M]."""
        mode, low, high = self.config.importance_mode, self.config.importance_floor, self.config.importance_cap
        sample_of = batch.sample_of[batch.counted]
        if mode.startswith("sequence_"):
            weights = bounded_exp(completion_sums(gap, batch))[sample_of]
        else:
            weights = self.ratio(gap, batch)
        if mode.endswith("truncate"):
            return weights.clamp(low, high)
        bounded = bounded_exp(completion_means(gap, batch))[sample_of] if mode == "geometric_mask" else weights
        return weights * ((bounded >= low) & (bounded <= high))

    def kl_terms(self, log_ratio: torch.Tensor, log_update: torch.Tensor) -> torch.Tensor:
        """Return the KL of each token in the loss; logs of policy / reference and of policy / old policy are given.

        With kl_bias_correction it is ratio k3 (DeepSeek-V3.2), whose gradient is ratio d grad log pi.
        """
        kl = bounded_kl(kl_estimate(log_ratio, self.estimator()), self.config.kl_clip)
        return bounded_exp(log_update) * kl if self.config.kl_bias_correction else kl

    def ratio(self, log_ratio: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the probability ratio of each token."""
        return bounded_exp(log_ratio)

    def clip(self, ratio: torch.Tensor) -> torch.Tensor:
        """Clip the ratio to its bounds, if there are any."""
        low, high = self.config.clip_low, self.config.clip_high
        return ratio.clamp(1 - low, 1 + high) if low or high else ratio

    def surrogate(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is minimised at each token, and where it is clipped (arXiv:1707.06347, eq. 7).

        dual_clip bounds it for negative advantages (arXiv:1912.09729, eq. 5).
        """
        unclipped, clipped = ratio * advantages, self.clip(ratio) * advantages
        gain, held = torch.min(unclipped, clipped), clipped < unclipped
        if self.config.dual_clip:
            least = self.config.dual_clip * advantages
            bounded = (advantages < 0) & (gain < least)
            gain, held = torch.where(bounded, least, gain), held | bounded
        return -gain, held

    def aggregate(self, per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the sum over the unit of the loss."""
        if self.config.loss_aggregation == "token_mean":
            return per_token.sum()
        if self.config.loss_aggregation == "fixed_length":
            longest = self.rollout.max_completion_tokens
            assert longest, "constructed without the run's RolloutSettings"
            return per_token.sum() / longest
        return (per_token / batch.counts()[batch.sample_of[batch.counted]]).sum()

    def has_gradient(self, sample: Sample) -> bool:
        """Whether an advantage is not 0, or a token has a KL, an entropy or a penalty in the loss."""
        assert sample.advantages is not None
        kl_in_loss = bool(self.config.kl_coef) and self.config.kl_in == "loss"
        penalized = sample.penalties is not None and bool(np.any(sample.penalties))
        return kl_in_loss or self.has_entropy_bonus() or penalized or bool(np.any(sample.advantages))

    # What changes from step to step besides weights

    def after_step(self, metrics: dict[str, float], samples: int) -> None:
        """Adapt the weights of the KL (arXiv:1909.08593, eq. 3) and of the entropy (arXiv:2505.22312)."""
        target, horizon = self.config.kl_target, self.config.kl_horizon
        if target:
            error = float(np.clip(self.completion_kl / target - 1, -0.2, 0.2))
            self.kl_weight *= 1 + error * min(1.0, samples / horizon)
        if self.config.entropy_target and "entropy" in metrics:
            self.entropy_is_low = metrics["entropy"] <= self.config.entropy_target
            change = self.config.entropy_coef_delta if self.entropy_is_low else -self.config.entropy_coef_delta
            self.entropy_weight = min(max(0.0, self.entropy_weight + change), self.config.entropy_coef_max)

    def state(self) -> dict[str, float]:
        adapted = {"entropy_weight": self.entropy_weight, "entropy_is_low": float(self.entropy_is_low)}
        counted = {"batches": float(self.batches)} if self.config.clip_cov_fraction else {}
        return {"kl_weight": self.kl_weight} | (adapted if self.config.entropy_target else {}) | counted

    def load_state(self, state: dict[str, float]) -> None:
        self.kl_weight = state["kl_weight"]
        self.entropy_weight = state.get("entropy_weight", self.entropy_weight)
        self.batches = int(state.get("batches", 0))
        self.entropy_is_low = bool(state.get("entropy_is_low", self.entropy_is_low))


def turn_rewards(sample: Sample) -> list[tuple[Ints, float]]:
    """Return, for each turn with tokens that count, their indices among all that count, and the turn's own reward."""
    places = np.flatnonzero(sample.mask)
    inside = [np.flatnonzero((places >= first) & (places < end)) for first, end, _, _ in sample.turns]
    rewards = [reward for _, _, reward, _ in sample.turns]
    return [(tokens.astype(np.int32), reward) for tokens, reward in zip(inside, rewards, strict=True) if len(tokens)]


def completion_sums(per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the sum over the counted tokens of each completion: [M] -> [B]."""
    sample_of = batch.sample_of[batch.counted]
    return per_token.new_zeros(len(batch.lengths)).index_add(0, sample_of, per_token)


def completion_means(per_token: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the mean over the counted tokens of each completion: [M] -> [B]."""
    return completion_sums(per_token, batch) / batch.counts()


def highest_of_completion(values: torch.Tensor, fraction: float, batch: MicroBatch) -> torch.Tensor:
    """Return 1 at the highest `fraction` of each completion's values, rounded up, and 0 elsewhere: [M] -> [M]."""
    sample_of = batch.sample_of[batch.counted]
    order = torch.argsort(values, descending=True, stable=True)
    order = order[torch.argsort(sample_of[order], stable=True)]  # by completion, then by value
    counts = completion_sums(torch.ones_like(values), batch)
    rank = torch.arange(len(values), device=values.device) - (counts.cumsum(0) - counts)[sample_of[order]]
    chosen = (rank < torch.ceil(fraction * counts - 1e-6)[sample_of[order]]).to(values.dtype)
    return torch.zeros_like(values).index_copy(0, order, chosen)


def covariances(samples: Sequence[Sample]) -> Doubles:
    """Return (log-probability - mean) (advantage - mean) of each token that counts, with means over all of them."""
    known = [(sample, sample.logprobs if sample.old_logprobs is None else sample.old_logprobs) for sample in samples]
    logprobs = np.concatenate([stream[s.mask] for s, stream in known if stream is not None]).astype(np.float64)
    advantages = np.concatenate([s.advantages[s.mask] for s in samples if s.advantages is not None]).astype(np.float64)
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean()) if len(logprobs) else logprobs


def penalize_by_covariance(samples: Sequence[Sample], fraction: float) -> None:
    """Mark the share of all tokens with the largest covariances, and at least one (arXiv:2505.22617, eq. 12)."""
    covariance = covariances(samples)
    marked = np.zeros(len(covariance))
    marked[np.argsort(-covariance, kind="stable")[: max(1, int(fraction * len(covariance)))]] = 1.0
    ends = np.cumsum([int(sample.mask.sum()) for sample in samples])[:-1]
    for sample, part in zip(samples, np.split(marked, ends), strict=True):
        sample.penalties = as_stream(sample, part)


def drop_by_covariance(samples: Sequence[Sample], config: PolicyGradient.Config, seed: int) -> None:
    """Set advantages to 0 at a random part of the tokens with covariances within bounds (arXiv:2505.22617, eq. 11)."""
    covariance = covariances(samples)
    within = np.flatnonzero((covariance > config.clip_cov_low) & (covariance < config.clip_cov_high))
    count = min(len(within), max(1, int(config.clip_cov_fraction * len(covariance))))
    dropped = np.zeros(len(covariance), dtype=np.bool_)
    dropped[np.random.default_rng((seed, len(covariance))).permutation(within)[:count]] = True
    start = 0
    for sample in samples:
        assert sample.advantages is not None
        size = int(sample.mask.sum())
        stream = sample.advantages.copy()
        stream[np.flatnonzero(sample.mask)[dropped[start : start + size]]] = 0.0
        sample.advantages, start = stream, start + size


Number = TypeVar("Number", "torch.Tensor", Doubles)


def bounded_kl(kl: Number, bound: float) -> Number:
    """Clip a KL estimate to at most the bound in size; 0: no bound."""
    return kl.clip(-bound, bound) if bound else kl


def token_mean(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a metric that is a mean over the tokens that count, whatever the unit of the loss: (sum, count)."""
    return per_token.sum(), torch.tensor(float(len(per_token)), device=per_token.device)


def sampler_mismatch(gap: torch.Tensor, stale: torch.Tensor) -> Metrics:
    """Measure how far the trainer's log-probabilities are from the sampler's.

    At tokens that the same weights sampled, only the engine's error is left: `sampler_kl` is ideally 0. At `stale`
    tokens, sampled with older weights, `policy_drift` is mostly what the policy has learned since then.
    """
    gap = gap.detach()
    kl, drifted = kl_estimate(-gap, "k3"), stale.to(gap.dtype)  # KL(sampler || trainer): the tokens are the sampler's
    none = gap.new_zeros(1)  # a micro-batch may have no token that counts
    return {
        "sampler_ratio": token_mean(bounded_exp(gap)),
        "sampler_kl": ((kl * (1 - drifted)).sum(), (1 - drifted).sum()),
        "policy_drift": ((kl * drifted).sum(), drifted.sum()),
        "largest_sampler_ratio": torch.cat([bounded_exp(gap), none]).max(),
        "largest_sampler_ratio_inverse": torch.cat([bounded_exp(-gap), none]).max(),
    }


def token_kl(sample: Sample, estimator: str) -> Doubles:
    """Estimate the KL of the sampling policy to the reference at each token that counts."""
    policy = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
    assert policy is not None and sample.ref_logprobs is not None
    log_ratio = (policy.astype(np.float64) - sample.ref_logprobs)[sample.mask]
    return kl_estimate(torch.from_numpy(log_ratio), estimator).numpy()


def standardize(values: Doubles, epsilon: float = 1e-6) -> Doubles:
    """Subtract the mean and divide by the unbiased standard deviation; exactly 0 where all values are equal."""
    if len(values) < 2 or np.ptp(values) == 0:
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + epsilon)


def whiten(credits: Sequence[Doubles]) -> list[Doubles]:
    """Standardize the numbers of all samples over all tokens of the batch."""
    lengths = [len(credit) for credit in credits]
    return np.split(standardize(np.concatenate(credits)), np.cumsum(lengths)[:-1])


def as_stream(sample: Sample, per_token: Doubles | float) -> Floats:
    """Turn one number per token that counts (or one for all of them) into a stream of the sample; 0 elsewhere."""
    stream = np.zeros(len(sample), dtype=np.float32)
    stream[sample.mask] = per_token
    return stream


def check_bounds(low: float, high: float = math.inf, **options: float) -> None:
    """Raise UsageError for the first of these options that is out of bounds."""
    bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    for name, value in options.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise UsageError(f"algo.{name} is {value}: it must be {bounds}")
