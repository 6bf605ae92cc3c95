"""A vLLM engine in the trainer's process, with a copy of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.core.errors import UsageError
from posttrain.core.types import Sample, WeightVersion
from posttrain.engines.base import GenerationRequest, LogprobFunction, OnCompletion, Sampling
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.environment import prepare_environment
from posttrain.engines.vllm.factory import adapter_base_folder, engine_beside_trainer
from posttrain.engines.weight_probe import OTHER_ENGINE, probe_sample
from posttrain.models import adapters
from posttrain.parallel.shards import full_tensor, local_shard
from posttrain.parallel.weight_transfer import NamedTensors


class VllmReplica:
    """Generates with vLLM and the weights that the trainer had at the last `refresh`, which also builds the engine."""

    def __init__(
        self,
        options: Mapping[str, Any],
        model: PreTrainedModel,
        tokenizer: Any,
        dtype: torch.dtype,
        weights: Callable[[], NamedTensors],
        logprobs: LogprobFunction,
    ) -> None:
        """`weights` and `logprobs`: methods of the trainer, which return its current weights and log-probabilities."""
        if getattr(model, "is_quantized", False):
            raise UsageError(
                "model.load_in_4bit: vLLM would compute with weights other than the trainer's; use rollout.engine local"
            )
        prepare_environment()
        self.options, self.model, self.tokenizer, self.dtype = options, model, tokenizer, dtype
        self.logprobs = logprobs
        self.base = adapter_base_folder(model)
        self.weights = self.adapter_weights if self.base else weights
        self.probe = probe_sample(model.config.get_text_config().vocab_size)
        self.engine: VllmEngine | None = None

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole adapter tensors; all processes that share the model must iterate together."""
        tensors: Iterable[tuple[str, torch.Tensor]] = adapters.adapter_tensors(self.model).items()
        for name, tensor in tensors:
            yield name, full_tensor(local_shard(tensor), tensor)

    def refresh(self, version: WeightVersion) -> None:
        """Load the trainer's current weights as `version`, and check that they have arrived."""
        if self.engine is None:
            self.engine = engine_beside_trainer(self.model, self.tokenizer, self.dtype, self.options, self.base)
        self.engine.wake()
        self.engine.load(self.weights(), version)
        self.engine.check([self.probe], self.logprobs([self.probe]), OTHER_ENGINE[self.dtype])

    @property
    def has_weights(self) -> bool:
        """Whether it can generate: not before the first `refresh`, nor after a `sleep` that dropped the weights."""
        return self.engine is not None and self.engine.version >= 0

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, on_completion: OnCompletion | None = None
    ) -> list[Sample]:
        assert self.engine is not None, "refresh comes first"
        return self.engine.generate(requests, sampling, on_completion=on_completion)

    def sleep(self) -> None:
        """Free device memory for training."""
        if self.engine is not None:
            self.engine.sleep()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
