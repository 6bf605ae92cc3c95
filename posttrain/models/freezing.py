"""Chooses which weights of a model are trained: all of them, or those of some layers or names."""

from __future__ import annotations

import re
from dataclasses import replace

from transformers import PreTrainedModel

from posttrain.config.sections import ModelConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import Head
from posttrain.nn.optimizer_rules import layer_of


def freeze_weights(model: PreTrainedModel, config: ModelConfig, head: Head) -> None:
    """Set `requires_grad` of each weight by the options model.freeze_layers to model.trainable_parameters.

    trainable_layers and trainable_parameters name what is trained, together; freeze_layers and frozen_parameters take
    from that. A score head is trained unless it is named, since it may be new.
    """
    names = list(dict(model.named_parameters()))
    layers = list(dict.fromkeys(layer for name in names if (layer := layer_of(name))))
    check_layer_count("freeze_layers", config.freeze_layers, len(layers), model)
    check_layer_count("trainable_layers", abs(config.trainable_layers), len(layers), model)
    wanted = chosen_layers(layers, config.trainable_layers)
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    named_in, named_out = (
        matching(names, getattr(config, option), f"model.{option}")
        for option in ("trainable_parameters", "frozen_parameters")
    )
    everything = not config.trainable_layers and not config.trainable_parameters
    for name, parameter in model.named_parameters():
        trained = everything or layer_of(name) in wanted or name in named_in
        trained = trained or (head == "score" and name.startswith("score."))
        first = layer_of(name) in layers[: config.freeze_layers]
        frozen = first or (bool(config.freeze_layers) and id(parameter) in embeddings)
        parameter.requires_grad_(trained and not frozen and name not in named_out)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"{type(model).__name__}: every weight is frozen, so nothing can be trained (model.freeze_*)")


def without_freezing(config: ModelConfig) -> ModelConfig:
    """Return the options of a model that is trained whole, such as a critic beside the policy."""
    return replace(config, freeze_layers=0, trainable_layers=0, frozen_parameters=(), trainable_parameters=())


def chosen_layers(layers: list[str], count: int) -> set[str]:
    """Return the last `count` layers; below 0, the first."""
    return set(layers[-count:]) if count > 0 else set(layers[:-count])


def check_layer_count(option: str, count: int, layers: int, model: PreTrainedModel) -> None:
    if count > layers:
        raise UsageError(f"model.{option}: {type(model).__name__} has {layers} layers, not {count}")


def matching(names: list[str], patterns: tuple[str, ...], option: str) -> set[str]:
    """Return the names that a regular expression matches from their beginning; each must match at least one."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if re.match(pattern, name)}
        if not matched:
            raise UsageError(f"{option}: no weight has a name that begins with {pattern!r}, such as {names[-1]}")
        found |= matched
    return found
