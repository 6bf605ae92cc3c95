"""Checks that weights have arrived: after an update trainer and engine compute log-probabilities of the same tokens.

A wrong update often still generates fluent text, so reading completions would not reveal it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.core.types import Floats, Sample

PROBE_TOKENS = 24
# Largest mean difference of log-probabilities: another engine adds numbers in another order than the trainer.
OTHER_ENGINE = {torch.float32: 0.01, torch.bfloat16: 0.25, torch.float16: 0.25}
SAME_ENGINE = {torch.float32: 0.0001, torch.bfloat16: 0.1, torch.float16: 0.1}


def probe_sample(vocabulary: int) -> Sample:
    """Return a sample of random tokens, the same in every process."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)
    return Sample(tokens=tokens.astype(np.int32), mask=np.arange(PROBE_TOKENS) > 0)


def mean_difference(samples: Sequence[Sample], ours: Sequence[Floats], theirs: Sequence[Floats]) -> float:
    """Return the mean absolute difference of log-probabilities at masked tokens; NaN if one of them is NaN."""
    found = [np.abs(a - b)[sample.mask] for sample, a, b in zip(samples, ours, theirs, strict=True)]
    return float(np.concatenate(found).mean())
