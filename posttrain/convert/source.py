"""What lies in a folder: format, family, layout, and every tensor at the place where it is expected."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.convert.families import COMPUTED, Shape, family_of, hf_stored, model_parts, predictors_in
from posttrain.convert.files import Entry, TensorFile, open_pt, open_safetensors
from posttrain.convert.megatron import Layout, Shards, check_layout, layout_from_json
from posttrain.convert.pieces import Part, Stored
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import read_json

MANIFEST = "convert.json"
RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
LAYER = re.compile(r"(?:decoder\.|encoder/)layers\.(\d+)\.")
NOT_WEIGHTS = re.compile(r"(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b.*|.*_extra_state.*")


@dataclass
class Source:
    """A checkpoint that was looked through; its tensors are not read yet."""

    folder: Path
    companions: Path  # where configuration and tokenizer lie
    config: dict[str, Any]
    layout: Layout
    shape: Shape
    parts: dict[str, Part]
    stored: list[Stored]
    files: dict[str, TensorFile]
    ignored: list[str]
    hashes: dict[str, str]  # what the conversion that made it noted down

    def entry(self, tensor: Stored) -> Entry:
        return self.files[tensor.file].entries[tensor.name]

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    return read_json(path)


def recognise_format(folder: Path) -> str:
    """hf, megatron (core or legacy), sharded, or adapter (peft's), by what is in the folder."""
    if (folder / "checkpoints").is_dir() or (folder / "model" / "config.json").is_file():
        return "sharded"
    if (folder / "latest_checkpointed_iteration.txt").is_file() or any(folder.glob("mp_rank_*")):
        return "megatron"
    refuse_distributed(folder)
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if (folder / "config.json").is_file():
        return "hf"
    raise UsageError(f"{folder}: neither a Hugging Face folder (config.json) nor a Megatron one (mp_rank_...)")


def open_source(folder: Path, kind: str, original: Path | None, given: Layout | None) -> Source:
    """Look through a folder. `original`: where config.json lies if not here; `given`: layout, if the user knows it."""
    config = read_model_config(original or folder)
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    iteration = "" if kind == "hf" else iteration_of(folder)
    files = {name: open_safetensors(folder / name) for name in hf_files(folder)} if kind == "hf" else {}
    files = files or open_ranks(folder, iteration)
    shape, parts = model_parts(config, predictors_in((name for f in files.values() for name in f.entries), config))
    layout = Layout()
    if kind == "hf":
        stored, ignored = locate_hf(folder, files, config, shape, parts)
    else:
        if "to" in manifest:
            layout = layout_from_json(manifest["to"])
        else:
            layout = recognise_layout(kind, files, given or Layout())
        stored, ignored = locate_megatron(folder, files, Shards(layout, shape, parts, iteration))
    hashes = {f"{row['file']}: {row['name']}": row["sha256"] for row in manifest.get("target", ())}
    source = Source(folder, original or folder, config, layout, shape, parts, stored, files, ignored, hashes)
    check_present(source)
    return source


def check_present(source: Source) -> None:
    """Every expected tensor is there with its shape, and none besides."""
    expected: dict[str, dict[str, Stored]] = defaultdict(dict)
    for tensor in source.stored:
        expected[tensor.file][tensor.name] = tensor
    for name, file in source.files.items():
        for missing in expected[name].keys() - file.entries.keys():
            raise CheckpointError(f"{file.path}: the tensor {missing} is missing")
        for extra in sorted(file.entries.keys() - expected[name].keys()):
            raise CheckpointError(f"{file.path}: the tensor {extra} has no place in this model; nothing was written")
        for tensor in expected[name].values():
            found = file.entries[tensor.name].shape
            if found != tensor.shape:
                raise CheckpointError(f"{file.path}: {tensor.name} is {found}, the model needs {tensor.shape}")


# Hugging Face


def locate_hf(
    folder: Path, files: dict[str, TensorFile], config: dict[str, Any], shape: Shape, parts: dict[str, Part]
) -> tuple[list[Stored], list[str]]:
    """Every tensor in its file, and what is there but computed."""
    homes: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.entries:
            if name in homes:
                raise CheckpointError(f"{file.path}: {name} is in {homes[name]} too")
            homes[name] = file_name
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name, file_name in read_json(index)["weight_map"].items():
            if homes.get(name) != file_name:
                raise CheckpointError(f"{folder / str(file_name)}: the tensor {name} is missing; {index.name} lists it")
    ignored = [name for name in homes if COMPUTED.fullmatch(name)]
    for name in ignored:
        del files[homes[name]].entries[name]
    stored = hf_stored(config, shape, parts)
    prefix = family_of(config).prefix
    if not any(name.startswith(prefix) for name in homes):  # a base model, saved without its head's wrapper
        stored = [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in stored]
    head = f"{family_of(config).head}.weight"
    if shape.tied and head in homes:
        stored.append(replace(stored[0], name=head))
    for tensor in stored:
        if tensor.name not in homes and not is_copy(tensor, stored):
            raise CheckpointError(f"{folder}: the tensor {tensor.name} is missing")
    return [replace(tensor, file=homes[tensor.name]) for tensor in stored if tensor.name in homes], ignored


def is_copy(tensor: Stored, stored: list[Stored]) -> bool:
    """Whether another tensor holds the same: a file may do without it."""
    return next(other for other in stored if other.pieces == tensor.pieces) is not tensor


def hf_files(folder: Path) -> list[str]:
    """The safetensors files of a folder; each that its index names is there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        for name in names:
            if not isinstance(name, str) or "/" in name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / str(name)}: missing, though {index.name} lists it")
        return names
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
    hint = f" {found}: pickle files are not read; save them as safetensors first." if found else ""
    raise CheckpointError(f"{folder}: there is no model.safetensors.{hint}")


# Megatron


def locate_megatron(folder: Path, files: dict[str, TensorFile], shards: Shards) -> tuple[list[Stored], list[str]]:
    """Every tensor in its rank, and what is there but no weight."""
    layout = shards.layout
    check_layout(layout, shards.shape)
    expected = shards.models().keys()
    for name in sorted(expected - files.keys()):
        raise CheckpointError(f"{folder / name}: missing; the layout is {layout}")
    for name in sorted(files.keys() - expected):
        raise CheckpointError(f"{folder / name}: one rank too many; the layout is {layout}")
    ignored = []
    for name, file in files.items():
        out = [entry for entry in file.entries if NOT_WEIGHTS.fullmatch(entry)]
        ignored += [f"{name}: {entry}" for entry in out]
        for entry in out:
            del file.entries[entry]
    return shards.stored(), ignored


def open_ranks(folder: Path, iteration: str) -> dict[str, TensorFile]:
    """The files of all ranks."""
    refuse_distributed(folder / iteration)
    files = {}
    for path in sorted((folder / iteration).glob("mp_rank_*/model_optim_rng.pt")):
        files[path.relative_to(folder).as_posix()] = open_pt(path)
    if not files:
        raise CheckpointError(f"{folder / iteration}: no mp_rank_*/model_optim_rng.pt in it")
    return files


def refuse_distributed(folder: Path) -> None:
    """Their index is a pickle that restricted readers do not know."""
    if any(folder.glob("*.distcp")) or (folder / ".metadata").is_file():
        raise UsageError(
            f"{folder}: a distributed checkpoint (.distcp), whose index is a pickle; it is not loaded. Write another "
            "form of it where it was made: Megatron with `--ckpt-convert-format torch --ckpt-convert-save DIR`; "
            "torch with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt`, "
            "and save what is in FILE.pt as safetensors"
        )


def iteration_of(folder: Path) -> str:
    """The folder of the last iteration, as the tracker file says."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        if any(folder.glob("mp_rank_*")):
            return "."
        raise CheckpointError(f"{tracker}: missing; is {folder} a Megatron checkpoint?")
    text = tracker.read_text(encoding="utf-8").strip()
    if text != "release" and not text.isdecimal():
        raise CheckpointError(f"{tracker}: damaged: {text[:40]!r} is no iteration")
    name = "release" if text == "release" else f"iter_{int(text):07d}"
    if not (folder / name).is_dir():
        raise CheckpointError(f"{folder / name}: missing, though {tracker.name} names it")
    return name


def recognise_layout(kind: str, files: dict[str, TensorFile], given: Layout) -> Layout:
    """What names and shapes tell; noop layers and what else they do not tell is as given."""
    ranks = [match.groups() for name in files if (match := RANK.fullmatch(Path(name).parent.name))]
    if len(ranks) != len(files):
        raise CheckpointError("folders of ranks are called mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_PPP_EEE")
    one = next(iter(ranks))
    tp = 1 + max(int(rank[0]) for rank in ranks)
    second = 1 + max(int(rank[1] or 0) for rank in ranks)
    third = 1 + max(int(rank[2] or 0) for rank in ranks)
    # mp_rank_00_001 is the second stage, or the second share of the experts where there is but one stage
    by_experts = one[1] is not None and one[2] is None and given.ep > 1 and given.pp == 1
    pp, ep = (1, second) if by_experts else (second, third)
    names = [name for file in files.values() for name in file.entries]
    virtual = any(name.startswith("model1/") for name in names)
    layers: dict[str, int] = defaultdict(int)
    for file_name, file in files.items():
        for name in file.entries:
            if match := LAYER.search(name):
                chunk = f"{RANK.fullmatch(Path(file_name).parent.name)[2]}:{name.split('/')[0]}"  # type: ignore[index]
                layers[chunk] = max(layers[chunk], int(match[1]) + 1)
    uneven = not virtual and not given.noop and not by_experts and len(set(layers.values())) > 1
    embedding = next(
        (
            file.entries[name]
            for file in files.values()
            for name in file.entries
            if re.fullmatch(r".*word_embeddings[./]weight", name)
        ),
        None,
    )
    adapters = any(".lora_A." in name for name in names)  # in files of their own
    if embedding is None and not adapters:
        raise CheckpointError("no rank has word embeddings; is the first stage missing?")
    return replace(
        given,
        format=kind,
        tp=tp,
        pp=pp,
        ep=ep,
        layers_per_stage=given.layers_per_stage
        or (tuple(count for _, count in sorted(layers.items())) if uneven and pp > 1 else ()),
        layers_per_virtual_stage=given.layers_per_virtual_stage or (max(layers.values()) if virtual else 0),
        padded_vocabulary=embedding.shape[0] * tp if embedding else 0,
        experts="grouped" if any(name.endswith("experts.weight1") for name in names) else "single",
        engine=any("layer_norm_weight" in name for name in names),
    )


def megatron_kind(folder: Path) -> str:
    """mcore or legacy, by the names in the first rank."""
    refuse_distributed(folder / iteration_of(folder))
    paths = sorted((folder / iteration_of(folder)).glob("mp_rank_*/model_optim_rng.pt"))
    if not paths:
        raise CheckpointError(f"{folder}: no mp_rank_*/model_optim_rng.pt in it")
    file = open_pt(paths[0])
    file.close()
    return "legacy" if any("/language_model/" in name for name in file.entries) else "mcore"
