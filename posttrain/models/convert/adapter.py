"""LoRA adapters added to the weights on the way: W + (alpha / r) B A, a rectangle of W at a time."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from posttrain.errors import CheckpointError, UsageError
from posttrain.models.convert.files import open_safetensors
from posttrain.models.convert.pieces import Span, Stored
from posttrain.models.convert.source import read_json


class Adapter:
    """A folder of peft's, by the parts that its pairs of matrices change."""

    def __init__(self, folder: Path, hf: list[Stored]) -> None:
        config = read_json(folder / "adapter_config.json")
        if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("lora_bias"):
            raise UsageError(f"{folder}: only plain LoRA can be merged here; `posttrain export` merges what peft can")
        self.config = config
        file = open_safetensors(folder / "adapter_model.safetensors")
        self.tensors: dict[str, torch.Tensor] = {}
        for name, entry in file.entries.items():
            data = file.read(name).view(entry.dtype).view(entry.shape)
            self.tensors[name.removeprefix("base_model.model.")] = data.float()
        file.close()
        stored = {tensor.name: tensor for tensor in hf}
        self.deltas: dict[str, list[tuple[Span, int, torch.Tensor, torch.Tensor]]] = {}
        used = set()
        for name in sorted(self.tensors):
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removesuffix(".lora_A.weight")
            other = f"{module}.lora_B.weight"
            target = stored.get(f"{module}.weight")
            if target is None or other not in self.tensors:
                raise CheckpointError(f"{folder}: {name} belongs to no matrix of this model")
            used |= {name, other}
            self.note(target, self.tensors[name], self.tensors[other] * self.scale(module))
        if left := sorted(self.tensors.keys() - used):
            raise CheckpointError(f"{folder}: {left[0]} is no part of an adapter that can be merged")

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA."""
        if self.config.get("rank_pattern") or self.config.get("alpha_pattern"):
            raise UsageError("adapter_config.json: rank_pattern and alpha_pattern are not known here")
        alpha, rank = float(self.config["lora_alpha"]), int(self.config["r"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def note(self, target: Stored, down: torch.Tensor, up: torch.Tensor) -> None:
        """Rows of B belong to the parts that the matrix is made of, in their order."""
        for piece in target.pieces:
            top = piece.at[1] if piece.transposed else piece.at[0]
            self.deltas.setdefault(piece.part, []).append((piece.rows, top - piece.rows[0], down, up))
        area = target.area[::-1] if target.pieces[0].transposed else target.area
        if (up.shape[0], down.shape[1]) != area or up.shape[1] != down.shape[0]:
            raise CheckpointError(f"{target.name}: its adapter is {tuple(up.shape)} x {tuple(down.shape)}")

    def add(self, part: str, rows: Span, columns: Span, weight: torch.Tensor) -> torch.Tensor:
        """The rectangle of a part with what the adapters add to it, rounded once."""
        for held, shift, down, up in self.deltas.get(part, ()):
            start, end = max(rows[0], held[0]), min(rows[1], held[1])
            if start < end:
                delta = up[start + shift : end + shift] @ down[:, columns[0] : columns[1]]
                changed = weight[start - rows[0] : end - rows[0]]
                changed.copy_(changed.float() + delta)
        return weight
