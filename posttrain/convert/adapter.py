"""LoRA adapters by the parameters they change: merged during conversion (W + (alpha / r) B A), or converted alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.convert.stored_tensors import ParameterBlock, ParameterShape, StoredTensor
from posttrain.core.errors import CheckpointError, UsageError

ROWS_AT_ONCE = 4096  # rows computed in float32 at a time, to bound memory beside a matrix in half precision


@dataclass
class LoraFactors:
    """The unscaled update of one parameter: up (out, r) @ down (r, in)."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass
class LoraAdapter:
    """Low-rank updates by parameter, and parameters that are replaced whole (the head of a reward model)."""

    config: dict[str, Any]  # as peft writes it: r, lora_alpha, use_rslora, task_type ...
    factors: dict[str, LoraFactors] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            self.config.get("peft_type", "LORA") != "LORA"
            or self.config.get("use_dora")
            or self.config.get("lora_bias")
        ):
            raise UsageError(
                "adapter_config.json: only plain LoRA is supported; `posttrain export` merges other kinds of adapters"
            )
        if self.config.get("rank_pattern") or self.config.get("alpha_pattern"):
            raise UsageError(
                "adapter_config.json: rank_pattern and alpha_pattern are not supported; merge with `posttrain export`"
            )

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA."""
        alpha, rank = float(self.config["lora_alpha"]), int(self.config["r"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def changes(self, parameter: str) -> bool:
        return parameter in self.factors or parameter in self.whole

    def add(self, block: ParameterBlock, place: torch.Tensor) -> None:
        """Apply the adapter to a block of a parameter in place; the sum is rounded once."""
        columns = slice(*block.columns)
        if block.parameter in self.whole:
            place.copy_(self.whole[block.parameter][slice(*block.rows), columns])
        if block.parameter not in self.factors:
            return
        factors = self.factors[block.parameter]
        up, down = factors.up[slice(*block.rows)].float() * self.scale, factors.down[:, columns].float()
        if block.repeat:
            place.copy_(place.float() + up @ down)
            return
        for start in range(0, place.shape[0], ROWS_AT_ONCE):
            rows = place[start : start + ROWS_AT_ONCE]
            rows.copy_(rows.float() + up[start : start + ROWS_AT_ONCE] @ down)


class LoraCollector:
    """Gathers LoRA factors from shards; checks that they are complete and that replicas are equal."""

    def __init__(self, parameters: dict[str, ParameterShape]) -> None:
        self.parameters = parameters
        self.values: dict[tuple[str, str], torch.Tensor] = {}
        self.filled: dict[tuple[str, str], torch.Tensor] = {}

    def add(self, parameter: str, what: str, rows: slice, columns: slice, tensor: torch.Tensor, origin: str) -> None:
        """Add a rectangle of `down`, of `up`, or of the parameter itself (`whole`)."""
        shape = self.parameters[parameter].rows, self.parameters[parameter].columns
        size = {"down": (tensor.shape[0], shape[1]), "up": (shape[0], tensor.shape[1]), "whole": shape}[what]
        key = parameter, what
        if key not in self.values:
            self.values[key] = torch.zeros(size, dtype=tensor.dtype)
            self.filled[key] = torch.zeros(size, dtype=torch.bool)
        held = self.values[key]
        if held.dtype != tensor.dtype or held.shape != size:
            raise CheckpointError(f"{origin}: its dtype or LoRA rank differs from that of another tensor-parallel rank")
        place, known = held[rows, columns], self.filled[key][rows, columns]
        if place.shape != tensor.shape:
            found, needed = tuple(tensor.shape), tuple(place.shape)
            raise CheckpointError(f"{origin}: has shape {found}, but the layout needs {needed}")
        if bool((known & (place != tensor)).any()):
            raise CheckpointError(f"replicated tensor {origin} differs between ranks: the checkpoint is inconsistent")
        place.copy_(tensor)
        known.fill_(True)

    def finish(self, config: dict[str, Any]) -> LoraAdapter:
        """Return the adapter, after checking that nothing is missing."""
        for (parameter, what), filled in self.filled.items():
            if not bool(filled.all()):
                raise CheckpointError(
                    f"the adapter's {what} for {parameter} is not complete: a rank's file lacks this tensor"
                )
        adapter = LoraAdapter(config)
        for parameter, what in self.values:
            if what == "whole":
                adapter.whole[parameter] = self.values[parameter, what]
            elif (parameter, "up") not in self.values or (parameter, "down") not in self.values:
                raise CheckpointError(f"the adapter has only one of the two matrices lora_A and lora_B for {parameter}")
            else:
                adapter.factors[parameter] = LoraFactors(self.values[parameter, "down"], self.values[parameter, "up"])
        if not adapter.factors:
            raise CheckpointError("the checkpoint has no adapters (tensors named ...lora_A...)")
        factors = adapter.factors
        adapter.factors = {p: trim_factors(f) for p, f in factors.items() if not is_only_fused(p, factors)}
        return adapter


def is_only_fused(parameter: str, factors: dict[str, LoraFactors]) -> bool:
    """Whether a parameter has rows in an adapter only because it is fused with a parameter that is adapted."""
    mine = factors[parameter]
    if bool(mine.up.any()):
        return False
    layer = parameter.split(".")[0]
    others = (f for name, f in factors.items() if name.split(".")[0] == layer and bool(f.up.any()))
    return any(other.down.shape == mine.down.shape and torch.equal(other.down, mine.down) for other in others)


def trim_factors(factors: LoraFactors) -> LoraFactors:
    """Remove the columns that add nothing: those of other parameters that were fused into the same matrix."""
    used = (factors.up != 0).any(dim=0)
    if not bool(used.any()) or bool(used.all()):
        return factors
    return LoraFactors(factors.down[used].contiguous(), factors.up[:, used].contiguous())


def distinct_downs(adapter: LoraAdapter, parameters: Iterable[str]) -> list[tuple[list[str], torch.Tensor]]:
    """Return the distinct `down` matrices of parameters that are fused into one matrix, each with its parameters."""
    found: list[tuple[list[str], torch.Tensor]] = []
    for parameter in dict.fromkeys(parameters):
        if parameter in adapter.factors:
            down = adapter.factors[parameter].down
            for users, known in found:
                if known.shape == down.shape and torch.equal(known, down):
                    users.append(parameter)
                    break
            else:
                found.append(([parameter], down))
    return found


def fused_rank(adapter: LoraAdapter, stored: Iterable[StoredTensor]) -> int:
    """Return the LoRA rank that every matrix of a layout can have: the largest sum of fused ranks."""
    ranks = [sum(down.shape[0] for _, down in distinct_downs(adapter, (p.parameter for p in t.blocks))) for t in stored]
    return max(ranks)


def stored_factors(adapter: LoraAdapter, tensor: StoredTensor, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return down and up for a stored matrix; None if the adapter does not change it."""
    groups = distinct_downs(adapter, (block.parameter for block in tensor.blocks))
    if not groups:
        return None
    spans = {block.columns for block in tensor.blocks}
    if len(spans) > 1 or any(block.repeat for block in tensor.blocks):
        raise UsageError(
            f"{tensor}: adapters cannot be written for a matrix made of blocks with different columns or of padding"
        )
    transposed = tensor.blocks[0].transposed
    height, width = tensor.matrix_shape[::-1] if transposed else tensor.matrix_shape
    example = groups[0][1]
    down, up = example.new_zeros((rank, width)), example.new_zeros((height, rank))
    start = 0
    for users, matrix in groups:
        end = start + matrix.shape[0]
        down[start:end] = matrix[:, slice(*tensor.blocks[0].columns)]
        for block in tensor.blocks:
            if block.parameter in users:
                top = block.at[1] if transposed else block.at[0]
                rows = adapter.factors[block.parameter].up[slice(*block.rows)]
                up[top : top + rows.shape[0], start:end] = rows
        start = end
    return down, up
