"""Partial rollouts: completions that a step's end cuts off, and that carry on in the next step with its weights.

More prompts are in progress than a step trains on. All their completions advance by the same number of tokens, until
enough prompts are complete; those are the batch, in the order of the data. Progress is counted in tokens, not in time,
so that equal runs give equal batches. A prompt that is as old as the limit allows is complete before a step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.types import Prompt, Sample, WeightVersion
from posttrain.engines.base import GenerationRequest, Generator, Sampling, seed_for
from posttrain.rollout.records import Rollout, as_row, from_row


@dataclass(slots=True, eq=False)
class CompletionInProgress:
    """A completion of a prompt in progress."""

    seed: int
    sample: Sample | None = None  # so far
    rollout: Rollout | None = None  # once it is finished


@dataclass(slots=True, eq=False)
class PromptInProgress:
    """A prompt whose completions are not all finished, or that no step has trained on yet."""

    position: int  # of the stream
    prompt: Prompt
    version: WeightVersion  # of the weights that began its completions
    completions: list[CompletionInProgress]

    @classmethod
    def begin(cls, position: int, prompt: Prompt, version: WeightVersion, seed: int, samples: int) -> PromptInProgress:
        completions = [CompletionInProgress(seed_for(seed, position, number)) for number in range(samples)]
        return cls(position, prompt, version, completions)

    @property
    def is_complete(self) -> bool:
        return all(completion.rollout is not None for completion in self.completions)

    @property
    def rollouts(self) -> list[Rollout]:
        return [completion.rollout for completion in self.completions if completion.rollout is not None]

    def copy(self) -> PromptInProgress:
        """Return a copy whose completions can advance while this one stays as it is."""
        return replace(self, completions=[replace(completion) for completion in self.completions])


def batch_is_complete(prompts: Sequence[PromptInProgress], wanted: int, oldest: WeightVersion) -> bool:
    """Whether `wanted` prompts are complete, and all that were begun by weights of version `oldest` or before."""
    if not all(prompt.is_complete for prompt in prompts if prompt.version <= oldest):
        return False
    return sum(prompt.is_complete for prompt in prompts) >= wanted


class PartialGeneration:
    """Advances the completions of prompts in progress."""

    def __init__(self, generator: Generator, sampling: Sampling, tokenizer: Any, tokens: int) -> None:
        """`tokens`: by which all completions advance at a time; 0: until they are finished."""
        self.generator, self.sampling, self.tokenizer, self.tokens = generator, sampling, tokenizer, tokens

    def advance(
        self, prompts: Sequence[PromptInProgress], version: WeightVersion, on_rollout: Callable[[Rollout], None]
    ) -> None:
        """Let all unfinished completions advance with weights of this version."""
        unfinished = [(each, one) for each in prompts for one in each.completions if one.rollout is None]
        requests = [self.request(each, one) for each, one in unfinished]
        for (each, one), sample in zip(unfinished, self.generator.generate(requests, self.sampling), strict=True):
            one.sample = with_versions(sample, one.sample, version)
            sample.group, sample.origin = each.position, each.prompt.origin
            if sample.finish == "stop" or tokens_of(sample) >= self.sampling.max_tokens:
                text = self.tokenizer.decode(sample.tokens[sample.mask], skip_special_tokens=True)
                one.rollout = Rollout(sample=sample, prompt=each.prompt, text=text)
                on_rollout(one.rollout)

    def request(self, prompt: PromptInProgress, completion: CompletionInProgress) -> GenerationRequest:
        request = GenerationRequest(prompt=prompt.prompt.tokens, group=prompt.position, seed=completion.seed)
        done = 0
        if (sample := completion.sample) is not None:
            assert sample.logprobs is not None
            request.begun = sample.tokens[sample.mask], sample.logprobs[sample.mask]
            done = tokens_of(sample)
        if self.tokens:
            request.token_limit = min(self.sampling.max_tokens, done + self.tokens)
        return request


def tokens_of(sample: Sample) -> int:
    """Return the number of tokens of the completion."""
    return int(sample.mask.sum())


def with_versions(sample: Sample, before: Sample | None, version: WeightVersion) -> Sample:
    """Record which weights sampled which tokens of a completion that was continued; `before`: as it was."""
    sample.version = sample.newest = version
    if before is not None:
        sample.version = before.version
        spans = list(before.version_spans or ((before.version, tokens_of(before)),))
        added = tokens_of(sample) - tokens_of(before)
        if spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + added)
        else:
            spans.append((version, added))
        sample.version_spans = tuple(spans) if len(spans) > 1 else ()
        sample.preemptions += before.preemptions
    return sample


# Checkpoints


def rows_of(prompts: Sequence[PromptInProgress]) -> list[dict[str, Any]]:
    """Return prompts in progress as JSON rows, one per completion."""
    rows = []
    for each in prompts:
        for completion in each.completions:
            assert completion.sample is not None, "every completion has advanced"
            rollout = completion.rollout or Rollout(sample=completion.sample, prompt=each.prompt, text="")
            added = {"seed": completion.seed, "finished": completion.rollout is not None, "begun_by": each.version}
            rows.append(as_row(rollout, 0) | added)
    return rows


def from_rows(rows: Sequence[dict[str, Any]]) -> list[PromptInProgress]:
    """Undo `rows_of`."""
    prompts: list[PromptInProgress] = []
    for row in rows:
        rollout = from_row(row)
        if not prompts or prompts[-1].position != row["group"]:
            prompts.append(PromptInProgress(row["group"], rollout.prompt, row["begun_by"], []))
        finished = rollout if row["finished"] else None
        prompts[-1].completions.append(CompletionInProgress(row["seed"], rollout.sample, finished))
    return prompts
