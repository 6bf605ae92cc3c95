"""Fills the per-token streams that an algorithm needs besides the examples: log-probabilities and values."""

from __future__ import annotations

from posttrain.algorithms import Algorithm
from posttrain.core.types import Sample
from posttrain.train.critic import Critic, fill_values
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.reference import ReferenceModel


class StreamFiller:
    """Fills samples with what `algorithm.needs()` names, by the policy, the reference and the critic."""

    def __init__(
        self,
        algorithm: Algorithm,
        policy: LearnerGroup,
        reference: ReferenceModel | None,
        critic: Critic | None = None,
    ) -> None:
        """`critic` None: values, if needed, come from the policy's second head."""
        self.algorithm, self.needs = algorithm, algorithm.needs()
        self.policy, self.reference, self.critic = policy, reference, critic

    def fill(self, samples: list[Sample], *, keep: bool = False) -> None:
        """Compute the streams and write them into the samples.

        With `keep`, ref_logprobs that an earlier call wrote are not computed again, unless the reference follows the
        policy. That is right only if the same samples always come together: sums are rounded differently in another
        micro-batch, so values kept from another batch would make a resumed run differ in the last digits.
        """
        if self.reference is not None:
            kept = keep and not self.reference.sync_steps
            self.reference.fill([s for s in samples if s.ref_logprobs is None] if kept else samples)
        self.fill_logprobs(samples)
        self.fill_values(samples)

    def fill_logprobs(self, samples: list[Sample]) -> None:
        """Computes the policy's own log-probabilities, where they are needed."""
        for name in ("logprobs", "old_logprobs"):
            if name in self.needs:
                wanted = [sample for sample in samples if self.algorithm.is_needed(name, sample)]
                streams = self.policy.logprobs(
                    wanted, distribution=self.algorithm.distribution, experts=self.algorithm.experts
                )
                for sample, stream in zip(wanted, streams, strict=True):
                    setattr(sample, name, stream)

    def fill_values(self, samples: list[Sample]) -> None:
        """Computes values, where they are needed."""
        if self.critic is not None:
            self.critic.fill(samples)
        elif "values" in self.needs:
            fill_values(self.policy, samples)
