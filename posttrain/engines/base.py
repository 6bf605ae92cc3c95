"""The interface of generation: requests and sampling settings in, samples with log-probabilities out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from posttrain.core.types import Floats, Ints, Sample, SamplingDistribution, WeightVersion


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """How tokens are sampled. The log-probabilities of a sample are those of exactly this distribution."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the one that does is its last token."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end a completion; the tokens that complete one are its last tokens."""


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """Which engine generates, and its options."""

    name: Literal["local", "vllm"] = "local"
    vllm_options: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM, by its own names."""
    num_beams: int = 0
    """Of the local engine: beam search with this many beams; 0: tokens are sampled."""


LOCAL = EngineSpec()


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion. Neighbouring requests with the same prompt share its prefill."""

    prompt: Ints
    group: int = 0
    seed: int = 0
    top_logprobs: int = 0
    """How many of the most likely tokens are recorded for each token, where tokens are streamed."""


OnCompletion = Callable[[int, Sample], None]
"""Called with a request's index and its sample when it is finished; other requests may still be active."""
OnToken = Callable[[int, int], None]
"""Called with a request's index and each token as soon as it is sampled."""
BetweenSteps = Callable[[], WeightVersion]
"""Called between two decode steps; weights may change in it. Returns the version of the weights."""


class Generator(Protocol):
    """Generates samples: the policy, rollout workers, an engine."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, on_completion: OnCompletion | None = None
    ) -> list[Sample]:
        """Return one sample per request, in order. `on_completion` may be called with some before all are finished."""


class LogprobFunction(Protocol):
    """Computes log-probabilities of samples by the trainer's forward pass."""

    def __call__(
        self,
        samples: Sequence[Sample],
        *,
        distribution: SamplingDistribution = SamplingDistribution(),  # noqa: B008
    ) -> list[Floats]: ...


def seed_for(run_seed: int, position: int, completion: int) -> int:
    """Seed of the k-th completion of a prompt: different for each, and independent of what else is generated."""
    digest = hashlib.blake2b(f"{run_seed}/{position}/{completion}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
