"""Open a checkpoint: recognise its format, family and layout, and locate every expected tensor."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.convert.families import COMPUTED, family_of
from posttrain.convert.files import TensorFile, TensorLocation, open_pt, open_safetensors
from posttrain.convert.hugging_face import hf_stored
from posttrain.convert.megatron import CheckpointLayout, MegatronShards, check_checkpoint_layout, layout_from_json
from posttrain.convert.parameters import ModelShape, count_mtp_layers, model_parameters
from posttrain.convert.stored_tensors import ParameterShape, StoredTensor
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import read_json
from posttrain.core.model_limits import check_files, check_model_config

MANIFEST = "convert.json"
RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
LAYER = re.compile(r"(?:decoder\.|encoder/)layers\.(\d+)\.")
NOT_WEIGHTS = re.compile(r"(optimizer|opt_param_scheduler|rng_state|rerun_state_machine)\b.*|.*_extra_state.*")


@dataclass
class SourceCheckpoint:
    """An open checkpoint: its layout and the locations of its tensors, which are not read yet."""

    folder: Path
    config_folder: Path  # holds configuration and tokenizer
    config: dict[str, Any]
    layout: CheckpointLayout
    shape: ModelShape
    parameters: dict[str, ParameterShape]
    stored: list[StoredTensor]
    files: dict[str, TensorFile]
    ignored: list[str]
    hashes: dict[str, str]  # sha256 by tensor, if convert.json records them

    def location(self, tensor: StoredTensor) -> TensorLocation:
        return self.files[tensor.file].tensors[tensor.name]

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    check_files(folder, str(folder))
    config = read_json(path)
    check_model_config(config, str(folder))
    return config


def recognise_format(folder: Path) -> str:
    """Return hf, megatron (core or legacy), sharded (a run or checkpoint of ours) or adapter (peft), by the files."""
    if (folder / "checkpoints").is_dir() or (folder / "model" / "config.json").is_file():
        return "sharded"
    if (folder / "latest_checkpointed_iteration.txt").is_file() or any(folder.glob("mp_rank_*")):
        return "megatron"
    refuse_distributed(folder)
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if (folder / "config.json").is_file():
        return "hf"
    raise UsageError(f"{folder}: neither a Hugging Face folder (config.json) nor a Megatron checkpoint (mp_rank_...)")


def open_source(
    folder: Path, kind: str, original: Path | None, given: CheckpointLayout | None, *, reward_model: bool = False
) -> SourceCheckpoint:
    """Open a checkpoint. `original`: folder with config.json, if not this one; `given`: layout options of the user.

    `reward_model`: it has a score head, also if the configuration is that of the language model it was trained from.
    """
    config = read_model_config(original or folder)
    if reward_model:
        config = as_reward_model(config, kind)
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    iteration = "" if kind == "hf" else iteration_of(folder)
    files = {name: open_safetensors(folder / name) for name in hf_files(folder)} if kind == "hf" else {}
    files = files or open_ranks(folder, iteration)
    shape, parameters = model_parameters(
        config, count_mtp_layers((name for f in files.values() for name in f.tensors), config)
    )
    layout = CheckpointLayout()
    if kind == "hf":
        stored, ignored = locate_hf(folder, files, config, shape, parameters)
    else:
        if "to" in manifest:
            layout = layout_from_json(manifest["to"])
        else:
            layout = recognise_layout(kind, files, given or CheckpointLayout())
        stored, ignored = locate_megatron(folder, files, MegatronShards(layout, shape, parameters, iteration))
    hashes = recorded_hashes(folder)
    source = SourceCheckpoint(
        folder, original or folder, config, layout, shape, parameters, stored, files, ignored, hashes
    )
    check_present(source)
    return source


def as_reward_model(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the configuration with a score head of one label, if it has a language-model head."""
    (architecture, *_) = config.get("architectures") or ["ForCausalLM"]
    if not architecture.endswith("ForCausalLM"):
        return config
    if kind == "hf":
        raise UsageError("--orm: the source is a language model, it has no score head: train one, posttrain reward")
    scored = architecture.replace("ForCausalLM", "ForSequenceClassification")
    return config | {"architectures": [scored], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def recorded_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of each tensor that a conversion to this folder recorded; empty if none did."""
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    return {f"{row['file']}: {row['name']}": row["sha256"] for row in manifest.get("target", ())}


def check_present(source: SourceCheckpoint) -> None:
    """Check that every expected tensor is present with its shape, and no others."""
    expected: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in source.stored:
        expected[tensor.file][tensor.name] = tensor
    for name, file in source.files.items():
        for missing in expected[name].keys() - file.tensors.keys():
            raise CheckpointError(f"{file.path}: tensor {missing} is missing")
        for extra in sorted(file.tensors.keys() - expected[name].keys()):
            raise CheckpointError(
                f"{file.path}: tensor {extra} is in the file but not in the model; nothing was written"
            )
        for tensor in expected[name].values():
            found = file.tensors[tensor.name].shape
            if found != tensor.shape:
                raise CheckpointError(
                    f"{file.path}: tensor {tensor.name} has shape {found}, but the model needs {tensor.shape}"
                )


# Hugging Face


def locate_hf(
    folder: Path,
    files: dict[str, TensorFile],
    config: dict[str, Any],
    shape: ModelShape,
    parameters: dict[str, ParameterShape],
) -> tuple[list[StoredTensor], list[str]]:
    """Locate every tensor in its file; return the tensors, and the names of computed buffers that are ignored."""
    file_of: dict[str, str] = {}
    for file_name, file in files.items():
        for name in file.tensors:
            if name in file_of:
                raise CheckpointError(f"{file.path}: tensor {name} is also in {file_of[name]}")
            file_of[name] = file_name
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name, file_name in read_json(index)["weight_map"].items():
            if file_of.get(name) != file_name:
                raise CheckpointError(f"{folder / str(file_name)}: tensor {name} is missing, but {index.name} lists it")
    ignored = [name for name in file_of if COMPUTED.fullmatch(name)]
    for name in ignored:
        del files[file_of[name]].tensors[name]
    stored = hf_stored(config, shape, parameters)
    prefix = family_of(config).prefix
    if not any(name.startswith(prefix) for name in file_of):  # saved from the base model class, without the prefix
        stored = [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in stored]
    head = f"{family_of(config).head}.weight"
    if shape.tied and head in file_of:
        stored.append(replace(stored[0], name=head))
    for tensor in stored:
        if tensor.name not in file_of and not is_replica(tensor, stored):
            raise CheckpointError(f"{folder}: tensor {tensor.name} is missing")
    return [replace(tensor, file=file_of[tensor.name]) for tensor in stored if tensor.name in file_of], ignored


def is_replica(tensor: StoredTensor, stored: list[StoredTensor]) -> bool:
    """Whether an earlier tensor has the same content, so that a file may lack this one."""
    return next(other for other in stored if other.blocks == tensor.blocks) is not tensor


def hf_files(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors files; check that every file of the index exists."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        for name in names:
            if not isinstance(name, str) or "/" in name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / str(name)}: missing, but {index.name} lists it")
        return names
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
    hint = f" Pickle files ({found}) are not read; save them as safetensors first." if found else ""
    raise CheckpointError(f"{folder}: no model.safetensors.{hint}")


# Megatron


def locate_megatron(
    folder: Path, files: dict[str, TensorFile], shards: MegatronShards
) -> tuple[list[StoredTensor], list[str]]:
    """Locate every tensor in its rank; return the tensors, and the names of entries that are not weights."""
    layout = shards.layout
    check_checkpoint_layout(layout, shards.shape)
    expected = shards.models().keys()
    for name in sorted(expected - files.keys()):
        raise CheckpointError(f"{folder / name}: missing, but the layout {layout} needs it")
    for name in sorted(files.keys() - expected):
        raise CheckpointError(f"{folder / name}: not expected in the layout {layout}")
    ignored = []
    for name, file in files.items():
        out = [location for location in file.tensors if NOT_WEIGHTS.fullmatch(location)]
        ignored += [f"{name}: {location}" for location in out]
        for location in out:
            del file.tensors[location]
    return shards.stored(), ignored


def open_ranks(folder: Path, iteration: str) -> dict[str, TensorFile]:
    """Open the files of all ranks."""
    refuse_distributed(folder / iteration)
    files = {}
    for path in sorted((folder / iteration).glob("mp_rank_*/model_optim_rng.pt")):
        files[path.relative_to(folder).as_posix()] = open_pt(path)
    if not files:
        raise CheckpointError(f"{folder / iteration}: no mp_rank_*/model_optim_rng.pt found")
    return files


def refuse_distributed(folder: Path) -> None:
    """Refuse distributed checkpoints: their index is a pickle that the restricted unpickler does not accept."""
    if any(folder.glob("*.distcp")) or (folder / ".metadata").is_file():
        raise UsageError(
            f"{folder}: a distributed checkpoint (.distcp) has a pickled index and is not loaded. Convert it where it "
            "was written: in Megatron with `--ckpt-convert-format torch --ckpt-convert-save DIR`; in torch with "
            "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt`, then save the content "
            "of FILE.pt as safetensors"
        )


def iteration_of(folder: Path) -> str:
    """Return the folder of the last iteration, which the tracker file names."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        if any(folder.glob("mp_rank_*")):
            return "."
        raise CheckpointError(f"{tracker}: missing; is {folder} a Megatron checkpoint?")
    text = tracker.read_text(encoding="utf-8").strip()
    if text != "release" and not text.isdecimal():
        raise CheckpointError(f"{tracker}: damaged: {text[:40]!r} is not an iteration")
    name = "release" if text == "release" else f"iter_{int(text):07d}"
    if not (folder / name).is_dir():
        raise CheckpointError(f"{folder / name}: missing, but {tracker.name} names it")
    return name


def recognise_layout(kind: str, files: dict[str, TensorFile], given: CheckpointLayout) -> CheckpointLayout:
    """Derive the layout from names and shapes; what these do not show (noop layers) is taken from `given`."""
    ranks = [match.groups() for name in files if (match := RANK.fullmatch(Path(name).parent.name))]
    if len(ranks) != len(files):
        raise CheckpointError("folders of ranks must be named mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_PPP_EEE")
    one = next(iter(ranks))
    tp = 1 + max(int(rank[0]) for rank in ranks)
    second = 1 + max(int(rank[1] or 0) for rank in ranks)
    third = 1 + max(int(rank[2] or 0) for rank in ranks)
    # mp_rank_00_001 is pipeline stage 1; with a single stage, expert rank 1
    by_experts = one[1] is not None and one[2] is None and given.ep > 1 and given.pp == 1
    pp, ep = (1, second) if by_experts else (second, third)
    names = [name for file in files.values() for name in file.tensors]
    virtual = any(name.startswith("model1/") for name in names)
    layers: dict[str, int] = defaultdict(int)
    for file_name, file in files.items():
        for name in file.tensors:
            if match := LAYER.search(name):
                chunk = f"{RANK.fullmatch(Path(file_name).parent.name)[2]}:{name.split('/')[0]}"  # type: ignore[index]
                layers[chunk] = max(layers[chunk], int(match[1]) + 1)
    uneven = not virtual and not given.noop and not by_experts and len(set(layers.values())) > 1
    embedding = next(
        (
            file.tensors[name]
            for file in files.values()
            for name in file.tensors
            if re.fullmatch(r".*word_embeddings[./]weight", name)
        ),
        None,
    )
    adapters = any(".lora_A." in name for name in names)  # files of adapters alone
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
    """Return mcore or legacy, by the names in the first rank."""
    refuse_distributed(folder / iteration_of(folder))
    paths = sorted((folder / iteration_of(folder)).glob("mp_rank_*/model_optim_rng.pt"))
    if not paths:
        raise CheckpointError(f"{folder}: no mp_rank_*/model_optim_rng.pt found")
    file = open_pt(paths[0])
    file.close()
    return "legacy" if any("/language_model/" in name for name in file.tensors) else "mcore"
