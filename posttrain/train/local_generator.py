"""Generation in the learner's process: with the trainer's weights where possible, else with a copy of them.

                        local engine                                    vLLM
one process, on-policy  the trainer's own weights, no copy              a replica
one process, ahead      a copy, so that batches in flight keep theirs   a replica
sharded model           whole models, gathered from the shards          a replica
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.core.types import Sample, WeightVersion
from posttrain.engines.base import (
    LOCAL,
    BetweenSteps,
    EngineSpec,
    GenerationRequest,
    OnCompletion,
    Sampling,
    check_samples,
)
from posttrain.engines.local import LocalEngine
from posttrain.engines.vllm.replica import VllmReplica
from posttrain.models.tensors import module_tensors
from posttrain.nn.forward import ModelRunner
from posttrain.nn.kernels.reference import kernels_for
from posttrain.parallel.fsdp import ModelShards, materialize


class LocalGenerator:
    """Generates with the weights of the last `update`, or with the trainer's current weights."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        shards: ModelShards | None,
        meta_model: Any,
        replica: VllmReplica | None,
        own_weights: bool,
        reserved_bytes: Callable[[], int],
        engine: EngineSpec = LOCAL,
        frees_copy: bool = False,
    ) -> None:
        """`own_weights`: keep the weights of the last `update` while the trainer's change.

        `frees_copy`: free the whole model that is gathered from shards while the trainer works.
        `engine`: options of the local engine.
        `meta_model`: the model on the meta device, if it is sharded; `reserved_bytes`: memory that engines leave free.
        """
        self.runner, self.tokenizer, self.shards, self.meta_model = runner, tokenizer, shards, meta_model
        self.replica, self.own_weights, self.reserved_bytes = replica, own_weights, reserved_bytes
        self.frees_copy, self.engine_options = frees_copy and not own_weights, engine.local_options
        self.version: WeightVersion = 0
        self.unsharded: dict[str, ModelRunner] = {}  # whole models, by use: `ahead` or `current`
        self.up_to_date: set[str] = set()  # those of them that hold the current weights
        self.engines: dict[int, LocalEngine] = {}
        self.sampler = runner  # the model that generates: the trainer's, or a copy of it
        if own_weights and replica is None and shards is None:
            self.sampler = ModelRunner.from_model(copy_of(runner.model).requires_grad_(False), packed=runner.packed)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        current: bool = False,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """Generate one sample per request; `current`: with the trainer's current weights.

        `on_completion` may be called with some samples before all are finished.
        """
        replica_is_busy = current and self.own_weights  # with a batch in flight
        if self.replica is not None and not replica_is_busy:
            if current or not self.replica.has_weights:
                self.replica.refresh(self.version)
            samples = self.replica.generate(requests, sampling)
            check_samples(requests, samples, sampling, self.runner.vocabulary_size, "vLLM")
            return samples
        return self.local_engine(current).generate(
            requests, sampling, between_steps=between_steps, on_completion=on_completion
        )

    def local_engine(self, current: bool) -> LocalEngine:
        """Returns the local engine; `current`: the one with the trainer's current weights."""
        if self.shards is None:
            runner = self.runner if current else self.sampler
        elif self.own_weights and not current:
            runner = self.unsharded["ahead"]
        else:
            runner = self.gather("current")
        if id(runner) not in self.engines:
            how: dict[str, Any] = {"reserved_bytes": self.reserved_bytes, "record_experts": True}
            self.engines[id(runner)] = LocalEngine(runner, self.tokenizer, **how, **self.engine_options)
        return self.engines[id(runner)]

    @torch.no_grad()
    def update(self, version: WeightVersion) -> None:
        """Make generation use the trainer's current weights from now on; `version`: their version."""
        self.version = version
        self.weights_of_engines_changed()
        if self.replica is not None:
            self.replica.refresh(version)
            return
        if self.shards is not None:
            self.gather("ahead" if self.own_weights else "current")
        if self.sampler is self.runner:
            return
        ours, theirs = self.runner.model.state_dict(), self.sampler.model.state_dict()
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])

    @torch.no_grad()
    def gather(self, name: str) -> ModelRunner:
        """Return a whole model with the current weights; all processes that hold a shard call this together."""
        assert self.shards is not None and self.meta_model is not None, "a model with a score head does not generate"
        if name not in self.unsharded:
            model = materialize(self.meta_model, self.shards.device, self.shards.dtype)
            self.unsharded[name] = ModelRunner.from_model(model, packed=self.runner.packed)
        if name not in self.up_to_date:
            theirs = module_tensors(self.unsharded[name].model)
            live = module_tensors(self.runner.model)
            for key, target in theirs.items():
                target.copy_(self.shards.whole_tensor(key, target.dtype, live.get(key)))
            self.up_to_date.add(name)
        return self.unsharded[name]

    def weights_changed(self) -> None:
        """Mark the gathered models as out of date, after the trainer's weights have changed."""
        self.up_to_date.clear()
        self.weights_of_engines_changed()

    def weights_of_engines_changed(self) -> None:
        """Make engines drop keys and values that they keep for later requests."""
        for engine in self.engines.values():
            engine.weights_changed()

    def release_memory(self) -> None:
        """Free the replica's or the copy's device memory for training, unless it generates meanwhile."""
        if self.replica is not None and not self.own_weights:
            self.replica.sleep()
        if self.frees_copy and self.unsharded:
            self.free_copies()

    def free_copies(self) -> None:
        """Free the models that were gathered from shards, and the engines with their caches; `gather` makes new."""
        for runner in self.unsharded.values():
            self.engines.pop(id(runner), None)
        self.unsharded.clear()
        self.up_to_date.clear()
        gc.collect()
        if self.shards is not None and self.shards.device.type != "cpu":
            torch.accelerator.empty_cache()

    def close(self) -> None:
        """End vLLM, whose processes are not freed with this object."""
        if self.replica is not None:
            self.replica.close()


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model. Its fused layers have the same kernels: these are a Python module."""
    kernels = kernels_for(next(model.parameters()).device)
    return copy.deepcopy(model, {id(kernels): kernels})
