"""Store encoded examples in a few long arrays, on disk if they are large; samples are created on access."""

from __future__ import annotations

import hashlib
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from posttrain.core.types import Sample

SPILL = 256 * 2**20  # bytes of a column kept in memory; a larger one is written to a memory-mapped file
BLOCK = 2**20
PENDING = 2**14  # single values that are collected before they are converted to an array
NUMBER_AT_END = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})", re.DOTALL)


class GrowingArray:
    """Values of one type that are appended; in memory, or beyond a limit in an unnamed temporary file."""

    def __init__(self, dtype: type[np.generic], limit: int, folder: Path | None) -> None:
        self.dtype = np.dtype(dtype)
        self.limit = limit
        self.folder = folder
        self.buffer = bytearray()
        self.pending: list[float] = []
        self.file: Any = None

    def add_one(self, value: float) -> None:
        """Append one value; an array takes either single values or arrays."""
        self.pending.append(value)
        if len(self.pending) == PENDING:
            self._add_pending()

    def _add_pending(self) -> None:
        values, self.pending = self.pending, []
        self.add(np.array(values, dtype=self.dtype))

    def add(self, values: npt.NDArray[Any]) -> None:
        self.buffer += values.astype(self.dtype, copy=False).tobytes()
        if len(self.buffer) > (self.limit if self.file is None else BLOCK):
            self._write()

    def _write(self) -> None:
        if self.file is None:
            # The file has no name, so a kill leaves nothing to clean up.
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  lives as long as the store
        self.file.write(self.buffer)
        self.buffer = bytearray()

    def array(self) -> npt.NDArray[Any]:
        """Return all values, read-only."""
        self._add_pending()
        if self.file is None:
            values = np.frombuffer(self.buffer, dtype=self.dtype)
            values.flags.writeable = False
            return values
        self._write()
        self.file.flush()
        return np.memmap(self.file, dtype=self.dtype, mode="r")


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """Concatenated samples: values per token, then per sample, then per example."""

    tokens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    targets: npt.NDArray[np.float32]  # empty if examples have none
    starts: npt.NDArray[np.int64]  # of each sample in tokens, and the end
    counted: npt.NDArray[np.int32]  # tokens of a sample that count
    label: npt.NDArray[np.float64]
    margin: npt.NDArray[np.float64]
    firsts: npt.NDArray[np.int64]  # first sample of each example, and the end
    place: npt.NDArray[np.int32]  # of each example: an index into `places`
    number: npt.NDArray[np.int64]  # of each example: its line; -1 if its origin does not end with a number
    places: tuple[str, ...]


class ExampleStoreBuilder:
    """Collects examples one by one and builds an `ExampleStore`."""

    def __init__(self, folder: Path | None = None, limit: int = SPILL) -> None:
        """`folder`: where temporary files are created, if needed; by default the system's temporary directory."""
        dtypes: dict[str, type[np.generic]] = dict.fromkeys(("starts", "firsts", "number"), np.int64)
        dtypes |= dict.fromkeys(("tokens", "counted", "place"), np.int32)
        dtypes |= dict.fromkeys(("label", "margin"), np.float64)
        dtypes |= {"mask": np.bool_, "targets": np.float32}
        self.columns = {name: GrowingArray(dtype, limit, folder) for name, dtype in dtypes.items()}
        self.places: dict[str, int] = {}
        self.count = self.samples = self.tokens = 0

    def add(self, example: Sequence[Sample]) -> None:
        columns = self.columns
        origin = example[0].origin
        found = NUMBER_AT_END.fullmatch(origin)
        text, number = (found.group(1), int(found.group(2))) if found else (origin, -1)
        columns["place"].add_one(self.places.setdefault(text, len(self.places)))
        columns["number"].add_one(number)
        columns["firsts"].add_one(self.samples)
        for sample in example:
            columns["starts"].add_one(self.tokens)
            columns["tokens"].add(sample.tokens)
            columns["mask"].add(sample.mask)
            if sample.targets is not None:
                columns["targets"].add(sample.targets)
            columns["counted"].add_one(int(np.count_nonzero(sample.mask)))
            columns["label"].add_one(sample.label)
            columns["margin"].add_one(sample.margin)
            self.tokens += len(sample)
        self.samples += len(example)
        self.count += 1

    def finish(self) -> ExampleStore:
        self.columns["starts"].add_one(self.tokens)
        self.columns["firsts"].add_one(self.samples)
        arrays: dict[str, Any] = {name: column.array() for name, column in self.columns.items()}
        assert len(arrays["targets"]) in (0, self.tokens), "some samples have targets and some have none"
        return ExampleStore(SampleArrays(**arrays, places=tuple(self.places)), np.arange(self.count))


class ExampleStore(Sequence[list[Sample]]):
    """Examples by number. The samples of an example are created at each access, unless `hold` was called."""

    def __init__(self, columns: SampleArrays, chosen: npt.NDArray[np.int64]) -> None:
        self.columns = columns
        self.chosen = chosen  # indices of these examples in the columns
        self._held: dict[int, list[Sample]] | None = None

    @classmethod
    def of(cls, examples: Iterable[Sequence[Sample]]) -> ExampleStore:
        """Build a store of given examples."""
        builder = ExampleStoreBuilder()
        for example in examples:
            builder.add(example)
        return builder.finish()

    def hold(self) -> None:
        """Keep the samples of an example from its first access on, with all that is written into them."""
        if self._held is None:
            self._held = {}

    def subset(self, indices: npt.ArrayLike) -> ExampleStore:
        """Return some of the examples in the given order; nothing is copied."""
        return ExampleStore(self.columns, self.chosen[np.asarray(indices, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> list[Sample]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[Sample]]: ...

    def __getitem__(self, index: int | slice) -> list[Sample] | list[list[Sample]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index = int(index) % len(self)
        if self._held is None:
            return self._make_samples(index)
        if index not in self._held:
            self._held[index] = self._make_samples(index)
        return self._held[index]

    def _make_samples(self, index: int) -> list[Sample]:
        columns, origin = self.columns, self.origin(index)
        samples = []
        for number in self._samples_of(index):
            start, end = int(columns.starts[number]), int(columns.starts[number + 1])
            samples.append(
                Sample(
                    tokens=columns.tokens[start:end],
                    mask=columns.mask[start:end],
                    targets=columns.targets[start:end] if len(columns.targets) else None,
                    label=float(columns.label[number]),
                    margin=float(columns.margin[number]),
                    group=index,
                    origin=origin,
                )
            )
        return samples

    def _samples_of(self, index: int) -> range:
        at = self.chosen[index]
        return range(self.columns.firsts[at], self.columns.firsts[at + 1])

    def origin(self, index: int) -> str:
        """Return `file:line` of an example."""
        at = self.chosen[index]
        number = int(self.columns.number[at])
        return self.columns.places[self.columns.place[at]] + (str(number) if number >= 0 else "")

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each sample."""
        return np.diff(self.columns.starts)[self._samples()]

    def counted(self) -> int:
        """Return the number of tokens that are trained on."""
        return int(self.columns.counted[self._samples()].sum(dtype=np.int64))

    def _samples(self) -> npt.NDArray[np.int64]:
        """Return the numbers of all samples of these examples."""
        first, size = self.columns.firsts[self.chosen], np.diff(self.columns.firsts)[self.chosen]
        before = np.repeat(np.cumsum(size) - size, size)
        return np.repeat(first, size) + np.arange(int(size.sum())) - before

    def fingerprint(self) -> str:
        """Return a digest that changes with any token, mask, target, label or margin, and with their order."""
        digest = hashlib.sha256()
        for part in self._parts():
            digest.update(part)
        return digest.hexdigest()

    def _parts(self) -> Iterator[Any]:
        columns = self.columns
        for index in range(len(self)):
            samples = self._samples_of(index)
            yield struct.pack("<q", len(samples))
            for number in samples:
                start, end = int(columns.starts[number]), int(columns.starts[number + 1])
                targets = columns.targets[start:end].tobytes()
                yield struct.pack("<qqdd", end - start, len(targets), columns.label[number], columns.margin[number])
                yield columns.tokens[start:end].tobytes()
                yield columns.mask[start:end].tobytes()
                yield targets
