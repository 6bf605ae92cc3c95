"""Saves a model as a plain Hugging Face folder, and reads such a folder into a model in place."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.checkpoints.tensor_files import save_sharded
from posttrain.core.errors import CheckpointError
from posttrain.models import adapters
from posttrain.models.paths import CONSTRUCTION
from posttrain.models.tensors import abbreviate, lazy_tensors, read_shards
from posttrain.parallel.fsdp import ModelShards


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, shards: ModelShards | None = None
) -> None:
    """Write a plain Hugging Face folder; of an adapted model only the adapters.

    If the model is sharded, all ranks call this: each writes some of the tensors, and rank 0 all other files.
    """
    if adapters.is_adapted(model):
        adapters.save_adapter(model, folder, shards)
    elif shards is None:
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_sharded(folder, "model", list(lazy_tensors(model, shards)), shards.rank, shards.size)
        if shards.rank == 0 and model.can_generate():
            model.generation_config.save_pretrained(folder)
    if shards is not None and shards.rank:
        return
    config = copy.deepcopy(model.config)
    config.use_cache = True
    config.dtype = model.dtype if shards is None else shards.dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if adapters.is_adapted(model) and hasattr(config, "quantization_config"):
        del config.quantization_config  # describes how the base is held in memory, not the base
    config.save_pretrained(folder)
    if model.get_output_embeddings() is None and config.pad_token_id is not None:  # see tokenizers.score_padding_id
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Read what `save_model` wrote into the model's tensors, which keep their addresses."""
    if adapters.is_adapted(model):
        adapters.load_adapter(model, folder)
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        read_shards(model, folder)
        return
    try:
        with CONSTRUCTION:
            saved, report = type(model).from_pretrained(
                folder, dtype=model.dtype, use_safetensors=True, output_loading_info=True, local_files_only=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be read: {str(error).splitlines()[0]}") from error
    live, read = model.state_dict(), saved.state_dict()
    only_model = set(report["missing_keys"]) | (live.keys() - read.keys())
    only_folder = set(report["unexpected_keys"]) | (read.keys() - live.keys())
    if only_model:
        raise CheckpointError(f"{folder} does not fit: these tensors are only in the model: {abbreviate(only_model)}")
    if only_folder:
        raise CheckpointError(f"{folder} does not fit: these tensors are not in the model: {abbreviate(only_folder)}")
    for name, tensor in live.items():
        if tensor.shape != read[name].shape:
            found, wanted = tuple(read[name].shape), tuple(tensor.shape)
            raise CheckpointError(f"{folder}: tensor {name} has shape {found}, but {wanted} in the model")
        tensor.copy_(read[name])
