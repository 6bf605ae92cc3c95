"""Supervised fine-tuning, and continued pretraining: the same loss on all tokens of plain text."""

from __future__ import annotations

from typing import Any, ClassVar

from posttrain.algorithms.base import Algorithm, ExampleKind, register
from posttrain.core.types import Batch, Loss, Outputs


@register("sft")
class SFT(Algorithm):
    """Negative log-likelihood of the tokens that count."""

    rows: ClassVar[ExampleKind] = "chat"
    unit = "token"
    separable = True
    defaults: ClassVar[dict[str, Any]] = {"update.learning_rate": 1e-5}

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        assert out.logprobs is not None
        return Loss(total=-out.logprobs[batch.counted].sum())


@register("pretrain")
class Pretrain(SFT):
    """SFT on text, where every token but the first of a sequence counts."""

    rows = "text"
