"""Run one conversion: describe both sides, check that every element is covered, stream, write the manifest, rename."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoints.checkpoint import CHECKPOINT_NAME, step_of, write_checkpoint
from posttrain.convert.adapter import LoraAdapter
from posttrain.convert.files import TensorFile, create_pt, create_safetensors
from posttrain.convert.hugging_face import hf_stored
from posttrain.convert.megatron import CheckpointLayout, MegatronShards, check_checkpoint_layout
from posttrain.convert.source import MANIFEST, SourceCheckpoint
from posttrain.convert.stored_tensors import StoredTensor, check_parameters, check_stored, connected_groups
from posttrain.convert.stream import TensorStream, as_bytes
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import atomic_write, check_new_folder, new_folder
from posttrain.core.temporary import remove_leftovers

ITERATION = "iter_0000001"
SHARD_BYTES = 5_000_000_000  # largest Hugging Face file
FLUSH_BYTES = 256 << 20  # written to a file before it is flushed
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
KEPT_IN_FLOAT32 = "router_bias.weight"  # rounding it would change the choice of experts

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

ProgressCallback = Callable[[int, int], None]  # bytes written since the last call, total bytes


@dataclass
class ConversionReport:
    """Summary of a finished conversion."""

    source: CheckpointLayout
    target: CheckpointLayout
    tensors: int
    elements: int  # of the model's parameters
    bytes_written: int
    padding: int  # rows beyond the vocabulary


def convert(
    source: SourceCheckpoint,
    out: Path,
    target: CheckpointLayout,
    *,
    dtype: torch.dtype | None = None,
    adapter: LoraAdapter | None = None,
    vocabulary_multiple: int = 1,
    workers: int = 1,
    progress: ProgressCallback = lambda count, total: None,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[Path, CheckpointLayout], None] = lambda folder, layout: None,
) -> ConversionReport:
    """Write `source` to the new folder `out` in another layout; `out` appears only when it is complete.

    `check` is called with the finished folder before it is renamed to `out`, and may raise to refuse it.
    """
    size = sum(source.location(tensor).size for tensor in source.stored)
    with new_folder(out, lambda: size) as unfinished:
        work = None
        try:
            work = Conversion(source, unfinished, target, dtype, adapter, vocabulary_multiple, shard_bytes, progress)
            report = work.run(workers)
            check(unfinished, report.target)
        finally:
            for file in work.files.values() if work else ():
                file.close()
    return report


class Conversion:
    """Plans one conversion and runs it."""

    def __init__(
        self,
        source: SourceCheckpoint,
        folder: Path,
        target: CheckpointLayout,
        dtype: torch.dtype | None,
        adapter: LoraAdapter | None,
        vocabulary_multiple: int,
        shard_bytes: int,
        progress: ProgressCallback,
    ) -> None:
        self.source, self.folder, self.dtype, self.progress = source, folder, dtype, progress
        hf = hf_stored(source.config, source.shape, source.parameters)
        self.adapter = adapter
        if target.format != "hf":
            unit = vocabulary_multiple * target.tp
            padded = ceil(source.shape.vocabulary / unit) * unit
            target = replace(target, padded_vocabulary=padded)
            check_checkpoint_layout(target, source.shape)
        self.target = target
        self.stored = hf if target.format == "hf" else self.megatron_shards().stored()
        for stored, what in ((source.stored, "the source"), (self.stored, "the target")):
            check_stored(stored)
            check_parameters(source.parameters, stored, what)
        self.dtypes = self.part_dtypes()
        if target.format == "hf":
            self.stored = self.sharded(hf, shard_bytes)
        self.total = sum(self.size_of(tensor) for tensor in self.stored)
        self.files = self.create_files()
        self.rows: dict[str, list[dict[str, Any]]] = {"source": [], "target": []}
        self.lock, self.dirty, self.flushes = threading.Lock(), Counter[TensorFile](), list[Future[None]]()
        largest = max(source.location(tensor).size for tensor in source.stored)
        largest = max(largest, *(self.size_of(tensor) for tensor in self.stored))
        self.stream = TensorStream(source, adapter, largest, lambda *what: self.record("source", *what))

    def megatron_shards(self) -> MegatronShards:
        return MegatronShards(self.target, self.source.shape, self.source.parameters, ITERATION)

    # The plan

    def part_dtypes(self) -> dict[str, torch.dtype]:
        """Return the type of every parameter in the target."""
        found: dict[str, torch.dtype] = {}
        for tensor in self.source.stored:
            dtype = self.source.location(tensor).dtype
            if dtype not in TYPES:
                raise CheckpointError(f"{tensor}: has type {dtype}; quantized weights cannot be converted")
            for block in tensor.blocks:
                if found.setdefault(block.parameter, dtype) != dtype:
                    raise CheckpointError(
                        f"{tensor}: has type {dtype}, on another rank {found[block.parameter]}: inconsistent checkpoint"
                    )
        if self.dtype is not None:
            found = {p: d if p.endswith(KEPT_IN_FLOAT32) else self.dtype for p, d in found.items()}
        return found

    def dtype_of(self, tensor: StoredTensor) -> torch.dtype:
        found = {self.dtypes[block.parameter] for block in tensor.blocks}
        if len(found) > 1:
            raise UsageError(
                f"{tensor}: fuses weights of types {sorted(map(str, found))}; choose one type with --dtype"
            )
        return found.pop()

    def size_of(self, tensor: StoredTensor) -> int:
        return tensor.matrix_shape[0] * tensor.matrix_shape[1] * self.dtype_of(tensor).itemsize

    def sharded(self, stored: list[StoredTensor], shard_bytes: int) -> list[StoredTensor]:
        """Distribute Hugging Face tensors over files of a limited size."""
        file_of, number, filled = [], 0, 0
        for tensor in stored:
            size = self.size_of(tensor)
            if filled and filled + size > shard_bytes:
                number, filled = number + 1, 0
            file_of.append(number)
            filled += size
        if not number:
            return stored
        name = "model-{:05d}-of-{:05d}.safetensors"
        return [replace(t, file=name.format(n + 1, number + 1)) for t, n in zip(stored, file_of, strict=True)]

    def create_files(self) -> dict[str, TensorFile]:
        """Create all target files, with space for their tensors."""
        models = {} if self.target.format == "hf" else self.megatron_shards().models()
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
                other: dict[str, Any] = {"args": self.megatron_arguments(), "checkpoint_version": 3.0, "iteration": 1}
                other |= {model: {} for model in models[name]}
                files[name] = create_pt(path, tensors, other)
        return files

    def megatron_arguments(self) -> dict[str, Any]:
        """Return what Megatron compares with its own arguments when it loads a checkpoint."""
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

    # Execution

    def run(self, workers: int) -> ConversionReport:
        """Convert all groups of tensors with this many threads and complete the folder."""
        groups = connected_groups(self.source.stored, self.stored)

        def convert(number: int) -> None:
            for tensor in groups[number + workers][0] if number + workers < len(groups) else ():
                self.source.files[tensor.file].prefetch(tensor.name)
            self.convert_group(*groups[number])

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
            file.finish()
        if self.target.format == "hf":
            self.write_index()
        else:
            (self.folder / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
        copy_config_files(self.source, self.folder, self.dtype)
        report = ConversionReport(
            self.source.layout,
            self.target,
            len(self.stored),
            sum(parameter.rows * parameter.columns for parameter in self.source.parameters.values()),
            self.total,
            sum(block.repeat for tensor in self.stored for block in tensor.blocks),
        )
        self.write_manifest(report)
        return report

    @torch.no_grad()
    def convert_group(self, sources: list[StoredTensor], targets: list[StoredTensor]) -> None:
        """Convert a group of tensors that have parameters in common."""
        for target in self.stream.assemble(sources, targets, self.dtype_of):
            assert target.data is not None and target.data.dtype == target.dtype
            data = as_bytes(target.data)
            digest = target.digest or hashlib.sha256(data.numpy()).hexdigest()
            for tensor in target.replicas:
                self.write(self.files[tensor.file], tensor.name, data)
                self.record("target", tensor, target.dtype, digest)
                self.progress(data.numel(), self.total)

    def write(self, file: TensorFile, name: str, data: torch.Tensor) -> None:
        """Write a tensor and start flushing early: flushing everything at the end would double the total time."""
        file.write(name, data)
        with self.lock:
            self.dirty[file] += data.numel()
            due = self.dirty[file] >= FLUSH_BYTES
            if due:
                self.dirty[file] = 0
        if due:
            self.flushes.append(self.flusher.submit(file.flush))

    def record(self, side: str, tensor: StoredTensor, dtype: torch.dtype, digest: str) -> None:
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
        file_of = {tensor.name: tensor.file for tensor in self.stored}
        if len(set(file_of.values())) > 1:
            total = sum(self.size_of(tensor) for tensor in self.stored)
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")

    def write_manifest(self, report: ConversionReport) -> None:
        """Write the manifest last, so that a folder with a manifest is complete."""
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


def copy_config_files(source: SourceCheckpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy configuration, tokenizer and chat template: every file that does not hold weights."""
    for path in sorted(source.config_folder.iterdir()):
        if not path.is_file() or path.name.endswith(WEIGHT_SUFFIXES) or path.name.startswith("."):
            continue
        if path.name not in (MANIFEST, "config.json", "latest_checkpointed_iteration.txt", "adapter_config.json"):
            shutil.copyfile(path, folder / path.name)
    config = dict(source.config)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def wrap_as_checkpoint(
    source: SourceCheckpoint, out: Path, training_state: Path | None, **details: Any
) -> ConversionReport:
    """Write a run directory with one checkpoint, which every verb accepts as a model.

    `training_state`: the checkpoint whose model the source is; its optimizer state and everything else that training
    needs are copied unchanged, so that the new run resumes at the same step.
    """
    remove_killed_save(out)
    check_new_folder(out)
    reports: list[ConversionReport] = []

    def write(folder: Path) -> None:
        reports.append(convert(source, folder / "model", CheckpointLayout(), **details))
        for path in sorted(training_state.iterdir()) if training_state else ():
            if path.is_dir() and path.name != "model":
                shutil.copytree(path, folder / path.name)
            elif path.is_file() and path.name != "manifest.json":
                shutil.copyfile(path, folder / path.name)

    step = step_of(training_state) if training_state and CHECKPOINT_NAME.fullmatch(training_state.name) else 0
    write_checkpoint(out / "checkpoints", step, write)
    run = training_state.parent.parent if training_state else None
    if run is not None and (run / "config.yaml").is_file():
        shutil.copyfile(run / "config.yaml", out / "config.yaml")
    return reports[0]


def remove_killed_save(out: Path) -> None:
    """Remove what a killed process left of a run directory without a checkpoint, so that the same command can run."""
    checkpoints = out / "checkpoints"
    remove_leftovers(checkpoints)
    with suppress(OSError):  # not there, or not empty
        checkpoints.rmdir()
