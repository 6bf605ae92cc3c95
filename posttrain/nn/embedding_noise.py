"""NEFTune (arXiv:2310.05914): uniform noise on the embeddings of an example in training.

    x + u alpha / sqrt(T D)      u: uniform in [-1, 1];  T: tokens of the example, D: size of an embedding

The noise of an example is a function of the run's seed, the optimizer step and its tokens. So it does not depend on
which examples are in the same micro-batch, on accumulation or on the number of devices, and a checkpoint needs no
generator state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from posttrain.core.types import MicroBatch


class EmbeddingNoise:
    """Adds noise to what a model's embedding returns, in passes within `added`."""

    def __init__(self, embedding: torch.nn.Module, alpha: float, seed: int) -> None:
        self.alpha, self.seed = alpha, seed
        self.step = 0  # number of optimizer steps so far; the learner sets it
        self.lengths: list[int] = []  # tokens of each sample of the pass; empty: no noise
        self.seeds: list[int] = []
        embedding.register_forward_hook(self.add)

    @contextmanager
    def added(self, batch: MicroBatch) -> Iterator[None]:
        """Add noise in the block, whose passes are over this micro-batch."""
        assert batch.sharing is None, "the tokens of a shared prefix would have the noise of several samples"
        parts = np.split(batch.tokens.cpu().numpy().astype(np.int32), np.cumsum(batch.lengths)[:-1])
        self.lengths, self.seeds = list(batch.lengths), [self.sample_seed(part) for part in parts]
        try:
            yield
        finally:
            self.lengths = []

    def sample_seed(self, tokens: Any) -> int:
        words = np.random.SeedSequence((self.seed, self.step, zlib.crc32(tokens.tobytes()))).generate_state(2)
        return int(words[0]) << 31 | int(words[1]) >> 1

    def add(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """Return the embeddings with noise: [1, T, D], samples end to end and padding, or [samples, longest, D]."""
        if not self.lengths:
            return output
        noise = torch.zeros_like(output, dtype=torch.float32)
        first, packed, size = 0, len(output) == 1, output.shape[-1]
        for row, (length, seed) in enumerate(zip(self.lengths, self.seeds, strict=True)):
            generator = torch.Generator(output.device).manual_seed(seed)
            drawn = torch.rand((length, size), generator=generator, device=output.device) * 2 - 1
            place = noise[0, first : first + length] if packed else noise[row, :length]
            place.copy_(drawn * (self.alpha / (length * size) ** 0.5))
            first += length
        return output + noise.to(output.dtype)
