"""Random ragged samples of every kind of row, and the double-precision batch made of them."""

import dataclasses

import numpy as np
import torch

from posttrain.core.types import MicroBatch, Sample
from posttrain.data.packing import collate


def sample(rng: np.random.Generator, mask: list[int], **fields) -> Sample:
    """One sample with this mask and random numbers; streams are small so that no loss saturates."""
    n = len(mask)
    return Sample(
        tokens=rng.integers(0, 100, n).astype(np.int32),
        mask=np.array(mask, dtype=np.bool_),
        ref_logprobs=rng.uniform(-3, -0.05, n).astype(np.float32),
        targets=np.where(rng.random(n) < 0.3, rng.random(n), rng.integers(0, 2, n)).astype(np.float32),
        margin=float(np.float32(rng.uniform(0, 1))),
        baseline=float(np.float32(rng.uniform(0, 1))),
        label=float(rng.integers(0, 2)),
        **fields,
    )


def masks(rng: np.random.Generator) -> list[list[int]]:
    """A single counted token, no counted token, an answer cut off, two turns, hardly a prompt, and random ones."""
    special = [[0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1], [0, 1], [0]]
    ragged = [[0, *rng.integers(0, 2, rng.integers(1, 9)).tolist()] for _ in range(6)]
    both = special + ragged
    return [both[i] for i in rng.permutation(len(both))]


def samples(rng: np.random.Generator, group_size: int) -> list[Sample]:
    """Twelve samples, neighbours in groups of `group_size`."""
    return [sample(rng, mask, group=i // group_size) for i, mask in enumerate(masks(rng))]


def batch_of(rows: list[Sample]) -> MicroBatch:
    """The packed batch in double precision."""
    batch = collate(rows)
    wide = {
        field.name: getattr(batch, field.name).double()
        for field in dataclasses.fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor) and getattr(batch, field.name).is_floating_point()
    }
    return dataclasses.replace(batch, **wide)


def random_logprobs(rng: np.random.Generator, batch: MicroBatch) -> torch.Tensor:
    """Log-probabilities with a gradient; where the mask is False stands nonsense that no loss may read."""
    values = torch.tensor(rng.uniform(-3, -0.05, len(batch.tokens)))
    return torch.where(batch.mask, values, torch.tensor(1e6, dtype=torch.float64)).requires_grad_()


def per_sample_lists(stream: torch.Tensor, batch: MicroBatch) -> list[list[float]]:
    """[T] -> a list of floats for each sample."""
    return [part.tolist() for part in stream.detach().split(batch.lengths)]
