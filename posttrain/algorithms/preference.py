"""What all losses on pairs share, and those without a reference model: SimPO, CPO, ORPO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from posttrain.algorithms.base import Algorithm, register
from posttrain.core.errors import UsageError
from posttrain.core.types import Batch, Loss, Outputs


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


class Pairwise(Algorithm):
    """Gives each answer an implicit reward and wants the chosen one's to be the higher."""

    rows = "pair"
    unit = "group"
    group_size = 2

    def rewards(self, out: Outputs, batch: Batch) -> torch.Tensor:
        """Implicit reward of each answer: [B]."""
        raise NotImplementedError

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        """Loss of each pair from the difference of its rewards."""
        raise NotImplementedError

    def nll_weight(self) -> float:
        """Weight of the chosen answer's negative log-likelihood, mean over its tokens."""
        raise NotImplementedError

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        assert out.logprobs is not None
        chosen, rejected = batch.pairs(self.rewards(out, batch))
        margin = chosen - rejected
        logprob = batch.per_sample(out.logprobs)
        chosen_nll, _ = batch.pairs(-logprob / batch.counts())
        per_pair = self.pair_loss(margin) + self.nll_weight() * chosen_nll
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
    """A pair's loss is one of LOSSES."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
        """Shape of the loss on the margin between the two answers."""
        beta: float = 0.1
        """Scale of the implicit rewards."""
        label_smoothing: float = 0.0
        """Part of the labels taken to be wrong: sigmoid hedges (cDPO), robust corrects for it."""
        pref_ftx: float = 0.0
        """Weight of the SFT loss on the chosen answer (mean over its tokens)."""

    def check(self) -> None:
        loss, smoothing = self.config.loss, self.config.label_smoothing
        if self.config.beta <= 0:
            raise UsageError(f"algo.beta is {self.config.beta}: it must be above 0")
        if smoothing and loss in ("hinge", "ipo"):
            raise UsageError(
                f"algo.label_smoothing {smoothing} has no meaning with algo.loss {loss}: "
                "set algo.label_smoothing to 0, or algo.loss to sigmoid or robust"
            )
        if not 0 <= smoothing <= 0.5 or (loss == "robust" and smoothing == 0.5):
            raise UsageError(
                f"algo.label_smoothing is {smoothing} with algo.loss {loss}: "
                f"it must be at least 0 and {'below' if loss == 'robust' else 'at most'} 0.5"
            )

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        return LOSSES[self.config.loss](margin, self.config.beta, self.config.label_smoothing)

    def nll_weight(self) -> float:
        return self.config.pref_ftx


@register("cpo")
class CPO(Margin):
    """Contrastive preference optimisation (arXiv:2401.08417): DPO with a uniform reference, plus SFT."""

    @dataclass(kw_only=True, slots=True)
    class Config(Margin.Config):
        pref_ftx: float = 1.0
        """Weight of the SFT loss on the chosen answer (mean over its tokens); other libraries' cpo_alpha."""

    defaults: ClassVar[dict[str, Any]] = {"update.learning_rate": 1e-6}

    def rewards(self, out: Outputs, batch: Batch) -> torch.Tensor:
        assert out.logprobs is not None
        return self.config.beta * batch.per_sample(out.logprobs)


@register("simpo")
class SimPO(Margin):
    """Simple preference optimisation (arXiv:2405.14734): length-mean log-probabilities and a target margin."""

    @dataclass(kw_only=True, slots=True)
    class Config(Margin.Config):
        beta: float = 2.5
        """Scale of the implicit rewards."""
        gamma_beta_ratio: float = 1.4
        """Margin to reach, divided by beta: the paper's gamma is gamma_beta_ratio * beta."""

    defaults: ClassVar[dict[str, Any]] = {"update.learning_rate": 1e-6}

    def rewards(self, out: Outputs, batch: Batch) -> torch.Tensor:
        assert out.logprobs is not None
        return self.config.beta * batch.per_sample(out.logprobs) / batch.counts()

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        return super().pair_loss(margin - self.config.gamma_beta_ratio * self.config.beta)


@register("orpo")
class ORPO(Pairwise):
    """Odds-ratio preference optimisation (arXiv:2403.07691): SFT that also lowers the odds of the rejected answer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        odds_weight: float = 0.1
        """Weight of the odds-ratio term: the paper's lambda, other libraries' beta."""

    defaults: ClassVar[dict[str, Any]] = {"update.learning_rate": 8e-6}

    def check(self) -> None:
        if self.config.odds_weight < 0:
            raise UsageError(f"algo.odds_weight is {self.config.odds_weight}: it must not be negative")

    def rewards(self, out: Outputs, batch: Batch) -> torch.Tensor:
        """Log odds p / (1 - p), where p is the geometric mean of the answer's token probabilities."""
        assert out.logprobs is not None
        mean = batch.per_sample(out.logprobs) / batch.counts()
        mean = mean.clamp(max=-1e-6)  # at p = 1 the odds are infinite
        return mean - torch.log(-torch.expm1(mean))

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        return -self.config.odds_weight * F.logsigmoid(margin)

    def nll_weight(self) -> float:
        return 1.0
