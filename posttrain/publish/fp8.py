"""Writes a model with 8-bit floating-point weights in the layout of compressed-tensors, which vLLM reads.

Weights are float8_e4m3fn with one scale per output channel; activations are scaled per token when the model runs. So no
data is needed for calibration.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.checkpoints.tensor_files import LazyTensors, TensorFiles, save_sharded
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models.tensors import file_tensors, module_tensors

FP8 = torch.float8_e4m3fn
LARGEST = float(torch.finfo(FP8).max)  # 448
MAX_ERROR = 0.06  # relative; rounding to 3 bits of mantissa gives 0.026
NUMBERS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}


def quantized_layers(model: PreTrainedModel, target: str = "fp8") -> dict[str, torch.nn.Linear]:
    """Return the layers whose weights have fewer bits in the format `target`: all linear ones but the output layer."""
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        raise UsageError(
            f"{target}: mixtures of experts such as {type(model).__name__} are not supported. Export as hf."
        )
    head = model.get_output_embeddings()
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and name != "score"
    }
    if not found:
        raise UsageError(f"{target}: {type(model).__name__} has no linear layers to quantize. Export as hf.")
    return found


def quantization_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return what config.json says about it."""
    quantized = quantized_layers(model)
    others = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear) and n not in quantized]
    group = {
        "targets": ["Linear"],
        "weights": NUMBERS | {"strategy": "channel", "dynamic": False},
        "input_activations": NUMBERS | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": others,
        "kv_cache_scheme": None,
    }


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit weights [out, in] and their scales [out, 1]; the largest weight of a channel becomes 448."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (weight.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def stored_tensors(model: PreTrainedModel) -> Iterator[LazyTensors]:
    """Yield the tensors of the files; each is converted when it is written."""
    quantized = {f"{name}.weight" for name in quantized_layers(model)}

    def entry(name: str, live: torch.Tensor) -> LazyTensors:
        if name not in quantized:
            plain = file_tensors(model, name, live.detach())
            return LazyTensors({key: (tuple(t.shape), t.dtype) for key, t in plain.items()}, lambda: plain)
        (key,) = file_tensors(model, name, live.detach())
        kinds = {key: (tuple(live.shape), FP8), f"{key}_scale": ((live.shape[0], 1), torch.float32)}
        return LazyTensors(kinds, lambda: dict(zip(kinds, quantize(live.detach()), strict=True)))

    for name, live in module_tensors(model).items():
        yield entry(name, live)


def write_fp8(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, configuration and tokenizer."""
    config = copy.deepcopy(model.config)
    config.use_cache = True
    config.dtype = model.dtype
    config.architectures = [type(model).__name__]
    config.quantization_config = quantization_config(model)
    save_sharded(folder, "model", list(stored_tensors(model)), 0, 1)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_fp8(folder: Path, model: PreTrainedModel) -> None:
    """Read the files into the model that was written, and let its layers round inputs as an 8-bit runtime does."""
    files, layers = TensorFiles(folder, "model"), quantized_layers(model)
    read = 0
    for name, parameter in module_tensors(model).items():
        for key, expected in file_tensors(model, name, parameter.detach()).items():
            found = files.read(key).float()
            read += 1
            if f"{key}_scale" in files.places:
                found, read = found * files.read(f"{key}_scale"), read + 1
            error = float((found - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))
            limit = MAX_ERROR if name.removesuffix(".weight") in layers else 0.0
            if found.shape != expected.shape or not error <= limit:
                raise PosttrainError(f"{folder}: {key} was read back with a relative error of {error:.3g}")
            expected.copy_(found)
    if read != len(files.places):
        raise PosttrainError(f"{folder}: has {len(files.places)} tensors, but {read} were expected")
    for layer in layers.values():
        layer.register_forward_pre_hook(round_inputs)


def round_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round activations [..., hidden] to 8 bits with one scale per token."""
    (values,) = inputs
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (((values / scale).to(FP8).to(values.dtype)) * scale,)
