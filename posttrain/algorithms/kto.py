"""Kahneman-Tversky optimisation (arXiv:2402.01306): completions labelled good or bad, no pairs.

The log-ratio of policy and reference of a completion is compared with a baseline, the KL between the two. The baseline
is estimated over the whole step in `assign_credit` and is a constant in the loss; nothing else crosses samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.algorithms.base import Algorithm, check_reference_sync, register
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.types import Loss, MicroBatch, Outputs, Sample

DESIRABLE, UNDESIRABLE, MISMATCHED = 1.0, 0.0, -1.0


@register(
    "kto", help="preference learning from single completions labelled good or bad (Kahneman-Tversky optimisation)"
)
class KTO(Algorithm):
    """Raises the log-ratio of desirable completions above the baseline, lowers that of undesirable ones below it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        variant: Literal["kto", "vanilla", "apo_zero_unpaired"] = "kto"
        """kto: the KL baseline is estimated from mismatched prompts and completions; vanilla: desirable completions are
        compared with the mean of undesirable ones, and the other way round; apo_zero_unpaired: the baseline is 0."""
        beta: float = 0.1
        """Strength of the KL regularisation towards the reference model."""
        desirable_weight: float = 1.0
        """Weight of desirable completions."""
        undesirable_weight: float = 1.0
        """Weight of undesirable completions."""
        length_normalize: bool = False
        """Use the mean log-ratio over a completion's tokens instead of the sum."""
        reference: str = ""
        """Path of the reference model; empty: the policy at the start of training."""
        reference_sync_steps: int = 0
        """Replace the reference model by the current policy every N steps; 0: never."""
        reference_mixup_alpha: float = 1.0
        """Share of the policy in the new reference, with algo.reference_sync_steps; the rest is the old reference."""
        precompute_reference: bool = False
        """Compute the reference's log-probabilities of all examples before training; needs algo.variant vanilla."""

    config: Config

    example_kind = "labelled"
    unit = "sample"
    min_batch_size = 2  # a prompt is matched with another example's completion
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 5e-7}

    def check(self) -> None:
        if not 0 < self.config.beta < math.inf:
            raise UsageError(f"algo.beta is {self.config.beta}: it must be above 0")
        config = self.config
        check_reference_sync(config.reference_sync_steps, config.reference_mixup_alpha, config.precompute_reference)
        if self.config.precompute_reference and self.config.variant == "kto":
            raise UsageError(
                "algo.precompute_reference does not go with algo.variant kto, whose mismatched pairs are new every "
                "step: leave it out, or set algo.variant to vanilla or apo_zero_unpaired"
            )

    def needs(self) -> set[str]:
        return {"ref_logprobs"} if self.config.variant == "apo_zero_unpaired" else {"ref_logprobs", "logprobs"}

    def reference_path(self) -> str:
        return self.config.reference

    def reference_sync_steps(self) -> int:
        return self.config.reference_sync_steps

    def reference_mixup_alpha(self) -> float:
        return self.config.reference_mixup_alpha

    def precompute_reference(self) -> bool:
        return self.config.precompute_reference

    def stratum(self, sample: Sample) -> float:
        return sample.label if self.config.variant == "vanilla" else 0.0

    def is_needed(self, stream: str, sample: Sample) -> bool:
        """Whether to compute them: the policy's log-probabilities only where the baseline is estimated."""
        return stream != "logprobs" or self.config.variant == "vanilla" or sample.label == MISMATCHED

    def prepare(self, samples: list[Sample]) -> list[Sample]:
        if self.config.variant != "kto":
            return samples
        if len(samples) < self.min_batch_size:
            raise UsageError(
                f"{samples[0].origin or 'kto'}: KTO needs at least 2 examples per step, to match a prompt with the "
                "completion of another one; this step has 1: change train.batch_size or the number of examples"
            )
        return samples + mismatched(samples)

    def assign_credit(self, samples: list[Sample]) -> list[Sample]:
        sides = {label: [s for s in samples if s.label == label] for label in (DESIRABLE, UNDESIRABLE, MISMATCHED)}
        if self.config.variant == "vanilla":
            if not sides[DESIRABLE] or not sides[UNDESIRABLE]:
                raise UsageError(
                    "algo.variant vanilla needs desirable and undesirable examples in every step: "
                    "raise train.batch_size, or set algo.variant to kto"
                )
            baseline = {DESIRABLE: self.kl(sides[UNDESIRABLE]), UNDESIRABLE: self.kl(sides[DESIRABLE])}
        elif self.config.variant == "apo_zero_unpaired":
            baseline = dict.fromkeys((DESIRABLE, UNDESIRABLE), 0.0)
        else:
            baseline = dict.fromkeys((DESIRABLE, UNDESIRABLE), self.kl(sides[MISMATCHED]))
        real = [sample for sample in samples if sample.label != MISMATCHED]
        for sample in real:
            sample.baseline = baseline[sample.label]
        return real

    def kl(self, samples: Sequence[Sample]) -> float:
        """Return the mean log-ratio of policy and reference, at least 0 as a KL must be."""
        total = 0.0
        for sample in samples:
            assert sample.logprobs is not None and sample.ref_logprobs is not None
            ratio = (sample.logprobs - sample.ref_logprobs)[sample.mask].sum(dtype=np.float64)
            total += float(ratio) / (max(1, sample.mask.sum()) if self.config.length_normalize else 1)
        return max(0.0, total / len(samples))

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.logprobs is not None and batch.ref_logprobs is not None
        ratio = batch.per_sample(out.logprobs - batch.ref_logprobs)
        if self.config.length_normalize:
            ratio = ratio / batch.counts()
        desirable = (batch.label == DESIRABLE).to(ratio.dtype)
        undesirable = 1 - desirable
        weight = self.config.desirable_weight * desirable + self.config.undesirable_weight * undesirable
        gain = (desirable - undesirable) * (ratio - batch.baseline)
        reward = self.config.beta * ratio.detach()
        return Loss(
            total=(weight * torch.sigmoid(-self.config.beta * gain)).sum(),  # 1 - sigmoid(x) is sigmoid(-x)
            metrics={
                "accuracy": (gain > 0).sum(),
                "kl": batch.baseline.sum(),
                "desirable_reward": ((reward * desirable).sum(), desirable.sum()),
                "undesirable_reward": ((reward * undesirable).sum(), undesirable.sum()),
            },
        )


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Pair every prompt with the completion of the next sample that has another prompt (or, if none has, of the next).

    The results are no longer than the longest sample, so that they also keep within data.max_length.
    """
    longest = max(len(sample) for sample in samples)
    starts = [int(sample.mask.argmax()) if sample.mask.any() else len(sample) for sample in samples]
    prompts = [sample.tokens[:start] for sample, start in zip(samples, starts, strict=True)]
    pairs = []
    for i, prompt in enumerate(prompts):
        others = (k % len(samples) for k in range(i + 1, i + len(samples)))
        j = next((k for k in others if not np.array_equal(prompts[k], prompt)), (i + 1) % len(samples))
        other, start = samples[j], starts[j]
        pairs.append(
            Sample(
                tokens=np.concatenate([prompt, other.tokens[start:]])[:longest],
                mask=np.concatenate([np.zeros(len(prompt), dtype=np.bool_), other.mask[start:]])[:longest],
                label=MISMATCHED,
                group=samples[i].group,
                origin=samples[i].origin,
            )
        )
    return pairs
