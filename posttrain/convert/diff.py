"""Compare the tensors of two checkpoints, which may have different formats and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.convert.hugging_face import hf_stored
from posttrain.convert.inspect import InspectedCheckpoint
from posttrain.convert.stored_tensors import ParameterBlock, StoredTensor, connected_groups
from posttrain.convert.stream import TensorStream

ROWS_AT_ONCE = 4096


@dataclass
class TensorDifference:
    """How a parameter that both checkpoints have differs."""

    name: str
    shape: tuple[int, ...]
    types: tuple[str, str]
    unequal: int  # elements
    largest: float
    mean: float
    scale: float  # largest absolute value in the first


def only_in(a: InspectedCheckpoint, b: InspectedCheckpoint) -> list[tuple[str, tuple[int, int]]]:
    """Return the parameters of `a` that `b` lacks or has in another size."""
    theirs = {name: (parameter.rows, parameter.columns) for name, parameter in b.source.parameters.items()}
    mine = {name: (parameter.rows, parameter.columns) for name, parameter in a.source.parameters.items()}
    names = hf_names(a)
    return [(names[name], size) for name, size in mine.items() if theirs.get(name) != size]


def hf_names(checkpoint: InspectedCheckpoint) -> dict[str, str]:
    """Return the Hugging Face name of every parameter."""
    source = checkpoint.source
    found = {name: name for name in source.parameters}
    if checkpoint.recognised:
        for tensor in hf_stored(source.config, source.shape, source.parameters):
            for block in tensor.blocks:
                whole = {other.parameter for other in tensor.blocks} == {block.parameter}
                label = tensor.name if whole else f"{tensor.name} ({block.parameter.split('.', 1)[1]})"
                found[block.parameter] = label if found[block.parameter] == block.parameter else found[block.parameter]
    return found


@torch.no_grad()
def differences(a: InspectedCheckpoint, b: InspectedCheckpoint) -> Iterator[TensorDifference]:
    """Compare all parameters that both have, with one group of tensors in memory at a time."""
    theirs = b.source.parameters
    targets = [
        StoredTensor(
            "",
            name,
            (p.rows, p.columns),
            (p.rows, p.columns),
            (ParameterBlock(name, (0, p.rows), (0, p.columns), (0, 0)),),
        )
        for name, p in a.source.parameters.items()
        if name in theirs and (theirs[name].rows, theirs[name].columns) == (p.rows, p.columns)
    ]
    names, common = hf_names(a), {target.name for target in targets}
    streams = [TensorStream(checkpoint.source, largest=largest_tensor(checkpoint)) for checkpoint in (a, b)]
    kinds = [parameter_dtypes(checkpoint) for checkpoint in (a, b)]
    mine = {id(tensor) for tensor in a.source.stored}
    needed = [t for s in (a, b) for t in s.source.stored if any(block.parameter in common for block in t.blocks)]
    for sources, wanted in connected_groups(needed, targets):
        if not wanted:
            continue
        sides = [[t for t in sources if id(t) in mine], [t for t in sources if id(t) not in mine]]
        first = {}
        for assembled in streams[0].assemble(sides[0], wanted, lambda t: kinds[0][t.name]):
            assert assembled.data is not None
            first[assembled.replicas[0].name] = assembled.data.clone()
        for assembled in streams[1].assemble(sides[1], wanted, lambda t: kinds[1][t.name]):
            assert assembled.data is not None
            target = assembled.replicas[0]
            parameter = a.source.parameters[target.name]
            shape = (parameter.rows,) if parameter.vector else target.shape
            mine_is, theirs_is = (str(kind[target.name]).removeprefix("torch.") for kind in kinds)
            numbers = measure(first.pop(target.name), assembled.data)
            yield TensorDifference(names[target.name], shape, (mine_is, theirs_is), *numbers)


def largest_tensor(checkpoint: InspectedCheckpoint) -> int:
    return max((checkpoint.source.location(tensor).size for tensor in checkpoint.source.stored), default=0)


def parameter_dtypes(checkpoint: InspectedCheckpoint) -> dict[str, torch.dtype]:
    """Return the type of every parameter in a checkpoint."""
    return {
        p.parameter: checkpoint.source.location(t).dtype for t in reversed(checkpoint.source.stored) for p in t.blocks
    }


def measure(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float, float]:
    """Return the number of unequal elements, largest and mean difference, and largest value; NaN equals NaN."""
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
