"""What all losses on preference pairs share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posttrain.algorithms.base import Algorithm
from posttrain.core.errors import UsageError
from posttrain.core.lazy import F, torch
from posttrain.core.types import Loss, MicroBatch, Outputs


def sigmoid_loss(logit: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    """-log sigmoid, as if a part `smoothing` of the labels were flipped (cDPO)."""
    return -(1 - smoothing) * F.logsigmoid(logit) - smoothing * F.logsigmoid(-logit)


def robust_loss(logit: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    """Unbiased when a part `smoothing` of the labels really is flipped (arXiv:2403.00409)."""
    return (-(1 - smoothing) * F.logsigmoid(logit) + smoothing * F.logsigmoid(-logit)) / (1 - 2 * smoothing)


def hinge_loss(logit: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    """SLiC (arXiv:2305.10425) with the reference taken in, as in arXiv:2309.06657."""
    return F.relu(1 - logit)


def ipo_loss(logit: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    """(margin - 1 / (2 beta))^2 of arXiv:2310.12036, eq. 17; the margin is the logit without its beta."""
    return ((logit - 0.5) / beta) ** 2


LOSSES: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "sigmoid": sigmoid_loss,
    "robust": robust_loss,
    "hinge": hinge_loss,
    "ipo": ipo_loss,
}
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")  # read label_smoothing; the last three: of DPO


class Pairwise(Algorithm):
    """Gives each completion an implicit reward and trains the chosen one's to be the higher."""

    example_kind = "pair"
    unit = "group"
    group_size = 2

    def rewards(self, out: Outputs, batch: MicroBatch) -> torch.Tensor:
        """Return the implicit reward of each completion: [B]."""
        raise NotImplementedError

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, given the difference of its rewards."""
        raise NotImplementedError

    def preference_loss(self, chosen: torch.Tensor, rejected: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the loss of each pair, given its two rewards."""
        return self.pair_loss(chosen - rejected)

    def pair_weights(self, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor | float:
        """Return constants that the losses of pairs are multiplied by; `logprobs`: sums over completions, [B]."""
        return 1.0

    def nll_weight(self) -> float:
        """Return the weight of the chosen completion's negative log-likelihood (mean over its tokens)."""
        raise NotImplementedError

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.logprobs is not None
        chosen, rejected = batch.pairs(self.rewards(out, batch))
        margin = chosen - rejected
        logprob = batch.per_sample(out.logprobs)
        chosen_nll, _ = batch.pairs(-logprob / batch.counts())
        weights = self.pair_weights(logprob, batch)
        per_pair = weights * self.preference_loss(chosen, rejected, batch) + self.nll_weight() * chosen_nll
        chosen_logprob, rejected_logprob = batch.pairs(logprob)
        return Loss(
            total=per_pair.sum(),
            metrics={
                "accuracy": (margin > 0).sum(),
                "margin": margin.detach().sum(),
                "chosen_reward": chosen.detach().sum(),
                "rejected_reward": rejected.detach().sum(),
                "chosen_logprob": chosen_logprob.detach().sum(),
                "rejected_logprob": rejected_logprob.detach().sum(),
                "chosen_nll": chosen_nll.detach().sum(),
            },
        )


class Margin(Pairwise):
    """Computes a pair's loss from the margin between its two rewards, by one of LOSSES."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
        """Loss on the margin between the rewards of the chosen and the rejected completion."""
        beta: float = 0.1
        """Scale of the implicit rewards."""
        label_smoothing: float = 0.0
        """Fraction of the labels assumed to be flipped: with sigmoid this is cDPO, with robust it is robust DPO."""
        sft_coef: float = 0.0
        """Weight of the SFT loss on the chosen completion (mean over its tokens)."""

    config: Config

    def check(self) -> None:
        check_loss(self.config.loss_type, self.config.beta, self.config.label_smoothing)

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        return LOSSES[self.config.loss_type](margin, self.config.beta, self.config.label_smoothing)

    def nll_weight(self) -> float:
        return self.config.sft_coef


def check_loss(loss: str, beta: float, smoothing: float) -> None:
    """Raise UsageError unless one of LOSSES can be computed with these options."""
    if not 0 < beta < math.inf:
        raise UsageError(f"algo.beta is {beta}: it must be above 0")
    if smoothing and loss not in SMOOTHED:
        raise UsageError(
            f"algo.label_smoothing {smoothing} has no meaning with algo.loss_type {loss}: "
            "set algo.label_smoothing to 0, or algo.loss_type to sigmoid or robust"
        )
    if not 0 <= smoothing <= 0.5 or (loss == "robust" and smoothing == 0.5):
        raise UsageError(
            f"algo.label_smoothing is {smoothing} with algo.loss_type {loss}: "
            f"it must be at least 0 and {'below' if loss == 'robust' else 'at most'} 0.5"
        )
