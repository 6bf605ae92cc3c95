"""Weights on their way from the learners to rollout workers on devices of their own: a broadcast, no file written.

The group is apart from torch's default one, so that it can be made anew when a rollout worker is replaced. Tensors go
in buckets, each announced by the names and shapes in it, so that the receiver need not know the sender's layout.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from posttrain.core.devices import default_device
from posttrain.core.types import Floats

BUCKET_BYTES = 256 * 2**20
RENDEZVOUS_LIMIT = timedelta(seconds=60)  # all are there and idle; one that is lost is noticed by the controller
ALIGNED = 16  # bytes: every type may begin at such a place

Weights = Iterable[tuple[str, torch.Tensor]]
Entry = tuple[str, str, list[int]]  # name, type, shape


@dataclass(slots=True, frozen=True)
class Rendezvous:
    """A group of one sender, rank 0, and the receivers."""

    size: int
    store: tuple[str, int]
    name: str
    seconds: float  # that an exchange may take
    backend: str = ""  # gloo or nccl; empty: as the device asks


@dataclass(slots=True, frozen=True)
class TransferResult:
    """What a transfer came to; `failure` says why it was not completed."""

    bytes: int
    seconds: float
    failure: str = ""
    probe: list[Floats] = field(default_factory=list)  # see learner.Learner.probe_logprobs


class Transfer:
    """One process's place in such a group."""

    def __init__(self, meeting: Rendezvous, rank: int) -> None:
        self.device = default_device()
        backend = meeting.backend or ("nccl" if self.device.type == "cuda" else "gloo")
        self.staging = self.device if backend == "nccl" else torch.device("cpu")  # where bytes are when they travel
        self.limit = timedelta(seconds=meeting.seconds)
        limit = min(self.limit, RENDEZVOUS_LIMIT)
        store = dist.TCPStore(*meeting.store, is_master=False, timeout=limit)
        named = dist.PrefixStore(meeting.name, store)
        self.group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.limit
            self.group = dist.ProcessGroupNCCL(named, rank, meeting.size, options)
        else:
            self.group = dist.ProcessGroupGloo(named, rank, meeting.size, limit)

    def send(self, weights: Weights) -> int:
        """All of them, to all others; the number of bytes."""
        total, waiting, size = 0, list[tuple[str, torch.Tensor]](), 0
        for name, tensor in weights:
            if waiting and size + tensor.nbytes > BUCKET_BYTES:
                total += self.send_bucket(waiting)
                waiting, size = [], 0
            waiting.append((name, tensor))
            size += tensor.nbytes
        if waiting:
            total += self.send_bucket(waiting)
        self.broadcast(torch.zeros(2, dtype=torch.int64))
        return total

    def send_bucket(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        entries = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
        head = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)
        bucket = torch.empty(sum(padded(t.nbytes) for _, t in tensors), dtype=torch.uint8, device=self.staging)
        place = 0
        for _, tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            bucket[place : place + len(flat)].copy_(flat)
            place += padded(len(flat))
        self.broadcast(torch.tensor([len(head), len(bucket)], dtype=torch.int64))
        self.broadcast(head)
        self.broadcast(bucket)
        return sum(tensor.nbytes for _, tensor in tensors)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the sender sends, on this process's device."""
        while True:
            head_size, size = self.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
            if not head_size:
                return
            head = self.broadcast(torch.empty(head_size, dtype=torch.uint8))
            entries: list[Entry] = json.loads(bytes(head.tolist()))
            bucket = self.broadcast(torch.empty(size, dtype=torch.uint8, device=self.staging)).to(self.device)
            place = 0
            for name, kind, shape in entries:
                dtype: torch.dtype = getattr(torch, kind)
                count = torch.Size(shape).numel() * dtype.itemsize
                yield name, bucket[place : place + count].view(dtype).view(shape)
                place += padded(count)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Small ones come back to the host."""
        moved = tensor.to(self.staging)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.limit
        self.group.broadcast([moved], options).wait()
        return moved if tensor.device == self.staging else moved.to(tensor.device)

    def abort(self) -> None:
        """End an exchange that is under way, where the backend can."""
        with contextlib.suppress(AttributeError):
            self.group.abort()


def padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
