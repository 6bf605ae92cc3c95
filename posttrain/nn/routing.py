"""Which experts the tokens of a mixture of experts go to: chosen, recorded while sampling, repeated in training.

The routers of transformers return logits, weights and the chosen experts. `observe_routers` adds hooks to them, through
which the pass that runs sees, and may change, what they choose: the engine's KV cache records it, and
`RecordedRouting` compares it with what was recorded, or repeats that (`rollout.router_replay`).

A pass finds its hooks by arguments that transformers hands through to every decoder layer, `cache` or `packing`, so
layers that are recomputed in the backward pass choose the same experts again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from posttrain.nn.kernels import reference
from posttrain.nn.kernels.reference import kernels_for

SOFTMAX_ROUTERS = (Qwen2MoeTopKRouter, Qwen3MoeTopKRouter, MixtralTopKRouter)
ROUTERS = (*SOFTMAX_ROUTERS, DeepseekV2TopkRouter, DeepseekV3TopkRouter)
NOT_RECORDED = -1
LAYER = "mixture_layer"  # attribute of an observed router: its number among the model's mixture layers

Choice = tuple[torch.Tensor, torch.Tensor]
"""Weights and indices [T, k] of the experts of each token."""


class RoutingObserver(Protocol):
    """Sees what the routers choose in one pass."""

    def route(self, layer: int, router: Any, logits: torch.Tensor, choice: Choice) -> Choice:
        """Return what is used in place of the router's choice; `layer` counts mixture layers."""


class CurrentPass(threading.local):
    """The observer of the decoder layer that this thread runs, until the layer's router has run."""

    observer: RoutingObserver | None = None


CURRENT = CurrentPass()


def routers_of(model: Any) -> list[Any]:
    """Return the routers of a model, layer by layer; none if one of them is of a kind not known here."""
    return [layer.mlp.gate for layer in mixture_layers(model)]


def mixture_layers(model: Any) -> list[Any]:
    """Return the decoder layers with experts; none if one of their routers is of a kind not known here."""
    layers = getattr(getattr(model, model.base_model_prefix, None), "layers", ())
    found = [layer for layer in layers if hasattr(getattr(layer, "mlp", None), "experts")]
    return found if all(isinstance(getattr(layer.mlp, "gate", None), ROUTERS) for layer in found) else []


def observe_routers(model: Any) -> None:
    """Add the hooks to a model, once; nothing happens to models without known routers."""
    for number, layer in enumerate(mixture_layers(model)):
        if not hasattr(layer.mlp.gate, LAYER):
            setattr(layer.mlp.gate, LAYER, number)
            layer.mlp.gate.register_forward_hook(after_router)
            layer.register_forward_pre_hook(before_layer, with_kwargs=True)


def before_layer(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Note which observer the pass has, if any."""
    CURRENT.observer = kwargs.get("cache") or getattr(kwargs.get("packing"), "routing", None)


def after_router(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Apply the rule for ties, then what the pass decides."""
    logits, *rest = output
    weights, chosen = first_of_equals(router, logits, (rest[0], rest[1]))
    observer, CURRENT.observer = CURRENT.observer, None
    if observer is not None:
        weights, chosen = observer.route(getattr(router, LAYER), router, logits, (weights, chosen))
    return logits, weights, chosen


def first_of_equals(router: Any, logits: torch.Tensor, choice: Choice) -> Choice:
    """Choose the first of equally probable experts, as the engine's kernel does.

    Where routers compute in half precision, many tokens have equal logits, and torch.topk on a GPU does not say which
    of them it returns: sampler and trainer would use different experts.
    """
    kernels = kernels_for(logits.device)
    if kernels is reference or logits.dtype == torch.float32 or not isinstance(router, SOFTMAX_ROUTERS):
        return choice
    _, chosen = kernels.route(logits.detach(), router.top_k, renormalize=False, dtype=torch.float32)
    return expert_weights(router, logits, chosen), chosen


def expert_weights(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Compute the weights that a router's own code gives to these experts: [T, E], [T, k] -> [T, k]."""
    logistic = isinstance(router, DeepseekV3TopkRouter)
    scores = logits.float().sigmoid() if logistic else logits.float().softmax(-1)
    weights = scores.gather(1, chosen)
    if getattr(router, "norm_topk_prob", isinstance(router, MixtralTopKRouter)):
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if logistic else total)
    weights = weights * getattr(router, "routed_scaling_factor", 1.0)
    rounded = isinstance(router, Qwen2MoeTopKRouter | Qwen3MoeTopKRouter)
    return weights.to(logits.dtype) if rounded else weights


@dataclass(slots=True, eq=False)
class RecordedRouting:
    """The experts that the sampler chose for the tokens of a micro-batch, and where the trainer's choice differs."""

    experts: torch.Tensor  # [T, layers, k]; NOT_RECORDED: the router decides
    replay: bool  # use them; else only count
    differs: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [T]; recomputed layers write it again

    def route(self, layer: int, router: Any, logits: torch.Tensor, choice: Choice) -> Choice:
        _, chosen = choice
        recorded = self.experts[:, layer].long()
        known = (recorded != NOT_RECORDED).all(1)
        self.differs[layer] = known & (recorded.sort(1).values != chosen.sort(1).values).any(1)
        if not self.replay:
            return choice
        chosen = torch.where(known[:, None], recorded, chosen)
        return expert_weights(router, logits, chosen), chosen

    def rerouted(self) -> torch.Tensor:
        """Return 1 where the trainer's router chooses other experts than the sampler's in at least one layer: [T]."""
        return torch.stack(list(self.differs.values())).any(0).float()


__all__ = [
    "LAYER",
    "NOT_RECORDED",
    "SOFTMAX_ROUTERS",
    "Choice",
    "RecordedRouting",
    "RoutingObserver",
    "expert_weights",
    "first_of_equals",
    "observe_routers",
    "routers_of",
]
