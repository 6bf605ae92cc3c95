"""Tensors of one layout made of those of another, a few at a time: read, proved, put together, handed on."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from posttrain.convert.adapter import Adapter
from posttrain.convert.files import Rooms
from posttrain.convert.pieces import Piece, Span, Stored
from posttrain.convert.source import MANIFEST, Source
from posttrain.core.errors import CheckpointError

SMALL = 64 << 20  # groups of tensors up to this size are held in memory together


@dataclass
class Made:
    """A tensor of the target on its way. Several stored tensors with the same pieces are copies of it."""

    copies: list[Stored]
    dtype: torch.dtype
    data: torch.Tensor | None = None
    digest: str = ""  # known already where the bytes are those of a source tensor
    filled: int = 0

    @property
    def elements(self) -> int:
        return self.copies[0].area[0] * self.copies[0].area[1]


@dataclass
class Stream:
    """Reads a source; what it is made into depends on who asks."""

    source: Source
    adapter: Adapter | None = None
    largest: int = 0  # bytes of the largest tensor on either side
    on_read: Callable[[Stored, torch.dtype, str], None] = lambda tensor, dtype, digest: None
    seen: dict[str, str] = field(default_factory=dict)  # digests by stored tensor

    def __post_init__(self) -> None:
        self.rooms = Rooms(max(SMALL, 2 * self.largest))

    def make(
        self, sources: list[Stored], targets: list[Stored], dtype_of: Callable[[Stored], torch.dtype]
    ) -> Iterator[Made]:
        """The targets, which have parts in common with these sources, one after the other as they get ready.

        As many as memory may hold are put together at a time, and every source passes by them.
        """
        copies: dict[tuple[Piece, ...], list[Stored]] = {}
        for tensor in targets:
            copies.setdefault(tensor.pieces, []).append(tensor)
        waiting = [Made(stored, dtype_of(stored[0])) for stored in copies.values()]
        limit = max(SMALL, 2 * self.largest) - max(self.size(tensor) for tensor in sources)
        while waiting:
            batch, held = [waiting.pop(0)], 0
            held = batch[0].elements * batch[0].dtype.itemsize
            while waiting and held + (size := waiting[0].elements * waiting[0].dtype.itemsize) <= limit:
                batch.append(waiting.pop(0))
                held += size
            yield from self.pass_by(sources, batch)

    def size(self, tensor: Stored) -> int:
        return self.source.entry(tensor).size

    def pass_by(self, sources: list[Stored], batch: list[Made]) -> Iterator[Made]:
        """Each source once past all tensors of a batch."""
        whole = {made.copies[0].pieces: made for made in batch}
        wanted: dict[str, list[tuple[Made, Piece]]] = defaultdict(list)
        for made in batch:
            for piece in made.copies[0].pieces:
                wanted[piece.part].append((made, piece))
        first: dict[tuple[Piece, ...], Stored] = {}
        for tensor in sources:
            if tensor.pieces in first:
                if str(tensor) not in self.seen:
                    self.rooms.give_back(self.load(tensor))
                self.compare(first[tensor.pieces], tensor)
                continue
            first[tensor.pieces] = tensor
            data = self.load(tensor)
            same = whole.get(tensor.pieces)
            if same is not None and self.unchanged(tensor, same):
                same.data, same.digest, same.filled = data, self.seen[str(tensor)], same.elements
                yield same
                same.data = None
                self.rooms.give_back(data)
                continue
            for piece in tensor.pieces:
                for made, place in wanted[piece.part] if not piece.repeat else ():
                    self.put(made, place, piece, data)
            self.rooms.give_back(data)
        for made in batch:
            assert made.filled == made.elements, f"{made.copies[0]}: {made.filled} of {made.elements} elements"
            if made.data is None:
                continue  # handed on already
            self.merge(made)
            yield made
            self.rooms.give_back(made.data)
            made.data = None

    def unchanged(self, tensor: Stored, made: Made) -> bool:
        """Whether the bytes are the same on both sides."""
        merged = self.adapter is not None and any(self.adapter.changes(piece.part) for piece in tensor.pieces)
        padded = any(piece.repeat for piece in tensor.pieces)
        return not merged and not padded and made.dtype == self.source.entry(tensor).dtype

    def load(self, tensor: Stored) -> torch.Tensor:
        """A source tensor as its rectangle; its bytes are those that were noted down, if they were."""
        file, entry = self.source.files[tensor.file], self.source.entry(tensor)
        data = file.read(tensor.name, self.rooms)
        if str(tensor) not in self.seen:
            digest = hashlib.sha256(data.numpy()).hexdigest()
            if self.source.hashes.get(str(tensor), digest) != digest:
                raise CheckpointError(f"{file.path}: damaged: {tensor.name} is not what {MANIFEST} says was written")
            self.seen[str(tensor)] = digest
            self.on_read(tensor, entry.dtype, digest)
        return data.view(entry.dtype).view(tensor.area)

    def compare(self, first: Stored, other: Stored) -> None:
        """Copies on several ranks are one tensor."""
        same = self.source.entry(first).dtype == self.source.entry(other).dtype
        if not same or self.seen[str(first)] != self.seen[str(other)]:
            raise CheckpointError(f"{other}: differs from its copy {first}; which one is right?")

    def put(self, made: Made, wanted: Piece, piece: Piece, tensor: torch.Tensor) -> None:
        """Copy what a source tensor has of a rectangle to its place in a target."""
        rows, columns = overlap(piece.rows, wanted.rows), overlap(piece.columns, wanted.columns)
        if rows is None or columns is None:
            return
        if made.data is None:
            dtype = made.dtype
            if self.adapter is not None and tensor.dtype != dtype:
                dtype = torch.float32  # rounded once, after the adapters are added
            made.data = self.rooms.take(made.elements * dtype.itemsize).view(dtype).view(made.copies[0].area)
        top, bottom, left, right = wanted.place
        place = made.data[top:bottom, left:right]
        place = place.T if wanted.transposed else place
        if not wanted.repeat:
            place = place[within(rows, wanted.rows), within(columns, wanted.columns)]
        top, bottom, left, right = piece.place
        held = tensor[top:bottom, left:right]
        held = held.T if piece.transposed else held
        place.copy_(held[within(rows, piece.rows), within(columns, piece.columns)])
        made.filled += place.numel()

    def merge(self, made: Made) -> None:
        """Add what adapters change, and bring the tensor to its type."""
        assert made.data is not None
        if self.adapter is None:
            return
        for piece in made.copies[0].pieces:
            top, bottom, left, right = piece.place
            place = made.data[top:bottom, left:right]
            place = place.T if piece.transposed else place
            self.adapter.add(piece, place)
        made.data = made.data.to(made.dtype)


def overlap(a: Span, b: Span) -> Span | None:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else None


def within(span: Span, frame: Span) -> slice:
    return slice(span[0] - frame[0], span[1] - frame[0])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
