"""A model for inference, and what inference needs to know of one: stop ids, positions, sampling, conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import Prompt, Sample
from posttrain.data.encoding.conversation import encode_conversation
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import Message
from posttrain.engines.base import LOCAL, EngineSpec, GenerationRequest, OnToken, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.models.paths import base_model_path, resolve_path
from posttrain.models.stop_ids import read_generation_config, stop_ids
from posttrain.train.learner import Learner

TEMPLATE_TOKENS = 64  # at most, of a chat template and of a condition around prompt and completion
CONDITION = "{prompt} <rm_score>: {reward:.2f} "
"""How a prompt states the reward of its completion, in training and afterwards (arXiv:2308.12050)."""


class InferenceModel:
    """A model with its tokenizer and the local engine. A learner without an optimizer holds the weights."""

    def __init__(
        self,
        model: ModelConfig,
        data: DataConfig,
        adapters: Mapping[str, str] | None = None,
        engine: EngineSpec = LOCAL,
    ) -> None:
        """`adapters`: directories or runs of adapters of this model, by the name that requests choose them with.

        `engine`: options of the local engine.
        """
        self.name = model.path
        self.learner = Learner(model, TrainConfig(), trainable=False, template=data.chat_template)
        self.tokenizer: Any = self.learner.tokenizer
        self.engine = LocalEngine(self.learner.runner, self.tokenizer, frozen=True, **engine.local_options)
        self.adapters = tuple(adapters or ())
        if adapters:
            self.engine.use_adapters({name: Path(resolve_path(path)) for name, path in adapters.items()})
        self.stop_ids = tuple(self.learner.stop_ids())
        self.encoder = Encoder(self.tokenizer, data, "prompt", self.learner.runner.vocabulary_size)

    @property
    def context(self) -> int | None:
        """Tokens of prompt and completion that the model supports, if its configuration states it."""
        return position_limit(self.learner.model.config)

    def encode(self, messages: list[Message]) -> Prompt:
        """Encode a conversation up to where the completion begins."""
        return encode_conversation(self.encoder, messages, self.name)

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Sample]:
        """Generate one completion per request."""
        return self.engine.generate(requests, sampling, on_token)


def stop_ids_of(model: ModelConfig, tokenizer: Any, template: str) -> tuple[int, ...]:
    """Return the stop ids without loading the weights; a template replaces those of the model's files."""
    config = None if template else read_generation_config(base_model_path(resolve_path(model.path)))
    return tuple(stop_ids(tokenizer, config))


def position_limit(config: Any) -> int | None:
    """Return the number of positions that the model was made for, if its configuration has it."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def has_position_table(config: Any) -> bool:
    """Whether positions are learned, so that none exist beyond the limit; with RoPE the model computes any position."""
    text = config.get_text_config()
    return position_limit(config) is not None and not hasattr(text, "rope_parameters")


def check_sampling(sampling: Sampling, section: str = "") -> Sampling:
    """Raise UsageError for settings with which no token could be sampled; `section` precedes the names of options."""
    for name, value, low, high in (
        ("max_tokens", sampling.max_tokens, 1, math.inf),
        ("temperature", sampling.temperature, 0, math.inf),
        ("top_p", sampling.top_p, 1e-6, 1),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, 1e-3, math.inf),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise UsageError(f"{section}{name} is {value}; it must be {bounds}.")
    if not all(sampling.stop_texts):
        raise UsageError(f"{section}stop: an empty text would end every completion before it begins.")
    return sampling


def conditioned(messages: list[Message], reward: float, template: str = CONDITION) -> list[Message]:
    """Add the reward that the completion has, or should have, to the last message of the prompt."""
    *before, last = messages
    return [*before, {**last, "content": fill_condition(template, str(last["content"]), reward)}]


def fill_condition(template: str, prompt: str, reward: float) -> str:
    if "{prompt}" not in template:
        raise UsageError(f"condition_template {template!r} needs {{prompt}}, and {{reward:.2f}} for the reward")
    before, after = template.split("{prompt}", 1)
    try:
        return before.format(reward=reward) + prompt + after.format(reward=reward)
    except (ValueError, KeyError, IndexError) as error:
        raise UsageError(f"condition_template {template!r} cannot be filled: {error!r}") from None
