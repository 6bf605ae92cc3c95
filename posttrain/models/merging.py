"""Merges several models of one architecture into one, tensor by tensor: linear, SLERP, TIES and DARE, as in mergekit.

Only one tensor of each model is in memory at a time. A source with LoRA adapters counts as its base with the adapters
added. Formulas: linear "Model soups" (2022), TIES "Resolving Interference When Merging Models" (2023), DARE "Language
Models are Super Mario" (2023); details are mergekit's, except that DARE divides by the density, as in the paper.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from posttrain.checkpoints.tensor_files import LazyTensors, TensorFiles, save_sharded
from posttrain.config.sections import ModelConfig
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.files import check_new_folder, new_folder, read_json
from posttrain.models import adapters
from posttrain.models.loading import local_folder, read_config
from posttrain.models.paths import base_model_path, is_adapter, resolve_path
from posttrain.models.tensors import abbreviate
from posttrain.models.tokenizers import load_tokenizer

MergeMethod = Literal["linear", "slerp", "ties", "dare_linear", "dare_ties"]
FILES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*", "vocab.*")
WITH_BASE = ("ties", "dare_linear", "dare_ties")
OPTIONS_OF = {"t": ("slerp",), "density": WITH_BASE, "scale": WITH_BASE, "seed": WITH_BASE[1:]}
"""Option -> the methods that it is for."""
PARALLEL = 0.9995  # cosine above which SLERP is linear interpolation
PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),  # others change the base weights
}


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """How models are merged."""

    method: MergeMethod = "linear"
    weights: tuple[float, ...] = ()
    """Weight of each model; empty: 1 each."""
    t: float = 0.5
    """SLERP: 0 is the first model, 1 the second."""
    density: float = 0.5
    """TIES: part of each difference from the base that is kept, the largest. DARE: probability of keeping a value."""
    scale: float = 1.0
    """TIES and DARE: factor of the merged difference from the base."""
    seed: int = 0
    """DARE: seed of the random choice."""

    @property
    def needs_base(self) -> bool:
        return self.method in WITH_BASE


class MergeSource:
    """The tensors of one model, read on request; LoRA adapters are added in float32."""

    def __init__(self, path: str) -> None:
        self.path = path
        folder = resolve_path(path)
        self.adapter = Path(folder) if is_adapter(folder) else None
        self.folder = local_folder(base_model_path(folder))
        self.files = TensorFiles(self.folder, "model")
        self.lora = TensorFiles(self.adapter, "adapter_model") if self.adapter else None
        self.scaling = lora_scaling(self.adapter) if self.adapter else 0.0
        if self.lora is not None:
            unknown = {n for n in self.lora.places if lora_target(n) not in self.files.places}
            if unknown:
                raise UsageError(f"{path}: its base model has no tensors for these adapters: {abbreviate(unknown)}")

    def read(self, name: str) -> torch.Tensor:
        tensor = self.files.read(name)
        down = adapters.PREFIX + name.removesuffix("weight") + "lora_A.weight"
        if self.lora is None or down not in self.lora.places:
            return tensor
        up = down.replace("lora_A", "lora_B")
        return tensor.float() + self.lora.read(up).float() @ self.lora.read(down).float() * self.scaling


def lora_target(name: str) -> str:
    """Return the tensor of the base that a tensor of adapters belongs to."""
    return name.removeprefix(adapters.PREFIX).replace("lora_A.", "").replace("lora_B.", "")


def lora_scaling(folder: Path) -> float:
    """Return the factor of plain LoRA adapters; UsageError for other kinds."""
    config = read_json(folder / adapters.CONFIG)
    for name, allowed in PLAIN_LORA.items():
        if config.get(name) not in allowed:
            raise UsageError(f"{folder}: adapters with {name} cannot be merged here: posttrain export them first")
    if is_adapter(resolve_path(adapters.base_model_of(folder))):
        raise UsageError(f"{folder}: its base has adapters itself: posttrain export it first")
    rank = config["r"]
    return float(config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank))


def merge_models(
    models: Sequence[str], out: Path, settings: MergeSettings, base: str = "", dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Write the merged model to the new folder `out`, and return a report.

    Tokenizer and configuration are those of the first model. Names and shapes of all tensors and the vocabularies must
    be equal. `dtype`: of the tensors written; None: that of the first model, or of the base.
    """
    check_settings(models, settings, base)
    check_new_folder(out)
    sources = [MergeSource(path) for path in models]
    origin = MergeSource(base) if base else None
    first = origin or sources[0]
    check_same(first, [*sources, *([origin] if origin else [])])
    weights = settings.weights or (1.0,) * len(models)
    combine = partial(merged_tensor, settings=settings, weights=weights)
    changed = 0

    def fetch(name: str) -> dict[str, torch.Tensor]:
        nonlocal changed
        reference = first.files.read(name)
        values = [source.read(name) for source in sources]
        if not reference.is_floating_point():
            if any(not torch.equal(value, reference) for value in values):
                raise UsageError(f"tensor {name} holds integers that differ between the models")
            return {name: reference}
        merged = combine(name, values, origin.read(name) if origin else None).to(dtype or reference.dtype)
        if not merged.isfinite().all():
            raise PosttrainError(f"tensor {name}: the merged values are not finite")
        changed += not torch.equal(merged, reference.to(merged.dtype))
        return {name: merged}

    def kind_of(stored: torch.dtype) -> torch.dtype:
        return dtype if dtype is not None and stored.is_floating_point else stored

    entries = [
        LazyTensors({name: (first.files.shape(name), kind_of(first.files.dtype(name)))}, partial(fetch, name))
        for name in sorted(first.files.places)
    ]
    with new_folder(out) as unfinished:
        save_sharded(unfinished, "model", entries, 0, 1)
        copy_companions(sources[0], unfinished)
        read_back = TensorFiles(unfinished, "model")
        assert read_back.places.keys() == first.files.places.keys()
    return {
        "out": str(out),
        "method": settings.method,
        "models": list(models),
        "tensors": len(entries),
        "changed": changed,
    }


def check_settings(models: Sequence[str], settings: MergeSettings, base: str) -> None:
    """Raise UsageError for settings that cannot work."""
    if len(models) < 2 and not (base and models):
        raise UsageError("merge: at least two models are needed, or one and --base")
    if settings.method == "slerp" and len(models) != 2:
        raise UsageError(f"merge: slerp takes two models, not {len(models)}")
    if settings.needs_base and not base:
        raise UsageError(f"merge: {settings.method} needs --base, the model that the others were trained from")
    if base and not settings.needs_base:
        raise UsageError(f"merge: {settings.method} has no base: leave out --base, or use ties or dare_ties")
    if settings.weights and (settings.method == "slerp" or len(settings.weights) != len(models)):
        wanted = "no weights (set --t)" if settings.method == "slerp" else f"{len(models)}, one per model"
        raise UsageError(f"merge: {len(settings.weights)} weights are given; {settings.method} takes {wanted}")
    if settings.method == "linear" and settings.weights and abs(sum(settings.weights)) < 1e-8:
        raise UsageError("merge: the weights add up to 0")
    for name, methods in OPTIONS_OF.items():
        if settings.method not in methods and getattr(settings, name) != getattr(MergeSettings(), name):
            raise UsageError(
                f"merge: --{name} has no effect with {settings.method}: leave it out, or use {' or '.join(methods)}"
            )
    if not 0 < settings.density <= 1 or not 0 <= settings.t <= 1:
        raise UsageError("merge: density must be above 0 and at most 1, and t from 0 to 1")


def check_same(first: MergeSource, others: Sequence[MergeSource]) -> None:
    """Raise UsageError if tensors or vocabularies of the models differ."""
    vocabulary = load_tokenizer(ModelConfig(path=first.path)).get_vocab()
    config = model_config(first)
    for other in others:
        if different := first.files.places.keys() ^ other.files.places.keys():
            raise UsageError(
                f"{first.path} and {other.path} do not have the same tensors: {abbreviate(set(different))}"
            )
        for name in first.files.places:
            if first.files.shape(name) != other.files.shape(name):
                raise UsageError(
                    f"tensor {name} has shape {first.files.shape(name)} in {first.path}, but "
                    f"{other.files.shape(name)} in {other.path}"
                )
        if model_config(other).model_type != config.model_type:
            raise UsageError(f"{first.path} is a {config.model_type}, {other.path} a {model_config(other).model_type}")
        if load_tokenizer(ModelConfig(path=other.path)).get_vocab() != vocabulary:
            raise UsageError(f"{first.path} and {other.path} have different vocabularies: their tokens do not match")


def model_config(source: MergeSource) -> PreTrainedConfig:
    return read_config(str(source.folder), "token")


def copy_companions(source: MergeSource, folder: Path) -> None:
    """Copy configuration and tokenizer; those beside adapters come before those of their base."""
    for place in (source.folder, *([source.adapter] if source.adapter else [])):
        for pattern in FILES:
            for file in place.glob(pattern):
                if file.is_file() and (place == source.folder or file.name != "config.json"):
                    shutil.copyfile(file, folder / file.name)
    if (source.folder / "merges.txt").is_file():
        shutil.copyfile(source.folder / "merges.txt", folder / "merges.txt")


# The formulas, on one tensor of each model


def merged_tensor(
    name: str,
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor | None,
    *,
    settings: MergeSettings,
    weights: Sequence[float],
) -> torch.Tensor:
    """Merge one tensor of all models, in float32."""
    values = [tensor.float() for tensor in tensors]
    if settings.method == "linear":
        return sum_of(values, weights) / sum(weights)
    if settings.method == "slerp":
        return slerp(values[0], values[1], settings.t)
    assert base is not None
    origin = base.float()
    deltas = [
        keep_largest(value - origin, settings.density)
        if settings.method == "ties"
        else keep_random(value - origin, settings.density, seed_of(settings.seed, number, name))
        for number, value in enumerate(values)
    ]
    if settings.method == "dare_linear":
        return origin + settings.scale * sum_of(deltas, weights)
    total, divisor = elect_signs(deltas, weights)
    merged = total / torch.where(divisor == 0, 1.0, divisor) if settings.method == "ties" else total
    return origin + settings.scale * merged


def sum_of(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total += weight * value
    return total


def slerp(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    """Interpolate on the arc between two tensors; nearly parallel ones linearly."""
    cosine = float((a / a.norm().clamp(min=1e-8) * (b / b.norm().clamp(min=1e-8))).sum().clamp(-1, 1))
    if abs(cosine) > PARALLEL:
        return (1 - t) * a + t * b
    angle = torch.tensor(cosine, dtype=torch.float64).arccos()
    first, second = (float((angle * part).sin() / angle.sin()) for part in (1 - t, t))
    return first * a + second * b


def keep_largest(delta: torch.Tensor, density: float) -> torch.Tensor:
    """Set all but the largest values to zero."""
    count = int(density * delta.numel())
    if density >= 1 or count == 0:
        return delta if density >= 1 else torch.zeros_like(delta)
    kept = delta.flatten().abs().topk(count).indices
    sparse = torch.zeros_like(delta).flatten()
    sparse[kept] = delta.flatten()[kept]
    return sparse.view_as(delta)


def keep_random(delta: torch.Tensor, density: float, seed: int) -> torch.Tensor:
    """Set values to zero at random and enlarge the others, so that the expected value stays the same."""
    if density >= 1:
        return delta
    mask = torch.rand(delta.shape, generator=torch.Generator().manual_seed(seed)) < density
    return delta * mask / density


def seed_of(seed: int, number: int, name: str) -> int:
    """Return a seed for one tensor of one model, which does not depend on the order of tensors."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}/{name}".encode()).digest()[:7], "little")


def elect_signs(deltas: Sequence[torch.Tensor], weights: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the weighted differences that have the sign of their sum; also return the sum of their weights."""
    positive = sum_of(deltas, weights) >= 0
    total, divisor = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        weighted = weight * delta
        agrees = torch.where(positive, weighted > 0, weighted < 0)
        total += weighted * agrees
        divisor += weight * agrees
    return total, divisor
