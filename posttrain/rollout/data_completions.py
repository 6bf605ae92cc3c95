"""Completions of the data in the place of generated ones: the mixture of generalised knowledge distillation (GKD)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.core.errors import DataError
from posttrain.core.types import Prompt, Sample
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import LabelledExample
from posttrain.rollout.records import Rollout

FROM_DATA = "data"  # the `finish` of a completion that was not generated
SEED_OF_CHOICE = 0xDA7A  # keeps its random numbers apart from others


class DataCompletions:
    """Decides by seed and position which completions are the data's, and encodes them as SFT does."""

    def __init__(self, encoder: Encoder, column: str, fraction: float, seed: int, max_tokens: int) -> None:
        """`encoder`: of labelled examples; `fraction`: the share of completions that are the data's."""
        self.encoder, self.column, self.fraction, self.seed = encoder, column, fraction, seed
        self.max_tokens = max_tokens

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DataError for the first prompt whose completion is missing or cannot be used."""
        for prompt in prompts:
            self.sample(prompt)

    def is_taken(self, position: int, number: int) -> bool:
        """Whether completion `number` of the prompt at this position is the data's."""
        rng = np.random.default_rng((self.seed ^ SEED_OF_CHOICE, position, number))
        return bool(rng.random() < self.fraction)

    def rollout(self, position: int, prompt: Prompt) -> Rollout:
        sample = self.sample(prompt)
        sample.group = position
        return Rollout(sample=sample, prompt=prompt, text=prompt.columns[self.column])

    def sample(self, prompt: Prompt) -> Sample:
        """Return the prompt with the data's completion."""
        text, origin = prompt.columns.get(self.column), prompt.origin
        if not isinstance(text, str) or not text:
            raise DataError(f"{origin}: {self.column}: expected a text (algo.completion_column), found {text!r}")
        for plain in (False, True):
            example = LabelledExample(
                prompt=prompt.messages,
                completion=[{"role": "assistant", "content": text}],
                label=1.0,
                plain=plain,
                origin=origin,
            )
            (sample,) = self.encoder.encode(example)
            start = len(prompt.tokens)
            if np.array_equal(sample.tokens[:start], prompt.tokens) and not sample.mask[:start].any():
                return self.checked(sample, start, origin)
        raise DataError(
            f"{origin}: {self.column} does not continue the prompt as it is rendered (tools, or a template of its own)"
        )

    def checked(self, sample: Sample, start: int, origin: str) -> Sample:
        if len(sample) - start > self.max_tokens:
            raise DataError(
                f"{origin}: {self.column} has {len(sample) - start} tokens, more than rollout.max_tokens = "
                f"{self.max_tokens}: raise it, or leave the example out"
            )
        sample.finish, sample.origin, sample.label = FROM_DATA, origin, 0.0
        sample.logprobs = np.zeros(len(sample), dtype=np.float32)
        return sample
