"""Broadcasts weights from learners to rollout workers on other devices, without writing files.

Several learners send, each to all receivers and in a process group of its own: bucket after bucket, in turns. While one
bucket is on its way, the learners gather the tensors of the next ones. The groups are separate from torch's default
one, so that they can be created again when a rollout worker is replaced. A bucket is preceded by a header with the
names, types and shapes of its tensors, so that the receiver need not know the sender's layout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from queue import Empty, Queue
from typing import Any

import torch
import torch.distributed as dist

from posttrain.core.devices import default_device
from posttrain.core.types import Floats

BUCKET_BYTES = 256 * 2**20
MAX_SENDERS = (
    8  # as many as the devices, and often the network cards, of a machine; each has a group, which takes memory
)
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
        self.on_the_way: list[tuple[Any, torch.Tensor]] = []  # the bucket that was sent last
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

    def send(self, weights: NamedTensors, number: int = 0, senders: int = 1, bucket_bytes: int = BUCKET_BYTES) -> int:
        """Broadcast every bucket whose turn it is, of sender `number` of `senders`; returns the number of bytes.

        The other senders iterate over the same tensors, and send the other buckets.
        """
        total = 0
        for index, bucket in enumerate(buckets(weights, bucket_bytes)):
            if index % senders == number:
                total += self.send_bucket(bucket)
        self.finish_bucket()
        self.broadcast(torch.zeros(2, dtype=torch.int64))
        return total

    def send_bucket(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        """Start to broadcast a bucket, once the one before has arrived; returns its bytes."""
        headers = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
        head = torch.frombuffer(bytearray(json.dumps(headers).encode()), dtype=torch.uint8)
        bucket = torch.empty(sum(padded(t.nbytes) for _, t in tensors), dtype=torch.uint8, device=self.staging)
        place = 0
        for _, tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            bucket[place : place + len(flat)].copy_(flat)
            place += padded(len(flat))
        self.finish_bucket()
        sizes = torch.tensor([len(head), len(bucket)], dtype=torch.int64)
        for tensor in (sizes.to(self.staging), head.to(self.staging), bucket):
            self.on_the_way.append((self.start_broadcast(tensor), tensor))
        return sum(tensor.nbytes for _, tensor in tensors)

    def finish_bucket(self) -> None:
        """Wait until the bucket that was sent last has arrived."""
        on_the_way, self.on_the_way = self.on_the_way, []
        for work, _ in on_the_way:
            work.wait()

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the only sender broadcasts, on this process's device."""
        while bucket := self.receive_bucket():
            yield from bucket

    def receive_bucket(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of the next bucket of this sender; none after the last one."""
        head_size, size = self.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        if not head_size:
            return []
        head = self.broadcast(torch.empty(head_size, dtype=torch.uint8))
        headers: list[TensorHeader] = json.loads(bytes(head.tolist()))
        bucket = self.broadcast(torch.empty(size, dtype=torch.uint8, device=self.staging)).to(self.device)
        place, tensors = 0, list[tuple[str, torch.Tensor]]()
        for name, kind, shape in headers:
            dtype: torch.dtype = getattr(torch, kind)
            count = torch.Size(shape).numel() * dtype.itemsize
            tensors.append((name, bucket[place : place + count].view(dtype).view(shape)))
            place += padded(count)
        return tensors

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor from rank 0; the result is on the device that the tensor was on."""
        moved = tensor.to(self.staging)
        self.start_broadcast(moved).wait()
        return moved if tensor.device == self.staging else moved.to(tensor.device)

    def start_broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to broadcast a tensor from rank 0, which must stay as it is until the result's `wait` returns."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.limit
        return self.group.broadcast([tensor], options)


def buckets(weights: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield tensors in lists of at most `bucket_bytes`, or of one tensor that is larger."""
    bucket, size = list[tuple[str, torch.Tensor]](), 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def receive_from_all(transfers: Sequence[WeightTransfer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of all senders, in the order in which the learners have gathered them."""
    # Through host memory several buckets arrive at a time. Groups of NCCL must not wait for each other.
    ahead = len(transfers) > 1 and all(transfer.staging.type == "cpu" for transfer in transfers)
    threads = [BucketReader(transfer) for transfer in transfers] if ahead else []
    ended = 0
    try:
        readers: list[WeightTransfer | BucketReader] = [*(threads or transfers)]
        for reader in cycle(readers):
            bucket = reader.receive_bucket()
            yield from bucket
            ended = 0 if bucket else ended + 1
            if ended == len(transfers):  # the first senders have as many buckets as the others, or one more
                return
    finally:
        for thread in threads:
            thread.discard_rest()


class BucketReader:
    """A thread that receives from one sender, one bucket ahead of what is read."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self.transfer = transfer
        self.queue: Queue[list[tuple[str, torch.Tensor]] | RuntimeError] = Queue(maxsize=1)
        self.discards = False
        threading.Thread(target=self.work, name="weights", daemon=True).start()

    def work(self) -> None:
        try:
            while bucket := self.transfer.receive_bucket():
                if not self.discards:
                    self.queue.put(bucket)
            self.queue.put([])
        except RuntimeError as error:  # a member is gone; raised by `receive_bucket`
            self.queue.put(error)

    def receive_bucket(self) -> list[tuple[str, torch.Tensor]]:
        """Return the next bucket; an empty one after the last."""
        found = self.queue.get()
        if isinstance(found, RuntimeError):
            raise found
        return found

    def discard_rest(self) -> None:
        """Receive what this sender still sends, after an error of another, so that it does not wait."""
        self.discards = True
        with suppress(Empty):
            self.queue.get_nowait()


def padded(size: int) -> int:
    """Round a number of bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
