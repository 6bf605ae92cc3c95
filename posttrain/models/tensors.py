"""A model's tensors by name: as its modules hold them, as its files hold them, whole or this process's part of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from posttrain.checkpoints.tensor_files import LazyTensors, TensorFiles
from posttrain.core.errors import CheckpointError, PosttrainError
from posttrain.models import adapters
from posttrain.parallel.fsdp import ModelShards
from posttrain.parallel.shards import full_tensor, local_shard, shard_slices


def module_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that a model consists of, by the names of its modules and in their order; tied weights once."""
    buffers, saved = dict(model.named_buffers()), model.state_dict().keys()
    return dict(model.named_parameters()) | {name: buffers[name] for name in saved if name in buffers}


def stored(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor as files hold it: mostly itself, but experts that are computed together lie there one by one."""
    return revert_weight_conversion(model, {name: tensor})


def plain_tensors(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of a model, adapters merged, by the names its files have; processes that share it call together."""
    for name, live in module_tensors(model).items():
        if adapters.is_beside(name):
            continue
        shard = local_shard(live).to(dtype) if isinstance(live, torch.nn.Parameter) else local_shard(live)
        whole = full_tensor(shard, live)
        if adapters.is_adapted(model):
            whole, name = adapters.merged(model, name, whole), adapters.plain_name(name)
        yield from stored(model, name, whole).items()


@torch.no_grad()
def write_tensors(model: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The inverse of `plain_tensors`, into a model that one process holds: in place, every tensor once."""
    live = module_tensors(model)
    wanted = {name: list(stored(model, name, tensor.to("meta"))) for name, tensor in live.items()}
    owners = {key: name for name, keys in wanted.items() for key in keys}
    waiting: dict[str, dict[str, torch.Tensor]] = {name: {} for name in wanted}
    for key, tensor in tensors:
        name = owners.get(key)
        if name is None or name not in waiting or key in waiting[name]:
            raise PosttrainError(f"weights for {type(model).__name__}: {key} has no place in it, or came twice")
        waiting[name][key] = tensor if len(wanted[name]) == 1 else tensor.clone()
        if len(waiting[name]) == len(wanted[name]):
            parts = [waiting[name][key] for key in wanted[name]]
            whole = tensor if len(parts) == 1 else assembled(model, name, parts, live[name].shape[0])
            if whole.shape != live[name].shape:
                raise PosttrainError(f"weights: {key} is {tuple(whole.shape)}, not {tuple(live[name].shape)}")
            live[name].copy_(whole)
            del waiting[name]
    if waiting:
        raise PosttrainError(f"weights for {type(model).__name__}: these did not come: {some_of(set(waiting))}")


def stored_entries(model: PreTrainedModel, shards: ModelShards) -> Iterator[LazyTensors]:
    """The tensors of a model that processes hold together, for its files; in the type that it computes in."""

    def entry_of(name: str, live: torch.Tensor) -> LazyTensors:
        dtype = shards.dtype if isinstance(live, torch.nn.Parameter) else live.dtype  # buffers stay as they are
        shapes = stored(model, name, torch.empty(live.shape, dtype=dtype, device="meta"))
        kinds = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in shapes.items()}
        return LazyTensors(kinds, lambda: stored(model, name, full_tensor(local_shard(live).to(dtype), live)))

    for name, live in module_tensors(model).items():
        yield entry_of(name, live)


def assembled(model: PreTrainedModel, name: str, parts: Sequence[torch.Tensor], experts: int) -> torch.Tensor:
    """The inverse of `stored`: experts that lie one by one, or their two halves, as one tensor; or some of them."""
    whole = torch.stack(list(parts[:experts]))
    if len(parts) == 2 * experts:
        whole = torch.cat([whole, torch.stack(list(parts[experts:]))], 1)
    again = list(stored(model, name, whole).values())
    if len(again) != len(parts) or not all(torch.equal(a, b) for a, b in zip(again, parts, strict=True)):
        raise CheckpointError(f"{type(model).__name__}: {name} cannot be put together from {len(parts)} tensors")
    return whole


@torch.no_grad()
def read_parts(model: PreTrainedModel, folder: Path, wanted: set[str] | None = None) -> None:
    """Read this process's part of each tensor, and little else; of all tensors, or of some that are known to fit."""
    files = TensorFiles(folder, "model")
    known: set[str] = set()
    for name, live in module_tensors(model).items():
        if wanted is not None and name not in wanted:
            continue
        plain = adapters.plain_name(name)
        names = list(stored(model, plain, torch.empty(live.shape, device="meta")))
        known |= set(names)
        part, (key, *more) = shard_slices(live), names
        if not more:  # itself, perhaps under another name
            if key in files.places and files.shape(key) != tuple(live.shape):
                raise CheckpointError(f"{folder}: {key} is {files.shape(key)}, the model's {tuple(live.shape)}")
            local_shard(live).copy_(files.read(key, part))
        elif part[0].start < part[0].stop:  # some of the experts
            halves = [names[first : first + live.shape[0]] for first in range(0, len(names), live.shape[0])]
            parts = [files.read(key) for half in halves for key in half[part[0]]]
            some = assembled(model, plain, parts, part[0].stop - part[0].start)
            local_shard(live).copy_(some[(slice(None), *part[1:])])
    if wanted is None and files.places.keys() - known:
        raise CheckpointError(f"{folder}: the model has no place for {some_of(files.places.keys() - known)}")


def some_of(names: set[str]) -> str:
    """A long list of names, cut short."""
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
