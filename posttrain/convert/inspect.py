"""Describe a checkpoint of any format. Only headers are read, and no code of the checkpoint is run."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from posttrain.checkpoints.checkpoint import (
    CHECKPOINT_NAME,
    list_checkpoints,
    looks_complete,
    step_of,
    verify,
)
from posttrain.convert.adapter_files import CONFIG, WEIGHTS, is_adapter_folder, is_peft
from posttrain.convert.files import TensorFile, open_safetensors
from posttrain.convert.megatron import CheckpointLayout
from posttrain.convert.parameters import ModelShape
from posttrain.convert.source import (
    MANIFEST,
    SourceCheckpoint,
    hf_files,
    iteration_of,
    megatron_kind,
    open_ranks,
    open_source,
    recognise_format,
    recognise_layout,
    recorded_hashes,
)
from posttrain.convert.stored_tensors import ParameterBlock, ParameterShape, StoredTensor
from posttrain.core.disk import format_bytes
from posttrain.core.errors import CheckpointError, PosttrainError, UsageError
from posttrain.core.files import read_json
from posttrain.models.paths import resolve_path


@dataclass
class InspectedCheckpoint:
    """An open checkpoint and what was recognised of it."""

    folder: Path  # where the weights are
    kind: str  # hf, mcore, legacy, or adapters in one of these
    source: SourceCheckpoint
    recognised: bool  # the family is in the table, so that parameters are known and replicas are counted once
    problem: str = ""  # why it was not recognised
    checkpoint: Path | None = None  # the checkpoint directory, for a run of posttrain


def inspect_checkpoint(
    folder: Path, original: Path | None = None, given: CheckpointLayout | None = None
) -> InspectedCheckpoint:
    """Open a checkpoint of any format. For a model that is not in the table of families, list its tensors unchanged."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    kind, checkpoint = recognise_format(folder), None
    if kind == "sharded":
        folder = Path(resolve_path(str(folder)))
        checkpoint, kind = folder.parent, recognise_format(folder)
    if kind == "megatron":
        kind = megatron_kind(folder)
    if is_adapter_folder(folder):
        return InspectedCheckpoint(
            folder,
            f"adapters, {'peft' if is_peft(folder) else kind}",
            open_unrecognised(folder, kind),
            False,
            "",
            checkpoint,
        )
    try:
        return InspectedCheckpoint(folder, kind, open_source(folder, kind, original, given), True, "", checkpoint)
    except PosttrainError as error:
        return InspectedCheckpoint(folder, kind, open_unrecognised(folder, kind), False, str(error), checkpoint)


def open_unrecognised(folder: Path, kind: str) -> SourceCheckpoint:
    """Open a checkpoint whose parameters are its tensors as they are stored."""
    if kind in ("mcore", "legacy"):
        files = open_ranks(folder, iteration_of(folder))
    else:
        names = [WEIGHTS] if is_peft(folder) else hf_files(folder)
        files = {name: open_safetensors(folder / name) for name in names}
    parameters, stored = {}, []
    for file_name, file in files.items():
        for name, location in file.tensors.items():
            parameter = f"{file_name}: {name}" if kind in ("mcore", "legacy") else name
            rows = location.shape[0] if location.shape else 1
            matrix_shape = rows, prod(location.shape[1:])
            parameters[parameter] = ParameterShape(*matrix_shape, vector=len(location.shape) < 2)
            blocks = (ParameterBlock(parameter, (0, matrix_shape[0]), (0, matrix_shape[1]), (0, 0)),)
            stored.append(StoredTensor(file_name, name, location.shape, matrix_shape, blocks))
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    shape = ModelShape(0, 0, 0, 0, 0, 0, 0, False)
    return SourceCheckpoint(
        folder, folder, config, CheckpointLayout(kind), shape, parameters, stored, files, [], recorded_hashes(folder)
    )


def describe_checkpoint(inspected: InspectedCheckpoint) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each line that `posttrain inspect` prints."""
    source = inspected.source
    yield "weights", str(inspected.folder)
    yield "format", describe_format(inspected)
    if inspected.checkpoint is not None:
        yield from checkpoint_facts(inspected.checkpoint)
    config = source.config or (read_json(inspected.folder / CONFIG) if (inspected.folder / CONFIG).is_file() else {})
    if "model_type" in config:
        yield (
            "family",
            f"{config['model_type']} ({', '.join(config.get('architectures') or ['no architecture given'])})",
        )
    if inspected.kind.startswith("adapters"):
        yield from adapter_facts(inspected)
    yield "layout", describe_layout(inspected)
    if inspected.recognised:
        shape = source.shape
        sizes = [f"{shape.layers} layers", f"hidden {shape.hidden}", f"{shape.heads} heads in {shape.groups} groups"]
        sizes += [f"{shape.experts} experts"] * bool(shape.experts)
        sizes += [f"{shape.mtp_layers} multi-token-prediction layers"] * bool(shape.mtp_layers)
        yield "model", ", ".join(sizes)
        yield "head", "tied to the embeddings" if shape.tied else shape.head
    yield from tensor_facts(inspected)
    yield "tokenizer", describe_tokenizer(inspected.folder)
    if source.hashes:
        yield "hashes", f"{len(source.hashes)} in {MANIFEST}"
    if source.ignored:
        yield "not weights", f"{len(source.ignored)} tensors: {source.ignored[0]} ..."
    if inspected.problem:
        yield "problem", inspected.problem


def describe_format(inspected: InspectedCheckpoint) -> str:
    parts = {"hf": "Hugging Face", "mcore": "Megatron core", "legacy": "Megatron legacy"}
    name = parts.get(inspected.kind, inspected.kind)
    return f"checkpoint of a run ({name})" if inspected.checkpoint is not None else name


def checkpoint_facts(checkpoint: Path) -> Iterator[tuple[str, str]]:
    if CHECKPOINT_NAME.fullmatch(checkpoint.name):
        others = len(list_checkpoints(checkpoint.parent)) - 1
        yield "step", f"{step_of(checkpoint)}" + (f", and {others} more checkpoints" if others else "")
        yield (
            "complete",
            "yes" if looks_complete(checkpoint) else "no: files are missing or have another size than recorded",
        )
    beside = sorted(path.name for path in checkpoint.iterdir() if path.name != "model")
    yield "other files", ", ".join(beside)


def adapter_facts(inspected: InspectedCheckpoint) -> Iterator[tuple[str, str]]:
    config = read_json(inspected.folder / CONFIG) if (inspected.folder / CONFIG).is_file() else {}
    if config:
        yield "adapters", f"r {config.get('r')}, alpha {config.get('lora_alpha')}, {config.get('target_modules', '')}"
        yield "base", str(config.get("base_model_name_or_path") or "not recorded")


def describe_layout(inspected: InspectedCheckpoint) -> str:
    layout = inspected.source.layout
    if not inspected.recognised and layout.format in ("mcore", "legacy"):
        try:
            layout = recognise_layout(layout.format, inspected.source.files, CheckpointLayout())
        except CheckpointError as error:
            return f"not recognised: {error}"
    count = len(inspected.source.files)
    files = f"{count} file{'s' * (count != 1)}"
    if layout.format not in ("mcore", "legacy"):
        return files
    parts = [f"tp {layout.tp}", f"pp {layout.pp}", f"ep {layout.ep}"]
    if layout.layers_per_stage:
        parts.append(f"layers per stage {','.join(map(str, layout.layers_per_stage))}")
    if layout.layers_per_virtual_stage:
        parts.append(f"{layout.layers_per_virtual_stage} layers per virtual stage")
    if layout.noop:
        parts.append(f"noop layers {','.join(map(str, layout.noop))}")
    if layout.padded_vocabulary:
        parts.append(f"vocabulary padded to {layout.padded_vocabulary}")
    parts += ["grouped experts"] * (layout.experts == "grouped") + ["Transformer Engine names"] * layout.engine
    return f"{', '.join(parts)}; {files}"


def tensor_facts(inspected: InspectedCheckpoint) -> Iterator[tuple[str, str]]:
    source = inspected.source
    elements = sum(parameter.rows * parameter.columns for parameter in source.parameters.values())
    yield (
        "parameters",
        f"{elements:,}" + ("" if inspected.recognised else " (replicas on several ranks are counted more than once)"),
    )
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in source.stored:
        location = source.location(tensor)
        name = str(location.dtype).removeprefix("torch.")
        counts[name] += 1
        sizes[name] += location.size
    kinds = ", ".join(f"{name}: {count} tensors, {format_bytes(sizes[name])}" for name, count in counts.most_common())
    yield "types", kinds or "no tensors"


def describe_tokenizer(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    found = [name for name in names if (folder / name).is_file()]
    if not found:
        return "none"
    parts = [", ".join(found)]
    if "tokenizer.json" in found:
        content = read_json(folder / "tokenizer.json")
        vocabulary = content.get("model", {}).get("vocab", ())
        extra = {row.get("id") for row in content.get("added_tokens", ()) if row.get("content") not in vocabulary}
        parts.append(f"{len(vocabulary) + len(extra)} tokens")
    config: dict[str, Any] = read_json(folder / names[3]) if names[3] in found else {}
    has_template = (folder / "chat_template.jinja").is_file() or bool(config.get("chat_template"))
    parts.append("with a chat template" if has_template else "no chat template")
    return ", ".join(parts)


def list_tensors(inspected: InspectedCheckpoint, hashes: bool) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield file, name, type, shape, sha256 of every tensor; `hashes`: compute it and compare with the record."""
    for tensor in inspected.source.stored:
        location = inspected.source.location(tensor)
        digest = inspected.source.hashes.get(str(tensor), "")
        if hashes:
            found = tensor_digest(inspected.source.files[tensor.file], tensor.name)
            if digest and digest != found:
                path = inspected.folder / tensor.file
                raise CheckpointError(f"{path}: damaged: the sha256 of tensor {tensor.name} is not the one recorded")
            digest = found
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        yield tensor.file, tensor.name, str(location.dtype).removeprefix("torch."), shape, digest


def tensor_digest(file: TensorFile, name: str) -> str:
    return hashlib.sha256(file.read(name).numpy()).hexdigest()


def check_checkpoint(inspected: InspectedCheckpoint) -> None:
    """Read every byte of a run's checkpoint and compare it with its manifest."""
    if inspected.checkpoint is not None and CHECKPOINT_NAME.fullmatch(inspected.checkpoint.name):
        verify(inspected.checkpoint)
