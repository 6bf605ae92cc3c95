"""LoRA adapters by the parts they change: merged on the way (W + (alpha / r) B A) or put together in another layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.convert.pieces import Part, Piece, Stored
from posttrain.core.errors import CheckpointError, UsageError

ROWS_AT_ONCE = 4096  # of float32 beside a matrix in half precision


@dataclass
class Factors:
    """What an adapter adds to one part, not scaled: up (out, r) @ down (r, in)."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass
class Adapter:
    """Pairs of matrices by part, and parts that it replaces altogether (the head of a reward model)."""

    config: dict[str, Any]  # as peft writes it: r, lora_alpha, use_rslora, task_type ...
    factors: dict[str, Factors] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            self.config.get("peft_type", "LORA") != "LORA"
            or self.config.get("use_dora")
            or self.config.get("lora_bias")
        ):
            raise UsageError(
                "adapter_config.json: only plain LoRA is known here; `posttrain export` merges what peft can"
            )
        if self.config.get("rank_pattern") or self.config.get("alpha_pattern"):
            raise UsageError("adapter_config.json: rank_pattern and alpha_pattern are not known here")

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA."""
        alpha, rank = float(self.config["lora_alpha"]), int(self.config["r"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def changes(self, part: str) -> bool:
        return part in self.factors or part in self.whole

    def add(self, piece: Piece, place: torch.Tensor) -> None:
        """Bring a rectangle of a part (rows, columns) to what it is with the adapter, in place, rounded once."""
        columns = slice(*piece.columns)
        if piece.part in self.whole:
            place.copy_(self.whole[piece.part][slice(*piece.rows), columns])
        if piece.part not in self.factors:
            return
        factors = self.factors[piece.part]
        up, down = factors.up[slice(*piece.rows)].float() * self.scale, factors.down[:, columns].float()
        if piece.repeat:
            place.copy_(place.float() + up @ down)
            return
        for start in range(0, place.shape[0], ROWS_AT_ONCE):
            rows = place[start : start + ROWS_AT_ONCE]
            rows.copy_(rows.float() + up[start : start + ROWS_AT_ONCE] @ down)


class Collector:
    """Factors gathered from shards: every element is there at the end, and copies agree."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self.parts = parts
        self.values: dict[tuple[str, str], torch.Tensor] = {}
        self.filled: dict[tuple[str, str], torch.Tensor] = {}

    def put(self, part: str, what: str, rows: slice, columns: slice, tensor: torch.Tensor, origin: str) -> None:
        """A rectangle of `down`, `up` or the part itself (`whole`)."""
        shape = self.parts[part].rows, self.parts[part].columns
        size = {"down": (tensor.shape[0], shape[1]), "up": (shape[0], tensor.shape[1]), "whole": shape}[what]
        key = part, what
        if key not in self.values:
            self.values[key] = torch.zeros(size, dtype=tensor.dtype)
            self.filled[key] = torch.zeros(size, dtype=torch.bool)
        held = self.values[key]
        if held.dtype != tensor.dtype or held.shape != size:
            raise CheckpointError(f"{origin}: type or rank differ from those of another rank")
        place, known = held[rows, columns], self.filled[key][rows, columns]
        if place.shape != tensor.shape:
            raise CheckpointError(f"{origin}: is {tuple(tensor.shape)}, the layout needs {tuple(place.shape)}")
        if bool((known & (place != tensor)).any()):
            raise CheckpointError(f"{origin}: differs from its copy on another rank; which one is right?")
        place.copy_(tensor)
        known.fill_(True)

    def adapter(self, config: dict[str, Any]) -> Adapter:
        for (part, what), filled in self.filled.items():
            if not bool(filled.all()):
                raise CheckpointError(f"the adapter's {what} for {part} is not complete: a rank is missing it")
        made = Adapter(config)
        for part, what in self.values:
            if what == "whole":
                made.whole[part] = self.values[part, what]
            elif (part, "up") not in self.values or (part, "down") not in self.values:
                raise CheckpointError(f"the adapter has only one of the two matrices for {part}")
            else:
                made.factors[part] = Factors(self.values[part, "down"], self.values[part, "up"])
        if not made.factors:
            raise CheckpointError("there are no adapters in it (tensors called ...lora_A...)")
        made.factors = {p: trimmed(f) for p, f in made.factors.items() if not only_fused(p, made.factors)}
        return made


def only_fused(part: str, factors: dict[str, Factors]) -> bool:
    """Whether a part has rows in an adapter just because it is in one matrix with a part that is adapted."""
    mine = factors[part]
    if bool(mine.up.any()):
        return False
    layer = part.split(".")[0]
    others = (f for name, f in factors.items() if name.split(".")[0] == layer and bool(f.up.any()))
    return any(other.down.shape == mine.down.shape and torch.equal(other.down, mine.down) for other in others)


def trimmed(factors: Factors) -> Factors:
    """Without the columns that add nothing: those of other parts, where several were fused into one matrix."""
    used = (factors.up != 0).any(dim=0)
    if not bool(used.any()) or bool(used.all()):
        return factors
    return Factors(factors.down[used].contiguous(), factors.up[:, used].contiguous())


def fused(adapter: Adapter, parts: Iterable[str]) -> list[tuple[list[str], torch.Tensor]]:
    """The different `down` matrices of parts that become one matrix, and who uses each."""
    found: list[tuple[list[str], torch.Tensor]] = []
    for part in dict.fromkeys(parts):
        if part in adapter.factors:
            down = adapter.factors[part].down
            for users, known in found:
                if known.shape == down.shape and torch.equal(known, down):
                    users.append(part)
                    break
            else:
                found.append(([part], down))
    return found


def rank_of(adapter: Adapter, stored: Iterable[Stored]) -> int:
    """The rank that every matrix of a layout can have: that of the one made of most."""
    ranks = [sum(down.shape[0] for _, down in fused(adapter, (p.part for p in t.pieces))) for t in stored]
    return max(ranks)


def pair(adapter: Adapter, tensor: Stored, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """down and up of a stored matrix, as large as its rectangle; None: the adapter does not change it."""
    groups = fused(adapter, (piece.part for piece in tensor.pieces))
    if not groups:
        return None
    spans = {piece.columns for piece in tensor.pieces}
    if len(spans) > 1 or any(piece.repeat for piece in tensor.pieces):
        raise UsageError(f"{tensor}: adapters cannot be written for a matrix that is put together like this")
    transposed = tensor.pieces[0].transposed
    height, width = tensor.area[::-1] if transposed else tensor.area
    example = groups[0][1]
    down, up = example.new_zeros((rank, width)), example.new_zeros((height, rank))
    start = 0
    for users, matrix in groups:
        end = start + matrix.shape[0]
        down[start:end] = matrix[:, slice(*tensor.pieces[0].columns)]
        for piece in tensor.pieces:
            if piece.part in users:
                top = piece.at[1] if transposed else piece.at[0]
                rows = adapter.factors[piece.part].up[slice(*piece.rows)]
                up[top : top + rows.shape[0], start:end] = rows
        start = end
    return down, up
