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
        """Required. Path of the teacher model; it must have the student's vocabulary."""
        divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
        """forward_kl: KL(teacher || student); reverse_kl: KL(student || teacher), mode-seeking; jsd: generalised
        Jensen-Shannon divergence, between the two."""
        jsd_beta: float = 0.5
        """Weight of the teacher in the mixture distribution of jsd."""
        temperature: float = 1.0
        """Temperature of the teacher's and the student's distributions."""
        divergence_top_k: int = 0
        """Compare the teacher's N likeliest tokens and all others as one; 0: the whole vocabulary."""
        sft_coef: float = 0.0
        """Weight of the SFT loss on the tokens of the data."""

    config: Config

    example_kind = "chat"
    unit = "token"
    separable = True
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-5}

    def check(self) -> None:
        config = self.config
        check_divergence(config.teacher, config.jsd_beta, config.temperature, config.divergence_top_k)

    def outputs(self) -> set[str]:
        return {"divergence", "logprobs"} if self.config.sft_coef else {"divergence"}

    def teacher_path(self) -> str:
        return self.config.teacher

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        config = self.config
        return ForwardRequest(
            names=frozenset(self.outputs()),
            divergence=config.divergence,
            jsd_beta=config.jsd_beta,
            temperature=config.temperature,
            divergence_top_k=config.divergence_top_k,
        )

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.divergence is not None
        divergence = out.divergence[batch.counted].sum()
        if not self.config.sft_coef:
            return Loss(total=divergence)
        assert out.logprobs is not None
        nll = -out.logprobs[batch.counted].sum()
        return Loss(
            total=divergence + self.config.sft_coef * nll,
            metrics={"divergence": divergence.detach(), "nll": nll.detach()},
        )


def check_divergence(teacher: str, jsd_beta: float, temperature: float, top_k: int) -> None:
    """Raise UsageError if a divergence from the teacher cannot be computed with these options."""
    if not teacher:
        raise UsageError("algo.teacher is not set: give the path of the model to learn from")
    if not 0 < jsd_beta < 1:
        raise UsageError(
            f"algo.jsd_beta is {jsd_beta}: it must be between 0 and 1; "
            "for the ends set algo.divergence to forward_kl (towards 0) or reverse_kl (towards 1)"
        )
    if temperature <= 0:
        raise UsageError(f"algo.temperature is {temperature}: it must be above 0")
    if top_k < 0:
        raise UsageError(f"algo.divergence_top_k is {top_k}: it must be at least 0")
