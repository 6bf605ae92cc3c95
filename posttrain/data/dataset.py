"""Load and encode all examples before the model is loaded; then stream them endlessly, resumable by a position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import Sample
from posttrain.data.encoding.encoder import Encoded, Encoder
from posttrain.data.prompts import PromptStore, PromptStoreBuilder
from posttrain.data.reading.examples import Example
from posttrain.data.reading.formats import SourceFormat
from posttrain.data.reading.mixture import Mixture
from posttrain.data.reading.records import BadRecord, Record
from posttrain.data.reading.sources import SourcePart, source_parts
from posttrain.data.store import ExampleStore, ExampleStoreBuilder

__all__ = ["Dataset", "Encoder", "ExampleStream", "load_dataset", "split_examples"]

ROWS_AT_ONCE = 512  # encoded in one call of the tokenizer,
BYTES_AT_ONCE = 2**22  # or fewer if they are large
SPLIT = 0x5B117  # keeps the split's random numbers apart from those of the epochs

SetAside = Callable[[BadRecord], None]


@dataclass(slots=True)
class Dataset:
    """Encoded rows: a row is a prompt, or the samples that an algorithm wants side by side, one or two of a pair."""

    rows: Any  # ExampleStore or PromptStore
    fingerprint: str
    descriptions: list[str]
    counts: dict[str, int]
    """read: rows of the files; kept: rows here; truncated, dropped; quoted: had a control token's text, as text;
    quarantined: could not be used and were set aside."""
    mixture: Mixture | None = None
    """How the sources are mixed, if weights are given."""


def load_dataset(
    files: Sequence[str],
    encoder: Encoder,
    max_rows: int | None = None,
    progress: Callable[[int], None] | None = None,
    quarantine: Path | None = None,
    cache: Path | None = None,
    weights: Sequence[float] = (),
) -> Dataset:
    """Read, recognise, encode and check all rows, or the first `max_rows` (of each source, if they are mixed).

    With `weights`, one per source, the sources are mixed; else they are read one after the other.

    `progress` hears how many were read. With data.on_bad_example: quarantine, bad rows are appended to the file
    `quarantine`; without a file they are only counted. Large data is kept in a file in the folder `cache`.
    """
    if not files:
        raise UsageError("no data files are given: set data.train")
    from posttrain.data.indexed_dataset import is_indexed  # which uses this file

    names = list(files)
    if len(names) == 1 and is_indexed(names[0]):
        return _indexed(names[0], encoder, max_rows)
    if indexed := [name for name in names if is_indexed(name)]:
        raise UsageError(f"{indexed[0]}: tokenized files cannot be combined with other files; use them alone")
    sources = [source_parts(name) for name in names]  # a wrong name is said at once, not after the other files are read
    builder = PromptStoreBuilder() if encoder.kind == "prompt" else ExampleStoreBuilder(cache)
    sizes: list[int] = []
    descriptions: list[str] = []
    counts = dict.fromkeys(("read", "kept", "truncated", "dropped", "quoted", "quarantined"), 0)
    with Quarantine(quarantine, encoder.config.on_bad_example == "stop") as aside:
        for name, parts in zip(names, sources, strict=True):
            source = source_format(encoder)
            sizes.append(-builder.rows)
            read_before = counts["read"] if weights else 0
            for part in parts:
                left = None if max_rows is None else max_rows - counts["read"] + read_before
                for chunk in chunks(islice(part.scan(None), left)):
                    understood = understand(chunk, source, aside.add)
                    for _, of_row in encode(understood, encoder, aside.add):
                        for encoded in of_row:
                            _keep(encoded, encoder, builder, counts)
                    counts["read"] += len(chunk)
                    if progress is not None:
                        progress(counts["read"])
                aside.check(part, counts)
            sizes[-1] += builder.rows
            if source.description:
                descriptions.append(f"{name}: {source.description}")
            if weights and not sizes[-1]:
                raise DataError(f"{name}: no examples are left of it, so it cannot be mixed with the others")
    if not builder.rows:
        raise DataError(
            f"{', '.join(names)}: no examples are left: {counts['read']} read, {counts['dropped']} dropped, longer "
            f"than data.max_length = {encoder.config.max_length}"
        )
    mixture = Mixture(tuple(sizes), tuple(weights), encoder.config.repeat) if weights else None
    return _dataset(builder.finish(), descriptions, counts, mixture)


def _indexed(name: str, encoder: Encoder, max_rows: int | None) -> Dataset:
    """Load examples that `posttrain data preprocess` has tokenized."""
    from posttrain.data.indexed_dataset import load_indexed, load_indexed_prompts

    if encoder.kind == "prompt":
        prompts, counts, description = load_indexed_prompts(name, encoder, max_rows)
        return _dataset(prompts, [description], {**counts, "quarantined": 0}, None)
    config = encoder.config
    limits: dict[str, Any] = {"max_tokens": config.max_length, "on_long": config.on_overlong, "max_rows": max_rows}
    rows = load_indexed(name, encoder.kind, encoder.vocab_size, bos_id=encoder.bos_id, **limits)
    return _dataset(rows, [rows.description], {**rows.counts, "quarantined": 0}, None)


def source_format(encoder: Encoder) -> SourceFormat:
    """Return the format recogniser of one source for this encoder."""
    return SourceFormat(encoder.kind, encoder.placeholder, encoder.config.map_keys)


def chunks(rows: Iterable[Record | BadRecord]) -> Iterator[list[Record | BadRecord]]:
    """Yield records in chunks; where reading raises an error, first those before it."""
    chunk: list[Record | BadRecord] = []
    size = 0
    damaged: DataError | None = None
    rows = iter(rows)
    while damaged is None:
        try:
            row = next(rows, None)
        except DataError as error:
            row, damaged = None, error
        if row is not None:
            chunk.append(row)
            size += row.size if isinstance(row, Record) else 0
        if chunk and (row is None or len(chunk) == ROWS_AT_ONCE or size > BYTES_AT_ONCE):
            yield chunk
            chunk, size = [], 0
        if row is None and damaged is None:
            return
    raise damaged


def understand(
    chunk: Iterable[Record | BadRecord], source: SourceFormat, set_aside: SetAside
) -> list[tuple[Record, list[Example]]]:
    """Yield records with their examples; pass records that cannot be used to `set_aside`."""
    understood: list[tuple[Record, list[Example]]] = []
    for row in chunk:
        if isinstance(row, BadRecord):
            set_aside(row)
            continue
        try:
            understood.append((row, source.examples(row)))
        except DataError as error:
            set_aside(_bad(row, error))
    return understood


def encode(
    understood: Sequence[tuple[Record, list[Example]]], encoder: Encoder, set_aside: SetAside
) -> Iterator[tuple[Record, list[Encoded]]]:
    """Yield records with their encoded examples; pass records that cannot be encoded to `set_aside`."""
    try:
        encoded = iter(encoder.encode_all([example for _, examples in understood for example in examples]))
    except DataError:  # one of them: which?
        for row, examples in understood:
            try:
                alone = encoder.encode_all(examples)
            except DataError as error:
                set_aside(_bad(row, error))
            else:
                yield row, alone
    else:
        for row, examples in understood:
            yield row, [next(encoded) for _ in examples]


def _bad(row: Record, error: DataError) -> BadRecord:
    return BadRecord(row.origin, str(error).removeprefix(f"{row.origin}: "), row.values)


def _keep(
    encoded: Encoded, encoder: Encoder, builder: ExampleStoreBuilder | PromptStoreBuilder, counts: dict[str, int]
) -> None:
    if encoder.kind == "text":
        for sample in encoded.samples:
            builder.add([sample])
    elif encoded.samples:
        builder.add(encoded.samples)
    counts["truncated"] += encoded.truncated
    counts["dropped"] += encoded.dropped
    counts["quoted"] += encoded.quoted


class Quarantine:
    """Handles records that cannot be used: the first ends the run, or all are written to a file and counted."""

    def __init__(self, path: Path | None, stop: bool) -> None:
        self.path, self.stop = path, stop
        self.of_part = self.read_before = 0
        self.first: BadRecord | None = None
        self.file: Any = None

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, bad: BadRecord) -> None:
        if self.stop:
            raise bad.error
        self.first = self.first or bad
        self.of_part += 1
        if self.path is None:
            return
        if self.file is None:
            self.file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        line = {"origin": bad.origin, "reason": bad.reason, "row": bad.raw}
        self.file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def check(self, part: SourcePart, counts: dict[str, int]) -> None:
        """Count the bad records of a finished file; DataError if it has no others."""
        counts["quarantined"] += self.of_part
        read = counts["read"] - self.read_before
        if self.first is not None and self.of_part == read:
            raise DataError(f"{part.name}: none of its {read:,} examples can be used. The first: {self.first.error}")
        self.of_part, self.read_before, self.first = 0, counts["read"], None


def _dataset(
    rows: ExampleStore | PromptStore, descriptions: list[str], counts: dict[str, int], mixture: Mixture | None
) -> Dataset:
    fingerprint = rows.fingerprint()
    if mixture is not None:
        fingerprint = hashlib.sha256(f"{fingerprint} {mixture}".encode()).hexdigest()
    return Dataset(rows, fingerprint, descriptions, {**counts, "kept": len(rows)}, mixture)


def split_examples(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split off a fraction of the examples for evaluation, always the same; parts of one record stay together."""
    if not 0 < fraction < 1:
        raise UsageError(f"data.eval is {fraction}: a part must be above 0 and below 1")
    rows = dataset.rows
    origins: list[str] = [rows.origin(row) for row in range(len(rows))]
    units = list(dict.fromkeys(origins))
    if len(units) == 1:  # one long text: its parts may be parted
        origins = units = [str(row) for row in range(len(rows))]
    if len(units) < 2:
        raise UsageError("data.eval_fraction: one example cannot be divided; name evaluation files with data.eval")
    order = np.random.default_rng([seed, SPLIT]).permutation(len(units))
    size = min(max(1, round(fraction * len(units))), len(units) - 1)
    aside = {units[index] for index in order[:size]}
    is_aside = np.array([origin in aside for origin in origins])
    mixture = dataset.mixture
    if mixture is not None:
        edges = np.cumsum((0, *mixture.sizes))
        left = tuple(int((~is_aside[a:b]).sum()) for a, b in pairwise(edges))
        if not all(left):
            raise UsageError(f"data.eval {fraction} leaves no rows of a source to train on; name files")
        mixture = replace(mixture, sizes=left)
    return (
        _dataset(rows.subset(np.flatnonzero(~is_aside)), dataset.descriptions, dataset.counts, mixture),
        _dataset(rows.subset(np.flatnonzero(is_aside)), dataset.descriptions, dataset.counts, None),
    )


class ExampleStream:
    """The rows without end, epoch by epoch, in an order that the seed and the epoch decide.

    An epoch has every row once; where sources are mixed by weight, it has the share of each. `position`, the number of
    rows taken so far, is all its state: workers are handed parts of what was taken, so it is the same for any number.
    """

    def __init__(
        self,
        rows: Sequence[list[Any]],
        rows_per_step: int,
        seed: int,
        shuffle: bool = True,
        strata: Sequence[float] | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """`strata`: a number per example; examples that differ in it are spread evenly over the epoch."""
        assert len(rows), "a stream needs rows"
        assert mixture is None or sum(mixture.sizes) == len(rows), "the mixture is of other rows"
        self.rows = rows
        self.strata = np.array(strata if strata is not None else np.zeros(len(rows)))
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.mixture = mixture
        self.rows_per_epoch = len(rows) if mixture is None else mixture.examples
        self.position = 0
        self._order = (-1, np.arange(0))  # epoch, and its order

    def take(self, n_rows: int | None = None) -> list[Sample]:
        """Samples of the next rows, `rows_per_step` by default; each row is a group of its own.

        If the rows hold their samples, these are the same every time, so that what is written into them stays; a row
        that comes up a second time in one call is a shallow copy.
        """
        samples: list[Sample] = []
        taken: set[int] = set()
        for _ in range(self.rows_per_step if n_rows is None else n_rows):
            position, index = self.next_row()
            row = self.rows[index]
            if index in taken:
                row = [replace(sample) for sample in row]
            taken.add(index)
            for sample in row:
                sample.group = position
            samples += row
        return samples

    def next_row(self) -> tuple[int, int]:
        """Return the next position in the stream and the index of its example."""
        self.position += 1
        return self.position - 1, self._index(self.position - 1)

    def _index(self, position: int) -> int:
        epoch, at = divmod(position, self.rows_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        return int(self._order[1][at])

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self.mixture is not None:
            order = self.mixture.order(epoch, self.seed, self.shuffle)
        elif self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        else:
            order = np.arange(len(self.rows))
        place = np.zeros(len(order))  # of each row in its stratum, from 0 to 1: merging by it spreads the strata
        for stratum in np.unique(self.strata):
            members = np.flatnonzero(self.strata[order] == stratum)
            place[members] = (np.arange(len(members)) + 0.5) / len(members)
        return order[np.argsort(place, kind="stable")]
