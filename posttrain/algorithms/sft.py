"""Supervised fine-tuning, and continued pretraining: the same loss on all tokens of plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.algorithms.base import Algorithm, register
from posttrain.core.types import ExampleKind, Loss, MicroBatch, Outputs


@register("sft", help="supervised fine-tuning on conversations: loss on the assistant's tokens")
class SFT(Algorithm):
    """Minimises the negative log-likelihood of the tokens that count."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        loss_type: Literal["nll", "dft"] = "nll"
        """nll: negative log-likelihood; dft: the same, each token weighted by its own probability (dynamic
        fine-tuning), so that tokens the model finds unlikely change it less."""

    config: Config

    example_kind: ClassVar[ExampleKind] = "chat"
    unit = "token"
    separable = True
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-5}

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.logprobs is not None
        logprobs = out.logprobs[batch.counted]
        if self.config.loss_type == "dft":
            return Loss(total=-(logprobs.detach().exp() * logprobs).sum(), metrics={"nll": -logprobs.detach().sum()})
        return Loss(total=-logprobs.sum())


@register("pretrain", help="continue pretraining on plain text: loss on all tokens")
class Pretrain(SFT):
    """SFT on text, where every token but the first of a sequence counts."""

    example_kind = "text"
