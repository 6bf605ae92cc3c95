"""Several LoRA adapters of one base model in one batch: each sequence has its own or none, and ranks may differ.

    y = x W' + b + s_i (x A_i') B_i'      i: the adapter of the row's sequence

The matrices of all adapters of a layer are stacked, shorter ones padded with zeros. The rows of a pass are sorted by
adapter once, and every adapted layer then adds two grouped products, those of layers with the same input at once: no
shape depends on which adapters a batch uses, so a CUDA graph can contain them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from posttrain.core.errors import UsageError
from posttrain.models.adapters import CONFIG, PREFIX, WEIGHTS, is_adapted
from posttrain.nn.kernels.reference import LowRankParts, RowsByAdapter, kernels_for

STACKED = "stacked_adapters"  # attribute of a linear layer that adapters of a set change
# Settings of peft that change what an adapter computes; only these values are supported.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": ([], {}, None),
    "layer_replication": ([], None),
}

log = logging.getLogger("posttrain")


class AdapterSet:
    """Adapters of a model, by name; number 0, the empty name, is the model without one."""

    def __init__(self, model: Any, folders: Mapping[str, Path]) -> None:
        """Read the adapters and attach them to the model's linear layers, whose weights stay as they are."""
        if is_adapted(model):
            raise UsageError(
                "the model has adapters of its own: serve its base model, and these adapters beside others"
            )
        self.numbers = {"": 0} | {name: number for number, name in enumerate(folders, 1)}
        self.rows: RowsByAdapter | None = None  # of the pass that runs; None: adapters are switched off
        self.kernels = kernels_for(next(model.parameters()).device)
        by_layer: dict[str, dict[int, Matrices]] = {}
        for name, folder in folders.items():
            for layer, matrices in read_peft_adapter(folder, model).items():
                by_layer.setdefault(layer, {})[self.numbers[name]] = matrices
        for layer, found in by_layer.items():
            module = model.get_submodule(layer)
            setattr(module, STACKED, StackedAdapters(self, found, next(module.parameters())))
            module.register_forward_hook(add_adapters_output)

    def begin(self, adapter: torch.Tensor) -> None:
        """Start a pass; `adapter` [rows]: number of each row's."""
        self.rows = self.kernels.rows_by_adapter(adapter, len(self.numbers))

    def select(self, wanted: torch.Tensor) -> None:
        """Continue the pass with some of its rows."""
        assert self.rows is not None
        self.begin(self.rows.adapter[wanted])

    def end(self) -> None:
        self.rows = None


@dataclass(slots=True, frozen=True, eq=False)
class Matrices:
    """The adapter of one linear layer."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r], with the scaling


class StackedAdapters:
    """The adapters of one linear layer."""

    def __init__(self, owner: AdapterSet, found: Mapping[int, Matrices], like: torch.Tensor) -> None:
        self.owner = owner
        some = next(iter(found.values()))
        rank, count = max(len(matrices.a) for matrices in found.values()), len(owner.numbers)
        self.a = like.new_zeros(count, rank, some.a.shape[1])
        self.b = like.new_zeros(count, len(some.b), rank)
        for number, matrices in found.items():
            self.a[number, : len(matrices.a)] = matrices.a
            self.b[number, :, : len(matrices.a)] = matrices.b

    def output(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what the adapters add to the layer's output: [rows, in] -> [rows, out]; None if they are off."""
        rows, kernels = self.owner.rows, self.owner.kernels
        if rows is None:
            return None
        inner = kernels.expert_linear(x, self.a, rows.ends, rows.order)
        return kernels.combine_rows(kernels.expert_linear(inner, self.b, rows.ends), rows.place, None)


class JoinedStacks:
    """The adapters of linear layers with the same input, computed together."""

    def __init__(self, stacks: Sequence[StackedAdapters | None], sizes: Sequence[int]) -> None:
        """`stacks`, `sizes`: of each layer; None: no adapter changes it."""
        found = [stack for stack in stacks if stack is not None]
        self.owner, rank = found[0].owner, max(stack.a.shape[1] for stack in found)
        self.parts = LowRankParts(list(sizes), [stack is not None for stack in stacks], rank)
        padded = [rank - stack.a.shape[1] for stack in found]
        pad = torch.nn.functional.pad
        self.a = torch.cat([pad(stack.a, (0, 0, 0, more)) for stack, more in zip(found, padded, strict=True)], 1)
        self.b = torch.cat([pad(stack.b, (0, more)) for stack, more in zip(found, padded, strict=True)], 1)
        first = column = 0
        for stack in found:  # share the memory
            stack.a, stack.b = self.a[:, first : first + rank], self.b[:, column : column + stack.b.shape[1]]
            first, column = first + rank, column + stack.b.shape[1]

    def add(self, x: torch.Tensor, out: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        """Return the layers' outputs with what the adapters of each row add; `gated`: silu(gate) * up of them."""
        rows, kernels = self.owner.rows, self.owner.kernels
        if rows is None:
            return kernels.silu_and_mul(out) if gated else out
        inner = kernels.low_rank_inner(x, self.a, rows)
        return kernels.add_low_rank(out, inner, self.b, self.parts, 1.0, rows, gated=gated)


def add_adapters_output(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Add the adapters to the output of a layer that runs its own code; a forward hook."""
    x = args[0]
    added = getattr(module, STACKED).output(x.reshape(-1, x.shape[-1]))
    return output if added is None else output + added.view_as(output)


def read_peft_adapter(folder: Path, model: Any) -> dict[str, Matrices]:
    """Read an adapter in peft's format; returns its matrices by the name of the linear layer."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise UsageError(f"{folder}: no adapter there (an adapter has {CONFIG} and {WEIGHTS})")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for key, values in SUPPORTED.items():
        if config.get(key, values[-1]) not in values:
            raise UsageError(
                f"{folder / CONFIG}: {key} is {config[key]!r}, which is not supported for several adapters"
            )
    base = config.get("base_model_name_or_path")
    if base and base != model.name_or_path:
        log.info(f"adapter {folder} was trained on {base}; it is used with {model.name_or_path}")
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    tensors = load_file(folder / WEIGHTS)
    found: dict[str, Matrices] = {}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        a, b = tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B."), None)
        check_layer(model, layer, a, b, folder)
        assert b is not None
        found[layer] = Matrices(a.float(), b.float() * scaling)
    if tensors or not found:
        what = f"tensor {next(iter(tensors))} is not of a LoRA adapter on a linear layer" if tensors else "no tensors"
        raise UsageError(f"{folder / WEIGHTS}: {what}")
    return found


def check_layer(model: Any, layer: str, a: torch.Tensor, b: torch.Tensor | None, folder: Path) -> None:
    """Raise UsageError unless the matrices fit a linear layer of the model that is not its head."""
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        module = None
    if not isinstance(module, torch.nn.Linear | Conv1D) or module is model.get_output_embeddings():
        raise UsageError(f"{folder}: {type(model).__name__} has no linear layer {layer} that an adapter could change")
    shape = module.weight.shape if isinstance(module, torch.nn.Linear) else module.weight.shape[::-1]
    if b is None or (len(b), a.shape[1]) != tuple(shape) or len(a) != b.shape[1]:
        found = "no matrix B" if b is None else f"A {tuple(a.shape)} and B {tuple(b.shape)}"
        raise UsageError(f"{folder}: {layer} of the model has shape {tuple(shape)}, the adapter {found}")


__all__ = ["STACKED", "AdapterSet", "JoinedStacks"]
