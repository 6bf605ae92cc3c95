"""Broadcasts weights from a learner to rollout workers on other devices, without writing files.

The process group is separate from torch's default one, so that it can be created again when a rollout worker is
replaced. Tensors are sent in buckets, each preceded by a header with their names, types and shapes, so that the
receiver need not know the sender's layout.
"""

from __future__ import annotations

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
RENDEZVOUS_LIMIT = timedelta(seconds=60)  # for joining: all processes are idle, and the controller notices a lost one
ALIGNMENT = 16  # bytes: valid for the start of a tensor of any type

NamedTensors = Iterable[tuple[str, torch.Tensor]]
TensorHeader = tuple[str, str, list[int]]  # name, type, shape


@dataclass(slots=True, frozen=True)
class Rendezvous:
    """How one sender (rank 0) and the receivers find each other and form a process group."""

    size: int
    store: tuple[str, int]
    name: str
    seconds: float  # time limit of one broadcast
    backend: str = ""  # gloo or nccl; empty: nccl on CUDA, else gloo, through host memory


@dataclass(slots=True, frozen=True)
class TransferResult:
    """The result of a transfer; `failure` says why it was not completed."""

    bytes: int
    seconds: float
    failure: str = ""
    probe: list[Floats] = field(default_factory=list)  # see learner.Learner.probe_logprobs


class WeightTransfer:
    """This process's membership in the group, as sender (rank 0) or receiver."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.device = default_device()
        backend = rendezvous.backend or ("nccl" if self.device.type == "cuda" else "gloo")
        self.staging = self.device if backend == "nccl" else torch.device("cpu")  # where buckets are broadcast from
        self.limit = timedelta(seconds=rendezvous.seconds)
        limit = min(self.limit, RENDEZVOUS_LIMIT)
        store = dist.TCPStore(*rendezvous.store, is_master=False, timeout=limit)
        named = dist.PrefixStore(rendezvous.name, store)
        self.group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.limit
            self.group = dist.ProcessGroupNCCL(named, rank, rendezvous.size, options)
        else:
            self.group = dist.ProcessGroupGloo(named, rank, rendezvous.size, limit)

    def send(self, weights: NamedTensors) -> int:
        """Broadcast all tensors to the receivers; returns the number of bytes."""
        total, bucket, size = 0, list[tuple[str, torch.Tensor]](), 0
        for name, tensor in weights:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                total += self.send_bucket(bucket)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            total += self.send_bucket(bucket)
        self.broadcast(torch.zeros(2, dtype=torch.int64))
        return total

    def send_bucket(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        headers = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
        head = torch.frombuffer(bytearray(json.dumps(headers).encode()), dtype=torch.uint8)
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
        """Yield the tensors that the sender broadcasts, on this process's device."""
        while True:
            head_size, size = self.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
            if not head_size:
                return
            head = self.broadcast(torch.empty(head_size, dtype=torch.uint8))
            headers: list[TensorHeader] = json.loads(bytes(head.tolist()))
            bucket = self.broadcast(torch.empty(size, dtype=torch.uint8, device=self.staging)).to(self.device)
            place = 0
            for name, kind, shape in headers:
                dtype: torch.dtype = getattr(torch, kind)
                count = torch.Size(shape).numel() * dtype.itemsize
                yield name, bucket[place : place + count].view(dtype).view(shape)
                place += padded(count)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor from rank 0; the result is on the device that the tensor was on."""
        moved = tensor.to(self.staging)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.limit
        self.group.broadcast([moved], options).wait()
        return moved if tensor.device == self.staging else moved.to(tensor.device)


def padded(size: int) -> int:
    """Round a number of bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
