"""Mix several sources into one file, by weights and limits, in an order that the seed determines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.errors import UsageError
from posttrain.core.types import ExampleKind
from posttrain.data.curation.formats import open_sources, refuse_overwriting
from posttrain.data.curation.row_spool import RowSpool
from posttrain.data.reading.mixture import Mixture
from posttrain.data.reading.records import ReadProgress

LIMIT = 0x71A17  # keeps the random numbers of the limits apart from those of the order


@dataclass(frozen=True, slots=True)
class MixedSource:
    """How much of a source was written."""

    name: str
    read: int
    written: int  # more than were read if the source is repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig:
    """How sources are mixed."""

    weights: Sequence[float] = ()  # share of each source, as data.weights; none: all examples of each
    max_examples: Sequence[int] = ()  # most examples of each source, drawn at random; 0: all
    total_examples: int = 0  # of the file; 0: as many as the weights allow
    repeat: bool = False  # repeat sources that the weights ask more of than there is
    shuffle: bool = True
    seed: int = 0
    normalize: bool = False  # write all rows in the usual format of their kind
    kind: ExampleKind | None = None
    map_keys: Mapping[str, Any] | None = None

    def check(self, sources: int) -> None:
        for name, values in (("weights", self.weights), ("max_examples", self.max_examples)):
            if len(values) not in (0, sources) and not (name == "max_examples" and len(values) == 1):
                raise UsageError(f"{name} has {len(values)} values for {sources} files; give one per file")
        if any(not 0 < weight < float("inf") for weight in self.weights):
            raise UsageError(f"weights are {', '.join(map(str, self.weights))}; they must be above 0")
        if any(limit < 0 for limit in (*self.max_examples, self.total_examples)):
            raise UsageError("max_examples and total_examples must be at least 0")
        if self.repeat and not self.weights:
            raise UsageError("repeat needs weights: without them all examples are written once")


def mix(
    names: Sequence[str],
    output: Path,
    config: MixConfig,
    progress: Callable[[int], None] | None = None,
    meter: ReadProgress | None = None,
) -> list[MixedSource]:
    """Write the mixture, all or nothing, and return how much of each source is in it."""
    config.check(len(names))
    refuse_overwriting(names, [output])
    sources = open_sources(names, config.kind, config.map_keys or {}, config.normalize)
    with RowSpool(output) as lines:
        sizes: list[int] = []
        for source in sources:
            before = len(lines)
            for row, _ in source.rows(config.normalize, meter):
                lines.add(row)
                if progress is not None and len(lines) % 1000 == 0:
                    progress(len(lines))
            sizes.append(len(lines) - before)
        order = order_of(sizes, config)
        lines.write(output, order)
    edges = np.cumsum((0, *sizes))
    written = np.bincount(np.searchsorted(edges, order, side="right") - 1, minlength=len(sizes))
    return [MixedSource(*found) for found in zip(names, sizes, written.tolist(), strict=True)]


def order_of(sizes: Sequence[int], config: MixConfig) -> list[int]:
    """Return the rows of the mixture, as numbers into all rows of all sources."""
    limits = list(config.max_examples) or [0]
    limits = limits * len(sizes) if len(limits) == 1 else limits
    kept: list[np.ndarray[Any, Any]] = []
    first = 0
    for number, (size, limit) in enumerate(zip(sizes, limits, strict=True)):
        rows = np.arange(size)
        if limit and limit < size:
            rows = np.sort(np.random.default_rng([config.seed, LIMIT, number]).permutation(size)[:limit])
        kept.append(first + rows)
        first += size
    rows = np.concatenate(kept)
    if config.weights:
        mixture = Mixture(tuple(map(len, kept)), tuple(config.weights), config.repeat)
        order = mixture.order(0, config.seed, config.shuffle)
    elif config.shuffle:
        order = np.random.default_rng([config.seed, 0]).permutation(len(rows))
    else:
        order = np.arange(len(rows))
    if config.total_examples > len(order):
        hint = "" if config.repeat or not config.weights else "; add --repeat to use examples several times"
        raise UsageError(f"total_examples is {config.total_examples:,}, but there are only {len(order):,}{hint}")
    found: list[int] = rows[order[: config.total_examples or None]].tolist()
    return found
