"""Contrastive preference optimisation (arXiv:2401.08417): DPO with a uniform reference, plus SFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.algorithms.base import register
from posttrain.algorithms.preference import Margin
from posttrain.core.lazy import torch
from posttrain.core.types import MicroBatch, Outputs


@register("cpo", help="contrastive preference optimisation, without a reference model")
class CPO(Margin):
    """The implicit reward is beta times the log-probability of the completion."""

    @dataclass(kw_only=True, slots=True)
    class Config(Margin.Config):
        sft_coef: float = 1.0
        """Weight of the SFT loss on the chosen completion (mean over its tokens); TRL's cpo_alpha."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-6}

    def rewards(self, out: Outputs, batch: MicroBatch) -> torch.Tensor:
        assert out.logprobs is not None
        return self.config.beta * batch.per_sample(out.logprobs)
