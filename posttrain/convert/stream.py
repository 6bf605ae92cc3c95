"""Assemble the tensors of one layout from those of another, a few at a time: read, verify the hash, copy, yield."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from posttrain.convert.adapter import LoraAdapter
from posttrain.convert.files import BufferPool
from posttrain.convert.source import MANIFEST, SourceCheckpoint
from posttrain.convert.stored_tensors import ParameterBlock, Span, StoredTensor
from posttrain.core.errors import CheckpointError

MIN_BATCH_BYTES = 64 << 20  # targets are assembled together up to this size, or more if a tensor is larger


@dataclass
class TargetTensor:
    """A tensor of the target while it is assembled. Stored tensors with equal blocks are replicas of it."""

    replicas: list[StoredTensor]
    dtype: torch.dtype
    data: torch.Tensor | None = None
    digest: str = ""  # known in advance where the bytes are those of a source tensor
    filled: int = 0

    @property
    def elements(self) -> int:
        return self.replicas[0].matrix_shape[0] * self.replicas[0].matrix_shape[1]


@dataclass
class TensorStream:
    """Reads a source checkpoint and assembles the tensors of a target from it."""

    source: SourceCheckpoint
    adapter: LoraAdapter | None = None
    largest: int = 0  # bytes of the largest tensor on either side
    on_read: Callable[[StoredTensor, torch.dtype, str], None] = lambda tensor, dtype, digest: None
    digests: dict[str, str] = field(default_factory=dict)  # of the source tensors read so far

    def __post_init__(self) -> None:
        self.buffers = BufferPool(max(MIN_BATCH_BYTES, 2 * self.largest))

    def assemble(
        self,
        sources: list[StoredTensor],
        targets: list[StoredTensor],
        dtype_of: Callable[[StoredTensor], torch.dtype],
    ) -> Iterator[TargetTensor]:
        """Yield each target once it is complete; `sources` hold all parameters of the targets.

        As many targets as memory allows are assembled at a time; every source is read once for each such batch.
        """
        replicas: dict[tuple[ParameterBlock, ...], list[StoredTensor]] = {}
        for tensor in targets:
            replicas.setdefault(tensor.blocks, []).append(tensor)
        waiting = [TargetTensor(stored, dtype_of(stored[0])) for stored in replicas.values()]
        limit = max(MIN_BATCH_BYTES, 2 * self.largest) - max(self.size(tensor) for tensor in sources)
        while waiting:
            batch = [waiting.pop(0)]
            held = batch[0].elements * batch[0].dtype.itemsize
            while waiting and held + (size := waiting[0].elements * waiting[0].dtype.itemsize) <= limit:
                batch.append(waiting.pop(0))
                held += size
            yield from self.assemble_batch(sources, batch)

    def size(self, tensor: StoredTensor) -> int:
        return self.source.location(tensor).size

    def assemble_batch(self, sources: list[StoredTensor], batch: list[TargetTensor]) -> Iterator[TargetTensor]:
        """Read each source once and copy its blocks to all targets of a batch."""
        by_blocks = {target.replicas[0].blocks: target for target in batch}
        wanted: dict[str, list[tuple[TargetTensor, ParameterBlock]]] = defaultdict(list)
        for target in batch:
            for block in target.replicas[0].blocks:
                wanted[block.parameter].append((target, block))
        first: dict[tuple[ParameterBlock, ...], StoredTensor] = {}
        for tensor in sources:
            if tensor.blocks in first:
                if str(tensor) not in self.digests:
                    self.buffers.give_back(self.load(tensor))
                self.check_replica(first[tensor.blocks], tensor)
                continue
            first[tensor.blocks] = tensor
            data = self.load(tensor)
            same = by_blocks.get(tensor.blocks)
            if same is not None and self.is_unchanged(tensor, same):
                same.data, same.digest, same.filled = data, self.digests[str(tensor)], same.elements
                yield same
                same.data = None
                self.buffers.give_back(data)
                continue
            for block in tensor.blocks:
                for target, wanted_block in wanted[block.parameter] if not block.repeat else ():
                    self.copy_overlap(target, wanted_block, block, data)
            self.buffers.give_back(data)
        for target in batch:
            assert target.filled == target.elements, (
                f"{target.replicas[0]}: {target.filled} of {target.elements} elements"
            )
            if target.data is None:
                continue  # yielded already
            self.merge_adapter(target)
            yield target
            self.buffers.give_back(target.data)
            target.data = None

    def is_unchanged(self, tensor: StoredTensor, target: TargetTensor) -> bool:
        """Whether the bytes are the same on both sides."""
        merged = self.adapter is not None and any(self.adapter.changes(block.parameter) for block in tensor.blocks)
        padded = any(block.repeat for block in tensor.blocks)
        return not merged and not padded and target.dtype == self.source.location(tensor).dtype

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        """Read a source tensor as a matrix; compare its digest with the recorded one, if there is one."""
        file, location = self.source.files[tensor.file], self.source.location(tensor)
        data = file.read(tensor.name, self.buffers)
        if str(tensor) not in self.digests:
            digest = hashlib.sha256(data.numpy()).hexdigest()
            if self.source.hashes.get(str(tensor), digest) != digest:
                raise CheckpointError(
                    f"{file.path}: damaged: the sha256 of tensor {tensor.name} is not the one recorded in {MANIFEST}"
                )
            self.digests[str(tensor)] = digest
            self.on_read(tensor, location.dtype, digest)
        return data.view(location.dtype).view(tensor.matrix_shape)

    def check_replica(self, first: StoredTensor, other: StoredTensor) -> None:
        """Check that the replicas of a tensor on several ranks are equal."""
        same = self.source.location(first).dtype == self.source.location(other).dtype
        if not same or self.digests[str(first)] != self.digests[str(other)]:
            pair = f"{first.file} and {other.file}" if first.name == other.name else f"{first} and {other}"
            raise CheckpointError(
                f"replicated tensor {other.name} differs between {pair}: the checkpoint is inconsistent"
            )

    def copy_overlap(
        self, target: TargetTensor, wanted: ParameterBlock, block: ParameterBlock, tensor: torch.Tensor
    ) -> None:
        """Copy the part of a wanted block that a source tensor holds to its place in the target."""
        rows, columns = overlap(block.rows, wanted.rows), overlap(block.columns, wanted.columns)
        if rows is None or columns is None:
            return
        if target.data is None:
            dtype = target.dtype
            if self.adapter is not None and tensor.dtype != dtype:
                dtype = torch.float32  # rounded once, after the adapters are added
            buffer = self.buffers.take(target.elements * dtype.itemsize)
            target.data = buffer.view(dtype).view(target.replicas[0].matrix_shape)
        top, bottom, left, right = wanted.place
        place = target.data[top:bottom, left:right]
        place = place.T if wanted.transposed else place
        if not wanted.repeat:
            place = place[within(rows, wanted.rows), within(columns, wanted.columns)]
        top, bottom, left, right = block.place
        held = tensor[top:bottom, left:right]
        held = held.T if block.transposed else held
        place.copy_(held[within(rows, block.rows), within(columns, block.columns)])
        target.filled += place.numel()

    def merge_adapter(self, target: TargetTensor) -> None:
        """Add the adapter's update and convert the tensor to the target's dtype."""
        assert target.data is not None
        if self.adapter is None:
            return
        for block in target.replicas[0].blocks:
            top, bottom, left, right = block.place
            place = target.data[top:bottom, left:right]
            place = place.T if block.transposed else place
            self.adapter.add(block, place)
        target.data = target.data.to(target.dtype)


def overlap(a: Span, b: Span) -> Span | None:
    """Return what two spans have in common; None if nothing."""
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else None


def within(span: Span, frame: Span) -> slice:
    """Return the span relative to the beginning of the frame."""
    return slice(span[0] - frame[0], span[1] - frame[0])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
