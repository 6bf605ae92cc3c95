"""Adapters in files: peft's folder, and Megatron's ranks with `...lora_A.default.weight` beside each matrix."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.convert.adapter import Adapter, Collector, pair, rank_of
from posttrain.convert.families import Shape, hf_stored
from posttrain.convert.files import TensorFile, create_pt, create_safetensors, open_safetensors
from posttrain.convert.megatron import Layout, Shards, check_layout, layout_from_json
from posttrain.convert.pieces import Part, Stored
from posttrain.convert.source import MANIFEST, iteration_of, open_ranks, recognise_layout
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import read_json, sync_folder
from posttrain.models.loading import resolve_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
WHOLE = ("score.weight", "rm_head.weight", "rm_head/weight")


class Base:
    """The model that adapters are for: its configuration is enough."""

    def __init__(self, config: dict[str, Any], shape: Shape, parts: dict[str, Part]) -> None:
        self.config, self.shape, self.parts = config, shape, parts
        self.hf = hf_stored(config, shape, parts)


def is_peft(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds adapters and not what they are for: peft's, or Megatron's ranks."""
    if is_peft(folder):
        return True
    if not (folder / "latest_checkpointed_iteration.txt").is_file() and not any(folder.glob("mp_rank_*")):
        return False
    files = open_ranks(folder, iteration_of(folder))
    for file in files.values():
        file.close()
    names = [name for file in files.values() for name in file.entries]
    return any(LORA.fullmatch(name) for name in names) and not any("word_embeddings" in name for name in names)


def base_folder(folder: Path, original: Path | None) -> Path:
    """Where the configuration of the model lies that adapters are for."""
    if original is not None:
        return original
    if (folder / "config.json").is_file():
        return folder
    named = (read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}).get("base_model_name_or_path")
    if not named:
        raise UsageError(f"{folder}: it does not say which model its adapters are for: --original FOLDER does")
    return Path(resolve_path(named))


def read_adapter(folder: Path, base: Base, kind: str, given: Layout, known: dict[str, Any]) -> tuple[Adapter, Layout]:
    """Adapters of either form. `known`: r and lora_alpha, where the folder does not say."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    config = config | {key: value for key, value in known.items() if value}
    if missing := {"r", "lora_alpha"} - config.keys():
        raise UsageError(f"{folder}: it does not say its {' and '.join(sorted(missing))}: --lora-r and --lora-alpha do")
    if is_peft(folder):
        return read_peft(folder, base, config), Layout()
    return read_ranks(folder, base, kind, given, config)


def read_peft(folder: Path, base: Base, config: dict[str, Any]) -> Adapter:
    file = open_safetensors(folder / WEIGHTS)
    try:
        tensors = {name.removeprefix(PREFIX): whole_tensor(file, name) for name in file.entries}
    finally:
        file.close()
    found = Collector(base.parts)
    used: set[str] = set()
    for stored in base.hf:
        used |= collect(found, stored, tensors, str(folder))
    if left := sorted(tensors.keys() - used):
        raise CheckpointError(f"{folder}: {left[0]} belongs to no matrix of this model")
    return found.adapter(config)


def read_ranks(folder: Path, base: Base, kind: str, given: Layout, config: dict[str, Any]) -> tuple[Adapter, Layout]:
    iteration = iteration_of(folder)
    files = open_ranks(folder, iteration)
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    if "to" in manifest:
        layout = layout_from_json(manifest["to"])
    else:
        layout = recognise_layout(kind, files, given)
    layout = with_vocabulary(layout, base.shape)
    check_layout(layout, base.shape)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, file in files.items():
        wanted = [entry for entry in file.entries if LORA.fullmatch(entry) or entry.endswith(WHOLE)]
        tensors[name] = {entry: whole_tensor(file, entry) for entry in wanted}
        file.close()
    found = Collector(base.parts)
    used: dict[str, set[str]] = {name: set() for name in files}
    for stored in Shards(layout, base.shape, base.parts, iteration).stored():
        if stored.file not in tensors:
            raise CheckpointError(f"{folder / stored.file}: missing; the layout is {layout}")
        used[stored.file] |= collect(found, stored, tensors[stored.file], str(folder / stored.file))
    for name in files:
        if left := sorted(tensors[name].keys() - used[name]):
            raise CheckpointError(f"{folder / name}: {left[0]} belongs to no matrix of this model")
    return found.adapter(config), layout


def with_vocabulary(layout: Layout, shape: Shape) -> Layout:
    """Adapters do not tell how embeddings are padded, nor care."""
    return replace(layout, padded_vocabulary=layout.padded_vocabulary or -(-shape.vocabulary // layout.tp) * layout.tp)


def whole_tensor(file: TensorFile, name: str) -> torch.Tensor:
    entry = file.entries[name]
    return file.read(name).view(entry.dtype).view(entry.shape)


def collect(found: Collector, stored: Stored, tensors: dict[str, torch.Tensor], origin: str) -> set[str]:
    """What one stored matrix has of an adapter; the names that were used."""
    if stored.name in tensors and stored.name.endswith(WHOLE):
        tensor = tensors[stored.name].view(stored.area)
        for piece in stored.pieces:
            found.put(
                piece.part, "whole", slice(*piece.rows), slice(*piece.columns), tensor, f"{origin}: {stored.name}"
            )
        return {stored.name}
    names = {what: [n for n in spellings(stored.name, what) if n in tensors] for what in "AB"}
    if not names["A"] and not names["B"]:
        return set()
    if len(names["A"]) != 1 or len(names["B"]) != 1:
        raise CheckpointError(f"{origin}: {stored.name} needs one lora_A and one lora_B")
    down, up = (tensors[names[what][0]] for what in "AB")
    height, width = stored.area[::-1] if stored.pieces[0].transposed else stored.area
    if (up.shape[0], down.shape[1]) != (height, width) or up.shape[1] != down.shape[0]:
        raise CheckpointError(f"{origin}: {stored.name}: its adapter is {tuple(up.shape)} x {tuple(down.shape)}")
    for piece in stored.pieces:
        top = piece.at[1] if piece.transposed else piece.at[0]
        rows = up[top : top + piece.rows[1] - piece.rows[0]]
        found.put(piece.part, "down", slice(None), slice(*piece.columns), down, f"{origin}: {names['A'][0]}")
        found.put(piece.part, "up", slice(*piece.rows), slice(None), rows, f"{origin}: {names['B'][0]}")
    return {names["A"][0], names["B"][0]}


def spellings(matrix: str, what: str) -> Iterator[str]:
    """Names of lora_A or lora_B of a matrix."""
    module = matrix.removesuffix(".weight")
    yield f"{module}.lora_{what}.weight"
    yield f"{module}.lora_{what}.default.weight"


def write_adapter(adapter: Adapter, base: Base, out: Path, target: Layout, companions: Path | None) -> int:
    """Write adapters in another layout to the new folder `out`; returns how many tensors there are."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        if target.format == "hf":
            stored, empty = [replace(t, file=WEIGHTS, name=PREFIX + t.name) for t in base.hf], {}
        else:
            target = with_vocabulary(target, base.shape)
            check_layout(target, base.shape)
            shards = Shards(target, base.shape, base.parts, "iter_0000001")
            stored, empty = shards.stored(), shards.models()
        config = rescaled(adapter, rank_of(adapter, stored))
        contents = tensors_of(adapter, stored, config["r"], ".default" if target.format != "hf" else "")
        count = fill(unfinished, contents, empty, config)
        if target.format == "hf":
            config |= {"target_modules": modules(contents[WEIGHTS], base.hf), "peft_type": "LORA"}
            config["modules_to_save"] = ["score"] if adapter.whole else None
        else:
            (unfinished / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
            (unfinished / "config.json").write_text(json.dumps(base.config, indent=2) + "\n", encoding="utf-8")
        for path in sorted(companions.iterdir()) if companions else ():
            if path.is_file() and re.match(r"(tokenizer|special_tokens|chat_template|vocab|merges)", path.name):
                shutil.copyfile(path, unfinished / path.name)
        for name, content in ((CONFIG, config), (MANIFEST, {"format": 1, "to": target.as_json(), "adapter": config})):
            (unfinished / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return count


def rescaled(adapter: Adapter, rank: int) -> dict[str, Any]:
    """The configuration for matrices of another rank, with which they add the same."""
    config = dict(adapter.config)
    if rank != config["r"]:
        alpha = adapter.scale * rank
        config |= {"r": rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "use_rslora": False}
    return config


def tensors_of(adapter: Adapter, stored: list[Stored], rank: int, infix: str) -> dict[str, dict[str, torch.Tensor]]:
    """All tensors by file and name."""
    contents: dict[str, dict[str, torch.Tensor]] = {}
    used: set[str] = set()
    for tensor in stored:
        part = tensor.pieces[0].part
        if part in adapter.whole:
            contents.setdefault(tensor.file, {})[tensor.name] = adapter.whole[part].view(tensor.shape)
            used.add(part)
        elif (found := pair(adapter, tensor, rank)) is not None:
            module = tensor.name.removesuffix(".weight")
            if module == tensor.name:
                raise UsageError(
                    f"{tensor}: experts in one matrix have no adapters; leave --grouped-experts and --engine"
                )
            for what, matrix in zip("AB", found, strict=True):
                contents.setdefault(tensor.file, {})[f"{module}.lora_{what}{infix}.weight"] = matrix
            used |= {piece.part for piece in tensor.pieces}
    assert not (adapter.factors.keys() | adapter.whole.keys()) - used
    return contents


def fill(
    folder: Path,
    contents: dict[str, dict[str, torch.Tensor]],
    empty: dict[str, list[str]],
    config: dict[str, Any],
) -> int:
    count = 0
    for name in sorted({*contents, *empty}):
        tensors = contents.get(name, {})
        sizes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name == WEIGHTS:
            file = create_safetensors(folder / name, sizes)
        else:
            arguments = {"lora_r": config["r"], "lora_alpha": config["lora_alpha"]}
            other: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": 1}
            file = create_pt(folder / name, sizes, other | {model: {} for model in empty[name]})
        for key, tensor in tensors.items():
            file.write(key, tensor.contiguous().reshape(-1).view(torch.uint8))
            count += 1
        file.seal()
    return count


def modules(tensors: dict[str, torch.Tensor], hf: list[Stored]) -> list[str]:
    """peft's target_modules: the last word of a name where all modules called so are adapted, else the whole name."""
    adapted = {match[1].removeprefix(PREFIX) for name in tensors if (match := LORA.fullmatch(name))}
    every = {tensor.name.removesuffix(".weight") for tensor in hf if tensor.name.endswith(".weight")}
    found = set()
    for name in adapted:
        word = name.rsplit(".", 1)[-1]
        alike = {other for other in every if other.rsplit(".", 1)[-1] == word}
        found.add(word if alike <= adapted else name)
    return sorted(found)
