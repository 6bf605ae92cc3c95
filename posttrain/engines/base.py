"""What an engine is: prompts and sampling settings in, samples with the sampler's log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.types import Ints, Sample


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
class Request:
    """One answer that is wanted. Requests of one group share their prompt, which is then computed once."""

    prompt: Ints
    group: int = 0
    seed: int = 0


OnToken = Callable[[int, int], None]
"""Called with the request's index and the token, as soon as it is chosen."""


class Engine(Protocol):
    """Generates with the weights of the version it was last given."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Sample]: ...
