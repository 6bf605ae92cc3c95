"""Exports the model of a run as a plain Hugging Face folder, which is read back and compared with its source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.checkpoints.tensor_files import TensorFiles
from posttrain.config.sections import ModelConfig
from posttrain.core.errors import CheckpointError, PosttrainError, UsageError
from posttrain.core.files import check_new_folder, new_folder
from posttrain.core.types import Head
from posttrain.models import adapters
from posttrain.models.loading import AUTO_CLASSES, read_config, read_model
from posttrain.models.paths import CONSTRUCTION, base_model_path, is_adapter, resolve_path
from posttrain.models.saving import save_model
from posttrain.models.tokenizers import load_tokenizer

PROBE_LENGTH = 24  # tokens
TOLERANCE = 1e-4  # relative difference of outputs, larger than rounding


@dataclass(slots=True)
class ExportSource:
    """The model to be exported, loaded, with its adapters merged unless they are to be kept."""

    folder: str
    head: Head
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    merged: bool
    averaged: bool
    rounding: float
    """Relative difference of outputs from rounding the float32 merge to the type of the base."""

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def report(self, out: Path) -> dict[str, Any]:
        """Return what is reported about every export."""
        return {
            "source": self.folder,
            "out": str(out),
            "architecture": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "merged": self.merged,
            "averaged": self.averaged,
            "rounding": self.rounding,
        }


def load_source(source: str, *, merge: bool = True, use_ema: bool = False) -> ExportSource:
    """Load the model of a run, checkpoint or folder; adapters are merged in float32, unless `merge` is False."""
    folder = resolve_path(source)
    head = head_of(folder)
    merging = merge and is_adapter(folder)
    model = read_model(folder, head, torch.float32 if merging else "auto").eval()
    if use_ema:
        use_average(model, Path(folder).parent)
    rounding = 0.0
    if merging:
        before = probe(model)
        check_equal_outputs(before, probe(adapters.merge(model)), "the merged model differs from the one with adapters")
        model = in_dtype_of_base(model, folder, head)
        rounding = relative_difference(before, probe(model))
    return ExportSource(folder, head, model, load_tokenizer(ModelConfig(path=folder)), merging, use_ema, rounding)


def export(source: str, out: Path, *, merge: bool = True, use_ema: bool = False) -> dict[str, Any]:
    """Write the model of a run, checkpoint or folder to `out`: weights, tokenizer, chat template, generation config.

    The result is read back with stock classes; if its weights or its logits differ from the source's, nothing is left
    at `out`.
    """
    check_new_folder(out)
    loaded = load_source(source, merge=merge, use_ema=use_ema)
    with new_folder(out, lambda: loaded.size) as unfinished:
        save_model(loaded.model, loaded.tokenizer, unfinished)
        difference = check_copy(loaded.model, unfinished, loaded.head)
    return loaded.report(out) | {"difference": difference}


def load_trained_model(source: str) -> PreTrainedModel:
    """Load the model of a run, checkpoint or folder in the type of its files, with adapters merged into it."""
    folder = resolve_path(source)
    model = read_model(folder, head_of(folder), "auto").eval()
    return adapters.merge(model) if is_adapter(folder) else model


def head_of(folder: str) -> Head:
    """Return the head that the model was trained with, according to its files."""
    if is_adapter(folder):
        task = json.loads((Path(folder) / adapters.CONFIG).read_text(encoding="utf-8")).get("task_type")
        return "score" if task == adapters.TASKS["score"] else "token"
    architectures = read_config(folder, "token").architectures or [""]
    return "score" if architectures[0].endswith("ForSequenceClassification") else "token"


@torch.no_grad()
def use_average(model: PreTrainedModel, folder: Path) -> None:
    """Replace the trained parameters by their exponential moving average."""
    file = folder / "ema.safetensors"
    if not file.is_file() and not (folder / "ema.safetensors.index.json").is_file():
        raise UsageError(f"there is no {file}: the run did not average its weights (train.ema_decay was 0)")
    parameters, saved = dict(model.named_parameters()), TensorFiles(folder, "ema")
    for name in saved.places:
        if name not in parameters or tuple(parameters[name].shape) != saved.shape(name):
            raise CheckpointError(f"{file}: tensor {name} is not in the model, or has another shape")
        parameters[name].copy_(saved.read(name))


def in_dtype_of_base(merged: PreTrainedModel, folder: str, head: Head) -> PreTrainedModel:
    """Round float32 weights once, to the types that they have in the base model."""
    rounded = read_model(base_model_path(folder), head, "auto").eval()
    rounded.load_state_dict(merged.state_dict())
    rounded.config = merged.config
    return rounded


@torch.no_grad()
def probe(model: PreTrainedModel) -> torch.Tensor:
    """Return the model's output on fixed tokens: logits [1, T, V], or the score at each token [1, T, 1]."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, PROBE_LENGTH + 1)[None] * 7919 % vocabulary  # a prime: spread over the vocabulary
    if model.get_output_embeddings() is not None:
        return model(input_ids=tokens, use_cache=False).logits.float()
    return model.score(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state).float()


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the mean absolute difference over mean absolute value."""
    return float((found - expected).abs().mean() / expected.abs().mean().clamp(min=1e-6))


def check_equal_outputs(expected: torch.Tensor, found: torch.Tensor, message: str) -> float:
    """Return the relative difference of two outputs; raise PosttrainError if it is larger than rounding."""
    difference = relative_difference(expected, found)
    if not difference <= TOLERANCE:
        raise PosttrainError(f"{message}: relative difference {difference:.3g}, above {TOLERANCE:g}")
    return difference


def check_copy(model: PreTrainedModel, folder: Path, head: Head) -> float:
    """Read the folder back and compare every weight bit for bit, then the output."""
    if adapters.is_adapted(model):
        copy = read_model(str(folder), head, model.dtype)
    else:
        with CONSTRUCTION:
            copy = AUTO_CLASSES[head].from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    written, source = copy.eval().state_dict(), model.state_dict()
    wrong = written.keys() ^ source.keys() or {n for n, t in source.items() if not torch.equal(t, written[n])}
    if wrong:
        raise PosttrainError(f"the exported model differs from its source in {', '.join(sorted(wrong)[:4])}")
    return check_equal_outputs(probe(model), probe(copy), "the exported model's output differs from its source's")
