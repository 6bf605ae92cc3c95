"""Mix several sources by weight (data.weights).

An epoch has a fixed number of examples, of which each source contributes its share, in an order drawn for every epoch.
Each source cycles on its own: examples that one epoch did not use come in the next, and no example repeats before all
others of its source were used. So the example at any position of the endless stream is a function of the seed and the
position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import UsageError

MAX_EXAMPLES = 2**31  # per epoch
INTERLEAVE = 0x313C5  # separates the random stream of the interleaving from those of the sources' orders

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of the sources and their weights in an epoch."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    repeat: bool = False
    """False: the first exhausted source ends the epoch; True: sources repeat until all were used completely."""
    limit: int = field(default=0, repr=False)  # fingerprints of data have the text of a mixture
    """Most examples of an epoch; 0: no limit."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Examples per epoch of each source."""
        epochs = [size / weight for size, weight in zip(self.sizes, self.weights, strict=True)]
        total = max(epochs) if self.repeat else min(epochs)  # times the sum of the weights: examples per epoch
        if self.limit:
            total = min(total, self.limit / sum(self.weights))
        if total * sum(self.weights) > MAX_EXAMPLES:
            raise UsageError(
                f"data.train: with these weights an epoch would have {total * sum(self.weights):.2g} examples. "
                "Choose weights closer to each other, or remove data.repeat"
            )
        return tuple(max(1, round(total * weight)) for weight in self.weights)

    @property
    def examples(self) -> int:
        """Examples per epoch."""
        return sum(self.counts)

    def order(self, epoch: int, seed: int, shuffle: bool) -> Indices:
        """Return the order of an epoch, as indices into the concatenated examples of all sources."""
        sources = np.repeat(np.arange(len(self.sizes)), self.counts)
        sources = np.random.default_rng([seed, epoch, INTERLEAVE]).permutation(sources)
        order = np.empty(len(sources), dtype=np.int64)
        first = 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            order[sources == source] = first + self._cycle(source, size, epoch * count, count, seed, shuffle)
            first += size
        return order

    def _cycle(self, source: int, size: int, start: int, count: int, seed: int, shuffle: bool) -> Indices:
        """Return examples `start` to `start + count` of a source that cycles, each cycle in another order."""
        if not shuffle:
            return np.arange(start, start + count) % size
        cycles = [
            np.random.default_rng([seed, number, source]).permutation(size)
            for number in range(start // size, (start + count - 1) // size + 1)
        ]
        return np.concatenate(cycles)[start % size :][:count]
