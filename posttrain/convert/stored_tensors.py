"""Describe stored tensors as blocks of the model's parameters, so that every element can be accounted for.

A parameter is a matrix of the model, independent of the file format: `3.q.weight`, always (out, in); a vector has one
column. A stored tensor is a matrix that blocks of parameters fill without gap or overlap, for example a shard of a
fused QKV matrix. Two lists of stored tensors over the same parameters fully describe a conversion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from posttrain.core.errors import UsageError

Span = tuple[int, int]
Region = tuple[str, Span, Span]  # a parameter's name, rows and columns
Rectangle = tuple[int, int, int, int]  # top, bottom, left, right


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """The size of a matrix or vector of the model."""

    rows: int
    columns: int = 1
    vector: bool = False


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """A rectangle of a parameter and its position in a stored tensor."""

    parameter: str
    rows: Span
    columns: Span
    at: tuple[int, int]  # top left corner in the stored matrix
    transposed: bool = False  # stored as (in, out)
    repeat: int = 0  # above 0: padding; the single row is stored this many times and carries no information

    @property
    def place(self) -> Rectangle:
        """The rectangle that the block occupies in the stored matrix."""
        height, width = self.repeat or self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        if self.transposed:
            height, width = width, height
        return self.at[0], self.at[0] + height, self.at[1], self.at[1] + width


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its shape there, and the matrix (same elements, same order) that the blocks fill."""

    file: str
    name: str
    shape: tuple[int, ...]
    matrix_shape: tuple[int, int]
    blocks: tuple[ParameterBlock, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def check_stored(stored: Iterable[StoredTensor]) -> None:
    """Check that every element of every stored tensor is filled exactly once."""
    for tensor in stored:
        problem = cover_error(tensor.matrix_shape, tuple(block.place for block in tensor.blocks))
        if problem:
            raise UsageError(f"{tensor}: {problem}")


def check_parameters(parameters: dict[str, ParameterShape], stored: Iterable[StoredTensor], side: str) -> None:
    """Check that every element of every parameter is stored exactly once; replicas (equal blocks) count once."""
    spans: dict[str, list[Rectangle]] = defaultdict(list)
    for blocks in {tensor.blocks for tensor in stored}:
        for block in blocks:
            if not block.repeat:
                spans[block.parameter].append((*block.rows, *block.columns))
    for name in spans.keys() - parameters.keys():
        raise UsageError(f"tensor {name} is in {side} but not in the model")
    for name, shape in parameters.items():
        problem = cover_error((shape.rows, shape.columns), tuple(sorted(spans[name])))
        if problem:
            raise UsageError(f"{name} in {side}: {problem}")


@lru_cache(maxsize=4096)  # the layers of a model have equal shapes
def cover_error(shape: tuple[int, int], rectangles: tuple[Rectangle, ...]) -> str:
    """Return why rectangles do not cover each element of a matrix exactly once; empty if they do."""
    for top, bottom, left, right in rectangles:
        if not (0 <= top < bottom <= shape[0] and 0 <= left < right <= shape[1]):
            return f"the block [{top}:{bottom}, {left}:{right}] is outside of the {shape[0]} x {shape[1]} matrix"
    ordered = sorted(rectangles)
    for number, (top, bottom, left, right) in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other[0] >= bottom:
                break
            if other[2] < right and left < other[3]:
                return f"elements are used twice: [{top}:{bottom}, {left}:{right}] and {other}"
    covered = sum((bottom - top) * (right - left) for top, bottom, left, right in rectangles)
    if covered != shape[0] * shape[1]:
        return f"{covered} of {shape[0] * shape[1]} elements are accounted for"
    return ""


# Building stored tensors


def full_span(parameter: ParameterShape) -> tuple[Span, Span]:
    return (0, parameter.rows), (0, parameter.columns)


def group_regions(
    names: list[str], parameters: dict[str, ParameterShape], first: int, count: int, groups: int
) -> Iterator[Region]:
    """Yield regions for key-value groups `first` to `first + count`: the group's queries, its key, its value."""
    for group in range(first, first + count):
        for name in names:
            rows = parameters[name].rows // groups
            yield name, (group * rows, (group + 1) * rows), (0, parameters[name].columns)


def stacked(file: str, name: str, regions: Iterable[Region], vector: bool, transposed: bool = False) -> StoredTensor:
    """Stack regions of equal width, one below the other; transposed: side by side."""
    blocks, below, width = [], 0, 0
    for parameter, rows, columns in regions:
        blocks.append(ParameterBlock(parameter, rows, columns, (0, below) if transposed else (below, 0), transposed))
        below, width = below + rows[1] - rows[0], columns[1] - columns[0]
    matrix_shape = (width, below) if transposed else (below, width)
    return StoredTensor(file, name, (below,) if vector else matrix_shape, matrix_shape, tuple(blocks))


def connected_groups(
    left: list[StoredTensor], right: list[StoredTensor]
) -> list[tuple[list[StoredTensor], list[StoredTensor]]]:
    """Group the stored tensors of both sides that have parameters in common; each group can be converted alone."""
    parent: dict[str, str] = {}

    def root(parameter: str) -> str:
        parent.setdefault(parameter, parameter)
        while parent[parameter] != parameter:
            parent[parameter] = parent[parent[parameter]]
            parameter = parent[parameter]
        return parameter

    for tensor in (*left, *right):
        first = root(tensor.blocks[0].parameter)
        for block in tensor.blocks:
            parent[root(block.parameter)] = first
    groups: dict[str, tuple[list[StoredTensor], list[StoredTensor]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((left, right)):
        for tensor in tensors:
            groups[root(tensor.blocks[0].parameter)][side].append(tensor)
    return list(groups.values())
