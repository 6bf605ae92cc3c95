"""Read and write adapters: peft's folder, or Megatron ranks with `...lora_A.default.weight` beside each matrix."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.convert.adapter import LoraAdapter, LoraCollector, fused_rank, stored_factors
from posttrain.convert.files import TensorFile, create_pt, create_safetensors, open_safetensors
from posttrain.convert.hugging_face import hf_stored
from posttrain.convert.megatron import CheckpointLayout, MegatronShards, check_checkpoint_layout, layout_from_json
from posttrain.convert.parameters import ModelShape
from posttrain.convert.source import MANIFEST, iteration_of, open_ranks, recognise_layout
from posttrain.convert.stored_tensors import ParameterShape, StoredTensor
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import new_folder, read_json
from posttrain.models.paths import resolve_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
WHOLE = ("score.weight", "rm_head.weight", "rm_head/weight")


class AdapterBase:
    """The model that adapters belong to, as far as its config.json describes it."""

    def __init__(self, config: dict[str, Any], shape: ModelShape, parameters: dict[str, ParameterShape]) -> None:
        self.config, self.shape, self.parameters = config, shape, parameters
        self.hf = hf_stored(config, shape, parameters)


def is_peft(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds adapters without their base model: peft's, or Megatron ranks."""
    if is_peft(folder):
        return True
    if not (folder / "latest_checkpointed_iteration.txt").is_file() and not any(folder.glob("mp_rank_*")):
        return False
    files = open_ranks(folder, iteration_of(folder))
    for file in files.values():
        file.close()
    names = [name for file in files.values() for name in file.tensors]
    return any(LORA.fullmatch(name) for name in names) and not any("word_embeddings" in name for name in names)


def base_folder(folder: Path, original: Path | None) -> Path:
    """Return the folder with the config.json of the adapters' base model."""
    if original is not None:
        return original
    if (folder / "config.json").is_file():
        return folder
    named = (read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}).get("base_model_name_or_path")
    if not named:
        raise UsageError(f"{folder}: the base model of these adapters is not recorded; name its folder with --original")
    return Path(resolve_path(named))


def read_adapter(
    folder: Path, base: AdapterBase, kind: str, given: CheckpointLayout, known: dict[str, Any]
) -> tuple[LoraAdapter, CheckpointLayout]:
    """Read adapters of either form. `known`: r and lora_alpha given by the user, for folders without them."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    config = config | {key: value for key, value in known.items() if value}
    if missing := {"r", "lora_alpha"} - config.keys():
        raise UsageError(f"{folder}: {' and '.join(sorted(missing))} not recorded; give --lora_rank and --lora_alpha")
    if is_peft(folder):
        return read_peft(folder, base, config), CheckpointLayout()
    return read_ranks(folder, base, kind, given, config)


def read_peft(folder: Path, base: AdapterBase, config: dict[str, Any]) -> LoraAdapter:
    file = open_safetensors(folder / WEIGHTS)
    try:
        tensors = {name.removeprefix(PREFIX): whole_tensor(file, name) for name in file.tensors}
    finally:
        file.close()
    found = LoraCollector(base.parameters)
    used: set[str] = set()
    for stored in base.hf:
        used |= collect_factors(found, stored, tensors, str(folder))
    if left := sorted(tensors.keys() - used):
        raise CheckpointError(f"{folder}: {left[0]} does not belong to any matrix of the base model")
    return found.finish(config)


def read_ranks(
    folder: Path, base: AdapterBase, kind: str, given: CheckpointLayout, config: dict[str, Any]
) -> tuple[LoraAdapter, CheckpointLayout]:
    iteration = iteration_of(folder)
    files = open_ranks(folder, iteration)
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    if "to" in manifest:
        layout = layout_from_json(manifest["to"])
    else:
        layout = recognise_layout(kind, files, given)
    layout = with_padded_vocabulary(layout, base.shape)
    check_checkpoint_layout(layout, base.shape)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, file in files.items():
        wanted = [location for location in file.tensors if LORA.fullmatch(location) or location.endswith(WHOLE)]
        tensors[name] = {location: whole_tensor(file, location) for location in wanted}
        file.close()
    found = LoraCollector(base.parameters)
    used: dict[str, set[str]] = {name: set() for name in files}
    for stored in MegatronShards(layout, base.shape, base.parameters, iteration).stored():
        if stored.file not in tensors:
            raise CheckpointError(f"{folder / stored.file}: missing, but the layout {layout} needs it")
        used[stored.file] |= collect_factors(found, stored, tensors[stored.file], str(folder / stored.file))
    for name in files:
        if left := sorted(tensors[name].keys() - used[name]):
            raise CheckpointError(f"{folder / name}: {left[0]} does not belong to any matrix of the base model")
    return found.finish(config), layout


def with_padded_vocabulary(layout: CheckpointLayout, shape: ModelShape) -> CheckpointLayout:
    """Fill in a padded vocabulary size: adapters do not record it and do not depend on it."""
    return replace(layout, padded_vocabulary=layout.padded_vocabulary or -(-shape.vocabulary // layout.tp) * layout.tp)


def whole_tensor(file: TensorFile, name: str) -> torch.Tensor:
    location = file.tensors[name]
    return file.read(name).view(location.dtype).view(location.shape)


def collect_factors(
    found: LoraCollector, stored: StoredTensor, tensors: dict[str, torch.Tensor], origin: str
) -> set[str]:
    """Collect the adapter of one stored matrix; return the names of the tensors that were used."""
    if stored.name in tensors and stored.name.endswith(WHOLE):
        tensor = tensors[stored.name].view(stored.matrix_shape)
        for block in stored.blocks:
            found.add(
                block.parameter, "whole", slice(*block.rows), slice(*block.columns), tensor, f"{origin}: {stored.name}"
            )
        return {stored.name}
    names = {what: [n for n in lora_names(stored.name, what) if n in tensors] for what in "AB"}
    if not names["A"] and not names["B"]:
        return set()
    if len(names["A"]) != 1 or len(names["B"]) != 1:
        raise CheckpointError(f"{origin}: {stored.name} needs exactly one lora_A and one lora_B")
    down, up = (tensors[names[what][0]] for what in "AB")
    height, width = stored.matrix_shape[::-1] if stored.blocks[0].transposed else stored.matrix_shape
    if (up.shape[0], down.shape[1]) != (height, width) or up.shape[1] != down.shape[0]:
        raise CheckpointError(
            f"{origin}: {stored.name} is {height} x {width}, but its adapter is {tuple(up.shape)} x {tuple(down.shape)}"
        )
    for block in stored.blocks:
        top = block.at[1] if block.transposed else block.at[0]
        rows = up[top : top + block.rows[1] - block.rows[0]]
        found.add(block.parameter, "down", slice(None), slice(*block.columns), down, f"{origin}: {names['A'][0]}")
        found.add(block.parameter, "up", slice(*block.rows), slice(None), rows, f"{origin}: {names['B'][0]}")
    return {names["A"][0], names["B"][0]}


def lora_names(matrix: str, what: str) -> Iterator[str]:
    """Yield the names that lora_A or lora_B of a matrix can have."""
    module = matrix.removesuffix(".weight")
    yield f"{module}.lora_{what}.weight"
    yield f"{module}.lora_{what}.default.weight"


def write_adapter(
    adapter: LoraAdapter, base: AdapterBase, out: Path, target: CheckpointLayout, companions: Path | None
) -> int:
    """Write adapters in another layout to the new folder `out`; return the number of tensors."""
    with new_folder(out) as unfinished:
        if target.format == "hf":
            stored, empty = [replace(t, file=WEIGHTS, name=PREFIX + t.name) for t in base.hf], {}
        else:
            target = with_padded_vocabulary(target, base.shape)
            check_checkpoint_layout(target, base.shape)
            shards = MegatronShards(target, base.shape, base.parameters, "iter_0000001")
            stored, empty = shards.stored(), shards.models()
        config = rescaled_config(adapter, fused_rank(adapter, stored))
        contents = tensors_by_file(adapter, stored, config["r"], ".default" if target.format != "hf" else "")
        count = write_adapter_files(unfinished, contents, empty, config)
        if target.format == "hf":
            config |= {"target_modules": target_modules(contents[WEIGHTS], base.hf), "peft_type": "LORA"}
            config["modules_to_save"] = ["score"] if adapter.whole else None
        else:
            (unfinished / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
            (unfinished / "config.json").write_text(json.dumps(base.config, indent=2) + "\n", encoding="utf-8")
        for path in sorted(companions.iterdir()) if companions else ():
            if path.is_file() and re.match(r"(tokenizer|special_tokens|chat_template|vocab|merges)", path.name):
                shutil.copyfile(path, unfinished / path.name)
        for name, content in ((CONFIG, config), (MANIFEST, {"format": 1, "to": target.as_json(), "adapter": config})):
            (unfinished / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return count


def rescaled_config(adapter: LoraAdapter, rank: int) -> dict[str, Any]:
    """Return the configuration for another rank, with alpha changed so that the update stays the same."""
    config = dict(adapter.config)
    if rank != config["r"]:
        alpha = adapter.scale * rank
        config |= {"r": rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "use_rslora": False}
    return config


def tensors_by_file(
    adapter: LoraAdapter, stored: list[StoredTensor], rank: int, infix: str
) -> dict[str, dict[str, torch.Tensor]]:
    """Return all adapter tensors by file and name."""
    contents: dict[str, dict[str, torch.Tensor]] = {}
    used: set[str] = set()
    for tensor in stored:
        parameter = tensor.blocks[0].parameter
        if parameter in adapter.whole:
            contents.setdefault(tensor.file, {})[tensor.name] = adapter.whole[parameter].view(tensor.shape)
            used.add(parameter)
        elif (found := stored_factors(adapter, tensor, rank)) is not None:
            module = tensor.name.removesuffix(".weight")
            if module == tensor.name:
                raise UsageError(
                    f"{tensor}: adapters on grouped experts cannot be written; leave out --grouped_experts and "
                    "--transformer_engine"
                )
            for what, matrix in zip("AB", found, strict=True):
                contents.setdefault(tensor.file, {})[f"{module}.lora_{what}{infix}.weight"] = matrix
            used |= {block.parameter for block in tensor.blocks}
    assert not (adapter.factors.keys() | adapter.whole.keys()) - used
    return contents


def write_adapter_files(
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
        file.finish()
    return count


def target_modules(tensors: dict[str, torch.Tensor], hf: list[StoredTensor]) -> list[str]:
    """Return peft's target_modules: the last word of a name if all modules with it are adapted, else the full name."""
    adapted = {match[1].removeprefix(PREFIX) for name in tensors if (match := LORA.fullmatch(name))}
    every = {tensor.name.removesuffix(".weight") for tensor in hf if tensor.name.endswith(".weight")}
    found = set()
    for name in adapted:
        word = name.rsplit(".", 1)[-1]
        same_word = {other for other in every if other.rsplit(".", 1)[-1] == word}
        found.add(word if same_word <= adapted else name)
    return sorted(found)
