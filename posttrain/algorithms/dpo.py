"""Direct preference optimisation (arXiv:2305.18290) and its family: one reward per completion, many shapes of the loss.

The reward is beta times the log-ratio of policy and reference. Losses of preference.py read the margin of a pair; those
here read both rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from posttrain.algorithms.base import Algorithm, check_reference_sync, register
from posttrain.algorithms.preference import LOSSES, SMOOTHED, Pairwise, check_loss, sigmoid_loss
from posttrain.core.errors import UsageError
from posttrain.core.lazy import F, torch
from posttrain.core.ops import Doubles, bounded_exp
from posttrain.core.types import MicroBatch, Outputs, Sample

LossType = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "apo_zero",
    "apo_down",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "discopop",
    "aot",
    "aot_unpaired",
]


def apo_zero(chosen: torch.Tensor, rejected: torch.Tensor, config: DPO.Config) -> torch.Tensor:
    """Raise the chosen and lower the rejected (arXiv:2408.06266, eq. 7)."""
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(chosen: torch.Tensor, rejected: torch.Tensor, config: DPO.Config) -> torch.Tensor:
    """Lower both, the rejected more (arXiv:2408.06266, eq. 8)."""
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def exo_pair(chosen: torch.Tensor, rejected: torch.Tensor, config: DPO.Config) -> torch.Tensor:
    """KL of the policy's preference to the label's, which errs with label_smoothing (arXiv:2402.00856, eq. 16)."""
    logit, wrong = chosen - rejected, config.label_smoothing
    better, worse = F.logsigmoid(logit), F.logsigmoid(-logit)
    return better.exp() * (better - math.log1p(-wrong)) + worse.exp() * (worse - math.log(wrong))


def nca_pair(chosen: torch.Tensor, rejected: torch.Tensor, config: DPO.Config) -> torch.Tensor:
    """Noise-contrastive alignment of two completions (arXiv:2402.05369)."""
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(chosen: torch.Tensor, rejected: torch.Tensor, config: DPO.Config) -> torch.Tensor:
    """Classify the chosen as good and the rejected as bad, without a shift of the rewards (arXiv:2404.04656)."""
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(chosen: torch.Tensor, rejected: torch.Tensor, config: DPO.Config) -> torch.Tensor:
    """Squared distance of log-ratios from 1 / (2 beta) and its negative (arXiv:2405.00675, eq. 4.7)."""
    return ((chosen - 0.5) / config.beta) ** 2 + ((rejected + 0.5) / config.beta) ** 2


def discopop(chosen: torch.Tensor, rejected: torch.Tensor, config: DPO.Config) -> torch.Tensor:
    """Mix the logistic and the exponential loss, by the margin (arXiv:2406.08414, eq. 5)."""
    logit = chosen - rejected
    share = torch.sigmoid(logit / config.discopop_tau)
    return -F.logsigmoid(logit) * (1 - share) + bounded_exp(-logit) * share


PAIR_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, DPO.Config], torch.Tensor]] = {
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "discopop": discopop,
}


@register("dpo", help="direct preference optimisation: also IPO, cDPO, APO, EXO, NCA, BCO, SPPO, AOT and mixtures")
class DPO(Pairwise):
    """The implicit reward is beta times the log-ratio of policy and reference."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        loss_type: LossType = "sigmoid"
        """Loss on the rewards of the chosen and the rejected completion."""
        loss_types: tuple[LossType, ...] = ()
        """Several losses, added up with algo.loss_weights, instead of algo.loss_type (MPO)."""
        loss_weights: tuple[float, ...] = ()
        """Weight of each of algo.loss_types; empty: 1 each."""
        discopop_tau: float = 0.05
        """Temperature of the mixture in the loss discopop."""
        f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
        """Which divergence from the reference regularises; it decides how a log-ratio becomes a reward (f-DPO)."""
        f_alpha: float = 0.5
        """Alpha of the alpha-divergence."""
        ld_alpha: float = 1.0
        """Weight of the tokens by which a completion is longer than the other of its pair (LD-DPO); 1: full weight."""
        weight_by_policy: bool = False
        """Multiply the loss of a pair by the policy's probability of its completions, a constant: the exponential of
        the sum of their mean log-probabilities (WPO)."""
        beta: float = 0.1
        """Strength of the KL regularisation towards the reference model."""
        label_smoothing: float = 0.0
        """Fraction of the labels assumed to be flipped: with sigmoid this is cDPO, with robust it is robust DPO."""
        sft_coef: float = 0.0
        """Weight of the SFT loss on the chosen completion (mean over its tokens)."""
        length_normalize: bool = False
        """Use the mean log-ratio over a completion's tokens instead of the sum, as other libraries do for IPO."""
        reference: str = ""
        """Path of the reference model; empty: the policy at the start of training."""
        reference_sync_steps: int = 0
        """Replace the reference model by the current policy every N steps (TR-DPO); 0: never."""
        reference_mixup_alpha: float = 1.0
        """Share of the policy in the new reference, with algo.reference_sync_steps; the rest is the old reference."""
        precompute_reference: bool = False
        """Compute the reference's log-probabilities of all examples before training, then free the reference model."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 5e-7}

    def needs(self) -> set[str]:
        return {"ref_logprobs", "logprobs"} if self.transport() else {"ref_logprobs"}

    def reference_path(self) -> str:
        return self.config.reference

    def reference_sync_steps(self) -> int:
        return self.config.reference_sync_steps

    def reference_mixup_alpha(self) -> float:
        return self.config.reference_mixup_alpha

    def precompute_reference(self) -> bool:
        return self.config.precompute_reference

    def check(self) -> None:
        config, losses = self.config, self.losses()
        smoothed = [loss for loss in losses if loss in SMOOTHED]
        for loss in smoothed or losses:  # of a mixture, those that assume flipped labels are smoothed
            check_loss(loss, config.beta, config.label_smoothing)
        if "exo_pair" in losses and not config.label_smoothing:
            raise UsageError("algo.label_smoothing is 0: exo_pair needs the probability of a wrong label, such as 1e-3")
        if not all(map(math.isfinite, config.loss_weights)):
            raise UsageError(f"algo.loss_weights {config.loss_weights}: weights must be finite numbers")
        if config.loss_weights and len(config.loss_weights) != len(config.loss_types):
            raise UsageError(
                f"algo.loss_weights has {len(config.loss_weights)} numbers for {len(config.loss_types)} losses in "
                "algo.loss_types. Give one each."
            )
        if len(losses) < len(config.loss_types):
            raise UsageError(
                f"algo.loss_types {' '.join(config.loss_types)}: a loss is named twice. Give it one weight."
            )
        check_reference_sync(config.reference_sync_steps, config.reference_mixup_alpha, config.precompute_reference)
        self.check_transport()
        if not 0 <= config.ld_alpha <= 1:
            raise UsageError(f"algo.ld_alpha is {config.ld_alpha}: it must be from 0 to 1")
        if config.discopop_tau <= 0:
            raise UsageError(f"algo.discopop_tau is {config.discopop_tau}: it must be above 0")

    def check_transport(self) -> None:
        """Raise UsageError if a loss that compares the pairs of a step does not go with the other options."""
        config, chosen = self.config, self.transport()
        if len(chosen) > 1:
            raise UsageError("algo.loss_types has aot and aot_unpaired, which sort a step in two ways: leave out one")
        for name, default in (("f_divergence", "reverse_kl"), ("ld_alpha", 1.0), ("weight_by_policy", False)):
            if chosen and (value := getattr(config, name)) != default:
                raise UsageError(
                    f"algo.{name} is {value}, but {chosen[0]} compares the log-ratios of different pairs as they are: "
                    "leave it out"
                )

    def transport(self) -> list[str]:
        """Return the losses that match the pairs of a step with each other."""
        return [name for name in self.losses() if name in TRANSPORT]

    def losses(self) -> dict[str, float]:
        """Return the weight of each loss."""
        names = self.config.loss_types or (self.config.loss_type,)
        return dict(zip(names, self.config.loss_weights or [1.0] * len(names), strict=False))

    def assign_credit(self, samples: list[Sample]) -> list[Sample]:
        """Write what each pair is compared with in the losses that sort the pairs of the step."""
        for name in self.transport():
            TRANSPORT[name](samples, self.config)
        return samples

    def preference_loss(self, chosen: torch.Tensor, rejected: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        config, total = self.config, torch.zeros_like(chosen)
        for name, weight in self.losses().items():
            if name in TRANSPORT:
                total = total + weight * transport_loss(name, chosen, rejected, batch, config)
            elif name in LOSSES:
                total = total + weight * LOSSES[name](chosen - rejected, config.beta, config.label_smoothing)
            else:
                total = total + weight * PAIR_LOSSES[name](chosen, rejected, config)
        return total

    def pair_weights(self, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor | float:
        if not self.config.weight_by_policy:
            return 1.0
        chosen, rejected = batch.pairs(logprobs.detach() / batch.counts())
        return (chosen + rejected).exp().clamp(max=1.0)

    def nll_weight(self) -> float:
        return self.config.sft_coef

    def rewards(self, out: Outputs, batch: MicroBatch) -> torch.Tensor:
        assert out.logprobs is not None and batch.ref_logprobs is not None
        ratios = out.logprobs - batch.ref_logprobs
        if self.config.ld_alpha < 1:
            ratios = torch.where(longer_part(batch), self.config.ld_alpha * ratios, ratios)
        ratio = batch.per_sample(ratios)
        if self.config.length_normalize:
            ratio = ratio / batch.counts()
        return self.config.beta * self.score(ratio)

    def score(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return f'(policy / reference) up to a constant, from the logarithm (arXiv:2309.16240, table 1)."""
        kind, power = self.config.f_divergence, self.config.f_alpha - 1
        if kind == "forward_kl":
            return -bounded_exp(-ratio)
        if kind == "js_divergence":
            return F.logsigmoid(ratio)
        if kind == "alpha_divergence" and abs(power) > 1e-6:
            return bounded_exp(power * ratio) / power
        return ratio


# Alignment by optimal transport (arXiv:2406.05882): sorted numbers of the step's pairs are compared, rank by rank. The
# ranks, and the number that a pair is compared with, are constants of the step, so no loss reads another sample.


def of_completions(samples: list[Sample], name: str, config: DPO.Config) -> Doubles:
    """Return the log-probability of each completion (or its mean) by one of the streams of log-probabilities."""
    sums = [float(getattr(sample, name)[sample.mask].sum(dtype=np.float64)) for sample in samples]
    return np.array(sums) / ([max(1, int(s.mask.sum())) for s in samples] if config.length_normalize else 1)


def match_margins(samples: list[Sample], config: DPO.Config) -> None:
    """aot: the policy's margin of a pair is compared with the reference's margin that has the same rank.

    Written as the difference from the reference's margin of the pair itself, which the rewards contain.
    """
    sides = (of_completions(samples, name, config) for name in ("logprobs", "ref_logprobs"))
    policy, reference = (side[0::2] - side[1::2] for side in sides)
    shift = np.sort(reference)[ranks(policy)] - reference
    for sample, value in zip(samples, shift.repeat(2), strict=True):
        sample.baseline = float(value)


def match_sides(samples: list[Sample], config: DPO.Config) -> None:
    """aot_unpaired: a chosen completion is compared with the rejected one of the step that has the same rank."""
    ratios = of_completions(samples, "logprobs", config) - of_completions(samples, "ref_logprobs", config)
    chosen, rejected = ratios[0::2], ratios[1::2]
    matched = np.stack([np.sort(rejected)[ranks(chosen)], np.sort(chosen)[ranks(rejected)]], axis=1)
    for sample, value in zip(samples, matched.ravel(), strict=True):
        sample.baseline = float(value)


def ranks(values: Doubles) -> npt.NDArray[np.int64]:
    """Return the rank of each number; equal numbers in their order."""
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


TRANSPORT: dict[str, Callable[[list[Sample], DPO.Config], None]] = {"aot": match_margins, "aot_unpaired": match_sides}


def transport_loss(
    name: str, chosen: torch.Tensor, rejected: torch.Tensor, batch: MicroBatch, config: DPO.Config
) -> torch.Tensor:
    """Return the logistic loss against what `assign_credit` matched with each pair.

    Of aot_unpaired each term belongs to two completions of different pairs: both have its gradient and half its value.
    """
    first, second = (config.beta * constant for constant in batch.pairs(batch.baseline))
    if name == "aot":
        return sigmoid_loss(chosen - rejected - first, config.beta, config.label_smoothing)
    terms = [sigmoid_loss(logit, config.beta, config.label_smoothing) for logit in (chosen - first, second - rejected)]
    return sum((term - term.detach() / 2 for term in terms), start=torch.zeros_like(chosen))


def longer_part(batch: MicroBatch) -> torch.Tensor:
    """Return where a token is beyond the length of the shorter completion of its pair: [T]."""
    counts = batch.per_sample(batch.mask.float())
    shorter = torch.minimum(*batch.pairs(counts)).repeat_interleave(2)
    place = batch.mask.float().cumsum(0) - (counts.cumsum(0) - counts)[batch.sample_of]
    return place > shorter[batch.sample_of]
