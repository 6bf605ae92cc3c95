"""Beam search by transformers: the most likely completions instead of sampled tokens. Slow: one prompt at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import torch

from posttrain.core.types import Ints, Sample, SamplingDistribution
from posttrain.engines.base import GenerationRequest, LogprobFunction, OnCompletion, Sampling
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, use_own_attention


class BeamEngine:
    """Gives the requests of a group the best of `beams` completions, in order. A temperature above 0 samples beams."""

    def __init__(self, runner: ModelRunner, tokenizer: Any, beams: int, logprobs: LogprobFunction) -> None:
        self.runner, self.tokenizer, self.beams, self.logprobs = runner, tokenizer, beams, logprobs

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, on_completion: OnCompletion | None = None
    ) -> list[Sample]:
        """Generate one sample per request, in order."""
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
        if on_completion is not None:
            for index, sample in enumerate(samples):
                on_completion(index, sample)
        return samples

    def search(self, group: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Sample]:
        """Search the completions of one prompt."""
        assert len(group) <= self.beams, f"{len(group)} completions of {self.beams} beams"
        prompt = group[0].prompt
        model = self.runner.model
        ids = torch.as_tensor(prompt, device=next(model.parameters()).device).long()[None]
        options: dict[str, Any] = {"stop_strings": list(sampling.stop_texts)} if sampling.stop_texts else {}
        if sampling.temperature:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            options |= {"min_p": sampling.min_p} if sampling.min_p else {}
        padding = next(iter(sampling.stop_ids), 0)
        with own_attention(self.runner), torch.no_grad(), torch.random.fork_rng():
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
            completion = row[len(prompt) :].cpu().numpy().astype(np.int32)
            yield self.build_sample(request, completion, sampling)

    def build_sample(self, request: GenerationRequest, completion: Ints, sampling: Sampling) -> Sample:
        """Cut the completion at its end and remove the padding."""
        ends = np.flatnonzero(np.isin(completion, sampling.stop_ids))
        finish = "stop" if len(ends) else "length"
        completion = completion[: ends[0] + 1] if len(ends) else completion
        if sampling.stop_texts:
            for length in range(1, len(completion) + 1):
                text = self.tokenizer.decode(completion[:length])
                if any(stop in text for stop in sampling.stop_texts):
                    completion, finish = completion[:length], "stop"
                    break
        tokens = np.concatenate([request.prompt, completion]).astype(np.int32)
        return Sample(
            tokens=tokens, mask=np.arange(len(tokens)) >= len(request.prompt), group=request.group, finish=finish
        )


@contextmanager
def own_attention(runner: ModelRunner) -> Iterator[None]:
    """Use the model's own attention, which supports transformers' cache of beams."""
    model = runner.model
    was_training = model.training
    model.eval()
    use_own_attention(model)
    try:
        yield
    finally:
        if runner.packed:
            attention.use_packed(model)
        model.train(was_training)
