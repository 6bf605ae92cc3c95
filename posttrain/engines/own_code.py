"""Generation by a model's own code and its own cache, for models that cannot run packed (`ModelRunner.packed`).

Prompts of one length are a batch, so that nothing is padded; it runs until its last sequence is finished. Slower than
the scheduler of the local engine, with the same distribution and the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from posttrain.core import ops
from posttrain.core.errors import UsageError
from posttrain.core.types import Sample, WeightVersion
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnCompletion, OnToken, Sampling
from posttrain.engines.kernels.reference import draw
from posttrain.engines.stop_text import StopTextMatcher
from posttrain.nn.forward import ModelRunner

MAX_ROWS = 64  # of a batch


@dataclass(slots=True)
class BatchRow:
    """A sequence of the batch."""

    index: int  # of its request
    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""  # stop or length, once it is finished
    version: WeightVersion = 0  # of the weights that sampled its first token
    newest: WeightVersion = 0  # and its last one

    def sample(self) -> Sample:
        prompt = self.request.prompt
        tokens = np.concatenate([prompt, np.array(self.tokens, dtype=np.int32)])
        logprobs = np.concatenate([np.zeros(len(prompt)), self.logprobs]).astype(np.float32)
        mask = np.arange(len(tokens)) >= len(prompt)
        group = self.request.group
        return Sample(
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            group=group,
            finish=self.finish,
            version=self.version,
            newest=self.newest,
        )


class OwnCodeGenerator:
    """Generates with `model.generate`, which samples the tokens that `BatchSampler` chooses."""

    def __init__(self, runner: ModelRunner, tokenizer: Any) -> None:
        self.runner, self.tokenizer = runner, tokenizer

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """Generate one sample per request, in order. The model must be in eval mode."""
        if any(request.begun is not None or request.token_limit for request in requests):
            raise UsageError(
                f"{type(self.runner.model).__name__} generates by its own code, which cannot continue completions that "
                "were cut off: leave out rollout.partial_prompts."
            )
        samples: dict[int, Sample] = {}
        for rows in batches(requests):
            sampler = BatchSampler(self.tokenizer, rows, sampling, on_token, between_steps)
            self.run(sampler)
            for row in rows:
                samples[row.index] = row.sample()
                if on_completion is not None:
                    on_completion(row.index, samples[row.index])
        return [samples[index] for index in range(len(requests))]

    def run(self, sampler: BatchSampler) -> None:
        """Let transformers decode until all rows of the batch are finished."""
        model = self.runner.model
        device = next(model.parameters()).device
        ids = torch.from_numpy(np.stack([row.request.prompt for row in sampler.rows])).long().to(device)
        with plain_generation(model):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampler.sampling.max_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([AllFinished(sampler)]),
            )


class BatchSampler(LogitsProcessor):  # type: ignore[misc]
    """Chooses the next token of each row and leaves it as the only one that can be sampled."""

    def __init__(
        self,
        tokenizer: Any,
        rows: list[BatchRow],
        sampling: Sampling,
        on_token: OnToken | None,
        between_steps: BetweenSteps | None,
    ) -> None:
        self.rows, self.sampling, self.on_token, self.between_steps = rows, sampling, on_token, between_steps
        self.stop_text = StopTextMatcher(tokenizer)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Sample one token per row from logits [rows, V]; a finished row gets padding."""
        version = self.between_steps() if self.between_steps is not None else 0
        tokens, logprobs = self.choose(input_ids, scores.float())
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not row.finish:
                self.record(row, token, logprob, version)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens[:, None], 0.0)

    def choose(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and their log-probabilities in the distribution that is sampled from."""
        sampling = self.sampling
        if sampling.repetition_penalty != 1.0:
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, input_ids, True)
            penalty = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
            logits = torch.where(seen, logits * penalty, logits)
        truncation = (sampling.top_k, sampling.top_p, sampling.min_p)
        if sampling.temperature == 0.0:
            logprobs = ops.tempered(logits, 1.0, *truncation).log_softmax(-1)
            best = logprobs.max(-1)
            return best.indices, best.values
        logits = logits / sampling.temperature
        device = logits.device
        seeds = torch.tensor([row.request.seed for row in self.rows], device=device)
        counters = torch.tensor([len(row.tokens) for row in self.rows], device=device)
        return draw(logits, 1.0, ops.least_kept(logits, *truncation), seeds, counters)

    def record(self, row: BatchRow, token: int, logprob: float, version: WeightVersion) -> None:
        """Append a token to its row, and find out whether that ends it."""
        if not row.tokens:
            row.version = version
        row.newest = version
        row.tokens.append(token)
        row.logprobs.append(logprob)
        texts = self.sampling.stop_texts
        if token in self.sampling.stop_ids or (texts and self.stop_text.matches(texts, row.tokens)):
            row.finish = "stop"
        elif len(row.tokens) == self.sampling.max_tokens:
            row.finish = "length"
        if self.on_token is not None:
            self.on_token(row.index, token)


class AllFinished(StoppingCriteria):  # type: ignore[misc]
    """Ends a batch when all its rows are finished."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        done = all(row.finish for row in self.sampler.rows)
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)


def batches(requests: Sequence[GenerationRequest]) -> Iterator[list[BatchRow]]:
    """Yield requests whose prompts have the same length, at most MAX_ROWS together."""
    by_length: dict[int, list[BatchRow]] = {}
    for index, request in enumerate(requests):
        by_length.setdefault(len(request.prompt), []).append(BatchRow(index, request))
    for rows in by_length.values():
        for first in range(0, len(rows), MAX_ROWS):
            yield rows[first : first + MAX_ROWS]


@contextmanager
def plain_generation(model: Any) -> Iterator[None]:
    """Take nothing from the model's generation settings: they would change what is sampled."""
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
