"""The token ids that end a completion."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from posttrain.data.encoding.templates import template_stop_ids
from posttrain.models.loading import read_config
from posttrain.models.paths import hub_options


def stop_ids(tokenizer: Any, generation_config: GenerationConfig | None) -> list[int]:
    """Return the end token of the tokenizer, those of its chat template, and those of the generation config, sorted."""
    named: Any = None if generation_config is None else generation_config.eos_token_id
    return sorted({*template_stop_ids(tokenizer), *(named if isinstance(named, list) else [named])} - {None})


def read_generation_config(source: str) -> GenerationConfig:
    """Read a model's generation config as transformers does with the model: from its own file or from config.json."""
    try:
        return GenerationConfig.from_pretrained(source, **hub_options(source))
    except OSError:  # there is no generation_config.json
        return GenerationConfig.from_model_config(read_config(source, "token"))
