"""Finds out which part of each tensor a process of a divided vLLM engine needs, and loads the part alone.

vLLM's loaders take whole tensors and copy a slice of each into the model, by rules of every architecture. Here they get
tensors without storage that have the whole shape, and each copy from one of them is intercepted: the first time to
record the slice, later to copy from the part that was received. So the rules stay vLLM's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.core.errors import PosttrainError
from posttrain.engines.vllm.weight_loading import replace_weights
from posttrain.parallel.weight_transfer import NamedTensors, Region, TensorParts

Shapes = Mapping[str, tuple[int, ...]]
ITEM = torch.ops.aten._local_scalar_dense.default
COPY = torch.ops.aten.copy_.default


class PartLoader:
    """The parts of an engine's tensors that this process needs."""

    def __init__(self, llm: Any, shapes: Shapes, dtype: torch.dtype) -> None:
        """Let the engine load tensors without storage; its weights are undefined afterwards."""
        self.llm, self.dtype = llm, dtype
        with SliceRecorder() as recorder:
            sources = ((name, recorder.add(name, shape, dtype)) for name, shape in shapes.items())
            replace_weights(llm, sources, 0)
        self.parts: TensorParts = recorder.regions
        self.shapes, self.copies, self.whole = dict(shapes), recorder.copies, recorder.whole

    def load(self, parts: NamedTensors, version: int) -> None:
        """Replace the engine's weights by what was received: of each tensor the part that `self.parts` names."""
        with PartCopier(self.parts, self.copies) as copier:
            replace_weights(self.llm, self.sources(copier, parts), version)

    def sources(self, copier: PartCopier, parts: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in parts:
            if name in self.whole:
                yield name, part
            else:
                copier.received[name] = part
                yield name, copier.add(name, self.shapes[name], part.dtype)


class SliceReader(TorchDispatchMode):
    """Intercepts what is done with some tensors without storage."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[str, torch.Tensor]] = {}  # by the address of their storage

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.known[tensor.untyped_storage()._cdata] = name, tensor
        return tensor

    def name_of(self, value: Any) -> str:
        """Return the name of the tensor that a value is a view of; empty: of none."""
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return ""
        return self.known.get(value.untyped_storage()._cdata, ("",))[0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is COPY and (name := self.name_of(args[1])):
            self.copy(name, args[0], args[1])
            return args[0]
        names = [name for value in flat(args) if (name := self.name_of(value))]
        if names and function is ITEM:
            self.use_whole(names[0])
            return 1.0
        out = function(*args, **(kwargs or {}))
        if names and not self.name_of(out[0] if isinstance(out, list | tuple) and out else out):  # not a view of it
            for name in names:
                self.use_whole(name)
        return out

    def copy(self, name: str, target: torch.Tensor, view: torch.Tensor) -> None:
        """Called for a copy from a view of a tensor."""

    def use_whole(self, name: str) -> None:
        """Called where something else than a copy is computed from a tensor."""


class SliceRecorder(SliceReader):
    """Records which part of each tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: TensorParts = {}
        self.copies: Counter[str] = Counter()  # into memory
        self.whole: set[str] = set()  # that other operations than copies read

    def copy(self, name: str, target: torch.Tensor, view: torch.Tensor) -> None:
        self.copies[name] += not target.is_meta
        shape = tuple(self.known[view.untyped_storage()._cdata][1].shape)
        found = located(view, shape)
        if found is None:
            self.use_whole(name)
        elif name in self.regions:
            pairs = zip(self.regions[name], found[0], strict=True)
            self.regions[name] = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in pairs)
        else:
            self.regions[name] = found[0]

    def use_whole(self, name: str) -> None:
        tensor = next(tensor for known, tensor in self.known.values() if known == name)
        self.whole.add(name)
        self.regions[name] = tuple((0, size) for size in tensor.shape)


class PartCopier(SliceReader):
    """Copies from the part that was received where the whole tensor is read; frees it after the last copy."""

    def __init__(self, parts: TensorParts, copies: Mapping[str, int]) -> None:
        super().__init__()
        self.parts, self.left = parts, dict(copies)
        self.received: dict[str, torch.Tensor] = {}

    def copy(self, name: str, target: torch.Tensor, view: torch.Tensor) -> None:
        if target.is_meta:
            return
        found = located(view, tuple(self.known[view.untyped_storage()._cdata][1].shape))
        if found is None or name not in self.received:
            self.use_whole(name)
        assert found is not None
        region, dims = found
        part, own = self.received[name], self.parts[name]
        if any(first < begin or end > last for (first, end), (begin, last) in zip(region, own, strict=True)):
            self.use_whole(name)
        offset = sum(
            (first - begin) * step for (first, _), (begin, _), step in zip(region, own, part.stride(), strict=True)
        )
        strides = [0 if dim is None else part.stride(dim) for dim in dims]
        target.copy_(part.as_strided(view.shape, strides, part.storage_offset() + offset))
        self.left[name] -= 1
        if not self.left[name]:
            del self.received[name]

    def use_whole(self, name: str) -> None:
        raise PosttrainError(f"weight update of vLLM: it reads another part of {name} than in its first update")


def located(view: torch.Tensor, shape: tuple[int, ...]) -> tuple[Region, list[int | None]] | None:
    """Return which part of a contiguous tensor of this shape a view is, and which dimension each of the view's is.

    None: it is not a slice with exchanged dimensions.
    """
    if 0 in shape:
        return tuple((0, size) for size in shape), [None] * view.ndim
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rest, bounds = view.storage_offset(), list[tuple[int, int]]()
    for size, stride in zip(shape, strides, strict=True):
        first = min(rest // stride, size - 1) if size > 1 else 0
        rest -= first * stride
        bounds.append((first, first + 1))
    dims: list[int | None] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        found = [dim for dim, own in enumerate(strides) if own == stride and shape[dim] > 1 and dim not in dims]
        if size == 1:
            dims.append(None)
            continue
        if not found or bounds[found[0]][0] + size > shape[found[0]]:
            return None
        dims.append(found[0])
        bounds[found[0]] = bounds[found[0]][0], bounds[found[0]][0] + size
    return tuple(bounds), dims


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments of an operation, and the elements of those that are lists."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
