"""Tensor files read and written by offset: safetensors, and Megatron's .pt. The only file that touches pickle.

Safe because torch's restricted unpickler (weights_only) makes nothing but tensors, plain containers and the classes
listed here; anything else in a file is refused by name and never called. The tensors' bytes are not read by it at all:
it tells where they lie, and they are read from there, so that no more than one tensor is in memory.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from posttrain.core.errors import CheckpointError

NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CODES = {dtype: name for name, dtype in NAMES.items()}
LONGEST_HEADER = 100_000_000
OWN_PAGES = 1 << 20
CHUNK = 1 << 30  # the kernel moves at most 2 GiB at once

# Found in Megatron's files beside tensors: its arguments, and the state of numpy's generator. None of them runs code.
ALLOWED: list[Any] = [
    argparse.Namespace,
    SimpleNamespace,
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Rooms:
    """Buffers that are used again: getting fresh pages from the system costs as much as filling them.

    They lie outside malloc's heap, which would grow with the model; `limit` bytes at most are kept for later.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.lock = limit, threading.Lock()
        self.free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Bytes [size] of any content."""
        if size < OWN_PAGES:
            return torch.empty(size, dtype=torch.uint8)
        with self.lock:
            fitting = [n for n, buffer in enumerate(self.free) if size <= buffer.numel() <= 2 * size]
            if fitting:
                return self.free.pop(min(fitting, key=lambda n: self.free[n].numel()))[:size]
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Whoever took it, or a view of it, must not use it any longer."""
        size = tensor.untyped_storage().nbytes()
        if size < OWN_PAGES:
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (size,))
        with self.lock:
            self.free.append(whole)
            while sum(buffer.numel() for buffer in self.free) > self.limit:
                self.free.pop(0)


class TensorFile:
    """A file, the tensors in it and whatever else it says."""

    def __init__(self, path: Path, entries: dict[str, Entry], other: dict[str, Any], mode: int = os.O_RDONLY) -> None:
        self.path, self.entries, self.other = path, entries, other
        self.handle = os.open(path, mode)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    def expect(self, name: str) -> None:
        """Let the disk fetch a tensor that will be read soon."""
        entry = self.entries[name]
        os.posix_fadvise(self.handle, entry.offset, entry.size, os.POSIX_FADV_WILLNEED)

    def read(self, name: str, rooms: Rooms | None = None) -> torch.Tensor:
        """A tensor, as bytes [size]."""
        entry = self.entries[name]
        data = rooms.take(entry.size) if rooms else torch.empty(entry.size, dtype=torch.uint8)
        view, done = memoryview(data.numpy()), 0
        while done < entry.size:
            count = os.preadv(self.handle, [view[done : done + CHUNK]], entry.offset + done)
            if not count:
                raise CheckpointError(f"{self.path}: ends inside the tensor {name}; copy the file again")
            done += count
        return data

    def write(self, name: str, data: torch.Tensor) -> None:
        """Fill a tensor's place with these bytes."""
        entry = self.entries[name]
        assert data.numel() == entry.size, name
        view, done = memoryview(data.numpy()), 0
        while done < entry.size:
            done += os.pwrite(self.handle, view[done : done + CHUNK], entry.offset + done)

    def flush(self) -> None:
        """Bring what was written until now to the disk, and its pages back: nobody reads them soon."""
        os.fsync(self.handle)
        os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def seal(self) -> None:
        """Bring it to the disk."""
        self.flush()
        self.close()


# safetensors


def open_safetensors(path: Path) -> TensorFile:
    """Read the header and believe nothing of it that the file's size does not bear out."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise CheckpointError(f"{path}: truncated or no safetensors file: its header does not fit into it")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries = {name: entry_of(values, 8 + length) for name, values in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: its header cannot be read ({error})") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset != end:
            raise CheckpointError(f"{path}: damaged: the tensor {name} does not begin where the one before ends")
        end += entry.size
    if end != size:
        raise CheckpointError(f"{path}: truncated or damaged: {size} bytes, its header describes {end}")
    return TensorFile(path, entries, {"metadata": metadata})


def entry_of(values: dict[str, Any], start: int) -> Entry:
    begin, end = values["data_offsets"]
    shape = tuple(values["shape"])
    if values["dtype"] not in NAMES:
        raise ValueError(f"dtype {values['dtype']} is not known here")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("sizes that are no numbers")
    entry = Entry(NAMES[values["dtype"]], shape, start + begin)
    if entry.size != end - begin:
        raise ValueError(f"{shape} of {values['dtype']} in {end - begin} bytes")
    return entry


def create_safetensors(path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> TensorFile:
    """A file with room for these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    entries = {
        name: Entry(dtype, shape, 8 + len(text) + header[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return TensorFile(path, entries, {}, os.O_RDWR)


# Megatron's .pt


def open_pt(path: Path) -> TensorFile:
    """Where the tensors lie, and everything else as plain values. Nested dicts become names with `/`."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            content = torch.load(path, map_location="meta", weights_only=True)  # bytes stay where they are
            if not all(offset_of(value) for value in tensors_in(content)):  # a torch that does not say where
                with FakeTensorMode():
                    content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        unsafe = "Unsupported global" in str(error) or "weights_only" in str(error) or "Weights only" in str(error)
        what = "holds objects other than tensors and plain values; it is not loaded" if unsafe else "cannot be read"
        named = [line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line]
        raise CheckpointError(f"{path}: {what}: {(named or [reason])[0].strip()[:300]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no dict; is it a Megatron checkpoint?")
    size, entries, other = path.stat().st_size, {}, {}
    for name, value in flat(content):
        if not isinstance(value, torch.Tensor):
            other[name] = value
            continue
        offset = offset_of(value)
        if offset is None or not value.is_contiguous():
            raise CheckpointError(f"{path}: {name} does not lie in one piece; save it again with .contiguous()")
        start = offset + value.storage_offset() * value.dtype.itemsize
        entries[name] = Entry(value.dtype, tuple(value.shape), start)
        if start + entries[name].size > size:
            raise CheckpointError(f"{path}: truncated: {name} would lie beyond its end")
    return TensorFile(path, entries, other)


def offset_of(tensor: torch.Tensor) -> int | None:
    """Where the tensor's storage begins in the file it was loaded from."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    return (value for _, value in flat(content if isinstance(content, dict) else {}) if isinstance(value, torch.Tensor))


def flat(content: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


_saving = threading.Lock()  # torch's switch for check sums is global


def create_pt(path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], other: dict[str, Any]) -> TensorFile:
    """A file as torch.save writes it, with room for these tensors; without zip's check sums, as the data follows."""
    content: dict[str, Any] = {**other, "args": argparse.Namespace(**other["args"])}
    with FakeTensorMode():
        for name, (dtype, shape) in tensors.items():
            place = content
            *folders, last = name.split("/")
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = torch.empty(shape, dtype=dtype)
    with _saving:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(content, path)
        finally:
            torch.serialization.set_crc32_options(before)
    entries = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = {info.filename.split("/", 1)[1]: info for info in archive.infolist()}
        for number, name in enumerate(name for name, value in flat(content) if isinstance(value, torch.Tensor)):
            dtype, shape = tensors[name]
            record = records[f"data/{number}"]  # torch numbers them in the order of the dict
            file.seek(record.header_offset + 26)  # of the lengths of name and padding, which precede the data
            lengths = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
            entries[name] = Entry(dtype, shape, record.header_offset + 30 + lengths)
            assert record.file_size == entries[name].size, name
    assert entries.keys() == tensors.keys()
    return TensorFile(path, entries, {}, os.O_RDWR)
