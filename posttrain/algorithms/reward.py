"""Reward model from pairs: the chosen completion's score above the rejected one's (arXiv:2203.02155, eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.algorithms.base import Algorithm, register
from posttrain.core.lazy import F, torch
from posttrain.core.types import Loss, MicroBatch, Outputs


@register("reward", help="train a reward model on preference pairs")
class Reward(Algorithm):
    """Trains one score per completion, read at its last token."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
        """With the scores c of the chosen and r of the rejected completion, sigmoid: -log sigmoid(c - r); logexp:
        log(1 + exp(r - c)), which is the same function computed in another way."""
        use_margin: bool = False
        """Subtract the example's margin from the score difference: c - r - margin (arXiv:2307.09288, eq. 2)."""
        center_coef: float = 0.0
        """Weight of (c + r)^2, which keeps scores around 0 (arXiv:2312.09244)."""

    config: Config

    example_kind = "pair"
    unit = "group"
    group_size = 2
    head = "score"
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 9e-6}

    def needs_margin(self) -> bool:
        return self.config.use_margin

    def outputs(self) -> set[str]:
        return {"scores"}

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.scores is not None
        chosen, rejected = batch.pairs(out.scores)
        margin = chosen - rejected
        logit = margin
        if self.config.use_margin:
            wanted, _ = batch.pairs(batch.margin)
            logit = margin - wanted
        if self.config.loss_type == "logexp":
            per_pair = torch.logaddexp(-logit, torch.zeros_like(logit))
        else:
            per_pair = -F.logsigmoid(logit)
        if self.config.center_coef:
            per_pair = per_pair + self.config.center_coef * (chosen + rejected) ** 2
        return Loss(
            total=per_pair.sum(),
            metrics={
                "accuracy": (margin > 0).sum(),
                "margin": margin.detach().sum(),
                "chosen_score": chosen.detach().sum(),
                "rejected_score": rejected.detach().sum(),
            },
        )
