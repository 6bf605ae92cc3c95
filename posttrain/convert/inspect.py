"""What a folder with weights holds, whatever its format; nothing in it is run, and nothing but headers is read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from posttrain.checkpoints.checkpoint import NAME, list_checkpoints, looks_complete, readable, step_of, verify
from posttrain.convert.adapter_files import CONFIG, WEIGHTS, is_adapter_folder, is_peft
from posttrain.convert.families import Shape
from posttrain.convert.files import TensorFile, open_safetensors
from posttrain.convert.megatron import Layout
from posttrain.convert.pieces import Part, Piece, Stored
from posttrain.convert.source import (
    MANIFEST,
    Source,
    hf_files,
    iteration_of,
    megatron_kind,
    open_ranks,
    open_source,
    recognise_format,
    recognise_layout,
)
from posttrain.core.errors import CheckpointError, PosttrainError, UsageError
from posttrain.core.files import read_json
from posttrain.models.loading import resolve_path


@dataclass
class Seen:
    """A folder that was looked through."""

    folder: Path  # where the weights are
    kind: str  # hf, mcore, legacy, or adapters in one of these
    source: Source
    known: bool  # the family is in the table: tensors are what the model needs, and are told apart from copies
    problem: str = ""  # why not
    checkpoint: Path | None = None  # of a run of ours, if the folder is one


def look(folder: Path, original: Path | None = None, given: Layout | None = None) -> Seen:
    """Open a folder of any format. A model that is not in the table of families is looked at tensor by tensor."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    kind, checkpoint = recognise_format(folder), None
    if kind == "sharded":
        folder = Path(resolve_path(str(folder)))
        checkpoint, kind = folder.parent, recognise_format(folder)
    if kind == "megatron":
        kind = megatron_kind(folder)
    if is_adapter_folder(folder):
        return Seen(
            folder, f"adapters, {'peft' if is_peft(folder) else kind}", raw(folder, kind), False, "", checkpoint
        )
    try:
        return Seen(folder, kind, open_source(folder, kind, original, given), True, "", checkpoint)
    except PosttrainError as error:
        return Seen(folder, kind, raw(folder, kind), False, str(error), checkpoint)


def raw(folder: Path, kind: str) -> Source:
    """A source whose parts are the tensors as they lie in the files."""
    if kind in ("mcore", "legacy"):
        files = open_ranks(folder, iteration_of(folder))
    else:
        names = [WEIGHTS] if is_peft(folder) else hf_files(folder)
        files = {name: open_safetensors(folder / name) for name in names}
    parts, stored = {}, []
    for file_name, file in files.items():
        for name, entry in file.entries.items():
            part = f"{file_name}: {name}" if kind in ("mcore", "legacy") else name
            rows = entry.shape[0] if entry.shape else 1
            area = rows, prod(entry.shape[1:])
            parts[part] = Part(*area, vector=len(entry.shape) < 2)
            pieces = (Piece(part, (0, area[0]), (0, area[1]), (0, 0)),)
            stored.append(Stored(file_name, name, entry.shape, area, pieces))
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    shape = Shape(0, 0, 0, 0, 0, 0, 0, False)
    return Source(folder, folder, config, Layout(kind), shape, parts, stored, files, [], noted_hashes(folder))


def noted_hashes(folder: Path) -> dict[str, str]:
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    return {f"{row['file']}: {row['name']}": row["sha256"] for row in manifest.get("target", ())}


def facts_of(seen: Seen) -> Iterator[tuple[str, str]]:
    """What there is to say, a line each."""
    source = seen.source
    yield "weights", str(seen.folder)
    yield "format", describe_format(seen)
    if seen.checkpoint is not None:
        yield from checkpoint_facts(seen.checkpoint)
    config = source.config or (read_json(seen.folder / CONFIG) if (seen.folder / CONFIG).is_file() else {})
    if "model_type" in config:
        yield (
            "family",
            f"{config['model_type']} ({', '.join(config.get('architectures') or ['no architecture named'])})",
        )
    if seen.kind.startswith("adapters"):
        yield from adapter_facts(seen)
    yield "layout", describe_layout(seen)
    if seen.known:
        shape = source.shape
        sizes = [f"{shape.layers} layers", f"hidden {shape.hidden}", f"{shape.heads} heads in {shape.groups} groups"]
        sizes += [f"{shape.experts} experts"] * bool(shape.experts)
        sizes += [f"{shape.predictors} layers for later tokens"] * bool(shape.predictors)
        yield "model", ", ".join(sizes)
        yield "head", "tied to the embeddings" if shape.tied else shape.head
    yield from tensor_facts(seen)
    yield "tokenizer", describe_tokenizer(seen.folder)
    if source.hashes:
        yield "hashes", f"{len(source.hashes)} in {MANIFEST}"
    if source.ignored:
        yield "no weights", f"{len(source.ignored)} tensors: {source.ignored[0]} ..."
    if seen.problem:
        yield "problem", seen.problem


def describe_format(seen: Seen) -> str:
    words = {"hf": "Hugging Face", "mcore": "Megatron core", "legacy": "Megatron legacy"}
    name = words.get(seen.kind, seen.kind)
    return f"checkpoint of a run ({name})" if seen.checkpoint is not None else name


def checkpoint_facts(checkpoint: Path) -> Iterator[tuple[str, str]]:
    if NAME.fullmatch(checkpoint.name):
        others = len(list_checkpoints(checkpoint.parent)) - 1
        yield "step", f"{step_of(checkpoint)}" + (f", and {others} more checkpoints" if others else "")
        yield "complete", "yes" if looks_complete(checkpoint) else "no: files are missing or have other sizes"
    beside = sorted(path.name for path in checkpoint.iterdir() if path.name != "model")
    yield "beside it", ", ".join(beside)


def adapter_facts(seen: Seen) -> Iterator[tuple[str, str]]:
    config = read_json(seen.folder / CONFIG) if (seen.folder / CONFIG).is_file() else {}
    if config:
        yield "adapters", f"r {config.get('r')}, alpha {config.get('lora_alpha')}, {config.get('target_modules', '')}"
        yield "base", str(config.get("base_model_name_or_path") or "not said")


def describe_layout(seen: Seen) -> str:
    layout = seen.source.layout
    if not seen.known and layout.format in ("mcore", "legacy"):
        try:
            layout = recognise_layout(layout.format, seen.source.files, Layout())
        except CheckpointError as error:
            return f"not recognised: {error}"
    count = len(seen.source.files)
    files = f"{count} file{'s' * (count != 1)}"
    if layout.format not in ("mcore", "legacy"):
        return files
    words = [f"tp {layout.tp}", f"pp {layout.pp}", f"ep {layout.ep}"]
    if layout.layers_per_stage:
        words.append(f"layers a stage {','.join(map(str, layout.layers_per_stage))}")
    if layout.layers_per_virtual_stage:
        words.append(f"{layout.layers_per_virtual_stage} layers a virtual stage")
    if layout.noop:
        words.append(f"noop layers {','.join(map(str, layout.noop))}")
    if layout.padded_vocabulary:
        words.append(f"vocabulary padded to {layout.padded_vocabulary}")
    words += ["experts grouped"] * (layout.experts == "grouped") + ["Transformer Engine's names"] * layout.engine
    return f"{', '.join(words)}; {files}"


def tensor_facts(seen: Seen) -> Iterator[tuple[str, str]]:
    source = seen.source
    elements = sum(part.rows * part.columns for part in source.parts.values())
    yield "parameters", f"{elements:,}" + ("" if seen.known else ", copies on several ranks counted")
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in source.stored:
        entry = source.entry(tensor)
        name = str(entry.dtype).removeprefix("torch.")
        counts[name] += 1
        sizes[name] += entry.size
    kinds = ", ".join(f"{name}: {count} tensors, {readable(sizes[name])}" for name, count in counts.most_common())
    yield "types", kinds or "no tensors"


def describe_tokenizer(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    found = [name for name in names if (folder / name).is_file()]
    if not found:
        return "none"
    words = [", ".join(found)]
    if "tokenizer.json" in found:
        content = read_json(folder / "tokenizer.json")
        vocabulary = content.get("model", {}).get("vocab", ())
        extra = {row.get("id") for row in content.get("added_tokens", ()) if row.get("content") not in vocabulary}
        words.append(f"{len(vocabulary) + len(extra)} tokens")
    config: dict[str, Any] = read_json(folder / names[3]) if names[3] in found else {}
    has_template = (folder / "chat_template.jinja").is_file() or bool(config.get("chat_template"))
    words.append("with a chat template" if has_template else "no chat template")
    return ", ".join(words)


def tensor_rows(seen: Seen, hashes: bool) -> Iterator[tuple[str, str, str, str, str]]:
    """File, name, type, shape and hash of every tensor; with `hashes` computed, and held against what was noted."""
    for tensor in seen.source.stored:
        entry = seen.source.entry(tensor)
        digest = seen.source.hashes.get(str(tensor), "")
        if hashes:
            found = digest_of(seen.source.files[tensor.file], tensor.name)
            if digest and digest != found:
                raise CheckpointError(f"{seen.folder / tensor.file}: damaged: {tensor.name} is not what was written")
            digest = found
        shape = " x ".join(map(str, tensor.shape)) or "number"
        yield tensor.file, tensor.name, str(entry.dtype).removeprefix("torch."), shape, digest


def digest_of(file: TensorFile, name: str) -> str:
    return hashlib.sha256(file.read(name).numpy()).hexdigest()


def check_checkpoint(seen: Seen) -> None:
    """Read every byte of a run's checkpoint and hold it against its manifest."""
    if seen.checkpoint is not None and NAME.fullmatch(seen.checkpoint.name):
        verify(seen.checkpoint)
