"""Generation in the learner's process: with the trainer's weights where possible, else with a copy of them.

                        local engine                                    vLLM
one process, on-policy  the trainer's own weights, no copy              a replica
one process, ahead      a copy, so that batches in flight keep theirs   a replica
sharded model           whole models, gathered from the shards          a replica
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.core.types import Sample, WeightVersion
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnCompletion, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.vllm.replica import VllmReplica
from posttrain.models.tensors import module_tensors
from posttrain.nn.forward import ModelRunner
from posttrain.parallel.fsdp import ModelShards, materialize
from posttrain.parallel.shards import full_tensor, local_shard


class LocalGenerator:
    """Generates with the weights of the last `update`, or with the current ones."""

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
    ) -> None:
        """`own_weights`: keep the weights of the last `update` while the trainer's change.

        `meta_model`: a sharded language model without its weights; `reserved_bytes`: that engines
        must leave free.
        """
        self.runner, self.tokenizer, self.shards, self.meta_model = runner, tokenizer, shards, meta_model
        self.replica, self.own_weights, self.reserved_bytes = replica, own_weights, reserved_bytes
        self.version: WeightVersion = 0
        self.unsharded: dict[str, ModelRunner] = {}  # whole models, by use: `ahead` or `current`
        self.up_to_date: set[str] = set()  # those of them that hold the current weights
        self.engines: dict[int, LocalEngine] = {}
        self.copy = runner
        if own_weights and replica is None and shards is None:
            self.copy = ModelRunner.from_model(copy.deepcopy(runner.model).requires_grad_(False))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        current: bool = False,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """Generates one sample per request; `current`: with the trainer's current weights.

        `on_completion` may be called with some samples before all are finished.
        """
        if self.replica is not None and not (current and self.own_weights):  # then it is busy with another batch
            if current or not self.replica.has_weights:
                self.replica.refresh(self.version)
            return self.replica.generate(requests, sampling)
        if self.shards is None:
            runner = self.runner if current else self.copy
        elif self.own_weights and not current:
            runner = self.unsharded["ahead"]
        else:
            runner = self.gather("current")
        if id(runner) not in self.engines:
            self.engines[id(runner)] = LocalEngine(runner, self.tokenizer, reserved_bytes=self.reserved_bytes)
        return self.engines[id(runner)].generate(
            requests, sampling, between_steps=between_steps, on_completion=on_completion
        )

    @torch.no_grad()
    def update(self, version: WeightVersion) -> None:
        """Generate with the trainer's current weights from now on, which are of this version."""
        self.version = version
        if self.replica is not None:
            self.replica.refresh(version)
            return
        if self.shards is not None:
            self.gather("ahead" if self.own_weights else "current")
        if self.copy is self.runner:
            return
        ours, theirs = self.runner.model.state_dict(), self.copy.model.state_dict()
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])

    @torch.no_grad()
    def gather(self, name: str) -> ModelRunner:
        """Returns a whole model with the current weights; all processes that hold a shard call this together."""
        assert self.shards is not None and self.meta_model is not None, "a model with a score head does not generate"
        if name not in self.unsharded:
            model = materialize(self.meta_model, self.shards.device, self.shards.dtype)
            self.unsharded[name] = ModelRunner.from_model(model)
        if name not in self.up_to_date:
            theirs = module_tensors(self.unsharded[name].model)
            for key, live in module_tensors(self.runner.model).items():
                theirs[key].copy_(full_tensor(local_shard(live).to(theirs[key].dtype), live))
            self.up_to_date.add(name)
        return self.unsharded[name]

    def weights_changed(self) -> None:
        """The trainer's weights have changed: what was gathered is out of date."""
        self.up_to_date.clear()

    def release_memory(self) -> None:
        """Frees the replica's device memory for training, unless it generates meanwhile."""
        if self.replica is not None and not self.own_weights:
            self.replica.sleep()

    def close(self) -> None:
        """Ends the engine that does not end with this process's objects."""
        if self.replica is not None:
            self.replica.close()
