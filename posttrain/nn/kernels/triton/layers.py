"""The norms and activations of a decoder layer."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803  (code that Triton compiles has its own conventions)
from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 1056  # each processes many rows and sums their part of a weight's gradient


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    normed, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    add_norm_kernel[(rows,)](
        x, residual, weight, normed, total, width, eps,
        ADD=residual is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return normed, total


@triton.jit
def add_norm_kernel(x, residual, weight, normed, total, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    kind = x.dtype.element_ty
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + at, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    unit = (value * scale).to(kind).to(tl.float32)
    out = unit * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, out.to(kind), mask=inside)


def norm_backward(
    gradient: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, carried: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = total.shape
    programs = min(PROGRAMS, rows)
    d_total = torch.empty_like(total)
    parts = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    norm_backward_kernel[(programs,)](
        gradient.contiguous(), total, weight, None if carried is None else carried.contiguous(), d_total, parts,
        rows, width, eps, CARRIED=carried is not None, BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return d_total, parts.sum(0).to(weight.dtype)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    gradient, total, weight, carried, d_total, parts, rows, width, eps, CARRIED: tl.constexpr, BLOCK: tl.constexpr
):
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    kind = total.dtype.element_ty
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    gathered = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(rows - program, tl.num_programs(0))):
        at = (program.to(tl.int64) + turn * tl.num_programs(0)) * width + column
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / width + eps)
        unit = value * scale
        gathered += g * unit
        g = g * w
        d = scale * (g - unit * (tl.sum(g * unit) / width))
        if CARRIED:
            d += tl.load(carried + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_total + at, d.to(kind), mask=inside)
    tl.store(parts + program * width + column, gathered, mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    silu_and_mul_kernel[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def silu_and_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * width + column, (active * up).to(kind), mask=inside)


def silu_and_mul_backward(gradient: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, d_gate_up = gate_up.new_empty(rows, width), torch.empty_like(gate_up)
    silu_and_mul_backward_kernel[(rows, triton.cdiv(width, 1024))](
        gradient.contiguous(), gate_up, out, d_gate_up, width, BLOCK=1024, num_warps=4
    )
    return out, d_gate_up


@triton.jit
def silu_and_mul_backward_kernel(gradient, gate_up, out, d_gate_up, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    pair = row * 2 * width + column
    gate = tl.load(gate_up + pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + pair + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    active = (gate * share).to(kind).to(tl.float32)
    tl.store(out + row * width + column, (active * up).to(kind), mask=inside)
    tl.store(d_gate_up + pair, (g * up * share * (1.0 + gate * (1.0 - share))).to(kind), mask=inside)
    tl.store(d_gate_up + pair + width, (g * gate * share).to(kind), mask=inside)
