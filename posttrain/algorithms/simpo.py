"""Simple preference optimisation (arXiv:2405.14734): length-mean log-probabilities and a target margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.algorithms.base import register
from posttrain.algorithms.preference import Margin
from posttrain.core.lazy import torch
from posttrain.core.types import MicroBatch, Outputs


@register("simpo", help="preference learning without a reference model, length-normalised")
class SimPO(Margin):
    """The implicit reward is beta times the mean log-probability of the completion's tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Margin.Config):
        beta: float = 2.5
        """Scale of the implicit rewards."""
        gamma_beta_ratio: float = 1.4
        """Target margin divided by beta: gamma in the paper is gamma_beta_ratio * beta."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-6}

    def rewards(self, out: Outputs, batch: MicroBatch) -> torch.Tensor:
        assert out.logprobs is not None
        return self.config.beta * batch.per_sample(out.logprobs) / batch.counts()

    def pair_loss(self, margin: torch.Tensor) -> torch.Tensor:
        return super().pair_loss(margin - self.config.gamma_beta_ratio * self.config.beta)
