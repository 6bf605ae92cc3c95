"""The interface of generation: requests and sampling settings in, samples with log-probabilities out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from posttrain.config.sections import SPECULATIVE_MAX_SEQUENCES
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import Floats, Ints, Sample, SamplingDistribution, WeightVersion


class SamplingOptions(Protocol):
    """Sampling options as users set them: of training, of pipelines, of tools."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]


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

    @classmethod
    def of(cls, options: SamplingOptions, stop_ids: Sequence[int] = ()) -> Sampling:
        """Take the settings from options; training has no repetition_penalty."""
        return cls(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=getattr(options, "repetition_penalty", 1.0),
            stop_ids=tuple(stop_ids),
            stop_texts=options.stop,
        )


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """Which engine generates, and its options."""

    name: Literal["local", "vllm"] = "local"
    vllm_options: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM, by its own names."""
    num_beams: int = 0
    """Of the local engine: beam search with this many beams; 0: tokens are sampled."""
    quantization: Literal["none", "fp8"] = "none"
    """Of the local engine: fp8 computes the layers with 8-bit copies of their weights."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of the local engine: fp8 stores keys and values as 8-bit floats; auto: in the model's precision."""
    speculative_tokens: int = 0
    """Of the local engine: most drafted tokens of a sequence and step; 0: no speculative decoding."""
    speculative_max_sequences: int = SPECULATIVE_MAX_SEQUENCES
    """Most active sequences with which tokens are drafted."""

    def __post_init__(self) -> None:
        for name, low in (("speculative_tokens", 0), ("speculative_max_sequences", 1)):
            if getattr(self, name) < low:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {low}.")

    @property
    def local_options(self) -> dict[str, Any]:
        """Return the options of LocalEngine."""
        return {
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "speculative_tokens": self.speculative_tokens,
            "speculative_max_sequences": self.speculative_max_sequences,
        }


LOCAL = EngineSpec()


class Constraint(Protocol):
    """Restricts the tokens of one completion, for example to a grammar; see engines/grammar.py."""

    def fill_mask(self, words: Ints) -> None:
        """Write which tokens may come next: bit t % 32 of word t // 32 is set if token t may."""

    def advance(self, token: int) -> None:
        """Take the token that was sampled."""


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion. Neighbouring requests with the same prompt share its prefill."""

    prompt: Ints
    group: int = 0
    seed: int = 0
    adapter: str = ""
    """Name of one of the engine's adapters (LocalEngine.use_adapters); empty: the model without one."""
    top_logprobs: int = 0
    """How many of the most likely tokens are recorded for each token, where tokens are streamed."""
    reuse_prefix: bool = False
    """Whether keys and values of its first tokens may come from earlier requests, and its own serve later ones.

    Completions are then equal up to rounding. The local engine reuses them while the weights are the same.
    """
    token_limit: int = 0
    """Cut the completion off at this many tokens, if Sampling.max_tokens is larger; 0: not. Only the local engine."""
    begun: tuple[Ints, Floats] | None = None
    """Tokens and log-probabilities that were sampled before, maybe with other weights; the completion continues them.

    Only the local engine. Keys and values of these tokens are computed again.
    """
    constraint: Constraint | None = None
    """Restricts the tokens; log-probabilities are those of the restricted distribution, which tokens are sampled from.

    Only schedulers of `LocalEngine.open_scheduler` support it.
    """


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


def check_samples(
    requests: Sequence[GenerationRequest], samples: Sequence[Sample], sampling: Sampling, vocabulary: int, engine: str
) -> None:
    """Raise PosttrainError unless each sample is a completion of its request that the policy could have generated.

    What a broken engine returns would be trained on, or end the run in an error far from its cause. `engine` is named.
    """
    if len(samples) != len(requests):
        raise PosttrainError(f"{engine} returned {len(samples)} samples for {len(requests)} requests")
    for number, (request, sample) in enumerate(zip(requests, samples, strict=True)):
        if problem := problem_of(request, sample, sampling, vocabulary):
            raise PosttrainError(
                f"{engine} returned what is not a completion of its prompt (request {number}, group {request.group}): "
                f"{problem}. Nothing of this batch was trained on. Compare with --rollout.engine local, and check the "
                "device."
            )


def problem_of(request: GenerationRequest, sample: Sample, sampling: Sampling, vocabulary: int) -> str:
    """Describe what is wrong with a sample; empty if nothing is."""
    start, completion = len(request.prompt), sample.tokens[len(request.prompt) :]
    if not np.array_equal(sample.tokens[:start], request.prompt):
        return "it does not begin with the prompt"
    if not 1 <= len(completion) <= sampling.max_tokens:
        return f"it has {len(completion)} tokens, of at most {sampling.max_tokens}"
    if request.begun is not None and not np.array_equal(completion[: len(request.begun[0])], request.begun[0]):
        return "it does not continue the completion that was begun"
    if completion.min() < 0 or completion.max() >= vocabulary:
        wrong = completion[(completion < 0) | (completion >= vocabulary)][0]
        return f"token id {wrong} is not in the vocabulary of {vocabulary}"
    if sample.mask[:start].any() or not sample.mask[start:].all():
        return "its mask does not mark the completion"
    if sample.logprobs is None or not np.isfinite(sample.logprobs[start:]).all():
        return "its log-probabilities are not finite numbers"
    return ""


def seed_for(run_seed: int, position: int, completion: int) -> int:
    """Return the seed of the k-th completion of a prompt; it does not depend on what else is generated."""
    digest = hashlib.blake2b(f"{run_seed}/{position}/{completion}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
