"""Matrix products of linear layers while a model trains: in the precision of the weights, or in 8 bits.

A linear layer has three products in a step: its output, the gradient of its input, and the gradient of its weight. In 8
bits the first two are computed from copies with one scale per row, made anew in every pass. The third stays in the
weights' precision, because it is added up over micro-batches in float32 (nn/weights.py), and small gradients would
round to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

FP8_CAPABILITY = (8, 9)  # of a GPU: Ada and newer
FP8_MULTIPLE = 16


class Products:
    """Products in the precision of the weights."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a linear layer: [T, in], [out, in] -> [T, out]."""
        return F.linear(x, weight, bias)

    def input_gradient(self, d_out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the layer's input: [T, out], [out, in] -> [T, in]."""
        return d_out @ weight


@dataclass(frozen=True, slots=True)
class Fp8Products(Products):
    """Products of 8-bit floats, each row with a scale of its own."""

    kernels: ModuleType

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernels.quantized_linear(x, *self.kernels.quantize_rows(weight), bias)

    def input_gradient(self, d_out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        transposed = self.kernels.quantize_rows(weight.t().contiguous())
        return self.kernels.quantized_linear(d_out, *transposed, None, fast_sums=False)


FULL = Products()


def can_quantize(weight: torch.Tensor) -> bool:
    """Whether a weight has sizes that products in 8 bits support."""
    return weight.shape[0] % FP8_MULTIPLE == 0 and weight.shape[1] % FP8_MULTIPLE == 0


def has_fp8(device: torch.device) -> bool:
    """Whether a device computes products in 8 bits; a CPU does so slowly, for tests."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


__all__ = ["FP8_MULTIPLE", "FULL", "Fp8Products", "Products", "can_quantize", "has_fp8"]
