"""Expert parallelism: groups of data ranks hold some experts of every layer each, and send tokens to them.

FSDP would gather all experts of a layer on every rank, most of which few tokens use. Here each rank holds whole experts
(a part of dimension 0 of the 3D weights that all families have in transformers), sends every token to the ranks of its
experts and receives the results. An expert processes the tokens of all ranks of its group, so its gradient is complete
for them; where there are several groups, their gradients are added up before the optimizer step.

Tensor ranks divide each expert besides (parallel/tensor.py): a rank then computes a term of its experts' outputs, from
the tokens of the data ranks with the same tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from posttrain.core.errors import UsageError
from posttrain.parallel.shards import divide

RUNS_STOCK = "runs_stock"
"""Attribute of experts: whether their own code is running, with weights that are put in their place."""
Division = tuple[int, int]
"""A dimension, and the number of its blocks, each of which ranks divide."""
TENSOR_DIVISIONS: dict[str, Division] = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
"""How tensor ranks divide [E, 2 I, H], the joined matrices of gate and up, and [E, H, I]."""


# The tensors of a layer's experts


def experts_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that hold all experts of a layer, with their names: adapted ones in their outermost form."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        base = base_experts(module)
        count = getattr(base, "num_experts", None)
        weights = list(base.parameters(recurse=False))
        stacked = bool(weights) and all(weight.ndim >= 2 and len(weight) == count for weight in weights)
        if stacked and hasattr(base, "down_proj"):  # a router has none
            inside |= {id(part) for part in module.modules()}
            yield name, module


def base_experts(module: Any) -> Any:
    """Return the experts without their adapters."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def adapters_of(module: Any) -> list[str]:
    """Return the names of the adapters of an adapted module; none of a plain one."""
    return list(module.lora_A) if hasattr(module, "base_layer") else []


def adapted_forms(module: Any) -> Iterator[Any]:
    """Yield peft's modules around a layer's experts, each of which adapts one of its weights."""
    while hasattr(module, "base_layer"):
        yield module
        module = module.base_layer


@dataclass(slots=True, frozen=True, eq=False)
class ExpertTensor:
    """A weight of a layer's experts, or a matrix of its adapter, and how ranks divide it."""

    owner: Any
    name: str
    expert_division: Division
    tensor_division: Division | None  # None: all tensor ranks hold it

    @property
    def parameter(self) -> torch.nn.Parameter:
        found: torch.nn.Parameter = getattr(self.owner, self.name)
        return found

    def replace(self, parameter: torch.nn.Parameter) -> None:
        setattr(self.owner, self.name, parameter)


def expert_tensors(experts: Any) -> Iterator[ExpertTensor]:
    """Yield the tensors of a layer's experts. peft's adapters of E experts and rank r are A [E r, in], B [out, r E]."""
    base = base_experts(experts)
    for name, _ in list(base.named_parameters(recurse=False)):
        yield ExpertTensor(base, name, (0, 1), TENSOR_DIVISIONS.get(name))
    for form in adapted_forms(experts):
        for adapter in adapters_of(form):
            divided, rank = TENSOR_DIVISIONS.get(form.parameter_name), form.r[adapter]
            inputs = (1, 1) if divided == (2, 1) else None
            outputs = (0, 2) if divided == (1, 2) else None
            yield ExpertTensor(form.lora_A[adapter], "weight", (0, 1), inputs)
            yield ExpertTensor(form.lora_B[adapter], "weight", (1, rank), outputs)


def local_weights(experts: Any, exchange: ExpertExchange | None = None) -> dict[str, torch.Tensor]:
    """Return this rank's part of the experts' weights, adapters added, as they are computed with."""

    def local(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part if exchange is None else part.to(exchange.device, exchange.dtype)

    base = base_experts(experts)
    found = {name: local(weight) for name, weight in base.named_parameters(recurse=False)}
    for form in adapted_forms(experts):
        if form.disable_adapters:
            continue
        for adapter in (name for name in form.active_adapters if name in form.lora_A):
            weight = found[form.parameter_name]
            a, b = (local(parts[adapter].weight).to(weight.dtype) for parts in (form.lora_A, form.lora_B))
            a = a.reshape(base.num_experts, -1, a.shape[1])  # [E, r, in]
            b = b.reshape(len(b), -1, base.num_experts).permute(2, 0, 1)  # [E, out, r]
            found[form.parameter_name] = torch.baddbmm(weight, b, a, alpha=form.scaling[adapter])
    return found


def run_with_weights(
    experts: Any, stock: Callable[..., torch.Tensor], *args: torch.Tensor, exchange: ExpertExchange | None = None
) -> torch.Tensor:
    """Run the experts' own code with this rank's part of their weights."""
    base = base_experts(experts)
    if getattr(base, RUNS_STOCK, False):
        return stock(*args)
    weights = local_weights(experts, exchange)
    setattr(base, RUNS_STOCK, True)
    try:
        found: torch.Tensor = torch.func.functional_call(base, weights, args)
    finally:
        setattr(base, RUNS_STOCK, False)
    return found


# Experts on several ranks


def shard_experts(model: torch.nn.Module, mesh: DeviceMesh, place: torch.device, exchange: ExpertExchange) -> list[Any]:
    """Keep only this rank's experts, on the device `place`, which exchange tokens from then on; returns the modules.

    `mesh`: of the ranks that divide experts, and of the tensor ranks.
    """
    found: dict[str, Any] = dict(experts_of(model))
    for module in found.values():
        base = base_experts(module)
        stock = base.forward
        for tensor in list(expert_tensors(module)):
            divisions = [tensor.expert_division, tensor.tensor_division if mesh.size(1) > 1 else None]
            tensor.replace(divide(tensor.parameter, mesh, divisions, place))
        base.num_experts //= mesh.size(0)
        module.forward = partial(run_distributed_experts, module, exchange, stock)
    return list(found.values())


def check_expert_parallel(model: torch.nn.Module, size: int) -> None:
    """Raise UsageError if `size` ranks cannot divide the experts of this model."""
    found: dict[str, Any] = dict(experts_of(model))
    if not found:
        raise UsageError(f"cluster.expert_parallel_size is {size}, but {type(model).__name__} has no experts to divide")
    for module in map(base_experts, found.values()):
        if module.num_experts % size:
            raise UsageError(
                f"cluster.expert_parallel_size is {size}, which does not divide the {module.num_experts} experts of a "
                "layer"
            )


class ExpertExchange:
    """The process group whose ranks send tokens to each other's experts."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, *, in_host: bool) -> None:
        """`device`, `dtype`: of the computation; `in_host`: the experts' weights are in host memory."""
        self.group, self.device, self.dtype, self.in_host = group, device, dtype, in_host
        self.size = dist.get_world_size(group)
        self.received: list[int] = []  # rows that this rank's experts computed, of each layer of each pass

    def counts(self, sent: torch.Tensor) -> list[int]:
        """Return the number of rows that each rank sends here, from the number `sent` to each."""
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self.group)
        found = coming.tolist()
        self.received.append(sum(found))
        return found

    @torch.no_grad()
    def imbalance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the most loaded rank and the mean, each summed over the layers of passes not counted yet.

        Their ratio is the time that experts take, compared with that of equal shares.
        """
        rows = torch.tensor(self.received, dtype=torch.float64, device=self.device)
        self.received = []
        most, total = rows.clone(), rows.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(total, group=self.group)
        return most.sum(), total.sum() / self.size


def run_distributed_experts(
    module: Any,
    exchange: ExpertExchange,
    stock: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the experts' output for [T, H]: tokens are sent to the ranks of their experts, and the results back."""
    base = base_experts(module)
    if getattr(base, RUNS_STOCK, False):
        return stock(hidden_states, top_k_index, top_k_weights)
    tokens, choices = top_k_index.shape
    expert = top_k_index.reshape(-1)
    order = expert.argsort(stable=True)  # by expert, and so by rank
    going = torch.bincount(expert // base.num_experts, minlength=exchange.size)
    sent, coming = going.tolist(), exchange.counts(going)
    rows = AllToAllRows.apply(hidden_states[order // choices], sent, coming, exchange.group)
    ids = AllToAllRows.apply((expert % base.num_experts)[order], sent, coming, exchange.group)
    ones = torch.ones_like(ids, dtype=top_k_weights.dtype)[:, None]
    compute = partial(run_with_weights, module, stock, exchange=exchange)
    if exchange.in_host and torch.is_grad_enabled():
        # Repeated in the backward pass, so that one layer's weights at a time are on the device.
        output = checkpoint(compute, rows, ids[:, None], ones, use_reentrant=False, preserve_rng_state=False)
    else:
        output = compute(rows, ids[:, None], ones)
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


__all__ = ["ExpertExchange", "adapted_forms", "experts_of", "shard_experts"]
