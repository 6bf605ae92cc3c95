"""Whether weights arrived: a few tokens that the trainer and a sampler both look at after each update.

An update that goes wrong leaves fluent text behind, so that nobody would notice it by reading answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.core.types import Floats, Sample

PROBE_TOKENS = 24
# How far log-probabilities may lie apart on average: another engine computes in another order than the trainer does.
OTHER_ENGINE = {torch.float32: 0.01, torch.bfloat16: 0.25, torch.float16: 0.25}
SAME_ENGINE = {torch.float32: 0.0001, torch.bfloat16: 0.1, torch.float16: 0.1}


def probe(vocabulary: int) -> Sample:
    """The same tokens everywhere."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS)
    return Sample(tokens=tokens.astype(np.int32), mask=np.arange(PROBE_TOKENS) > 0)


def difference(samples: Sequence[Sample], ours: Sequence[Floats], theirs: Sequence[Floats]) -> float:
    """Of log-probabilities of the tokens that count, on average; not a number if one of them is not."""
    found = [np.abs(a - b)[sample.mask] for sample, a, b in zip(samples, ours, theirs, strict=True)]
    return float(np.concatenate(found).mean())
