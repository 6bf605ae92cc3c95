"""How much memory training takes, worked out from a model's shape; no weight is loaded.

Bytes for P parameters of which A are trained (A = P without adapters), e bytes each (2 in bfloat16, 4 in float32):

    weights      e P                            4 bits a number in the layers that model.load_in_4bit shrinks
    masters      4 A                            if what is trained is not float32 already
    gradients    4 A                            from the first backward pass of a step to its end
    AdamW        8 A + 4 per trained tensor     both averages, and a step counter each
    EMA          4 A                            with update.ema_decay
    helpers      e P of the reference, of the teacher
    activations  1.2 e T (sum of inputs and outputs of every matrix a token passes in the layers), for T tokens in a
                 pack; with checkpointing e T (hidden size) a layer, and one layer in full
    logits       4 copies of a float32 chunk: logits, their exponentials, and two gradients
    in flight    gradients of the largest matrix that are summed before they reach their place: 1, or 2 beside masters

The first five are exact. The others are estimates: the factor 1.2 stands for what norms and gates keep besides the
matrices' inputs and outputs (measured: 1.0 to 1.3 on Llama, Qwen, GPT-2, Mixtral and DeepSeek).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain import ops

KEPT_BESIDES_MATRICES = 1.2
LOGITS_COPIES = 4
BITS_IN_4BIT = 4 + 8 / 64 + 32 / (64 * 256)  # a number, its share of a block's scale, and of the scales' own scale


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelSize:
    """What of a model decides memory."""

    parameters: int
    weight_bytes: int
    trained: int
    trained_tensors: int
    has_masters: bool
    element: int  # bytes of an activation
    hidden: int
    vocabulary: int
    largest: int  # numbers in the largest trained tensor
    layers: tuple[int, ...]  # numbers a token leaves in each layer, by the rule above without its factor


@dataclass(slots=True, frozen=True, kw_only=True)
class Estimate:
    """Bytes of every part, and of what is there at the same time in each phase of a step."""

    weights: int
    masters: int
    gradients: int
    optimizer: int
    average: int
    reference: int
    teacher: int
    activations: int
    logits: int
    in_flight: int
    activations_plain: int
    activations_checkpointed: int
    one_layer: int

    @property
    def always(self) -> int:
        """What stays from the first step to the last."""
        return self.weights + self.masters + self.optimizer + self.average + self.reference + self.teacher

    @property
    def phases(self) -> dict[str, int]:
        look = self.always + self.one_layer + self.logits  # a forward pass forgets a layer when the next one is done
        train = self.always + self.gradients + self.activations + self.logits + self.in_flight
        return {"forward and backward": train, "optimizer step": self.always + self.gradients, "evaluation": look}

    @property
    def peak(self) -> int:
        return max(self.phases.values())


def measure(model: Any) -> ModelSize:
    """The size of a model, which may well be on the meta device; `requires_grad` says what is trained."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    layers = decoder_layers(model)
    embedding = model.get_input_embeddings().weight
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trained=sum(p.numel() for p in trained),
        trained_tensors=len(trained),
        has_masters=any(p.dtype != torch.float32 for p in trained),
        element=embedding.element_size(),
        hidden=embedding.shape[1],
        vocabulary=embedding.shape[0],
        largest=max((p.numel() for p in trained), default=0),
        layers=tuple(numbers_a_token(layer, experts_per_token(model.config)) for layer in layers),
    )


def estimate(
    size: ModelSize,
    *,
    tokens: int,
    checkpointing: bool,
    average: bool,
    scores: bool = False,
    reference: ModelSize | None = None,
    teacher: ModelSize | None = None,
) -> Estimate:
    """Bytes of training a model with packs of `tokens` tokens; `scores`: it has a score head, so no logits."""
    masters = 4 * size.trained * size.has_masters
    kept = [KEPT_BESIDES_MATRICES * size.element * tokens * numbers for numbers in size.layers]
    plain = round(sum(kept))
    checkpointed = round(size.element * tokens * size.hidden * len(kept) + max(kept))
    chunk = 4 * min(tokens, ops.chunk_length(size.vocabulary)) * size.vocabulary
    return Estimate(
        weights=size.weight_bytes,
        masters=masters,
        gradients=4 * size.trained,
        optimizer=8 * size.trained + 4 * size.trained_tensors,
        average=4 * size.trained * average,
        reference=reference.weight_bytes if reference else 0,
        teacher=teacher.weight_bytes if teacher else 0,
        activations=checkpointed if checkpointing else plain,
        logits=0 if scores else LOGITS_COPIES * chunk * (2 if teacher else 1),
        in_flight=size.largest * size.element * (2 if masters else 1),
        activations_plain=plain,
        activations_checkpointed=checkpointed,
        one_layer=round(max(kept)),
    )


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The stack of layers: the longest list of modules that is not inside another (experts are)."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    assert lists, f"{type(model).__name__} has no list of layers"
    return list(max(lists, key=lambda modules: sum(p.numel() for p in modules.parameters())))


def numbers_a_token(layer: torch.nn.Module, experts: int) -> int:
    """Inputs and outputs of every matrix that a token passes; of E experts, stored as [E, out, in], only some."""
    total = 0
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            total += sum(parameter.shape)
        elif parameter.ndim == 3:
            total += sum(parameter.shape[1:]) * min(experts, parameter.shape[0])
    return total


def experts_per_token(config: Any) -> int:
    """Of a Hugging Face config; 1 for models without experts."""
    return getattr(config, "num_experts_per_tok", None) or 1


def device_memory(device: torch.device) -> tuple[str, int]:
    """Name and bytes of a device; of the CPU: what this process may use."""
    if device.type == "cpu":
        return "cpu", host_memory()
    module = torch.get_device_module(device)
    if device.type == "mps":
        return "Apple GPU", int(module.recommended_max_memory())
    properties = module.get_device_properties(device)
    return str(properties.name), int(properties.total_memory)


def host_memory() -> int:
    """Bytes of memory of this machine, or of the container if that has less."""
    import os

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).is_file() and (limit := Path(file).read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total
