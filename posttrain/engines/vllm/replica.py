"""An engine beside a trainer, with weights of its own: made when it is first needed, brought up to date when told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.core.errors import UsageError
from posttrain.core.types import Floats, Sample, WeightVersion
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.vllm import engine as vllm
from posttrain.engines.weight_probe import OTHER_ENGINE, probe
from posttrain.models import adapters
from posttrain.models.paths import is_adapter, resolve_path
from posttrain.parallel.shards import full_tensor, local_shard

Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Looks = Callable[[Sequence[Sample]], list[Floats]]
"""Log-probabilities of samples by the trainer's own weights."""


class VllmReplica:
    """vLLM with the weights that the trainer had at the last `refresh`."""

    def __init__(
        self,
        options: Sequence[str],
        model: PreTrainedModel,
        tokenizer: Any,
        dtype: torch.dtype,
        weights: Weights,
        logprobs: Looks,
    ) -> None:
        if getattr(model, "is_quantized", False):
            raise UsageError(f"model.load_in_4bit: {vllm.OPTION} would not see the same weights; use the local engine")
        vllm.prepare_environment()
        self.options, self.model, self.tokenizer, self.dtype = options, model, tokenizer, dtype
        self.logprobs = logprobs
        self.base = base_folder(model)
        self.weights: Weights = (lambda: whole(adapters.adapter_tensors(model).items())) if self.base else weights
        self.probe = probe(model.config.get_text_config().vocab_size)
        self.engine: vllm.VllmEngine | None = None

    def refresh(self, version: WeightVersion) -> None:
        """Loads the trainer's current weights, which are of this version, and checks that they have arrived."""
        if self.engine is None:
            adapter = adapters.adapter_config(self.model) if self.base else None
            self.engine = vllm.VllmEngine(
                self.model.config,
                self.tokenizer,
                self.options,
                dtype=self.dtype,
                base=self.base,
                adapter=adapter,
                beside_trainer=True,
            )
        self.engine.wake()
        self.engine.load(self.weights(), version)
        self.engine.check([self.probe], self.logprobs([self.probe]), OTHER_ENGINE[self.dtype])

    @property
    def has_weights(self) -> bool:
        """False before the first `refresh`, and after `sleep` where it drops the weights."""
        return self.engine is not None and self.engine.version >= 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Sample]:
        assert self.engine is not None, "refresh comes first"
        return self.engine.generate(requests, sampling)

    def sleep(self) -> None:
        """Its memory is wanted for training."""
        if self.engine is not None:
            self.engine.sleep()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def base_folder(model: PreTrainedModel) -> str:
    """Where vLLM finds the weights that adapters stand beside; empty: there are no adapters, or nothing to find."""
    if not adapters.is_adapted(model):
        return ""
    source = resolve_path(model.name_or_path)
    return "" if is_adapter(source) else source


def whole(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors that several processes share are put together; all of them must ask."""
    for name, tensor in weights:
        yield name, full_tensor(local_shard(tensor), tensor)
