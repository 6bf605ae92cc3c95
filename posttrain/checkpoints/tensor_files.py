"""Writes and reads safetensors files: in one file or sharded over ranks, whole tensors or slices of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from posttrain.core.errors import CheckpointError
from posttrain.core.files import read_json, write_json
from posttrain.core.lazy import torch

KINDS = {
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.int64": "I64",
    "torch.float8_e4m3fn": "F8_E4M3",
}


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors of any device as safetensors. Two that share memory are an error: loading would separate them."""
    from safetensors.torch import save_file  # it imports torch, for which commands that only inspect need not wait

    _refuse_shared(path, tensors)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_tensors` wrote, on the CPU."""
    from safetensors.torch import load_file  # as above

    with _read_errors(path):
        return load_file(path)


@dataclass(slots=True)
class LazyTensors:
    """Tensors to be written, of known names and shapes, that are gathered by `fetch`; all ranks fetch together."""

    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]
    fetch: Callable[[], dict[str, torch.Tensor]]
    writers: range = range(0)  # the ranks that can fetch them; empty: all

    def kinds_as_json(self) -> dict[str, list[Any]]:
        return {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in self.kinds.items()}

    @classmethod
    def from_json(cls, kinds: dict[str, list[Any]]) -> LazyTensors:
        """Describe tensors of other ranks, which are not fetched here."""
        return cls({name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in kinds.items()}, dict)


def save_sharded(folder: Path, stem: str, entries: Sequence[LazyTensors], rank: int, ranks: int) -> None:
    """Write full tensors as safetensors files with an index, as Hugging Face does; rank i mod `ranks` writes entry i.

    Of an entry that only some ranks can fetch, one of these writes it. No rank ever holds more than one entry. Rank 0
    writes the index.
    """
    chosen = [entry.writers or range(ranks) for entry in entries]
    writers = [able[number % len(able)] for number, able in enumerate(chosen)]
    writing = sorted(set(writers)) or [0]
    names = {
        writer: f"{stem}-{number + 1:05d}-of-{len(writing):05d}.safetensors" for number, writer in enumerate(writing)
    }
    with ExitStack() as stack:
        file = stack.enter_context((folder / names[rank]).open("wb")) if rank in names else None
        if file is not None:
            file.write(_header([entry.kinds for entry, writer in zip(entries, writers, strict=True) if writer == rank]))
        for entry, writer in zip(entries, writers, strict=True):
            tensors = entry.fetch()
            if writer == rank:
                assert file is not None
                for name, (shape, dtype) in entry.kinds.items():
                    tensor = tensors[name].detach().cpu().contiguous()
                    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    if rank == 0:
        places = {name: names[w] for entry, w in zip(entries, writers, strict=True) for name in entry.kinds}
        size = sum(_bytes_of(*kind) for entry in entries for kind in entry.kinds.values())
        write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})


def _header(groups: Sequence[dict[str, tuple[tuple[int, ...], torch.dtype]]]) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, then the offsets of each tensor as JSON."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (shape, dtype) in ((name, kind) for group in groups for name, kind in group.items()):
        end = place + _bytes_of(shape, dtype)
        described[name] = {"dtype": KINDS[str(dtype)], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class TensorFiles:
    """The tensors of one safetensors file, or of several with an index; they are read on request, whole or in part."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.single_file = folder / f"{stem}.safetensors"
        self.open_files: dict[Path, Any] = {}
        index = folder / f"{stem}.safetensors.index.json"
        if not self.single_file.is_file() and index.is_file():
            places = read_json(index)
            if not isinstance(places.get("weight_map"), dict):
                raise CheckpointError(f"{index}: damaged: it has no weight_map")
            self.places = {name: folder / file for name, file in places["weight_map"].items()}
        else:
            with _read_errors(self.single_file):
                self.places = dict.fromkeys(self.file(self.single_file).keys(), self.single_file)

    def file(self, path: Path) -> Any:
        if path not in self.open_files:
            self.open_files[path] = safe_open(path, framework="pt")
        return self.open_files[path]

    def shape(self, name: str) -> tuple[int, ...]:
        with _read_errors(self.places[name]):
            return tuple(self.file(self.places[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        with _read_errors(self.places[name]):
            code = self.file(self.places[name]).get_slice(name).get_dtype()
        known = {kind: getattr(torch, name.removeprefix("torch.")) for name, kind in KINDS.items()}
        if code not in known:
            raise CheckpointError(f"{self.places[name]}: tensor {name} has the type {code}, which is not supported")
        found: torch.dtype = known[code]
        return found

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read a tensor, or only the given slices of it, to the CPU."""
        if name not in self.places:
            raise CheckpointError(f"{self.single_file.parent}: {self.single_file.stem} has no tensor {name}")
        path = self.places[name]
        with _read_errors(path):
            if not part:
                return self.file(path).get_tensor(name)
            return self.file(path).get_slice(name)[part if len(part) > 1 else part[0]]


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error


def _refuse_shared(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    # Checked before the copy to the CPU, after which they would no longer share memory.
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel() > 0:
            extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + extent * tensor.element_size(), name))
    spans.sort()
    for (device, _, end, name), (next_device, begin, _, next_name) in pairwise(spans):
        if device == next_device and begin < end:
            raise CheckpointError(f"{path}: tensors {name} and {next_name} share memory; save one of them, or a clone")
