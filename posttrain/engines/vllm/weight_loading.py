"""Loads new weights into a vLLM engine in the same process, through vLLM's weight-transfer interface."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from posttrain.core.errors import PosttrainError
from posttrain.core.types import WeightVersion
from posttrain.parallel.weight_transfer import NamedTensors

BACKEND = "posttrain"  # name of our backend among vLLM's weight-transfer backends


def replace_weights(llm: Any, weights: NamedTensors, version: WeightVersion) -> None:
    """Replace all weights of the engine; raise if one is missing from `weights`."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": ((name, tensor.detach()) for name, tensor in weights)}})
    llm.finish_weight_update()
    (missing,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine.missing)
    if missing:
        raise PosttrainError(f"weight update of vLLM: the trainer sent no tensor for {', '.join(missing[:5])}")
    if hasattr(llm.llm_engine, "set_weight_version"):  # vLLM 0.25 keeps no version
        llm.llm_engine.set_weight_version(str(version))


def replace_lora(
    llm: Any, weights: NamedTensors, version: WeightVersion, adapter: dict[str, Any], folder: Path, previous: Any
) -> Any:
    """Replace the LoRA adapter by way of `folder`, from which vLLM reads it; return the new LoRARequest.

    `adapter`: the content of adapter_config.json; `previous`: the LoRARequest to replace. Each version has a new name
    and number, by which vLLM caches adapters.
    """
    from vllm.lora.request import LoRARequest

    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    if previous is not None:
        llm.llm_engine.remove_lora(previous.lora_int_id)
    number = 1 if previous is None else previous.lora_int_id + 1
    request = LoRARequest(f"version-{version}-{number}", number, str(folder))
    llm.llm_engine.add_lora(request)
    return request


@cache
def transfer_backend() -> str:
    """Register our weight-transfer backend: an iterator of tensors in the same process, without a copy in between."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class InProcess(WeightTransferEngine):
        init_info_cls = WeightTransferInitInfo
        update_info_cls = WeightTransferUpdateInfo

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            self.loaded: set[str] = set()
            self.discard_packed_experts()
            initialize_layerwise_reload(self.model)
            self.expected = {name for name, _ in self.model.named_parameters()}  # as in checkpoints

        def discard_packed_experts(self) -> None:
            """Make vLLM build the kernel of experts again: on a CPU it packs their weights when it builds it."""
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(update_info["weights"])
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Any) -> None:
            self.loaded |= self.model.load_weights(update_info)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            self.update_tied_head()
            tied = self.model_config.hf_text_config.tie_word_embeddings
            left = self.expected - self.loaded
            self.missing = sorted(name for name in left if not (tied and name.startswith("lm_head.")))

        def update_tied_head(self) -> None:
            """Update an output layer that is tied to the embedding.

            It is not loaded itself, and on a CPU it computes with a packed copy, which holds the previous weights.
            """
            if not self.model_config.hf_text_config.tie_word_embeddings:
                return
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # abstract in vLLM 0.25
            raise NotImplementedError("weights are passed by update_weights")

    WeightTransferEngineFactory.register_engine(BACKEND, InProcess)
    return BACKEND
