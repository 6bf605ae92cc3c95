"""Stored tensors as rectangles of the model's parts, so that every element can be accounted for.

A part is a matrix of the model whatever the file format: `layers.3.q.weight`, always (out, in); a vector is one column.
A stored tensor is a rectangle that pieces of parts fill without gap or overlap: a shard of a fused QKV matrix, say.
Two lists of stored tensors over the same parts are all that a conversion has to know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from posttrain.core.errors import UsageError

Span = tuple[int, int]
Rectangle = tuple[int, int, int, int]  # top, bottom, left, right


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix or vector of the model."""

    rows: int
    columns: int = 1
    vector: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a part and where it lies in a stored tensor."""

    part: str
    rows: Span
    columns: Span
    at: tuple[int, int]  # its top left corner in the stored rectangle
    transposed: bool = False  # stored as (in, out)
    repeat: int = 0  # over 0: padding; the one row is stored this many times and means nothing

    @property
    def place(self) -> Rectangle:
        """Where it lies in the stored rectangle."""
        height, width = self.repeat or self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        if self.transposed:
            height, width = width, height
        return self.at[0], self.at[0] + height, self.at[1], self.at[1] + width


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its shape there, and the rectangle (same elements, same order) that pieces fill."""

    file: str
    name: str
    shape: tuple[int, ...]
    area: tuple[int, int]
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def check_stored(stored: Iterable[Stored]) -> None:
    """Every element of every stored tensor is filled exactly once."""
    for tensor in stored:
        problem = fault_in_cover(tensor.area, tuple(piece.place for piece in tensor.pieces))
        if problem:
            raise UsageError(f"{tensor}: {problem}")


def check_parts(parts: dict[str, Part], stored: Iterable[Stored], what: str) -> None:
    """Every element of every part is stored exactly once, copies (the same pieces again) not counted."""
    spans: dict[str, list[Rectangle]] = defaultdict(list)
    for pieces in {tensor.pieces for tensor in stored}:
        for piece in pieces:
            if not piece.repeat:
                spans[piece.part].append((*piece.rows, *piece.columns))
    for name in spans.keys() - parts.keys():
        raise UsageError(f"{name}: {what} has it, the model has not")
    for name, part in parts.items():
        problem = fault_in_cover((part.rows, part.columns), tuple(sorted(spans[name])))
        if problem:
            raise UsageError(f"{name} in {what}: {problem}")


@lru_cache(maxsize=4096)  # all layers look the same
def fault_in_cover(area: tuple[int, int], rectangles: tuple[Rectangle, ...]) -> str:
    """What is wrong with a cover of an area by rectangles; empty if each element is covered once."""
    for top, bottom, left, right in rectangles:
        if not (0 <= top < bottom <= area[0] and 0 <= left < right <= area[1]):
            return f"a piece [{top}:{bottom}, {left}:{right}] does not lie in {area[0]} x {area[1]}"
    ordered = sorted(rectangles)
    for number, (top, bottom, left, right) in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other[0] >= bottom:
                break
            if other[2] < right and left < other[3]:
                return f"elements are used twice: [{top}:{bottom}, {left}:{right}] and {other}"
    covered = sum((bottom - top) * (right - left) for top, bottom, left, right in rectangles)
    if covered != area[0] * area[1]:
        return f"{covered} of {area[0] * area[1]} elements are accounted for"
    return ""


# Building stored tensors


def stacked(
    file: str, name: str, blocks: Iterable[tuple[str, Span, Span]], vector: bool, transposed: bool = False
) -> Stored:
    """Blocks of parts (part, rows, columns) of equal width, one below the other; transposed: side by side."""
    pieces, below, width = [], 0, 0
    for part, rows, columns in blocks:
        pieces.append(Piece(part, rows, columns, (0, below) if transposed else (below, 0), transposed))
        below, width = below + rows[1] - rows[0], columns[1] - columns[0]
    area = (width, below) if transposed else (below, width)
    return Stored(file, name, (below,) if vector else area, area, tuple(pieces))


def components(left: list[Stored], right: list[Stored]) -> list[tuple[list[Stored], list[Stored]]]:
    """Stored tensors of both sides that share parts, together: each such group can be converted on its own."""
    parent: dict[str, str] = {}

    def root(part: str) -> str:
        parent.setdefault(part, part)
        while parent[part] != part:
            parent[part] = parent[parent[part]]
            part = parent[part]
        return part

    for tensor in (*left, *right):
        first = root(tensor.pieces[0].part)
        for piece in tensor.pieces:
            parent[root(piece.part)] = first
    groups: dict[str, tuple[list[Stored], list[Stored]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((left, right)):
        for tensor in tensors:
            groups[root(tensor.pieces[0].part)][side].append(tensor)
    return list(groups.values())
