"""A model's tensors by name: as its modules hold them or as its files do, in full or this process's shard of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from posttrain.checkpoints.tensor_files import LazyTensors, TensorFiles
from posttrain.core.errors import CheckpointError, PosttrainError
from posttrain.models import adapters
from posttrain.parallel.fsdp import ModelShards
from posttrain.parallel.pipeline import tensors_elsewhere
from posttrain.parallel.shards import full_tensor, local_shard, read_shard, shard_ranges


def module_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return all parameters and saved buffers by name, in the model's order; tied weights once."""
    buffers, saved = dict(model.named_buffers()), model.state_dict().keys()
    return dict(model.named_parameters()) | {name: buffers[name] for name in saved if name in buffers}


def file_tensors(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor as files hold it: usually unchanged, but fused experts are stored one by one."""
    return revert_weight_conversion(model, {name: tensor})


def export_tensors(
    model: PreTrainedModel, dtype: torch.dtype, shards: ModelShards | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's full tensors, adapters merged, by their names in files; all ranks of a sharded model iterate."""
    pipeline, held = None if shards is None else shards.pipeline, module_tensors(model)

    def merged(name: str, kind: torch.dtype) -> torch.Tensor:
        full = full_tensor(local_shard(held[name]).to(kind), held[name])
        return adapters.merge_tensor(model, name, full) if adapters.is_adapted(model) else full

    for name in held if pipeline is None else pipeline.owners:
        if adapters.is_adapter_tensor(name):
            continue
        if pipeline is None:
            full = merged(name, dtype if isinstance(held[name], torch.nn.Parameter) else held[name].dtype)
        else:
            kind = dtype if name in pipeline.parameters else pipeline.shapes[name][1]
            full = pipeline.whole_tensor(name, kind, partial(merged, name, kind))
        yield from file_tensors(model, adapters.plain_name(name), full).items()


@torch.no_grad()
def import_tensors(model: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy what `export_tensors` yielded into a model that is not sharded: in place, every tensor once."""
    live = module_tensors(model)
    wanted = {name: list(file_tensors(model, name, tensor.to("meta"))) for name, tensor in live.items()}
    owners = {key: name for name, keys in wanted.items() for key in keys}
    waiting: dict[str, dict[str, torch.Tensor]] = {name: {} for name in wanted}
    for key, tensor in tensors:
        name = owners.get(key)
        if name is None or name not in waiting or key in waiting[name]:
            raise PosttrainError(f"weights for {type(model).__name__}: unknown tensor {key}, or received twice")
        waiting[name][key] = tensor if len(wanted[name]) == 1 else tensor.clone()
        if len(waiting[name]) == len(wanted[name]):
            parts = [waiting[name][key] for key in wanted[name]]
            full = tensor if len(parts) == 1 else join_experts(model, name, parts, live[name].shape[0])
            if full.shape != live[name].shape:
                found, expected = tuple(full.shape), tuple(live[name].shape)
                raise PosttrainError(f"weights: tensor {key} has shape {found}, but {expected} in the model")
            live[name].copy_(full)
            del waiting[name]
    if waiting:
        raise PosttrainError(f"weights for {type(model).__name__}: not received: {abbreviate(set(waiting))}")


def lazy_tensors(model: PreTrainedModel, shards: ModelShards) -> Iterator[LazyTensors]:
    """Yield the tensors of a sharded model for its files, in the type that it computes in."""

    def lazy(name: str, live: torch.Tensor) -> LazyTensors:
        dtype = shards.dtype if isinstance(live, torch.nn.Parameter) else live.dtype  # buffers keep their type
        shapes = file_tensors(model, name, torch.empty(live.shape, dtype=dtype, device="meta"))
        kinds = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in shapes.items()}
        return LazyTensors(kinds, lambda: file_tensors(model, name, full_tensor(local_shard(live).to(dtype), live)))

    yield from shards.of_all_stages([lazy(name, live) for name, live in module_tensors(model).items()])


def join_experts(model: PreTrainedModel, name: str, parts: Sequence[torch.Tensor], experts: int) -> torch.Tensor:
    """Undo `file_tensors` for fused experts: stack the tensors of all experts (or of their two halves) into one."""
    joined = torch.stack(list(parts[:experts]))
    if len(parts) == 2 * experts:
        joined = torch.cat([joined, torch.stack(list(parts[experts:]))], 1)
    again = list(file_tensors(model, name, joined).values())
    if len(again) != len(parts) or not all(torch.equal(a, b) for a, b in zip(again, parts, strict=True)):
        raise CheckpointError(f"{type(model).__name__}: {name} cannot be assembled from {len(parts)} tensors")
    return joined


@torch.no_grad()
def read_shards(model: PreTrainedModel, folder: Path, wanted: set[str] | None = None) -> None:
    """Read this process's shard of each tensor, and little else; of all tensors, or of `wanted`, which must fit.

    Tensors of layers that other pipeline stages hold may be in the files.
    """
    files = TensorFiles(folder, "model")
    known: set[str] = set()
    for name, live in module_tensors(model).items():
        if wanted is not None and name not in wanted:
            continue
        plain = adapters.plain_name(name)
        names = list(file_tensors(model, plain, torch.empty(live.shape, device="meta")))
        known |= set(names)
        (key, *more) = names
        if not more:  # the tensor itself, perhaps under another name
            if key in files.places and files.shape(key) != tuple(live.shape):
                found, expected = files.shape(key), tuple(live.shape)
                raise CheckpointError(f"{folder}: tensor {key} has shape {found}, but {expected} in the model")
            local_shard(live).copy_(read_shard(live, partial(files.read, key)))
        else:  # some of the experts
            ((first, end),) = shard_ranges(live)[0]
            if first == end:
                continue
            halves = [names[start : start + live.shape[0]] for start in range(0, len(names), live.shape[0])]
            parts = [files.read(key) for half in halves for key in half[first:end]]
            some = join_experts(model, plain, parts, end - first)
            local_shard(live).copy_(read_shard(live, partial(slices_of_others, some)))
    for name, shape in tensors_elsewhere(model).items():
        known |= set(file_tensors(model, adapters.plain_name(name), torch.empty(shape, device="meta")))
    if wanted is None and files.places.keys() - known:
        extra = abbreviate(files.places.keys() - known)
        raise CheckpointError(f"{folder} does not fit: these tensors are not in the model: {extra}")


def slices_of_others(experts: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
    """Return slices of dimensions other than that of the experts, which are those wanted."""
    return experts[(slice(None), *part[1:])]


def abbreviate(names: set[str]) -> str:
    """Return a list of names as text, at most four of them."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
