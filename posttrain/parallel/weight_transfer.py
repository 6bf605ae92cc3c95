"""Broadcasts weights from learners to rollout workers on other devices, without writing files.

Several learners send, bucket after bucket, in turns. While one bucket is on its way, the learners gather the tensors of
the next ones. An engine that several processes hold together says which part of each tensor each of them needs; a
learner then sends to the processes of one part, of all engines, and they receive nothing else. A sender and its
receivers are a process group of their own (`TransferGroup`), separate from torch's default one, so that it can be
created again when a rollout worker is replaced. A bucket is preceded by a header with the names, types and shapes of
its tensors, so that the receiver need not know the sender's layout.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
MAX_GROUPS = 8  # of one process; each takes memory. As many as the devices, and often network ports, of a machine
RENDEZVOUS_LIMIT = timedelta(seconds=60)  # for joining: all processes are idle, and the controller notices a lost one
POLL_SECONDS = 0.01  # between two looks for the other processes
GIVEN_UP = "given up"  # key in the store: why the processes that wait need not wait any longer
ALIGNMENT = 16  # bytes: valid for the start of a tensor of any type

NamedTensors = Iterable[tuple[str, torch.Tensor]]
TensorHeader = tuple[str, str, list[int]]  # name, type, shape
Region = tuple[tuple[int, int], ...]
"""A part of a tensor: first and end index in each dimension."""
TensorParts = dict[str, Region]
"""What one process of an engine needs of each tensor, by name; nothing of tensors that are not in it."""


@dataclass(slots=True, frozen=True)
class Rendezvous:
    """How one sender (rank 0) and the receivers find each other and form a process group."""

    size: int
    store: tuple[str, int]
    name: str
    seconds: float  # time limit of one broadcast
    backend: str = ""  # gloo or nccl; empty: nccl on CUDA, else gloo, through host memory

    @property
    def limit(self) -> timedelta:
        """How long a process waits for the others."""
        return min(timedelta(seconds=self.seconds), RENDEZVOUS_LIMIT)

    def own_store(self) -> dist.Store:
        """Connect to the part of the store that is this group's alone."""
        return dist.PrefixStore(self.name, dist.TCPStore(*self.store, is_master=False, timeout=self.limit))

    def wait_for_all(self, store: dist.Store, rank: int) -> None:
        """Wait until every process is there; raises RuntimeError at the limit, or as soon as one cannot come."""
        deadline = time.monotonic() + self.limit.total_seconds()
        names = [f"rank {rank}" for rank in range(self.size)]
        store.set(names[rank], "")
        while not store.check(names):
            if store.check([GIVEN_UP]):
                raise RuntimeError(store.get(GIVEN_UP).decode())
            if time.monotonic() > deadline:
                missing = [name for name in names if not store.check([name])]
                raise RuntimeError(f"timeout: {', '.join(missing)} of {self.size} did not come within {self.limit}")
            time.sleep(POLL_SECONDS)

    def give_up(self, reason: str) -> None:
        """Let the processes that wait for the others fail now; called by the controller when it has lost one."""
        self.own_store().set(GIVEN_UP, reason)


@dataclass(slots=True, frozen=True)
class TransferGroup:
    """The process group of one sender and the processes that receive one part of each tensor."""

    rendezvous: Rendezvous
    sender: int  # rank of the learner
    part: int = 0  # rank in their engine of the processes that receive
    turn: int = 0  # of the buckets of this part, the sender sends number turn, turn + turns, ...
    turns: int = 1


def plan_groups(learners: int, parts: int, rendezvous: Callable[[], Rendezvous]) -> list[TransferGroup]:
    """Divide the work of sending `parts` parts among the learners, so that no process has more than MAX_GROUPS.

    With more learners than parts, several send a part in turns; with fewer, a learner sends several parts.
    """
    count = max(parts, min(learners, MAX_GROUPS * parts))
    turns = [len(range(part, count, parts)) for part in range(parts)]
    return [
        TransferGroup(rendezvous(), number % learners, number % parts, number // parts, turns[number % parts])
        for number in range(count)
    ]


@dataclass(slots=True, frozen=True)
class TransferResult:
    """The result of a transfer; `failure` says why it was not completed."""

    bytes: int
    seconds: float
    failure: str = ""
    probe: list[Floats] = field(default_factory=list)  # see learner.Learner.probe_logprobs


class WeightTransfer:
    """This process's membership in a TransferGroup, as sender (rank 0) or receiver."""

    def __init__(
        self, rendezvous: Rendezvous, rank: int, *, turn: int = 0, turns: int = 1, parts: TensorParts | None = None
    ) -> None:
        """For a sender: `turn`, `turns` as in TransferGroup; `parts`: what the receivers need; None: whole tensors."""
        self.device = default_device()
        self.turn, self.turns, self.parts = turn, turns, parts
        self.on_the_way: list[tuple[Any, torch.Tensor]] = []  # the bucket that was sent last
        backend = rendezvous.backend or ("nccl" if self.device.type == "cuda" else "gloo")
        self.staging = self.device if backend == "nccl" else torch.device("cpu")  # where buckets are broadcast from
        self.limit = timedelta(seconds=rendezvous.seconds)
        store = rendezvous.own_store()
        rendezvous.wait_for_all(store, rank)
        self.group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.limit
            self.group = dist.ProcessGroupNCCL(store, rank, rendezvous.size, options)
        else:
            self.group = dist.ProcessGroupGloo(store, rank, rendezvous.size, rendezvous.limit)

    def needed(self, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Return the part of each tensor that the receivers need."""
        if self.parts is None:
            return tensors
        return [
            (name, tensor[tuple(slice(*bounds) for bounds in self.parts[name])])
            for name, tensor in tensors
            if name in self.parts
        ]

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

    def finish(self) -> None:
        """Wait until everything has arrived, and say that this was all."""
        self.finish_bucket()
        self.broadcast(torch.zeros(2, dtype=torch.int64))

    def receive_bucket(self) -> list[tuple[str, torch.Tensor]] | None:
        """Return the tensors of the next bucket of this sender; None after the last one."""
        head_size, size = self.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        if not head_size:
            return None
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


def send_to_all(transfers: Sequence[WeightTransfer], weights: NamedTensors, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Send every bucket whose turn it is in each of this process's groups; returns the number of bytes.

    The other senders iterate over the same tensors, and send the other buckets or parts.
    """
    total = 0
    for index, bucket in enumerate(buckets(weights, bucket_bytes)):
        for transfer in transfers:
            if index % transfer.turns == transfer.turn:
                total += transfer.send_bucket(transfer.needed(bucket))
    for transfer in transfers:
        transfer.finish()
    return total


def receive_from_all(transfers: Sequence[WeightTransfer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what all senders of this process's part send, in the order in which the learners have gathered it."""
    # Through host memory several buckets arrive at a time. Groups of NCCL must not wait for each other.
    ahead = len(transfers) > 1 and all(transfer.staging.type == "cpu" for transfer in transfers)
    threads = [BucketReader(transfer) for transfer in transfers] if ahead else []
    ended = 0
    try:
        readers: list[WeightTransfer | BucketReader] = [*(threads or transfers)]
        for reader in cycle(readers):
            bucket = reader.receive_bucket()
            yield from bucket or []
            ended = ended + 1 if bucket is None else 0
            if ended == len(transfers):  # the first senders have as many buckets as the others, or one more
                return
    finally:
        for thread in threads:
            thread.discard_rest()


class BucketReader:
    """A thread that receives from one sender, one bucket ahead of what is read."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self.transfer = transfer
        self.queue: Queue[list[tuple[str, torch.Tensor]] | RuntimeError | None] = Queue(maxsize=1)
        self.discards = False
        threading.Thread(target=self.work, name="weights", daemon=True).start()

    def work(self) -> None:
        try:
            while (bucket := self.transfer.receive_bucket()) is not None:
                if not self.discards:
                    self.queue.put(bucket)
            self.queue.put(None)
        except RuntimeError as error:  # a member is gone; raised by `receive_bucket`
            self.queue.put(error)

    def receive_bucket(self) -> list[tuple[str, torch.Tensor]] | None:
        """Return the next bucket; None after the last."""
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
