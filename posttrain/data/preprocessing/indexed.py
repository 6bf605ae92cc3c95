"""Read and write Megatron's indexed format: `.bin` holds the concatenated numbers, `.idx` the start of each sequence.

    .idx   magic, version, type code | sequences S, document edges D | S lengths int32 | S byte offsets int64
           | D edges int64, from 0 to S | optionally S modes int8
    .bin   the sequences one after the other, in the type that the code names

All numbers are little-endian. A file with its final name is complete: it is written under a temporary name, synced to
disk and renamed, the `.idx` last.
"""

from __future__ import annotations

import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError
from posttrain.core.files import sync_folder

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, document edges
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
DTYPES = {code: np.dtype(name) for code, name in TYPES.items()}
CODES = {dtype: code for code, dtype in DTYPES.items()}
UNFINISHED = ".unfinished"  # suffix of a file that is being written

Numbers = npt.NDArray[Any]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's token type: two bytes per token if they suffice."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedWriter:
    """Appends sequences; only their lengths stay in memory. The files get their final names in `finish`."""

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike, with_modes: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in CODES, f"the indexed format has no code for {self.dtype}"
        self.lengths = array("i")
        self.edges = array("q", [0])
        self.modes: array[int] | None = array("b") if with_modes else None
        self.bin: BinaryIO = Path(f"{bin_path(prefix)}{UNFINISHED}").open("wb")  # noqa: SIM115  closed by finish or discard

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
        elif not self.bin.closed:
            self.finish()

    def add(self, sequence: npt.ArrayLike, mode: int = 0) -> None:
        """Add a sequence that is a document of its own."""
        self.add_sequence(sequence, mode)
        self.end_document()

    def add_sequence(self, sequence: npt.ArrayLike, mode: int = 0) -> None:
        """Add a sequence to the current document, which `end_document` ends."""
        numbers = self._fitting(np.asarray(sequence))
        self.bin.write(numbers.tobytes())
        self.lengths.append(len(numbers))
        if self.modes is not None:
            self.modes.append(mode)

    def end_document(self) -> None:
        self.edges.append(len(self.lengths))

    def add_all(self, numbers: Numbers, lengths: Numbers, documents: Numbers) -> None:
        """Add many concatenated sequences; `documents` has the number of sequences of each document."""
        assert self.modes is None, "modes are given one by one"
        assert len(numbers) == lengths.sum() and len(lengths) == documents.sum(), "the lengths do not add up"
        self.bin.write(self._fitting(numbers).tobytes())
        first = len(self.lengths)
        self.lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.edges.frombytes((first + np.cumsum(documents, dtype=np.int64)).tobytes())

    def add_index(self, prefix: str | Path) -> None:
        """Append all sequences of another indexed file."""
        other = IndexedReader(prefix)
        if other.dtype != self.dtype or (len(other) and (other.modes is None) != (self.modes is None)):
            kinds = [f"{file.dtype}, with{'out' * (file.modes is None)} modes" for file in (other, self)]
            raise DataError(f"{idx_path(prefix)}: has {kinds[0]}; it cannot be added to {kinds[1]}")
        first = len(self.lengths)
        self.lengths.frombytes(other.lengths.tobytes())
        self.edges.frombytes((other.edges[1:] + first).tobytes())
        if self.modes is not None and other.modes is not None:
            self.modes.frombytes(other.modes.tobytes())
        if other.is_dense:
            with bin_path(prefix).open("rb") as source:
                shutil.copyfileobj(source, self.bin, 2**20)
        else:
            for sequence in other:
                self.bin.write(sequence.tobytes())

    def finish(self) -> None:
        """Sync both files to disk, then rename them, the `.idx` last."""
        self.write_index()
        self.publish()

    def write_index(self) -> None:
        """Write the `.idx`; both files are then complete, still under their temporary names."""
        close_safely(self.bin)
        lengths = np.frombuffer(self.lengths, dtype="<i4")
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        offsets *= self.dtype.itemsize
        with Path(f"{idx_path(self.prefix)}{UNFINISHED}").open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self.edges)))
            for numbers in (lengths, offsets, np.frombuffer(self.edges, dtype="<i8")):
                file.write(numbers.tobytes())
            if self.modes is not None:
                file.write(self.modes.tobytes())
            close_safely(file)

    def publish(self) -> None:
        """Rename the files; files with these names are removed first, so that old and new never mix."""
        unpublish(self.prefix)
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            Path(f"{path}{UNFINISHED}").replace(path)
        sync_folder(bin_path(self.prefix).parent)

    def discard(self) -> None:
        self.bin.close()
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            Path(f"{path}{UNFINISHED}").unlink(missing_ok=True)

    def _fitting(self, numbers: Numbers) -> Numbers:
        """Convert to the type of the file; ValueError if a value would change."""
        if numbers.ndim != 1:
            raise ValueError(f"{self.prefix}: a sequence must have one dimension, not {numbers.ndim}")
        if not numbers.size or np.can_cast(numbers.dtype, self.dtype, "safe"):
            return numbers.astype(self.dtype, copy=False)
        converted = numbers.astype(self.dtype)
        if (converted != numbers).any():
            raise ValueError(
                f"{self.prefix}: values from {numbers.min()} to {numbers.max()} do not fit into {self.dtype}"
            )
        return converted


class IndexedReader(Sequence[Numbers]):
    """Gives access to the memory-mapped sequences of an indexed file: `reader[i]` is a view, in constant time."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.dtype, self.lengths, self.offsets, self.edges, self.modes = _read_index(idx_path(prefix))
        # A plain array: slices of a memmap are slow.
        self.numbers = np.asarray(_read_numbers(bin_path(prefix), self.dtype)).view(np.ndarray)
        ends = self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize
        needed, there = int(ends.max(initial=0)), bin_path(prefix).stat().st_size
        if needed > there:
            raise DataError(
                f"{bin_path(prefix)}: {there} bytes, but {idx_path(prefix)} needs {needed}: is it truncated?"
            )
        self.starts = self.offsets // self.dtype.itemsize
        self.is_dense = there == needed == int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self.starts[index]
        return self.numbers[start : start + self.lengths[index]]


def _read_index(path: Path) -> tuple[np.dtype[Any], Numbers, Numbers, Numbers, Numbers | None]:
    try:
        raw: Numbers = np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) < HEADER.size or raw[:9].tobytes() != MAGIC:
        raise DataError(f"{path}: not an index file of Megatron's indexed format")
    _, version, code, sequences, edges = HEADER.unpack(raw[: HEADER.size].tobytes())
    if version != VERSION or code not in DTYPES:
        raise DataError(f"{path}: version {version} with type code {code}; supported is version 1 with codes 1 to 8")
    sizes = (4 * sequences, 8 * sequences, 8 * edges)
    with_modes = len(raw) == HEADER.size + sum(sizes) + sequences
    if len(raw) != HEADER.size + sum(sizes) and not with_modes:
        raise DataError(
            f"{path}: {len(raw)} bytes do not match {sequences} sequences and {edges} edges: is it truncated?"
        )
    lengths, offsets, document_edges, modes = (
        part.view(kind)
        for part, kind in zip(np.split(raw[HEADER.size :], np.cumsum(sizes)), ("<i4", "<i8", "<i8", "i1"), strict=True)
    )
    dtype = DTYPES[code]
    in_order = not len(document_edges) or (document_edges[0] == 0 and document_edges[-1] <= sequences)
    if (
        lengths.min(initial=0) < 0
        or offsets.min(initial=0) < 0
        or (offsets % dtype.itemsize).any()
        or not in_order
        or (np.diff(document_edges) < 0).any()
    ):
        raise DataError(f"{path}: damaged: impossible lengths, offsets or document edges")
    return dtype, lengths, offsets, document_edges, modes if with_modes and sequences else None


def _read_numbers(path: Path, dtype: np.dtype[Any]) -> Numbers:
    try:
        size = path.stat().st_size // dtype.itemsize
        return np.memmap(path, dtype=dtype, mode="r", shape=(size,)) if size else np.zeros(0, dtype=dtype)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def unpublish(prefix: str | Path) -> None:
    """Remove the files with this prefix, the `.idx` first: without it the `.bin` is not read."""
    for path in (idx_path(prefix), bin_path(prefix)):
        path.unlink(missing_ok=True)


def close_safely(file: BinaryIO) -> None:
    """Flush and fsync a file, then close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
