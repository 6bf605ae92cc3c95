"""Tensor parallelism: tensor ranks divide the heads and the feed-forward layers, by Hugging Face's plan of a family."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from posttrain.core.errors import UsageError

FAMILIES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Families whose Hugging Face plan of tensor parallelism was compared with one process."""

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The plan's words: split the outputs; split the inputs; replicated, but used on local heads, so that each rank's
gradient is one term of a sum."""


def apply_tensor_parallel(model: Any, mesh: DeviceMesh, device: torch.device) -> frozenset[str]:
    """Leave each tensor rank its heads and its part of the feed-forward layers.

    Returns the names of replicated parameters whose gradients must be summed over the tensor ranks.
    """
    prefix, plan = model.base_model_prefix, model.config.base_model_tp_plan
    layers = getattr(model, prefix)
    for parameter in layers.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    styles: dict[str, Any] = {}
    for pattern, word in plan.items():
        if word in (COLUMNS, ROWS):
            styles |= parallel_styles(layers, pattern, word)
    parallelize_module(layers, mesh, styles, src_data_rank=None)
    summed = [pattern.split("*.")[-1] for pattern, word in plan.items() if word == SUMMED]
    names = (name for name, _ in model.named_parameters())
    return frozenset(name for name in names if any(f".{part}." in name for part in summed))


def check_tensor_parallel(model: Any, size: int) -> None:
    """Raise UsageError if `size` ranks cannot divide the heads and the feed-forward layers of this model."""
    config = model.config
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"cluster.tensor_parallel_size is {size}, but {type(model).__name__} ({config.model_type}) cannot be "
            f"split over tensor ranks here; {', '.join(FAMILIES)} can. Leave it at 1: cluster.zero_stage 3 shards "
            "every model."
        )
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, what) % size:
            raise UsageError(
                f"cluster.tensor_parallel_size is {size}, which does not divide the model's {what.replace('_', ' ')}, "
                f"which is {getattr(config, what)}"
            )


def parallel_styles(layers: Any, pattern: str, word: str) -> dict[str, Any]:
    """Return the styles of one entry of the plan, by module; a pipeline stage has some of the layers.

    Of an adapted layer, lora_B is split like the layer's outputs, or lora_A like its inputs.
    """
    style = ColwiseParallel if word == COLUMNS else RowwiseParallel
    styles: dict[str, Any] = {}
    for name, module in layers.named_modules():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            if hasattr(module, "base_layer"):
                adapter = f"{name}.lora_{'B' if word == COLUMNS else 'A'}.default"
                styles |= {f"{name}.base_layer": style(), adapter: style()}
            else:
                styles[name] = style()
    return styles


def tensor_shard_dim(parameter: torch.Tensor) -> int | None:
    """Return the dimension that tensor ranks divide; None: each holds everything that its data rank has."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    placement = parameter.placements[names.index("tensor")] if "tensor" in names else Replicate()
    return None if isinstance(placement, Replicate) else placement.dim  # type: ignore[attr-defined]


def is_tensor_sharded(parameter: torch.Tensor) -> bool:
    """Whether tensor ranks hold different parts of the parameter."""
    return tensor_shard_dim(parameter) is not None


__all__ = ["apply_tensor_parallel", "check_tensor_parallel", "is_tensor_sharded", "tensor_shard_dim"]
