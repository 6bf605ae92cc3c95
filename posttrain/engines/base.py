"""What an engine is: prompts and sampling settings in, samples with the sampler's log-probabilities out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from posttrain.core.types import Ints, Sample, WeightVersion

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Log-probabilities are of exactly this distribution."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer and belong to it."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer; the tokens that complete them belong to it."""


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One answer that is wanted. Requests of one group share their prompt, which is then computed once."""

    prompt: Ints
    group: int = 0
    seed: int = 0
    top_logprobs: int = 0
    """So many of the likeliest tokens are told at each place, where somebody reads along."""


OnCompletion = Callable[[int, Sample], None]
"""Called with the request's index and its answer, as soon as it is complete; others may still be under way."""
OnToken = Callable[[int, int], None]
"""Called with the request's index and the token, as soon as it is chosen."""


BetweenSteps = Callable[[], WeightVersion]
"""Called between two steps, when no sequence is being computed: weights may change in it. Returns their version."""


class Generator(Protocol):
    """Generates samples: the policy, rollout workers, an engine."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, on_completion: OnCompletion | None = None
    ) -> list[Sample]:
        """Return one sample per request, in order. `on_completion` may be called with some before all are finished."""


class Engine(Protocol):
    """Generates with the weights it has."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Sample]: ...

    def sleep(self) -> None:
        """Give back what memory the next call can take again."""


class CopyEngine(Engine, Protocol):
    """An engine with weights of its own, which must be sent."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """New weights, whole and by their Hugging Face names; samples bear the version from now on."""

    def wake(self) -> None:
        """Take the memory again; weights may have to be sent again."""


def seed_for(run_seed: int, position: int, completion: int) -> int:
    """Seed of the k-th completion of a prompt: different for each, and independent of what else is generated."""
    digest = hashlib.blake2b(f"{run_seed}/{position}/{completion}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
