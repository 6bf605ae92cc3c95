"""Beam search, by transformers: the likeliest whole answers instead of drawn tokens. Slow, a prompt at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.core.types import Floats, Sample, SamplingDistribution
from posttrain.engines.base import GenerationRequest, OnToken, Sampling
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, needs_eager_attention


class Looks(Protocol):
    """Log-probabilities of samples by our own forward pass."""

    def __call__(self, samples: Sequence[Sample], *, distribution: SamplingDistribution) -> list[Floats]: ...


class BeamEngine:
    """The requests of a group get the best of `beams` answers, from the best down; beams are drawn at a temperature."""

    def __init__(self, runner: ModelRunner, tokenizer: Any, beams: int, logprobs: Looks) -> None:
        self.runner, self.tokenizer, self.beams, self.logprobs = runner, tokenizer, beams, logprobs

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Sample]:
        """One sample a request; nobody can read along, as a beam may still be given up."""
        assert on_token is None, "beams are known at the end"
        samples = [
            sample
            for _, group in groupby(requests, key=lambda request: request.group)
            for sample in self.search(list(group), sampling)
        ]
        distribution = SamplingDistribution()
        if sampling.temperature:
            distribution = SamplingDistribution(
                temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
            )
        for sample, found in zip(samples, self.logprobs(samples, distribution=distribution), strict=True):
            sample.logprobs = found
        return samples

    def search(self, group: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Sample]:
        """Answers to one prompt."""
        assert len(group) <= self.beams, f"{len(group)} answers of {self.beams} beams"
        prompt = group[0].prompt
        model = self.runner.model
        ids = torch.as_tensor(prompt, device=next(model.parameters()).device).long()[None]
        options: dict[str, Any] = {"stop_strings": list(sampling.stop_texts)} if sampling.stop_texts else {}
        if sampling.temperature:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            options |= {"min_p": sampling.min_p} if sampling.min_p else {}
        padding = next(iter(sampling.stop_ids), 0)
        with own_attention(model), torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(group[0].seed)
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=self.beams,
                num_return_sequences=len(group),
                do_sample=bool(sampling.temperature),
                max_new_tokens=sampling.max_tokens,
                repetition_penalty=sampling.repetition_penalty,
                eos_token_id=list(sampling.stop_ids) or None,
                pad_token_id=padding,
                use_cache=True,
                tokenizer=self.tokenizer,
                **options,
            )
        for request, row in zip(group, found, strict=True):
            answer = row[len(prompt) :].cpu().numpy().astype(np.int32)
            yield self.sample(request, answer, sampling)

    def sample(
        self, request: GenerationRequest, answer: np.ndarray[Any, np.dtype[np.int32]], sampling: Sampling
    ) -> Sample:
        """Without the padding behind its end."""
        ends = np.flatnonzero(np.isin(answer, sampling.stop_ids))
        finish = "stop" if len(ends) else "length"
        answer = answer[: ends[0] + 1] if len(ends) else answer
        if sampling.stop_texts:
            for length in range(1, len(answer) + 1):
                text = self.tokenizer.decode(answer[:length])
                if any(stop in text for stop in sampling.stop_texts):
                    answer, finish = answer[:length], "stop"
                    break
        tokens = np.concatenate([request.prompt, answer]).astype(np.int32)
        return Sample(
            tokens=tokens, mask=np.arange(len(tokens)) >= len(request.prompt), group=request.group, finish=finish
        )

    def sleep(self) -> None:
        """It holds nothing between two calls."""


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """The model's own code, which knows what beams do to a cache."""
    was_training = model.training
    model.eval()
    model.set_attn_implementation("eager" if needs_eager_attention(model) else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)
        model.train(was_training)
