"""Writes a model as one GGUF file, tensor by tensor, and reads it back with the readers of gguf and transformers."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models.adapters import require_packages
from posttrain.models.tensors import file_tensors, module_tensors
from posttrain.publish import k_quants
from posttrain.publish.gguf_model import GgufFamily, family_of, frequency_factors, metadata, stored_tensor
from posttrain.publish.gguf_tokenizer import Vocabulary

GgufType = Literal["f16", "q8_0", "q4_k_m"]
FILE_TYPES: dict[str, int] = {"f16": 1, "q8_0": 7, "q4_k_m": 15}  # llama.cpp's llama_ftype
BLOCKS = {"Q4_K": 256, "Q6_K": 256, "Q5_0": 32, "Q8_0": 32}
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0", "Q5_0": "F16", "Q8_0": "F16"}  # if a row does not have whole blocks
# Relative to the norm of the tensor. Norms are stored with one added, which costs digits.
MAX_ERRORS = {"F32": 1e-5, "F16": 1e-3, "Q8_0": 0.02, "Q6_K": 0.05, "Q5_0": 0.10, "Q4_K": 0.15}


def require_gguf() -> None:
    """Raise UsageError, with the command that installs it, if the package gguf is missing."""
    require_packages("gguf", option="--format gguf")


def tensor_type(name: str, shape: tuple[int, ...], config: Any, kind: GgufType) -> str:
    """Return the type of a tensor by its name in the file, as llama.cpp's quantization of this name chooses it."""
    if len(shape) < 2 or not name.endswith(".weight") or name.endswith("_norm.weight"):
        return "F32"
    if kind == "f16":
        return "F16"
    found = "Q8_0" if kind == "q8_0" else mixed_type(name, config)
    while found in BLOCKS and shape[-1] % BLOCKS[found]:
        found = FALLBACKS[found]
    return found


def mixed_type(name: str, config: Any) -> str:
    """Return the type of a matrix in q4_k_m: Q6_K for the output layer and half of the values and down projections."""
    if name == "output.weight" or (name == "token_embd.weight" and config.tie_word_embeddings):
        return "Q6_K"
    if name.endswith((".attn_v.weight", ".ffn_down.weight")):
        layer, layers = int(name.split(".")[1]), config.num_hidden_layers
        if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2:
            return "Q6_K"
        large = config.model_type == "llama" and layers == 80 and name.endswith(".attn_v.weight")
        return "Q8_0" if large else "Q4_K"  # llama.cpp has Q5_K there, which is not written here; Q8_0 is larger
    return "Q4_K"


def encode(tensor: torch.Tensor, kind: str) -> np.ndarray:
    """Return a tensor's content in a type of GGUF."""
    from gguf import GGMLQuantizationType, quants

    if kind in ("Q4_K", "Q6_K"):
        return k_quants.quantize(tensor, kind).numpy()
    found: np.ndarray = quants.quantize(tensor.float().numpy(), GGMLQuantizationType[kind])
    return found


def file_size(shape: tuple[int, ...], kind: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return math.prod(shape) // block * size


def plain_tensors(
    model: PreTrainedModel, family: GgufFamily, stored: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors by their names in the file, as llama.cpp wants them; not `stored`: as the model has them."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(number for number in MODEL_ARCH if MODEL_ARCH_NAMES[number] == family.architecture)
    names = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for module_name, live in module_tensors(model).items():
        for name, tensor in file_tensors(model, module_name, live.detach()).items():
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise UsageError(f"GGUF: llama.cpp's {family.architecture} has no tensor {name}. Export as hf.")
            yield found, stored_tensor(model.config, family, name, tensor) if stored else tensor
    factors = frequency_factors(model.config)
    if factors is not None:
        yield "rope_freqs.weight", factors


def write_gguf(model: PreTrainedModel, vocabulary: Vocabulary, path: Path, kind: GgufType, name: str) -> None:
    """Write the file. One tensor at a time is converted; the model itself stays as it is."""
    from gguf import GGMLQuantizationType, GGUFWriter

    family = family_of(model.config)
    types = {
        found: tensor_type(found, tuple(tensor.shape), model.config, kind)
        for found, tensor in plain_tensors(model, family)
    }
    writer = GGUFWriter(path, family.architecture)
    try:
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[kind])
        if kind != "f16":
            writer.add_quantization_version(2)
        for key, value in metadata(model.config, family).items():
            add_value(writer, f"{family.architecture}.{key}", value)
        add_vocabulary(writer, vocabulary)
        for found, tensor in plain_tensors(model, family):
            shape, stored = tuple(tensor.shape), GGMLQuantizationType[types[found]]
            if types[found] in BLOCKS:  # the writer is told bytes per row and makes values of them
                shape = (*shape[:-1], file_size(shape[-1:], types[found]))
            width = {"F32": np.float32, "F16": np.float16}.get(types[found], np.uint8)
            writer.add_tensor_info(found, shape, np.dtype(width), file_size(tuple(tensor.shape), types[found]), stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for found, tensor in plain_tensors(model, family):
            writer.write_tensor_data(encode(tensor.cpu(), types[found]))
    finally:
        writer.close()


def add_value(writer: Any, key: str, value: int | float | str) -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
    add(key, value)


def add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """Add the tokenizer's metadata."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, number in vocabulary.special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.adds_space is not None:
        writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def load_gguf(path: Path, model: PreTrainedModel, kind: GgufType) -> None:
    """Read the file with transformers' own reader, and replace the weights of the model that was written by those read.

    Every weight must be there and differ from what it replaces by no more than its type allows.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    names = model
    if model.config.model_type == "mistral":  # the reader knows it, but not that its names are those of llama
        with torch.device("meta"):
            names = type(model)(copy.deepcopy(model.config))
        names.config.model_type = "llama"
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        content = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    check_read_config(content["config"], model.config)
    types = {
        tensor.data_ptr(): tensor_type(name, tuple(tensor.shape), model.config, kind)
        for name, tensor in plain_tensors(model, family_of(model.config), stored=False)
    }
    live = dict(model.named_parameters())
    read: dict[str, torch.Tensor] = content["tensors"]
    if missing := sorted(live.keys() - read.keys()):
        raise PosttrainError(f"{path}: these tensors were not read back: {', '.join(missing[:4])}")
    for name, parameter in live.items():
        found = read.pop(name).float()
        if found.shape != parameter.shape:
            raise PosttrainError(f"{path}: {name} was read back with shape {tuple(found.shape)}")
        expected = parameter.detach().float()
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
        stored = types[parameter.data_ptr()]
        if not error <= MAX_ERRORS[stored]:
            raise PosttrainError(f"{path}: {name} ({stored}) was read back with a relative error of {error:.3g}")
        parameter.data.copy_(found)


def check_read_config(found: dict[str, Any], config: Any) -> None:
    """Compare the sizes that transformers read from the file with the model's own."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        if name in found and found[name] != getattr(config, name):
            raise PosttrainError(f"GGUF: {name} was read back as {found[name]}, not {getattr(config, name)}")
