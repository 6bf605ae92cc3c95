"""Read and write tensor files by offset: safetensors, and Megatron's .pt. The only module that handles pickle.

Safe because torch's restricted unpickler (weights_only) creates nothing but tensors, plain containers and the classes
listed here; anything else in a file is refused by name and never called. The unpickler does not read the tensors'
bytes: it returns their offsets, and one tensor at a time is read from there.
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

SAFETENSORS_DTYPES = {
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
SAFETENSORS_CODES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
MIN_MAPPED_BYTES = 1 << 20  # smaller buffers come from malloc
CHUNK = 1 << 30  # the kernel transfers at most 2 GiB per call

# Classes in Megatron's files beside tensors: its arguments and the state of numpy's generator. None of them runs code.
ALLOWED_CLASSES: list[Any] = [
    argparse.Namespace,
    SimpleNamespace,
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
]


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Type, shape and byte offset of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


class BufferPool:
    """Reuses buffers: getting fresh pages from the system costs as much as filling them.

    The buffers are mapped outside malloc's heap, which would grow with the model; at most `limit` free bytes are kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.lock = limit, threading.Lock()
        self.free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of `size` bytes with arbitrary content."""
        if size < MIN_MAPPED_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        with self.lock:
            fitting = [n for n, buffer in enumerate(self.free) if size <= buffer.numel() <= 2 * size]
            if fitting:
                return self.free.pop(min(fitting, key=lambda n: self.free[n].numel()))[:size]
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Return a buffer, or a view of one, to the pool; the caller must not use it afterwards."""
        size = tensor.untyped_storage().nbytes()
        if size < MIN_MAPPED_BYTES:
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (size,))
        with self.lock:
            self.free.append(whole)
            while sum(buffer.numel() for buffer in self.free) > self.limit:
                self.free.pop(0)


class TensorFile:
    """An open file, the locations of its tensors, and its other values."""

    def __init__(
        self, path: Path, locations: dict[str, TensorLocation], other: dict[str, Any], mode: int = os.O_RDONLY
    ) -> None:
        self.path, self.tensors, self.other = path, locations, other
        self.handle = os.open(path, mode)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    def prefetch(self, name: str) -> None:
        """Ask the kernel to read a tensor ahead."""
        location = self.tensors[name]
        os.posix_fadvise(self.handle, location.offset, location.size, os.POSIX_FADV_WILLNEED)

    def read(self, name: str, buffers: BufferPool | None = None) -> torch.Tensor:
        """Read a tensor as bytes [size]."""
        location = self.tensors[name]
        data = buffers.take(location.size) if buffers else torch.empty(location.size, dtype=torch.uint8)
        view, done = memoryview(data.numpy()), 0
        while done < location.size:
            count = os.preadv(self.handle, [view[done : done + CHUNK]], location.offset + done)
            if not count:
                raise CheckpointError(f"{self.path}: truncated inside tensor {name}; copy the file again")
            done += count
        return data

    def write(self, name: str, data: torch.Tensor) -> None:
        """Write the bytes of a tensor to its place."""
        location = self.tensors[name]
        assert data.numel() == location.size, name
        view, done = memoryview(data.numpy()), 0
        while done < location.size:
            done += os.pwrite(self.handle, view[done : done + CHUNK], location.offset + done)

    def flush(self) -> None:
        """Sync what was written so far to disk and drop its pages from the cache: they are not read again soon."""
        os.fsync(self.handle)
        os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Sync the file to disk and close it."""
        self.flush()
        self.close()


# safetensors


def open_safetensors(path: Path) -> TensorFile:
    """Open a safetensors file; check its header against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: truncated, or not a safetensors file: its header is longer than the file")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        locations = {name: read_tensor_location(values, 8 + length) for name, values in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: the header cannot be read ({error})") from error
    end = 8 + length
    for name, location in sorted(locations.items(), key=lambda item: (item[1].offset, item[1].size)):
        if location.offset != end:
            raise CheckpointError(f"{path}: damaged: tensor {name} does not begin where the previous one ends")
        end += location.size
    if end != size:
        raise CheckpointError(f"{path}: truncated or damaged: the file has {size} bytes, its header describes {end}")
    return TensorFile(path, locations, {"metadata": metadata})


def read_tensor_location(values: dict[str, Any], start: int) -> TensorLocation:
    begin, end = values["data_offsets"]
    shape = tuple(values["shape"])
    if values["dtype"] not in SAFETENSORS_DTYPES:
        raise ValueError(f"dtype {values['dtype']} is not supported")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("sizes must be non-negative integers")
    location = TensorLocation(SAFETENSORS_DTYPES[values["dtype"]], shape, start + begin)
    if location.size != end - begin:
        raise ValueError(f"{shape} of {values['dtype']} in {end - begin} bytes")
    return location


def create_safetensors(path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> TensorFile:
    """Create a safetensors file with space for these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    locations = {
        name: TensorLocation(dtype, shape, 8 + len(text) + header[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return TensorFile(path, locations, {}, os.O_RDWR)


# Megatron's .pt


def open_pt(path: Path) -> TensorFile:
    """Open a .pt file: the locations of its tensors, other values as they are. Nested dicts become names with `/`."""
    try:
        with torch.serialization.safe_globals(ALLOWED_CLASSES):
            content = torch.load(path, map_location="meta", weights_only=True)  # does not read the tensors' bytes
            # Some versions of torch do not record offsets on meta tensors.
            if not all(offset_of(value) for value in tensor_values(content)):
                with FakeTensorMode():
                    content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        unsafe = "Unsupported global" in str(error) or "weights_only" in str(error) or "Weights only" in str(error)
        what = "contains objects other than tensors and plain values, and is not loaded" if unsafe else "cannot be read"
        named = [line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line]
        raise CheckpointError(f"{path}: {what}: {(named or [reason])[0].strip()[:300]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: does not contain a dict; is it a Megatron checkpoint?")
    size, locations, other = path.stat().st_size, {}, {}
    for name, value in flat_items(content):
        if not isinstance(value, torch.Tensor):
            other[name] = value
            continue
        offset = offset_of(value)
        if offset is None or not value.is_contiguous():
            raise CheckpointError(f"{path}: tensor {name} is not contiguous; save it again with .contiguous()")
        start = offset + value.storage_offset() * value.dtype.itemsize
        locations[name] = TensorLocation(value.dtype, tuple(value.shape), start)
        if start + locations[name].size > size:
            raise CheckpointError(f"{path}: truncated: tensor {name} would end after the end of the file")
    return TensorFile(path, locations, other)


def offset_of(tensor: torch.Tensor) -> int | None:
    """Return where the tensor's storage begins in the file it was loaded from."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def tensor_values(content: Any) -> Iterator[torch.Tensor]:
    values = flat_items(content if isinstance(content, dict) else {})
    return (value for _, value in values if isinstance(value, torch.Tensor))


def flat_items(content: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flat_items(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


_save_lock = threading.Lock()  # torch's checksum option is global


def create_pt(path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], other: dict[str, Any]) -> TensorFile:
    """Create a file as torch.save does, with space for these tensors; without zip checksums: the data comes later."""
    content: dict[str, Any] = {**other, "args": argparse.Namespace(**other["args"])}
    with FakeTensorMode():
        for name, (dtype, shape) in tensors.items():
            place = content
            *folders, last = name.split("/")
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = torch.empty(shape, dtype=dtype)
    with _save_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(content, path)
        finally:
            torch.serialization.set_crc32_options(before)
    locations = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = {info.filename.split("/", 1)[1]: info for info in archive.infolist()}
        for number, name in enumerate(name for name, value in flat_items(content) if isinstance(value, torch.Tensor)):
            dtype, shape = tensors[name]
            record = records[f"data/{number}"]  # torch numbers them in the order of the dict
            file.seek(record.header_offset + 26)  # the lengths of the name and of the padding before the data
            lengths = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
            locations[name] = TensorLocation(dtype, shape, record.header_offset + 30 + lengths)
            assert record.file_size == locations[name].size, name
    assert locations.keys() == tensors.keys()
    return TensorFile(path, locations, {}, os.O_RDWR)
