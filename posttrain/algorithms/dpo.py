"""Direct preference optimisation (arXiv:2305.18290), with IPO, hinge, cDPO and robust DPO as shapes of its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.algorithms.base import register
from posttrain.algorithms.preference import Margin
from posttrain.core.lazy import torch
from posttrain.core.types import MicroBatch, Outputs


@register("dpo", help="direct preference optimisation: also IPO, cDPO, hinge and robust")
class DPO(Margin):
    """The implicit reward is beta times the log-ratio of policy and reference."""

    @dataclass(kw_only=True, slots=True)
    class Config(Margin.Config):
        beta: float = 0.1
        """How hard the policy is held to the reference."""
        length_normalize: bool = False
        """Mean over an answer's tokens instead of their sum (other libraries do this for IPO)."""
        reference: str = ""
        """Path of the reference model; empty: the policy as it was at the start."""
        precompute_reference: bool = False
        """Compute the reference's log-probabilities of all rows first, then free the reference model."""

    config: Config

    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 5e-7}

    def needs(self) -> set[str]:
        return {"ref_logprobs"}

    def reference_path(self) -> str:
        return self.config.reference

    def precompute_reference(self) -> bool:
        return self.config.precompute_reference

    def rewards(self, out: Outputs, batch: MicroBatch) -> torch.Tensor:
        assert out.logprobs is not None and batch.ref_logprobs is not None
        ratio = batch.per_sample(out.logprobs - batch.ref_logprobs)
        if self.config.length_normalize:
            ratio = ratio / batch.counts()
        return self.config.beta * ratio
