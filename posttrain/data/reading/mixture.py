"""Several sources mixed by weight: `a.jsonl:0.7 b.parquet:0.3`.

An epoch has a fixed number of rows, of which each source gives its share, in an order drawn anew for every epoch. Each
source goes round by itself: what an epoch did not take of it comes in the next, and no row comes again before all its
others did. So the row at any position of the endless stream can be computed from the seed and the position alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import UsageError

WEIGHT = re.compile(r"(?P<name>.+):(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?inf|nan)", re.DOTALL | re.I)
MOST_ROWS = 2**31  # of an epoch
INTERLEAVE = 0x313C5  # keeps the random numbers of the interleaving apart from those of the sources' orders

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How many rows each source has and how much of an epoch comes from it."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    repeat: bool = False
    """False: the source that runs out first ends the epoch; True: the others start again until all are used up."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each source in an epoch."""
        epochs = [size / weight for size, weight in zip(self.sizes, self.weights, strict=True)]
        total = max(epochs) if self.repeat else min(epochs)  # times the sum of the weights: rows of an epoch
        if total * sum(self.weights) > MOST_ROWS:
            raise UsageError(
                f"data.train: with these weights an epoch would have {total * sum(self.weights):.2g} rows. "
                "Bring the weights nearer to each other, or take data.repeat away"
            )
        return tuple(max(1, round(total * weight)) for weight in self.weights)

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return sum(self.counts)

    def order(self, epoch: int, seed: int, shuffle: bool) -> Indices:
        """The rows of an epoch, as indices into all rows of all sources laid end to end."""
        turns = np.repeat(np.arange(len(self.sizes)), self.counts)
        turns = np.random.default_rng([seed, epoch, INTERLEAVE]).permutation(turns)
        order = np.empty(len(turns), dtype=np.int64)
        first = 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            order[turns == source] = first + self._turn(source, size, epoch * count, count, seed, shuffle)
            first += size
        return order

    def _turn(self, source: int, size: int, start: int, count: int, seed: int, shuffle: bool) -> Indices:
        """Rows `start` to `start + count` of a source that goes round and round, each round in another order."""
        if not shuffle:
            return np.arange(start, start + count) % size
        rounds = [
            np.random.default_rng([seed, number, source]).permutation(size)
            for number in range(start // size, (start + count - 1) // size + 1)
        ]
        return np.concatenate(rounds)[start % size :][:count]
