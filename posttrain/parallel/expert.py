"""Expert parallelism: groups of data ranks hold some experts of every layer each, and send tokens to them.

FSDP would gather all experts of a layer on every rank, most of which few tokens use. Here each rank holds whole experts
(a part of dimension 0 of the 3D weights that all families have in transformers), sends every token to the ranks of its
experts and receives the results. An expert processes the tokens of all ranks of its group, so its gradient is complete
for them; where there are several groups, their gradients are added up before the optimizer step.
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
    """Yield the modules that hold all experts of a layer, with their names."""
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        weights = list(module.parameters(recurse=False))
        stacked = bool(weights) and all(weight.ndim >= 2 and len(weight) == count for weight in weights)
        if stacked and hasattr(module, "down_proj"):  # a router has none
            yield name, module


def shard_experts(model: torch.nn.Module, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> list[Any]:
    """Keep only this rank's experts, which compute in `dtype` from then on; returns the modules that hold them."""
    found: dict[str, Any] = dict(experts_of(model))
    for module in found.values():
        for name, parameter in module.named_parameters(recurse=False):
            part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()]
            part = part.clone() if part.is_meta else part.to(device, copy=True)
            whole = DTensor.from_local(
                part, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(module, name, torch.nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.num_experts //= mesh.size()
        module.forward = partial(
            run_distributed_experts, module, ExpertExchange(mesh.get_group(), dtype), module.forward
        )
    return list(found.values())


def check_expert_parallel(model: torch.nn.Module, size: int) -> None:
    """Raise UsageError if `size` ranks cannot divide the experts of this model."""
    found: dict[str, Any] = dict(experts_of(model))
    if not found:
        raise UsageError(f"cluster.expert_parallel_size is {size}, but {type(model).__name__} has no experts to divide")
    if any(name.endswith(".base_layer") for name in found):
        raise UsageError(
            f"cluster.expert_parallel_size is {size}, but experts with adapters cannot be divided. Set it to 1, or "
            "adapt other modules: --model.lora_target_modules q_proj k_proj v_proj o_proj"
        )
    for module in found.values():
        if module.num_experts % size:
            raise UsageError(
                f"cluster.expert_parallel_size is {size}, which does not divide the {module.num_experts} experts of a "
                "layer"
            )


class ExpertExchange:
    """The process group whose ranks send tokens to each other's experts."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self.size = dist.get_world_size(group)
        self.exchanged = False  # whether the module's own code is running, on tokens that were already exchanged

    def counts(self, sent: torch.Tensor) -> list[int]:
        """Return the number of rows that each rank sends here, from the number `sent` to each."""
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self.group)
        return coming.tolist()


def run_distributed_experts(
    module: Any,
    exchange: ExpertExchange,
    stock: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the experts' output for [T, H]: tokens are sent to the ranks of their experts, and the results back."""
    if exchange.exchanged:
        return stock(hidden_states, top_k_index, top_k_weights)
    tokens, choices = top_k_index.shape
    expert = top_k_index.reshape(-1)
    order = expert.argsort(stable=True)  # by expert, and so by rank
    going = torch.bincount(expert // module.num_experts, minlength=exchange.size)
    sent, coming = going.tolist(), exchange.counts(going)
    rows = AllToAllRows.apply(hidden_states[order // choices], sent, coming, exchange.group)
    ids = AllToAllRows.apply((expert % module.num_experts)[order], sent, coming, exchange.group)
    own = {
        name: weight.to_local(grad_placements=[Shard(0)]).to(exchange.dtype)
        for name, weight in module.named_parameters(recurse=False)
    }
    exchange.exchanged = True
    try:
        ones = torch.ones_like(ids, dtype=top_k_weights.dtype)[:, None]
        output = torch.func.functional_call(module, own, (rows, ids[:, None], ones))
    finally:
        exchange.exchanged = False
    back = AllToAllRows.apply(output, coming, sent, exchange.group)
    unsorted = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    each = back[unsorted].view(tokens, choices, -1) * top_k_weights.reshape(tokens, choices, 1)
    return each.sum(1).to(hidden_states.dtype)


class AllToAllRows(torch.autograd.Function):
    """Sends `sent[i]` rows to rank i and returns the rows received, `coming[i]` from rank i."""

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
        return AllToAllRows.apply(gradients[0], *ctx.how), None, None, None


__all__ = ["experts_of", "shard_experts"]
