"""Products in 8 bits."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803  (code that Triton compiles has its own conventions)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.nn.kernels.reference import FP8, FP8_LARGEST


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=FP8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(8192, triton.next_power_of_2(width))
    quantize_rows_kernel[(rows,)](
        x, out, scale, width, x.stride(0), LARGEST=FP8_LARGEST, BLOCK=block, num_warps=4 if block <= 2048 else 8
    )
    return out, scale


@triton.jit
def quantize_rows_kernel(x, out, scale, width, stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
    own = tl.maximum(tl.max(most), 1e-12) / LARGEST
    tl.store(scale + row, own)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32) / own
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)  # rounding of the scale
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=column < width)


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, fast_sums: bool = True
) -> torch.Tensor:
    rows, own_scale = quantize_rows(x)
    return torch._scaled_mm(
        rows, weight.t(), scale_a=own_scale, scale_b=scale.t(), bias=bias, out_dtype=x.dtype, use_fast_accum=fast_sums
    )
