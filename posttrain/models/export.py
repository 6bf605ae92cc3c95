"""From a run to a plain Hugging Face folder that anybody can load; checked before it is called done."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.checkpoints.tensor_files import TensorFiles
from posttrain.config.sections import ModelConfig
from posttrain.core.errors import CheckpointError, PosttrainError, UsageError
from posttrain.core.types import Head
from posttrain.models import adapters
from posttrain.models.loading import (
    AUTO_CLASSES,
    is_adapter,
    load_tokenizer,
    read_config,
    read_model,
    resolve_path,
    save_model,
)

PROBE_LENGTH = 24
TOLERANCE = 1e-4


def export(source: str, out: Path, *, merge: bool = True, use_ema: bool = False) -> dict[str, Any]:
    """Write the model of a run, checkpoint or folder to `out`: weights, tokenizer, chat template, generation config.

    Adapters are merged into their base, in float32, unless `merge` is False. The result is read back with stock
    classes; if its weights or its logits are not the source's, nothing is left at `out`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name a new folder")
    folder = resolve_path(source)
    head = head_of(folder)
    merging = merge and is_adapter(folder)
    model = read_model(folder, head, torch.float32 if merging else "auto").eval()
    if use_ema:
        take_average(model, Path(folder).parent)
    rounding = 0.0  # from float32, in which adapters are merged, to the type of the base
    if merging:
        before = probe(model)
        compare(before, probe(adapters.merge(model)), "the merged model differs from the one with adapters")
        model = in_dtype_of_base(model, folder, head)
        rounding = relative_difference(before, probe(model))
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        save_model(model, load_tokenizer(ModelConfig(path=folder)), unfinished)
        difference = check_copy(model, unfinished, head)
        unfinished.chmod(0o755)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {
        "source": folder,
        "out": str(out),
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "merged": merging,
        "averaged": use_ema,
        "difference": difference,
        "rounding": rounding,
    }


def head_of(folder: str) -> Head:
    """Which head the model was trained with, as its files say."""
    if is_adapter(folder):
        task = json.loads((Path(folder) / adapters.CONFIG).read_text(encoding="utf-8")).get("task_type")
        return "score" if task == adapters.TASKS["score"] else "token"
    architectures = read_config(folder, "token").architectures or [""]
    return "score" if architectures[0].endswith("ForSequenceClassification") else "token"


@torch.no_grad()
def take_average(model: PreTrainedModel, folder: Path) -> None:
    """Replace the trained parameters by their running average."""
    file = folder / "ema.safetensors"
    if not file.is_file() and not (folder / "ema.safetensors.index.json").is_file():
        raise UsageError(f"there is no {file}: the run kept no average of its weights (update.ema_decay was 0)")
    parameters, saved = dict(model.named_parameters()), TensorFiles(folder, "ema")
    for name in saved.places:
        if name not in parameters or tuple(parameters[name].shape) != saved.shape(name):
            raise CheckpointError(f"{file}: {name} has no counterpart in the model")
        parameters[name].copy_(saved.read(name))


def in_dtype_of_base(merged: PreTrainedModel, folder: str, head: Head) -> PreTrainedModel:
    """Round float32 weights once, to the type that each has in the model the adapters were made for."""
    while is_adapter(folder):
        folder = resolve_path(adapters.base_of(Path(folder)))
    rounded = read_model(folder, head, "auto").eval()
    rounded.load_state_dict(merged.state_dict())
    rounded.config = merged.config
    return rounded


@torch.no_grad()
def probe(model: PreTrainedModel) -> torch.Tensor:
    """The model's output on fixed tokens: logits [1, T, V], or the score at each of them [1, T, 1]."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, PROBE_LENGTH + 1)[None] * 7919 % vocabulary  # a prime: they differ, and spread
    if model.get_output_embeddings() is not None:
        return model(input_ids=tokens, use_cache=False).logits.float()
    return model.score(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state).float()


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean absolute difference over mean absolute value."""
    return float((found - expected).abs().mean() / expected.abs().mean().clamp(min=1e-6))


def compare(expected: torch.Tensor, found: torch.Tensor, complaint: str) -> float:
    """The relative difference of two outputs, if the order of sums explains it: the weights are of one type."""
    difference = relative_difference(expected, found)
    if not difference <= TOLERANCE:
        raise PosttrainError(f"{complaint}: relative difference {difference:.3g}, at most {TOLERANCE:g} is rounding")
    return difference


def check_copy(model: PreTrainedModel, folder: Path, head: Head) -> float:
    """Read the folder back and compare: every weight bit for bit, then what comes out."""
    if adapters.is_adapted(model):
        copy = read_model(str(folder), head, model.dtype)
    else:
        copy = AUTO_CLASSES[head].from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    written, source = copy.eval().state_dict(), model.state_dict()
    wrong = written.keys() ^ source.keys() or {n for n, t in source.items() if not torch.equal(t, written[n])}
    if wrong:
        raise PosttrainError(f"the exported model differs from its source in {', '.join(sorted(wrong)[:4])}")
    return compare(probe(model), probe(copy), "the exported model's output differs from its source's")
