"""Writes a model with weights of 4 bits, chosen by AWQ or GPTQ, in the layout of compressed-tensors, which vLLM reads.

llm-compressor computes both: GPTQ (arXiv:2210.17323) rounds column by column and lets later columns make up for the
error of earlier ones; AWQ (arXiv:2306.00978) scales weights up whose inputs are large before all are rounded. Both look
at what the layers get as input, so they need examples of the text that the model will see.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError, PosttrainError, UsageError
from posttrain.core.types import ExampleKind
from posttrain.data.dataset import Encoder, load_dataset
from posttrain.data.reading.formats import FORMATS
from posttrain.data.reading.sources import read_records
from posttrain.publish.fp8 import quantized_layers

FourBitMethod = Literal["awq", "gptq"]
METHODS = ("awq", "gptq")
GROUP_SIZES = (128, 64, 32)  # weights of a row that share a scale; vLLM has kernels for these
KINDS: tuple[ExampleKind, ...] = ("chat", "text", "pair", "labelled", "stepwise")
MAX_TOKENS = 2048  # of an example


@dataclass(frozen=True, slots=True)
class Calibration:
    """Where the examples of a calibration are, and how many of the first ones are used."""

    data: str = ""
    examples: int = 256


def check_four_bit(method: str, calibration: Calibration) -> None:
    """Raise UsageError, before a model is loaded, if the library or the examples are missing."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise UsageError(
            f"--format {method} needs llm-compressor, in an environment of its own: pip install "
            "'posttrain[llm-compressor]'. docs/export.md"
        )
    if not calibration.data:
        raise UsageError(
            f"--format {method} needs examples: set --calibration_data to a data file, such as the one the model was "
            "trained on"
        )
    if calibration.examples < 1:
        raise UsageError(f"--calibration_examples is {calibration.examples}; it must be at least 1")


def calibration_kind(file: str) -> ExampleKind:
    """Return the kind of examples that the first record of a file fits."""
    for record in islice(read_records(file), 1):
        fitting = [form for form in FORMATS if form.matches(record.values)]
        for kind in KINDS:
            if any(form.provides(kind) for form in fitting):
                return kind
    return "chat"  # the error of load_dataset says what is wrong with the file


def calibration_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration
) -> list[torch.Tensor]:
    """Return the tokens of the first examples, encoded as in training: [T] each."""
    config = model.config.get_text_config()
    length = min(MAX_TOKENS, config.max_position_embeddings)
    encoder = Encoder(tokenizer, DataConfig(max_length=length), calibration_kind(calibration.data), config.vocab_size)
    dataset = load_dataset([calibration.data], encoder, calibration.examples)
    found = [torch.tensor(sample.tokens, dtype=torch.long) for sample in dataset.samples()]
    if not found:
        raise DataError(f"{calibration.data}: there are no examples for the calibration")
    return found[: calibration.examples]


def group_size(model: PreTrainedModel) -> int | None:
    """Return how many weights of a row share a scale: what divides the rows of all layers; None: whole rows."""
    widths = {layer.in_features for layer in quantized_layers(model, "awq and gptq").values()}
    return next((size for size in GROUP_SIZES if all(width % size == 0 for width in widths)), None)


def recipe(model: PreTrainedModel, method: FourBitMethod) -> list[Any]:
    """Return llm-compressor's steps: GPTQ with symmetric weights; AWQ's scales, then asymmetric weights."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    size = group_size(model)
    shared = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    weights = {"num_bits": 4, "type": "int", "symmetric": method == "gptq", **shared}
    quantized = quantized_layers(model, "awq and gptq")
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    scheme: dict[str, Any] = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [name for name in linear if name not in quantized],
    }
    if method == "gptq":
        return [GPTQModifier(**scheme)]
    return [AWQModifier(), QuantizationModifier(**scheme)]


@contextmanager
def unpinned_without_accelerator() -> Iterator[None]:
    """Let AWQ run on a CPU: llm-compressor 0.14 pins its copies of activations, which needs an accelerator."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    pin = IntermediatesCache.pin_memory
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = pin


def write_four_bit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[torch.Tensor],
    method: FourBitMethod,
    folder: Path,
) -> None:
    """Quantize the model in place, and write weights, configuration and tokenizer."""
    from llmcompressor import oneshot
    from loguru import logger

    for library in ("llmcompressor", "compressed_tensors"):  # they report every layer
        logger.disable(library)
    batches = [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]} for ids in tokens]
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    source = copy.deepcopy(model.config)
    try:
        with unpinned_without_accelerator():
            oneshot(
                model=model,
                tokenizer=tokenizer,
                dataset=loader,
                recipe=recipe(model, method),
                num_calibration_samples=len(batches),
            )
    except (RuntimeError, ValueError, KeyError, AttributeError, torch.linalg.LinAlgError) as error:
        raise PosttrainError(
            f"llm-compressor could not quantize {source.model_type} by {method}: {type(error).__name__}: {error}"
        ) from error
    model.config.use_cache = True
    model.save_pretrained(folder, save_compressed=True)
    tokenizer.save_pretrained(folder)


def load_four_bit(folder: Path) -> PreTrainedModel:
    """Read the files with transformers, which lets compressed-tensors compute the weights from them."""
    from transformers import CompressedTensorsConfig

    how = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, quantization_config=how
    )
    return model.eval()  # type: ignore[no-any-return]
