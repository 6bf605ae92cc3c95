"""One conversion: plan both sides, account for every element, stream, write the manifest last, rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import CheckpointError, UsageError
from posttrain.models.checkpoint import sync_folder, write_checkpoint
from posttrain.models.convert.adapter import Adapter
from posttrain.models.convert.families import hf_stored
from posttrain.models.convert.files import TensorFile, create_pt, create_safetensors, room
from posttrain.models.convert.megatron import Layout, Shards, check_layout
from posttrain.models.convert.pieces import Piece, Stored, check_parts, check_stored, components
from posttrain.models.convert.source import MANIFEST, Source

ITERATION = "iter_0000001"
SHARD_BYTES = 5_000_000_000
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
KEPT_IN_FLOAT32 = "router_bias.weight"  # rounding it would change which experts are chosen

Progress = Callable[[int], None]  # bytes written since the last call


@dataclass
class Report:
    """What a conversion did."""

    source: Layout
    target: Layout
    tensors: int
    elements: int
    bytes_written: int
    padding: int


def convert(
    source: Source,
    out: Path,
    target: Layout,
    *,
    dtype: torch.dtype | None = None,
    lora: Path | None = None,
    vocabulary_multiple: int = 1,
    workers: int = 1,
    progress: Progress = lambda count: None,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[Path, Layout], None] = lambda folder, layout: None,
) -> Report:
    """Write `source` to the new folder `out` in another layout. Nothing is there under that name unless all is.

    `check` may look at the finished folder, and refuse it, before it gets its name.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        work = Conversion(source, unfinished, target, dtype, lora, vocabulary_multiple, shard_bytes, progress)
        report = work.run(workers)
        check(unfinished, report.target)
        unfinished.chmod(0o755)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return report


class Conversion:
    """The plan of one conversion and its execution."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        target: Layout,
        dtype: torch.dtype | None,
        lora: Path | None,
        vocabulary_multiple: int,
        shard_bytes: int,
        progress: Progress,
    ) -> None:
        self.source, self.folder, self.dtype, self.progress = source, folder, dtype, progress
        hf = hf_stored(source.config, source.shape, source.parts)
        self.adapter = Adapter(lora, hf) if lora else None
        if target.format != "hf":
            unit = vocabulary_multiple * target.tp
            padded = ceil(source.shape.vocabulary / unit) * unit
            target = replace(target, padded_vocabulary=padded)
            check_layout(target, source.shape)
        self.target = target
        self.stored = hf if target.format == "hf" else self.shards().stored()
        for stored, what in ((source.stored, "the source"), (self.stored, "the target")):
            check_stored(stored)
            check_parts(source.parts, stored, what)
        self.dtypes = self.part_dtypes()
        if target.format == "hf":
            self.stored = self.numbered(hf, shard_bytes)
        self.files = self.create()
        self.rows: dict[str, list[dict[str, Any]]] = {"source": [], "target": []}

    def shards(self) -> Shards:
        return Shards(self.target, self.source.shape, self.source.parts, ITERATION)

    # The plan

    def part_dtypes(self) -> dict[str, torch.dtype]:
        """The type of every part in the target."""
        found: dict[str, torch.dtype] = {}
        for tensor in self.source.stored:
            dtype = self.source.entry(tensor).dtype
            if not dtype.is_floating_point:
                raise CheckpointError(f"{tensor}: is {dtype}; quantised weights are not converted")
            for piece in tensor.pieces:
                if found.setdefault(piece.part, dtype) != dtype:
                    raise CheckpointError(f"{tensor}: is {dtype}, another rank's is {found[piece.part]}")
        if self.dtype is not None:
            found = {p: d if p.endswith(KEPT_IN_FLOAT32) else self.dtype for p, d in found.items()}
        return found

    def dtype_of(self, tensor: Stored) -> torch.dtype:
        found = {self.dtypes[piece.part] for piece in tensor.pieces}
        if len(found) > 1:
            raise UsageError(f"{tensor}: would be made of {sorted(map(str, found))}; choose one type with --dtype")
        return found.pop()

    def size_of(self, tensor: Stored) -> int:
        return tensor.area[0] * tensor.area[1] * self.dtype_of(tensor).itemsize

    def numbered(self, stored: list[Stored], shard_bytes: int) -> list[Stored]:
        """Hugging Face tensors over files of a limited size."""
        homes, number, filled = [], 0, 0
        for tensor in stored:
            size = self.size_of(tensor)
            if filled and filled + size > shard_bytes:
                number, filled = number + 1, 0
            homes.append(number)
            filled += size
        if not number:
            return stored
        name = "model-{:05d}-of-{:05d}.safetensors"
        return [replace(t, file=name.format(n + 1, number + 1)) for t, n in zip(stored, homes, strict=True)]

    def create(self) -> dict[str, TensorFile]:
        """All target files, with room for their tensors."""
        models = {} if self.target.format == "hf" else self.shards().models()
        wanted: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {name: {} for name in models}
        for tensor in self.stored:
            wanted.setdefault(tensor.file, {})[tensor.name] = (self.dtype_of(tensor), tensor.shape)
        files = {}
        for name, tensors in wanted.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.target.format == "hf":
                files[name] = create_safetensors(path, tensors)
            else:
                other: dict[str, Any] = {"args": self.arguments(), "checkpoint_version": 3.0, "iteration": 1}
                other |= {model: {} for model in models[name]}
                files[name] = create_pt(path, tensors, other)
        return files

    def arguments(self) -> dict[str, Any]:
        """What Megatron compares with its own arguments when it loads."""
        shape, target = self.source.shape, self.target
        return {
            "num_layers": shape.layers + len(target.noop),
            "hidden_size": shape.hidden,
            "ffn_hidden_size": shape.ffn,
            "num_attention_heads": shape.heads,
            "num_query_groups": shape.groups,
            "kv_channels": shape.head_dim,
            "padded_vocab_size": target.padded_vocabulary,
            "tensor_model_parallel_size": target.tp,
            "pipeline_model_parallel_size": target.pp,
            "expert_model_parallel_size": target.ep,
            "num_layers_per_virtual_pipeline_stage": target.layers_per_virtual_stage or None,
            "num_layer_list": ",".join(map(str, target.layers_per_stage)) or None,
            "noop_layers": ",".join(map(str, target.noop)) or None,
            "num_experts": shape.experts or None,
            "untie_embeddings_and_output_weights": not shape.tied,
            "add_qkv_bias": "q" in shape.biased,
            "use_mcore_models": target.format == "mcore",
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
        }

    # The work

    def run(self, workers: int) -> Report:
        groups = components(self.source.stored, self.stored)
        with ThreadPoolExecutor(max(1, workers)) as pool:
            running = [pool.submit(self.group, *group) for group in groups]
            try:
                for future in running:
                    future.result()
            except BaseException:
                for future in running:
                    future.cancel()
                raise
        written = sum(self.size_of(tensor) for tensor in self.stored)
        assert len(self.rows["target"]) == len(self.stored) and len(self.rows["source"]) == len(self.source.stored)
        for file in self.files.values():
            file.seal()
        if self.target.format == "hf":
            self.write_index()
        else:
            (self.folder / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
        copy_companions(self.source, self.folder, self.dtype)
        report = Report(
            self.source.layout,
            self.target,
            len(self.stored),
            sum(part.rows * part.columns for part in self.source.parts.values()),
            written,
            sum(piece.repeat for tensor in self.stored for piece in tensor.pieces),
        )
        self.write_manifest(report)
        return report

    @torch.no_grad()
    def group(self, sources: list[Stored], targets: list[Stored]) -> None:
        """Convert the tensors that have parts in common."""
        have: dict[tuple[Piece, ...], torch.Tensor] = {}
        for tensor in sources:
            loaded = self.load(tensor)
            if tensor.pieces not in have:
                have[tensor.pieces] = loaded
            elif not equal_bits(have[tensor.pieces], loaded):
                raise CheckpointError(f"{tensor}: differs from its copy on another rank; which one is right?")
        same: dict[tuple[Piece, ...], list[Stored]] = {}
        for tensor in targets:
            same.setdefault(tensor.pieces, []).append(tensor)
        for copies in same.values():
            made = self.assemble(copies[0], have)
            data = as_bytes(made)
            digest = hashlib.sha256(data.numpy()).hexdigest()
            for tensor in copies:
                self.files[tensor.file].write(tensor.name, data)
                self.note("target", tensor, made.dtype, digest)
                self.progress(data.numel())

    def load(self, tensor: Stored) -> torch.Tensor:
        """A source tensor as its rectangle; its bytes are those that were noted down, if they were."""
        file, entry = self.source.files[tensor.file], self.source.entry(tensor)
        data = file.read(tensor.name)
        digest = hashlib.sha256(data.numpy()).hexdigest()
        if self.source.hashes.get(str(tensor), digest) != digest:
            raise CheckpointError(f"{file.path}: damaged: {tensor.name} is not what {MANIFEST} says was written")
        self.note("source", tensor, entry.dtype, digest)
        return data.view(entry.dtype).view(tensor.area)

    def note(self, side: str, tensor: Stored, dtype: torch.dtype, digest: str) -> None:
        self.rows[side].append(
            {
                "file": tensor.file,
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": str(dtype).removeprefix("torch."),
                "sha256": digest,
            }
        )

    def assemble(self, target: Stored, have: dict[tuple[Piece, ...], torch.Tensor]) -> torch.Tensor:
        made = room(self.size_of(target)).view(self.dtype_of(target)).view(target.area)
        for piece in target.pieces:
            top, bottom, left, right = piece.place
            place = made[top:bottom, left:right]
            place = place.T if piece.transposed else place
            if piece.repeat:
                row = torch.empty((1, place.shape[1]), dtype=made.dtype)
                self.fill(row, piece, have)
                place.copy_(row)
            else:
                self.fill(place, piece, have)
        return made

    def fill(self, place: torch.Tensor, wanted: Piece, have: dict[tuple[Piece, ...], torch.Tensor]) -> None:
        """Copy the rectangle of a part out of the source tensors that hold it."""
        lent = place
        if self.adapter is not None and wanted.part in self.adapter.deltas:
            lent = torch.empty(place.shape, dtype=torch.float32)
        filled = 0
        for pieces, tensor in have.items():
            for piece in pieces:
                if piece.part != wanted.part or piece.repeat:
                    continue
                rows, columns = overlap(piece.rows, wanted.rows), overlap(piece.columns, wanted.columns)
                if rows is None or columns is None:
                    continue
                top, bottom, left, right = piece.place
                held = tensor[top:bottom, left:right]
                held = held.T if piece.transposed else held
                lent[within(rows, wanted.rows), within(columns, wanted.columns)] = held[
                    within(rows, piece.rows), within(columns, piece.columns)
                ]
                filled += (rows[1] - rows[0]) * (columns[1] - columns[0])
        assert filled == place.numel(), f"{wanted.part}: {filled} of {place.numel()} elements"
        if lent is not place:
            assert self.adapter is not None
            place.copy_(self.adapter.add(wanted.part, wanted.rows, wanted.columns, lent))

    # The rest of the folder

    def write_index(self) -> None:
        homes = {tensor.name: tensor.file for tensor in self.stored}
        if len(set(homes.values())) > 1:
            total = sum(self.size_of(tensor) for tensor in self.stored)
            index = {"metadata": {"total_size": total}, "weight_map": homes}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write_manifest(self, report: Report) -> None:
        """Last, so that a folder with a manifest is complete."""
        content = {
            "format": 1,
            "from": report.source.as_json(),
            "to": report.target.as_json(),
            "model_type": self.source.config["model_type"],
            "elements": report.elements,
            "padding_rows": report.padding,
            "adapter": self.adapter.config if self.adapter else None,
            "ignored": self.source.ignored,
            "source": sorted(self.rows["source"], key=lambda row: (row["file"], row["name"])),
            "target": sorted(self.rows["target"], key=lambda row: (row["file"], row["name"])),
        }
        with (self.folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else None


def within(span: tuple[int, int], frame: tuple[int, int]) -> slice:
    return slice(span[0] - frame[0], span[1] - frame[0])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Unlike torch.equal this takes NaN for NaN."""
    return a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def copy_companions(source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    """Configuration, tokenizer, chat template: every small file that is no weight."""
    for path in sorted(source.companions.iterdir()):
        if not path.is_file() or path.name.endswith(WEIGHTS) or path.name.startswith("."):
            continue
        if path.name not in (MANIFEST, "config.json", "latest_checkpointed_iteration.txt", "adapter_config.json"):
            shutil.copyfile(path, folder / path.name)
    config = dict(source.config)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def wrap_as_checkpoint(source: Source, out: Path, target: Layout, **details: Any) -> Report:
    """The same as a run folder of ours with one checkpoint, which every verb takes for a model."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name a new folder")
    reports: list[Report] = []
    write_checkpoint(out / "checkpoints", 0, lambda f: reports.append(convert(source, f / "model", target, **details)))
    return reports[0]
