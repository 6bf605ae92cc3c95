"""LoRA adapters on linear layers with the same input, computed together: in generation and in the fused layers.

    y_i = x W_i' + b_i + s_i (x A_i') B_i'

The frozen weights W_i are one matrix product and the small matrices A_i another; the rest is added to y in place. The
parameters remain those of peft's modules. Modules that compute something else, such as DoRA, dropout or quantized
weights, run their own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.nn.kernels.reference import LowRankParts
from posttrain.nn.weights import is_plain_linear, join_storage, joined_view, weight_gradients

ZEROS_AFTER_BIAS = "zeros_after_bias"  # attribute of a linear layer


@dataclass(slots=True, frozen=True, eq=False)
class Adapter:
    """The adapter of one linear layer."""

    a: torch.nn.Parameter  # [r, in]
    b: torch.nn.Parameter  # [out, r]
    scaling: float


def base_linear(module: Any) -> Any:
    """Return the plain linear layer that a module is or adapts; None if the module's own code must run."""
    if is_plain_linear(module):
        return module
    base = getattr(module, "base_layer", None)
    return base if is_plain_linear(base) and _is_plain_lora(module, base) else None


def _is_plain_lora(module: Any, base: Any) -> bool:
    """Whether one adapter adds scaling * B A x, and nothing else happens."""
    names = [name for name in getattr(module, "active_adapters", ()) if name in getattr(module, "lora_A", ())]
    if len(names) != 1 or module.merged or module.lora_variant or base.weight.requires_grad:
        return False
    a, b, dropout = (parts[names[0]] for parts in (module.lora_A, module.lora_B, module.lora_dropout))
    if not (is_plain_linear(a) and is_plain_linear(b)) or a.bias is not None or b.bias is not None:
        return False
    drops = module.training and not isinstance(dropout, torch.nn.Identity)
    return not drops and a.weight.dtype == b.weight.dtype == base.weight.dtype


def adapter_of(module: Any) -> Adapter | None:
    """Return the adapter of a module that `base_linear` accepts; None if it has none, or it is switched off."""
    if is_plain_linear(module) or module.disable_adapters:
        return None
    (name,) = (name for name in module.active_adapters if name in module.lora_A)
    return Adapter(module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]))


def join_adapters(modules: Sequence[Any]) -> None:
    """Lay out the weights of linear layers with the same input and the matrices A of their adapters as one matrix.

    The matrices B are another one, if their ranks are equal. Biases are followed by zeros for the rows of A.
    """
    found = [adapter for module in modules if (adapter := adapter_of(module)) is not None]
    linears = [base_linear(module) for module in modules]
    if not found:
        return
    a = [adapter.a for adapter in found]
    join_storage([*(linear.weight for linear in linears), *a])
    if len({adapter.b.shape[1] for adapter in found}) == 1:
        join_storage([adapter.b for adapter in found])
    if all(linear.bias is not None for linear in linears):
        join_storage([*(linear.bias for linear in linears), _zeros_after(linears[-1], sum(map(len, a)))])


def _zeros_after(linear: Any, count: int) -> torch.nn.Parameter:
    """Return zeros to follow the bias of a layer in memory; the layer keeps them, outside of its state."""
    (zeros,) = getattr(linear, ZEROS_AFTER_BIAS, (None,))
    if zeros is None or len(zeros) != count or zeros.device != linear.bias.device or zeros.dtype != linear.bias.dtype:
        zeros = torch.nn.Parameter(linear.bias.detach().new_zeros(count), requires_grad=False)
        setattr(linear, ZEROS_AFTER_BIAS, (zeros,))  # in a tuple: not registered as a parameter
    return zeros


class JoinedAdapters:
    """Linear layers with the same input and their adapters for generation: one product and one kernel.

    [y, h] = x [W, A]' + [b, 0]      y_i + s h_i B_i'      h_i: the columns of layer i's adapter
    """

    def __init__(self, modules: Sequence[Any], kernels: ModuleType) -> None:
        """`modules`: for which `supports` holds."""
        join_adapters(modules)
        self.kernels = kernels
        linears = [base_linear(module) for module in modules]
        adapters = [adapter_of(module) for module in modules]
        found = [adapter for adapter in adapters if adapter is not None]
        self.weight = join_storage([*(linear.weight for linear in linears), *(adapter.a for adapter in found)])
        self.b = join_storage([adapter.b for adapter in found])[None]
        self.scaling = found[0].scaling
        sizes = [linear.out_features for linear in linears]
        self.parts = LowRankParts(sizes, [adapter is not None for adapter in adapters], found[0].b.shape[1])
        self.width = sum(sizes)
        self.bias = None
        if linears[0].bias is not None:
            zeros = _zeros_after(linears[-1], len(self.weight) - self.width)
            self.bias = join_storage([*(linear.bias for linear in linears), zeros])

    @staticmethod
    def supports(modules: Sequence[Any]) -> bool:
        """Whether the adapters have one rank and one scaling."""
        found = [adapter for module in modules if (adapter := adapter_of(module)) is not None]
        return len({(adapter.b.shape[1], adapter.scaling) for adapter in found}) == 1

    def __call__(self, x: torch.Tensor, base: torch.Tensor | None = None, *, gated: bool = False) -> torch.Tensor:
        """Return the outputs, concatenated; `gated`: silu(gate) * up of the two layers.

        `base`: the outputs without adapters, if they were computed from other weights, such as quantized ones.
        """
        if base is None:
            joined = F.linear(x, self.weight, self.bias)
            base, inner = joined[:, : self.width], joined[:, self.width :]
        else:
            inner = F.linear(x, self.weight[self.width :])
        return self.kernels.add_low_rank(base, inner, self.b, self.parts, self.scaling, gated=gated)


def adapted_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapters: Sequence[Adapter | None],
    sizes: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layers' outputs for x, concatenated, and x A' of all adapters, without gradients.

    `weight`, `bias`: of all layers, joined; `adapters`, `sizes`: the adapter and the number of outputs of each layer.
    """
    out = F.linear(x, weight, bias)
    inner = F.linear(x, joined_a(adapters))
    for adapter, columns, ranks in adapter_slices(adapters, sizes):
        out[:, columns].addmm_(inner[:, ranks], adapter.b.t(), alpha=adapter.scaling)
    return out, inner


def joined_a(adapters: Sequence[Adapter | None]) -> torch.Tensor:
    """Return the matrices A as one: a view if they are adjacent in memory."""
    found = [adapter.a for adapter in adapters if adapter is not None]
    joined = joined_view(found)
    return torch.cat([a.detach() for a in found]) if joined is None else joined


def adapter_slices(adapters: Sequence[Adapter | None], sizes: Sequence[int]) -> Iterator[tuple[Adapter, slice, slice]]:
    """Yield each adapter with its columns of the outputs and of x A'."""
    column = rank = 0
    for adapter, size in zip(adapters, sizes, strict=True):
        if adapter is not None:
            yield adapter, slice(column, column + size), slice(rank, rank + len(adapter.a))
            rank += len(adapter.a)
        column += size


class AdaptedLinear(torch.autograd.Function):
    """`adapted_linear` with gradients of x and of the adapters; x and x A' are saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: Sequence[Adapter | None],
        sizes: Sequence[int],
        *matrices: torch.Tensor,  # A and B of each adapter, for autograd
    ) -> torch.Tensor:
        out, inner = adapted_linear(x, weight, bias, adapters, sizes)
        ctx.save_for_backward(x, inner)
        ctx.weight, ctx.adapters, ctx.sizes = weight, adapters, sizes
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_out,) = gradients
        x, inner = ctx.saved_tensors
        d_inner, d_b = torch.empty_like(inner), []
        for adapter, columns, ranks in adapter_slices(ctx.adapters, ctx.sizes):
            d_inner[:, ranks] = (d_out[:, columns] @ adapter.b).mul_(adapter.scaling)
            d_b += weight_gradients([adapter.b], d_out[:, columns], inner[:, ranks] * adapter.scaling)
        d_a = weight_gradients([adapter.a for adapter in ctx.adapters if adapter is not None], d_inner, x)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (d_out @ ctx.weight).addmm_(d_inner, joined_a(ctx.adapters))
        matrices = [gradient for pair in zip(d_a, d_b, strict=True) for gradient in pair]
        return d_x, None, None, None, None, *matrices


def project_adapted(x: torch.Tensor, modules: Sequence[Any], weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Return the outputs of the modules, some of which have adapters, for x, concatenated; with gradients."""
    adapters = [adapter_of(module) for module in modules]
    sizes = [base_linear(module).out_features for module in modules]
    matrices = [matrix for adapter in adapters if adapter is not None for matrix in (adapter.a, adapter.b)]
    return AdaptedLinear.apply(x, weight, bias, adapters, sizes, *matrices)


__all__ = [
    "Adapter",
    "JoinedAdapters",
    "adapted_linear",
    "adapter_of",
    "base_linear",
    "join_adapters",
    "project_adapted",
]
