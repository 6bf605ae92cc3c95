"""Builds vLLM engines: for a model path with its own weights, for rollout workers, and beside a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.config.sections import ModelConfig
from posttrain.core.devices import default_device
from posttrain.data.encoding.templates import apply_template
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.models import adapters
from posttrain.models.loading import compute_dtype, load_model, read_config
from posttrain.models.paths import base_model_path, is_adapter, resolve_path
from posttrain.models.tensors import export_tensors
from posttrain.models.tokenizers import load_tokenizer


def engine_for_path(model: ModelConfig, template: str, options: Mapping[str, Any], *, read_weights: bool) -> VllmEngine:
    """Build an engine in the dtype that a learner would use.

    `read_weights`: vLLM reads the model's own weights (adapters are merged first); otherwise it waits for `load`.
    """
    tokenizer, source = load_tokenizer(model), resolve_path(model.path)
    apply_template(tokenizer, template)
    config, dtype = read_config(base_model_path(source), "token"), compute_dtype(model, default_device())
    if read_weights and not is_adapter(source):
        return VllmEngine(config, tokenizer, options, dtype=dtype, base=source)
    engine = VllmEngine(config, tokenizer, options, dtype=dtype)
    if read_weights:
        merged = load_model(model, "token", device=torch.device("cpu"), trainable=False, seed=0)
        engine.load(export_tensors(merged, dtype), 0)
    return engine


def engine_beside_trainer(
    model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype, options: Mapping[str, Any], base: str
) -> VllmEngine:
    """Build an engine that shares the device with a trainer; with a `base` (adapter_base_folder), it loads adapters."""
    adapter = adapters.adapter_config(model) if base else None
    return VllmEngine(model.config, tokenizer, options, dtype=dtype, base=base, adapter=adapter, beside_trainer=True)


def adapter_base_folder(model: PreTrainedModel) -> str:
    """Return the folder of the adapters' base weights; empty without adapters, or if these are stacked."""
    if not adapters.is_adapted(model):
        return ""
    source = resolve_path(model.name_or_path)
    return "" if is_adapter(source) else source
