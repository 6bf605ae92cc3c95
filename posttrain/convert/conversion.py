"""One conversion: plan both sides, account for every element, stream, write the manifest last, rename."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoints.checkpoint import NAME, step_of, write_checkpoint
from posttrain.convert.adapter import Adapter
from posttrain.convert.families import hf_stored
from posttrain.convert.files import TensorFile, create_pt, create_safetensors
from posttrain.convert.megatron import Layout, Shards, check_layout
from posttrain.convert.pieces import Stored, check_parts, check_stored, components
from posttrain.convert.source import MANIFEST, Source
from posttrain.convert.stream import Stream, as_bytes
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import atomic_write, sync_folder

ITERATION = "iter_0000001"
SHARD_BYTES = 5_000_000_000
FLUSH = 256 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
KEPT_IN_FLOAT32 = "router_bias.weight"  # rounding it would change which experts are chosen

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Progress = Callable[[int, int], None]  # bytes written since the last call, bytes in all


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
    adapter: Adapter | None = None,
    vocabulary_multiple: int = 1,
    workers: int = 1,
    progress: Progress = lambda count, total: None,
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
    work = None
    try:
        work = Conversion(source, unfinished, target, dtype, adapter, vocabulary_multiple, shard_bytes, progress)
        report = work.run(workers)
        check(unfinished, report.target)
        unfinished.chmod(0o755)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
        sync_folder(out.parent)
    finally:
        for file in work.files.values() if work else ():
            file.close()
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
        adapter: Adapter | None,
        vocabulary_multiple: int,
        shard_bytes: int,
        progress: Progress,
    ) -> None:
        self.source, self.folder, self.dtype, self.progress = source, folder, dtype, progress
        hf = hf_stored(source.config, source.shape, source.parts)
        self.adapter = adapter
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
        self.total = sum(self.size_of(tensor) for tensor in self.stored)
        self.files = self.create()
        self.rows: dict[str, list[dict[str, Any]]] = {"source": [], "target": []}
        self.lock, self.dirty, self.flushes = threading.Lock(), Counter[TensorFile](), list[Future[None]]()
        largest = max(source.entry(tensor).size for tensor in source.stored)
        largest = max(largest, *(self.size_of(tensor) for tensor in self.stored))
        self.stream = Stream(source, adapter, largest, lambda *what: self.note("source", *what))

    def shards(self) -> Shards:
        return Shards(self.target, self.source.shape, self.source.parts, ITERATION)

    # The plan

    def part_dtypes(self) -> dict[str, torch.dtype]:
        """The type of every part in the target."""
        found: dict[str, torch.dtype] = {}
        for tensor in self.source.stored:
            dtype = self.source.entry(tensor).dtype
            if dtype not in TYPES:
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

        def convert(number: int) -> None:
            for tensor in groups[number + workers][0] if number + workers < len(groups) else ():
                self.source.files[tensor.file].expect(tensor.name)
            self.group(*groups[number])

        with ThreadPoolExecutor(1) as self.flusher, ThreadPoolExecutor(max(1, workers)) as pool:
            running = [pool.submit(convert, number) for number in range(len(groups))]
            try:
                for future in running:
                    future.result()
                for future in self.flushes:
                    future.result()
            except BaseException:
                for future in running:
                    future.cancel()
                raise
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
            self.total,
            sum(piece.repeat for tensor in self.stored for piece in tensor.pieces),
        )
        self.write_manifest(report)
        return report

    @torch.no_grad()
    def group(self, sources: list[Stored], targets: list[Stored]) -> None:
        """Convert the tensors that have parts in common."""
        for made in self.stream.make(sources, targets, self.dtype_of):
            assert made.data is not None and made.data.dtype == made.dtype
            data = as_bytes(made.data)
            digest = made.digest or hashlib.sha256(data.numpy()).hexdigest()
            for tensor in made.copies:
                self.write(self.files[tensor.file], tensor.name, data)
                self.note("target", tensor, made.dtype, digest)
                self.progress(data.numel(), self.total)

    def write(self, file: TensorFile, name: str, data: torch.Tensor) -> None:
        """And have the disk begin early: all of it at the end would take as long again as the work."""
        file.write(name, data)
        with self.lock:
            self.dirty[file] += data.numel()
            due = self.dirty[file] >= FLUSH
            if due:
                self.dirty[file] = 0
        if due:
            self.flushes.append(self.flusher.submit(file.flush))

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
        atomic_write(self.folder / MANIFEST, json.JSONEncoder(indent=1).iterencode(content))


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


def wrap_as_checkpoint(source: Source, out: Path, carried: Path | None, **details: Any) -> Report:
    """The same as a run folder of ours with one checkpoint, which every verb takes for a model.

    `carried`: the checkpoint that the source is the model of; its optimizer state and all else that training needs to
    go on come along as they are, so that the new run resumes where the old one stood.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name a new folder")
    reports: list[Report] = []

    def write(folder: Path) -> None:
        reports.append(convert(source, folder / "model", Layout(), **details))
        for path in sorted(carried.iterdir()) if carried else ():
            if path.is_dir() and path.name != "model":
                shutil.copytree(path, folder / path.name)
            elif path.is_file() and path.name != "manifest.json":
                shutil.copyfile(path, folder / path.name)

    step = step_of(carried) if carried and NAME.fullmatch(carried.name) else 0
    write_checkpoint(out / "checkpoints", step, write)
    run = carried.parent.parent if carried else None
    if run is not None and (run / "config.yaml").is_file():
        shutil.copyfile(run / "config.yaml", out / "config.yaml")
    return reports[0]
