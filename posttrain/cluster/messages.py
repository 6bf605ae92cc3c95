"""Messages between the controller and its workers, over a multiprocessing connection between our own processes.

Most of the data are samples and arrays. Their numbers travel as a few long arrays, as raw bytes after the message
itself, so that a batch of thousands of samples costs one copy and not thousands of pickled objects.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.core.types import LISTED, STREAMS, Sample

ARRAY_FIELDS = ("tokens", "mask", *STREAMS, *LISTED, "experts")
OTHER_FIELDS = tuple(name for name in Sample.__slots__ if name not in ARRAY_FIELDS)

Buffers = list[npt.NDArray[Any]]


@dataclass(slots=True)
class Header:
    """Describes a message."""

    kind: str  # to a worker: call, ping, log, stacks, end; to the controller: result, error, pong, beat
    number: int  # of the call that it belongs to
    parallel: bool = False  # may run in parallel with other calls; see worker.py
    buffers: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # dtype and shape of arrays that follow


@dataclass(slots=True)
class PackedSamples:
    """A list of samples whose arrays are in the buffers."""

    lengths: list[int]
    arrays: dict[str, tuple[int, list[int] | None]]  # field -> (its buffer, the samples that have it; None: all)
    others: dict[str, list[Any]]


@dataclass(slots=True)
class PackedArrays:
    """A list of one-dimensional arrays of one dtype, concatenated in one buffer."""

    lengths: list[int]
    buffer: int


@dataclass(slots=True)
class Unreadable:
    """Replaces a body that cannot be unpickled in this process, for instance because a class cannot be imported."""

    reason: str


def send(connection: Connection, kind: str, number: int, body: Any, *, parallel: bool = False) -> None:
    """Send a message. The body goes first, so that one that cannot be pickled raises before anything is sent."""
    buffers: Buffers = []
    connection.send(pack(body, buffers))
    connection.send(Header(kind, number, parallel, [(array.dtype.str, array.shape) for array in buffers]))
    for array in buffers:
        write_array(connection, array)


def receive(connection: Connection) -> tuple[Header, Any]:
    """Read the next message; raises EOFError or OSError if the connection is closed."""
    try:
        body = connection.recv()
    except Exception as error:  # the message was read to its end, but its content cannot be rebuilt here
        if isinstance(error, EOFError | OSError):
            raise
        body = Unreadable(f"{type(error).__name__}: {error}")
    header = connection.recv()
    buffers: Buffers = []
    for dtype, shape in header.buffers:
        buffers.append(np.empty(shape, dtype=dtype))
        read_array(connection, buffers[-1])
    return header, unpack(body, buffers)


def write_array(connection: Connection, array: npt.NDArray[Any]) -> None:
    """Write the array's bytes directly: Connection.send_bytes would copy them twice."""
    left = array.reshape(-1).view(np.uint8).data
    while left:
        left = left[os.write(connection.fileno(), left) :]


def read_array(connection: Connection, array: npt.NDArray[Any]) -> None:
    """Fill the array with bytes from the connection."""
    left = array.reshape(-1).view(np.uint8).data
    while left:
        count = os.readv(connection.fileno(), [left])
        if not count:
            raise EOFError
        left = left[count:]


def pack(value: Any, buffers: Buffers) -> Any:
    """Replace lists of samples and of arrays in a value; their numbers are appended to the buffers."""
    if type(value) is tuple:
        return tuple(pack(part, buffers) for part in value)
    if type(value) is dict:
        return {key: pack(part, buffers) for key, part in value.items()}
    if type(value) is list and value:
        if all(type(part) is Sample for part in value):
            return pack_samples(value, buffers)
        if all(type(part) is np.ndarray and part.ndim == 1 and part.dtype.kind in "biuf" for part in value):
            if len({part.dtype for part in value}) == 1:
                return PackedArrays([len(part) for part in value], add_buffer(value, buffers))
        elif type(value[0]) in (tuple, list, dict):
            return [pack(part, buffers) for part in value]
    return value


def unpack(value: Any, buffers: Buffers) -> Any:
    """Undo `pack`."""
    if type(value) is tuple:
        return tuple(unpack(part, buffers) for part in value)
    if type(value) is dict:
        return {key: unpack(part, buffers) for key, part in value.items()}
    if type(value) is list and value and type(value[0]) in (tuple, list, dict, PackedSamples, PackedArrays):
        return [unpack(part, buffers) for part in value]
    if type(value) is PackedSamples:
        return unpack_samples(value, buffers)
    if type(value) is PackedArrays:
        return split_array(buffers[value.buffer], value.lengths)
    return value


def pack_samples(samples: list[Sample], buffers: Buffers) -> PackedSamples:
    arrays: dict[str, tuple[int, list[int] | None]] = {}
    for name in ARRAY_FIELDS:
        streams = [getattr(sample, name) for sample in samples]
        present = [index for index, stream in enumerate(streams) if stream is not None]
        if present:
            buffer = add_buffer([streams[i] for i in present], buffers)
            arrays[name] = (buffer, None if len(present) == len(samples) else present)
    others = {name: [getattr(sample, name) for sample in samples] for name in OTHER_FIELDS}
    return PackedSamples([len(sample) for sample in samples], arrays, others)


def unpack_samples(packed: PackedSamples, buffers: Buffers) -> list[Sample]:
    count = len(packed.lengths)
    fields: dict[str, list[Any]] = dict(packed.others)
    for name, (buffer, present) in packed.arrays.items():
        indices = range(count) if present is None else present
        streams: list[Any] = [None] * count
        for index, stream in zip(
            indices, split_array(buffers[buffer], [packed.lengths[i] for i in indices]), strict=True
        ):
            streams[index] = stream
        fields[name] = streams
    names = list(fields)
    return [Sample(**dict(zip(names, values, strict=True))) for values in zip(*fields.values(), strict=True)]


def add_buffer(arrays: Buffers, buffers: Buffers) -> int:
    """Concatenate the arrays into a new buffer; returns its index."""
    buffers.append(np.concatenate(arrays))
    return len(buffers) - 1


def split_array(whole: npt.NDArray[Any], lengths: list[int]) -> Buffers:
    return np.split(whole, np.cumsum(lengths)[:-1]) if lengths else []


def set_timeout(connection: Connection, seconds: float) -> None:
    """Limit each read and write: the other process may have been stopped in the middle of a message."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
