"""Messages between the controller and its workers, over a connection of multiprocessing between our own processes.

Samples and arrays are most of what is sent. They travel as a few long arrays, as raw bytes after the message proper, so
that a batch of thousands costs a copy and not an object each.
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

from posttrain.core.types import STREAMS, Sample

ARRAYS = ("tokens", "mask", *STREAMS)
OTHERS = tuple(name for name in Sample.__slots__ if name not in ARRAYS)

Buffers = list[npt.NDArray[Any]]


@dataclass(slots=True)
class Header:
    """What is known of a message before it is read."""

    kind: str  # call, ping; answer, error, pong
    number: int  # of the call that it belongs to
    side: bool = False  # called from a second thread: may run beside the others
    buffers: list[tuple[str, int]] = field(default_factory=list)  # type and length of each array that follows


@dataclass(slots=True)
class SamplesAside:
    """A list of samples whose arrays come as buffers."""

    lengths: list[int]
    arrays: dict[str, tuple[int, list[int] | None]]  # name -> its buffer, and which samples have it (None: all)
    others: dict[str, list[Any]]


@dataclass(slots=True)
class ArraysAside:
    """A list of flat arrays of one type, as one buffer."""

    lengths: list[int]
    buffer: int


@dataclass(slots=True)
class Unreadable:
    """A body of which something could not be made here, as an object of a class that cannot be imported."""

    reason: str


def send(connection: Connection, kind: str, number: int, body: Any, *, side: bool = False) -> None:
    """Send a whole message; the body comes first, so that one that cannot be sent raises before anything is."""
    buffers: Buffers = []
    connection.send(lightened(body, buffers))
    connection.send(Header(kind, number, side, [(array.dtype.str, len(array)) for array in buffers]))
    for array in buffers:
        write(connection, array)


def receive(connection: Connection) -> tuple[Header, Any]:
    """The next message; EOFError or OSError where there is none."""
    try:
        body = connection.recv()
    except Exception as error:  # read to its end, but what it speaks of is not known here
        if isinstance(error, EOFError | OSError):
            raise
        body = Unreadable(f"{type(error).__name__}: {error}")
    head = connection.recv()
    buffers: Buffers = []
    for kind, length in head.buffers:
        buffers.append(np.empty(length, dtype=kind))
        read(connection, buffers[-1])
    return head, restored(body, buffers)


def write(connection: Connection, array: npt.NDArray[Any]) -> None:
    """Its bytes as they are; the connection's own way would copy them twice."""
    left = array.view(np.uint8).data
    while left:
        left = left[os.write(connection.fileno(), left) :]


def read(connection: Connection, array: npt.NDArray[Any]) -> None:
    left = array.view(np.uint8).data
    while left:
        count = os.readv(connection.fileno(), [left])
        if not count:
            raise EOFError
        left = left[count:]


def lightened(value: Any, buffers: Buffers) -> Any:
    """The same with samples and arrays moved into buffers."""
    if type(value) is tuple:
        return tuple(lightened(part, buffers) for part in value)
    if type(value) is dict:
        return {key: lightened(part, buffers) for key, part in value.items()}
    if type(value) is list and value:
        if all(type(part) is Sample for part in value):
            return samples_aside(value, buffers)
        if all(type(part) is np.ndarray and part.ndim == 1 and part.dtype.kind in "biuf" for part in value):
            if len({part.dtype for part in value}) == 1:
                return ArraysAside([len(part) for part in value], keep(value, buffers))
        elif type(value[0]) in (tuple, list, dict):
            return [lightened(part, buffers) for part in value]
    return value


def restored(value: Any, buffers: Buffers) -> Any:
    if type(value) is tuple:
        return tuple(restored(part, buffers) for part in value)
    if type(value) is dict:
        return {key: restored(part, buffers) for key, part in value.items()}
    if type(value) is list and value and type(value[0]) in (tuple, list, dict, SamplesAside, ArraysAside):
        return [restored(part, buffers) for part in value]
    if type(value) is SamplesAside:
        return samples_again(value, buffers)
    if type(value) is ArraysAside:
        return cut(buffers[value.buffer], value.lengths)
    return value


def samples_aside(samples: list[Sample], buffers: Buffers) -> SamplesAside:
    arrays: dict[str, tuple[int, list[int] | None]] = {}
    for name in ARRAYS:
        streams = [getattr(sample, name) for sample in samples]
        having = [place for place, stream in enumerate(streams) if stream is not None]
        if having:
            place = keep([streams[i] for i in having], buffers)
            arrays[name] = (place, None if len(having) == len(samples) else having)
    others = {name: [getattr(sample, name) for sample in samples] for name in OTHERS}
    return SamplesAside([len(sample) for sample in samples], arrays, others)


def samples_again(aside: SamplesAside, buffers: Buffers) -> list[Sample]:
    count = len(aside.lengths)
    found: dict[str, list[Any]] = dict(aside.others)
    for name, (buffer, having) in aside.arrays.items():
        places = range(count) if having is None else having
        streams: list[Any] = [None] * count
        for place, stream in zip(places, cut(buffers[buffer], [aside.lengths[i] for i in places]), strict=True):
            streams[place] = stream
        found[name] = streams
    names = list(found)
    return [Sample(**dict(zip(names, values, strict=True))) for values in zip(*found.values(), strict=True)]


def keep(arrays: Buffers, buffers: Buffers) -> int:
    """One buffer of them all; its place."""
    buffers.append(np.concatenate(arrays))
    return len(buffers) - 1


def cut(whole: npt.NDArray[Any], lengths: list[int]) -> Buffers:
    return np.split(whole, np.cumsum(lengths)[:-1]) if lengths else []


def bound(connection: Connection, seconds: float) -> None:
    """No read or write of a part of a message takes longer: the other end may have been stopped in the middle of it."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
