"""Supervised fine-tuning, and continued pretraining: the same loss on all tokens of plain text."""

from __future__ import annotations

from typing import Any, ClassVar

from posttrain.algorithms.base import Algorithm, register
from posttrain.core.types import ExampleKind, Loss, MicroBatch, Outputs


@register("sft", help="supervised fine-tuning on conversations: loss on the assistant's tokens")
class SFT(Algorithm):
    """Minimises the negative log-likelihood of the tokens that count."""

    example_kind: ClassVar[ExampleKind] = "chat"
    unit = "token"
    separable = True
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-5}

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.logprobs is not None
        return Loss(total=-out.logprobs[batch.counted].sum())


@register("pretrain", help="continue pretraining on plain text: loss on all tokens")
class Pretrain(SFT):
    """SFT on text, where every token but the first of a sequence counts."""

    example_kind = "text"
