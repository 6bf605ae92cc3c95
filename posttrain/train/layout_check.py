"""Checks before anything is loaded that every model of a run can be divided as the configuration says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from posttrain.algorithms import Algorithm, OnlineAlgorithm
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.models import memory
from posttrain.models.freezing import without_freezing
from posttrain.parallel.layouts import ParallelLayout, check_layout


def layout_of(config: Config, role: str) -> ParallelLayout:
    """Return how the devices of a role share its model."""
    placed = config.cluster.of(role)
    return ParallelLayout(
        placed.tensor_parallel,
        placed.zero,
        frozenset(config.cluster.offload),
        context_parallel=placed.context_parallel,
        ulysses_degree=placed.ulysses_degree,
        expert_parallel=placed.expert_parallel,
        replicate=placed.replicate,
        pipeline_parallel=placed.pipeline_parallel,
        virtual_stages=placed.virtual_stages,
        layers_per_stage=placed.layers_per_stage,
        defer_reduction=config.cluster.defer_gradient_reduction,
        sequence_parallel=config.cluster.sequence_parallel and placed.tensor_parallel > 1,
    )


def check_layouts(config: Config, algorithm: Algorithm) -> None:
    """Raise UsageError if a model of the run cannot be divided as the configuration says.

    `posttrain plan` and every run call it, so a plan that fits is one that the run accepts.
    """
    if config.cluster.devices == 1 and "parameters" not in config.cluster.offload:
        return
    if algorithm.teacher_path() and layout_of(config, "actor").pipeline_parallel > 1:
        raise UsageError(
            "algo.teacher and cluster.pipeline_parallel_size cannot be combined: the divergence needs the hidden "
            "states of student and teacher on one device. Remove one of them."
        )
    for role, layout, model in divided_models(config, algorithm):
        try:
            check_layout(layout, config.cluster.of(role).devices, model, in_4bit=config.model.load_in_4bit)
        except UsageError as error:
            raise UsageError(f"{error} (role {role})" if role != "actor" else str(error)) from None
    if isinstance(config, OnlineConfig) and config.rollout.engine == "vllm":
        check_engine(config)


def divided_models(config: Config, algorithm: Algorithm) -> Iterator[tuple[str, ParallelLayout, Any]]:
    """Yield role, layout and model, on the meta device, of all models that several devices hold together."""

    def model_of(role: str, path: str, **changes: Any) -> tuple[str, ParallelLayout, Any]:
        head = changes.pop("head", "token")
        chosen = config.model if role == "actor" and path == config.model.path else without_freezing(config.model)
        own = replace(chosen, path=path, **changes)
        return role, layout_of(config, role), memory.counted_model(own, head, torch.bfloat16)

    path = config.model.path
    yield model_of("actor", path, head=algorithm.head)
    if algorithm.teacher_path():
        role, layout, model = model_of("actor", algorithm.teacher_path(), lora_rank=0)
        yield role, layout.without_experts(), model
    reference = algorithm.reference_path()
    if "ref_logprobs" in algorithm.needs() and (reference or not config.model.lora_rank):
        yield model_of("reference", reference or path, lora_rank=0)
    if not isinstance(config, OnlineConfig):
        return
    rewards = [text.removeprefix("model:") for text in config.reward.functions if text.startswith("model:")]
    places = [place for place, text in enumerate(config.reward.functions) if text.startswith("model:")]
    for place, own in zip(places, rewards, strict=True):
        yield model_of(f"reward-{place}", own, head="score", lora_rank=0)
    settings = algorithm.critic() if isinstance(algorithm, OnlineAlgorithm) else None
    if settings is not None:
        yield model_of("critic", settings.path or (rewards[0] if rewards else path), head="score")


def check_engine(config: OnlineConfig) -> None:
    """Raise UsageError if the devices cannot be divided into vLLM engines."""
    rollout = config.cluster.of("rollout")
    if rollout.place == "actor" and rollout.devices % vllm_engine_size(config):
        raise UsageError(
            f"rollout.vllm_options: tensor_parallel_size is {vllm_engine_size(config)}, which does not divide the "
            f"{rollout.devices} devices of the policy"
        )


def vllm_engine_size(config: Config) -> int:
    """Return the number of devices of one vLLM engine."""
    if not isinstance(config, OnlineConfig):
        return 1
    own = config.cluster.rollout_tensor_parallel_size if config.cluster.rollout_devices else 1
    return max(own, int(config.rollout.vllm_options.get("tensor_parallel_size", 1)))
