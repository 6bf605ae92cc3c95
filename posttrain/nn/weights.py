"""Weights of linear layers: adjacent in memory where layers share an input, with gradients in float32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MASTER = "float32_master"
"""Attribute of a half-precision weight: the float32 tensor that the optimizer updates; its `grad` accumulates."""

FROZEN_PART = "frozen_part"
"""Attribute of a trained weight: the indices of the part that the optimizer must not change."""


def is_plain_linear(module: Any) -> bool:
    """Whether a module is a plain linear layer: adapted, quantized and sharded ones keep their own code."""
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


def joined_view(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one view over all parameters (joined along dimension 0); None if they are not adjacent in memory."""
    if not parameters:
        return None
    first = parameters[0].detach()
    ends = [parameter.storage_offset() + parameter.numel() for parameter in parameters]
    adjacent = [parameter.storage_offset() for parameter in parameters[1:]] == ends[:-1]
    same_storage = len({parameter.untyped_storage()._cdata for parameter in parameters}) == 1
    if not (adjacent and same_storage and all(parameter.is_contiguous() for parameter in parameters)):
        return None
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def join_storage(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Move parameters into adjacent memory if they are not there; returns the view of `joined_view`."""
    found = joined_view(parameters)
    if found is not None:
        return found
    with torch.inference_mode(False), torch.no_grad():  # these weights will be trained
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
    return joined


def weight_gradients(
    parameters: Sequence[torch.Tensor], d_out: torch.Tensor, x: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the weight gradients of linear layers of x that were computed as one, for autograd.

    If the weights have float32 masters (see Optimizer), the gradients are added to the masters' instead, by the matrix
    product itself: no rounding to half precision, and no extra pass over the weights. Autograd then gets None.
    """
    sizes = [len(parameter) for parameter in parameters]
    masters = [getattr(parameter, MASTER, None) for parameter in parameters]
    if not any(parameter.requires_grad for parameter in parameters):
        return [None] * len(sizes)
    if any(master is None and p.requires_grad for master, p in zip(masters, parameters, strict=True)):
        return list((d_out.t() @ x).split(sizes))
    grads = [None if master is None else master.grad for master in masters]
    joined = None if any(grad is None for grad in grads) else joined_view([grad for grad in grads if grad is not None])
    if joined is not None:
        add_product(joined, d_out.t(), x)
        return [None] * len(sizes)
    parts = add_product(None, d_out.t(), x).split(sizes)
    for master, grad, part in zip(masters, grads, parts, strict=True):
        if master is not None:  # otherwise this weight is frozen
            master.grad = part if grad is None else grad.add_(part)
    return [None] * len(sizes)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a @ b to total in place, in float32: rounding every sum to half precision would lose too much."""
    if a.is_meta:  # which has no product of two types
        return a.new_empty(len(a), b.shape[1], dtype=torch.float32) if total is None else total
    if a.device.type == "cpu":
        return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
