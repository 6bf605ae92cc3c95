"""Distillation: the student's distribution over every next token against a teacher's (arXiv:1503.02531, 2306.13649).

The divergence needs whole distributions, so it is computed where the logits are; the loss only adds it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.algorithms.base import Algorithm, register
from posttrain.core.errors import UsageError
from posttrain.core.types import ForwardRequest, Loss, MicroBatch, Outputs


@register("distill", help="learn a teacher's next-token distribution")
class Distill(Algorithm):
    """Minimises the divergence from a teacher with the same vocabulary, at the tokens that count."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        teacher: str = ""
        """Path of the teacher; it must have the student's vocabulary."""
        divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
        """forward_kl: KL(teacher, student), covers; reverse_kl: KL(student, teacher), seeks modes; jsd: between."""
        jsd_beta: float = 0.5
        """Share of the teacher in the mixture that jsd compares both with."""
        temperature: float = 1.0
        """Both distributions are softened by it."""
        sft_weight: float = 0.0
        """Weight of the SFT loss on the data's own tokens."""

    config: Config

    example_kind = "chat"
    unit = "token"
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-5}

    def check(self) -> None:
        if not self.config.teacher:
            raise UsageError("algo.teacher is not set: give the path of the model to learn from")
        if not 0 < self.config.jsd_beta < 1:
            raise UsageError(
                f"algo.jsd_beta is {self.config.jsd_beta}: it must be between 0 and 1; "
                "for the ends set algo.divergence to forward_kl (towards 0) or reverse_kl (towards 1)"
            )
        if self.config.temperature <= 0:
            raise UsageError(f"algo.temperature is {self.config.temperature}: it must be above 0")

    def outputs(self) -> set[str]:
        return {"divergence", "logprobs"} if self.config.sft_weight else {"divergence"}

    def teacher_path(self) -> str:
        return self.config.teacher

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        config = self.config
        return ForwardRequest(
            names=frozenset(self.outputs()),
            divergence=config.divergence,
            jsd_beta=config.jsd_beta,
            temperature=config.temperature,
        )

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.divergence is not None
        divergence = out.divergence[batch.counted].sum()
        if not self.config.sft_weight:
            return Loss(total=divergence)
        assert out.logprobs is not None
        nll = -out.logprobs[batch.counted].sum()
        return Loss(
            total=divergence + self.config.sft_weight * nll,
            metrics={"divergence": divergence.detach(), "nll": nll.detach()},
        )
