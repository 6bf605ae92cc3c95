"""Which tensors of two checkpoints differ and by how much, whatever their formats and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.convert.families import hf_stored
from posttrain.convert.inspect import Seen
from posttrain.convert.pieces import Piece, Stored, components
from posttrain.convert.stream import Stream

ROWS_AT_ONCE = 4096


@dataclass
class Difference:
    """A part that both have."""

    name: str
    shape: tuple[int, ...]
    types: tuple[str, str]
    unequal: int  # elements
    largest: float
    mean: float
    scale: float  # largest absolute value in the first


def only_in(a: Seen, b: Seen) -> list[tuple[str, tuple[int, int]]]:
    """Parts that the second does not have, or has in another size."""
    theirs = {name: (part.rows, part.columns) for name, part in b.source.parts.items()}
    mine = {name: (part.rows, part.columns) for name, part in a.source.parts.items()}
    names = labels(a)
    return [(names[name], size) for name, size in mine.items() if theirs.get(name) != size]


def labels(seen: Seen) -> dict[str, str]:
    """Parts under the names that Hugging Face has for them."""
    source = seen.source
    found = {name: name for name in source.parts}
    if seen.known:
        for tensor in hf_stored(source.config, source.shape, source.parts):
            for piece in tensor.pieces:
                whole = {other.part for other in tensor.pieces} == {piece.part}
                label = tensor.name if whole else f"{tensor.name} ({piece.part.split('.', 1)[1]})"
                found[piece.part] = label if found[piece.part] == piece.part else found[piece.part]
    return found


@torch.no_grad()
def differences(a: Seen, b: Seen) -> Iterator[Difference]:
    """All parts that both have, a group of tensors in memory at a time."""
    theirs = b.source.parts
    targets = [
        Stored("", name, (p.rows, p.columns), (p.rows, p.columns), (Piece(name, (0, p.rows), (0, p.columns), (0, 0)),))
        for name, p in a.source.parts.items()
        if name in theirs and (theirs[name].rows, theirs[name].columns) == (p.rows, p.columns)
    ]
    names, common = labels(a), {target.name for target in targets}
    streams = [Stream(seen.source, largest=largest(seen)) for seen in (a, b)]
    kinds = [types_of(seen) for seen in (a, b)]
    mine = {id(tensor) for tensor in a.source.stored}
    needed = [t for s in (a, b) for t in s.source.stored if any(piece.part in common for piece in t.pieces)]
    for sources, wanted in components(needed, targets):
        if not wanted:
            continue
        sides = [[t for t in sources if id(t) in mine], [t for t in sources if id(t) not in mine]]
        first = {}
        for made in streams[0].make(sides[0], wanted, lambda t: kinds[0][t.name]):
            assert made.data is not None
            first[made.copies[0].name] = made.data.clone()
        for made in streams[1].make(sides[1], wanted, lambda t: kinds[1][t.name]):
            assert made.data is not None
            target = made.copies[0]
            part = a.source.parts[target.name]
            shape = (part.rows,) if part.vector else target.shape
            mine_is, theirs_is = (str(kind[target.name]).removeprefix("torch.") for kind in kinds)
            numbers = measure(first.pop(target.name), made.data)
            yield Difference(names[target.name], shape, (mine_is, theirs_is), *numbers)


def largest(seen: Seen) -> int:
    return max((seen.source.entry(tensor).size for tensor in seen.source.stored), default=0)


def types_of(seen: Seen) -> dict[str, torch.dtype]:
    """The type of every part in a checkpoint."""
    return {p.part: seen.source.entry(t).dtype for t in reversed(seen.source.stored) for p in t.pieces}


def measure(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float, float]:
    """Unequal elements, largest and mean difference, largest value; NaN equals NaN."""
    unequal, most, total, scale = 0, 0.0, 0.0, 0.0
    for start in range(0, a.shape[0], ROWS_AT_ONCE):
        x, y = (t[start : start + ROWS_AT_ONCE].double() for t in (a, b))
        apart = ~((x == y) | (x.isnan() & y.isnan()))
        gaps = (x - y).abs().nan_to_num(nan=float("inf"))[apart]
        unequal += int(apart.sum())
        most = max(most, float(gaps.max()) if gaps.numel() else 0.0)
        total += float(gaps.sum())
        scale = max(scale, float(x.abs().nan_to_num(nan=0.0).max()) if x.numel() else 0.0)
    return unequal, most, total / max(1, a.numel()), scale
