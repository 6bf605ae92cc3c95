"""Expert parallelism: each data rank keeps some experts of every layer, and tokens travel to them.

FSDP would gather all experts of a layer on every rank, most of which few tokens use. Here each rank holds whole experts
(a part of dimension 0 of the 3D weights that all families have in transformers), sends every token to the ranks of its
experts and gets the results back. An expert sees the tokens of all ranks, so its gradient is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from posttrain.core.errors import UsageError


def experts_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that hold all experts of a layer, by name."""
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        weights = list(module.parameters(recurse=False))
        stacked = bool(weights) and all(weight.ndim >= 2 and len(weight) == count for weight in weights)
        if stacked and hasattr(module, "down_proj"):  # which a router has not
            yield name, module


def keep_own(model: torch.nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Leave this rank its experts; the modules that hold them. They compute in `dtype` from now on."""
    found: dict[str, Any] = dict(experts_of(model))
    if not found:
        raise UsageError(f"cluster.layout: ep={mesh.size()}, but {type(model).__name__} has no experts to divide")
    if any(name.endswith(".base_layer") for name in found):
        raise UsageError(
            f"cluster.layout: ep={mesh.size()}, but there are adapters on experts, which are not divided. Leave ep "
            "out, or name what gets adapters: --model.lora_targets q_proj k_proj v_proj o_proj"
        )
    for module in found.values():
        if module.num_experts % mesh.size():
            raise UsageError(
                f"cluster.layout: ep={mesh.size()} does not divide {module.num_experts}, the experts of a layer"
            )
        for name, parameter in module.named_parameters(recurse=False):
            part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()]
            part = part.clone() if part.is_meta else part.to(device, copy=True)
            whole = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(module, name, torch.nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.num_experts //= mesh.size()
        module.forward = partial(run, module, Exchange(mesh.get_group(), dtype), module.forward)
    return list(found.values())


class Exchange:
    """Rows that travel between the ranks that hold experts."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self.size = dist.get_world_size(group)
        self.arrived = False  # whether the module's own code is at work, on rows that have travelled

    def counts(self, sent: torch.Tensor) -> list[int]:
        """How many rows each rank sends here, of how many are sent to each."""
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self.group)
        return coming.tolist()


def run(
    module: Any,
    exchange: Exchange,
    stock: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What the experts make of [T, H]: tokens go to the ranks of their experts, and come back."""
    if exchange.arrived:
        return stock(hidden_states, top_k_index, top_k_weights)
    tokens, choices = top_k_index.shape
    expert = top_k_index.reshape(-1)
    order = expert.argsort(stable=True)  # by expert, and so by rank
    going = torch.bincount(expert // module.num_experts, minlength=exchange.size)
    sent, coming = going.tolist(), exchange.counts(going)
    rows = Travelled.apply(hidden_states[order // choices], sent, coming, exchange.group)
    ids = Travelled.apply((expert % module.num_experts)[order], sent, coming, exchange.group)
    own = {
        name: weight.to_local(grad_placements=[Shard(0)]).to(exchange.dtype)
        for name, weight in module.named_parameters(recurse=False)
    }
    exchange.arrived = True
    try:
        ones = torch.ones_like(ids, dtype=top_k_weights.dtype)[:, None]
        made = torch.func.functional_call(module, own, (rows, ids[:, None], ones))
    finally:
        exchange.arrived = False
    back = Travelled.apply(made, coming, sent, exchange.group)
    unsorted = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    each = back[unsorted].view(tokens, choices, -1) * top_k_weights.reshape(tokens, choices, 1)
    return each.sum(1).to(hidden_states.dtype)


class Travelled(torch.autograd.Function):
    """Rows, `sent[i]` of which go to rank i; those that come from there, `coming[i]` from rank i."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], coming: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.how = coming, sent, group
        found = rows.new_empty(sum(coming), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), coming, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return Travelled.apply(gradients[0], *ctx.how), None, None, None


__all__ = ["experts_of", "keep_own"]
