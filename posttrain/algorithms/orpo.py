"""Odds-ratio preference optimisation (arXiv:2403.07691): SFT that also lowers the odds of the rejected completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.algorithms.base import Algorithm, register
from posttrain.algorithms.preference import Pairwise
from posttrain.core.errors import UsageError
from posttrain.core.lazy import F, torch
from posttrain.core.types import MicroBatch, Outputs


@register(
    "orpo", help="supervised fine-tuning and preference learning in one stage (odds-ratio preference optimisation)"
)
class ORPO(Pairwise):
    """The implicit reward is the log-odds of the completion."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        odds_ratio_coef: float = 0.1
        """Weight of the odds-ratio loss: lambda in the paper, beta in TRL."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 8e-6}

    def check(self) -> None:
        if self.config.odds_ratio_coef < 0:
            raise UsageError(f"algo.odds_ratio_coef is {self.config.odds_ratio_coef}: it must not be negative")

    def rewards(self, out: Outputs, batch: MicroBatch) -> torch.Tensor:
        """Log odds log(p / (1 - p)), where p is the geometric mean of the completion's token probabilities."""
        assert out.logprobs is not None
        mean = batch.per_sample(out.logprobs) / batch.counts()
        mean = mean.clamp(max=-1e-6)  # at p = 1 the odds are infinite
        return mean - torch.log(-torch.expm1(mean))

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        return -self.config.odds_ratio_coef * F.logsigmoid(margin)

    def nll_weight(self) -> float:
        return 1.0
