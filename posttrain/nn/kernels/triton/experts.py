"""Mixtures of experts: routing, rows sorted by expert, and their products."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803  (code that Triton compiles has its own conventions)
from __future__ import annotations

import torch
import triton
import triton.language as tl


def route(
    logits: torch.Tensor, per_token: int, *, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, per_token, dtype=dtype, device=logits.device)
    chosen = torch.empty(tokens, per_token, dtype=torch.long, device=logits.device)
    route_kernel[(tokens,)](
        logits, weights, chosen, experts, PER_TOKEN=per_token, RENORMALIZE=renormalize,
        CHOICES=triton.next_power_of_2(per_token), BLOCK=triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    return weights, chosen


@triton.jit
def route_kernel(
    logits, weights, chosen, experts,
    PER_TOKEN: tl.constexpr, RENORMALIZE: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    z = tl.load(logits + token * experts + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    mass = tl.exp(z - tl.max(z, 0))
    left = tl.where(expert < experts, mass / tl.sum(mass, 0), -1.0)
    found, picked = tl.zeros([CHOICES], tl.float32), tl.zeros([CHOICES], tl.int32)
    for turn in range(PER_TOKEN):
        best = tl.argmax(left, 0)
        found = tl.where(choice == turn, tl.max(left, 0), found)
        picked = tl.where(choice == turn, best, picked)
        left = tl.where(expert == best, -1.0, left)
    if RENORMALIZE:
        found = found / tl.sum(found, 0)
    at = token * PER_TOKEN + choice
    tl.store(weights + at, found.to(weights.dtype.element_ty), mask=choice < PER_TOKEN)
    tl.store(chosen + at, picked.to(tl.int64), mask=choice < PER_TOKEN)


def sort_by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = chosen.numel()
    order, place = (torch.empty(pairs, dtype=torch.long, device=chosen.device) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    block = max(128, min(4096, triton.next_power_of_2(pairs)))
    sort_by_expert_kernel[(experts,)](
        chosen.contiguous(), order, place, ends, pairs, BLOCK=block, num_warps=4 if block <= 1024 else 8
    )
    return order, place.view(chosen.shape), ends


@triton.jit(do_not_specialize=["pairs"])
def sort_by_expert_kernel(chosen, order, place, ends, pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    fewer, same = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        own = tl.load(chosen + start + offset, mask=start + offset < pairs, other=2**30).to(tl.int32)
        fewer += (own < expert).to(tl.int32)
        same += (own == expert).to(tl.int32)
    first = tl.sum(fewer)
    tl.store(ends + expert, first + tl.sum(same))
    for start in range(0, pairs, BLOCK):
        pair = start + offset
        mine = tl.load(chosen + pair, mask=pair < pairs, other=2**30).to(tl.int32) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        row = first + rank - 1
        tl.store(order + row, pair.to(tl.int64), mask=mine)
        tl.store(place + pair, row.to(tl.int64), mask=mine)
        first += tl.sum(mine.to(tl.int32))


def expert_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    pairs: torch.Tensor | None = None,
    per_token: int = 1,
    *,
    gated: bool = False,
) -> torch.Tensor:
    count, (experts, width, depth) = len(rows) if pairs is None else len(pairs), weight.shape
    width = width // 2 if gated else width
    out = rows.new_empty(count, width)
    # Twice the mean, because a block that does not hold all rows of an expert reads the expert's weights again.
    block_rows = max(16, min(64, triton.next_power_of_2(2 * count // experts)))
    wide = rows.dtype == torch.float32  # needs twice the shared memory, and exact products
    block_width, block_depth = (64 if gated or wide else 128), (32 if wide else 64)
    expert_linear_kernel[(triton.cdiv(width, block_width), experts)](
        rows, weight, ends, pairs, out, width, depth, weight.stride(0), weight.stride(1), weight.stride(2),
        PER_TOKEN=per_token, GATHER=pairs is not None, GATED=gated, PRECISION="ieee" if wide else "tf32",
        ROWS=block_rows, WIDTH=block_width, DEPTH=block_depth, num_warps=4, num_stages=2 if wide else 4,
    )  # fmt: skip
    return out


@triton.jit
def expert_linear_kernel(
    rows, weight, ends, pairs, out, width, depth, stride_expert, stride_out, stride_in,
    PER_TOKEN: tl.constexpr, GATHER: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    real = column < width
    kind = out.dtype.element_ty
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    own = weight + expert.to(tl.int64) * stride_expert + column[None, :] * stride_out
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < last
        source = row.to(tl.int64)
        if GATHER:
            source = tl.load(pairs + row, mask=inside, other=0) // PER_TOKEN
        result = tl.zeros([ROWS, WIDTH], tl.float32)
        up = tl.zeros([ROWS, WIDTH], tl.float32)
        for begin in range(0, depth, DEPTH):
            k = begin + tl.arange(0, DEPTH)
            deep = k < depth
            x = tl.load(rows + source[:, None] * depth + k[None, :], mask=inside[:, None] & deep[None, :], other=0.0)
            at, there = own + k[:, None] * stride_in, deep[:, None] & real[None, :]
            result = tl.dot(x, tl.load(at, mask=there, other=0.0), result, input_precision=PRECISION)
            if GATED:
                up = tl.dot(x, tl.load(at + width * stride_out, mask=there, other=0.0), up, input_precision=PRECISION)
        if GATED:
            gate = result.to(kind).to(tl.float32)
            active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
            result = active * up.to(kind).to(tl.float32)
        to = out + row[:, None].to(tl.int64) * width + column[None, :]
        tl.store(to, result.to(kind), mask=inside[:, None] & real[None, :])


def expert_weight_gradients(
    d_out: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, total: torch.Tensor | None
) -> torch.Tensor:
    experts, height, width = len(ends), d_out.shape[1], rows.shape[1]
    added = total is not None
    if total is None:
        total = torch.empty(experts, height, width, dtype=torch.float32, device=rows.device)
    wide = rows.dtype == torch.float32
    block, depth = (64, 32) if wide else (128, 64)
    tiles = triton.cdiv(height, block) * triton.cdiv(width, block)
    expert_weight_gradients_kernel[(tiles, experts)](
        d_out.contiguous(), rows.contiguous(), ends, total, height, width, ADD=added,
        PRECISION="ieee" if wide else "tf32", BLOCK=block, DEPTH=depth, num_warps=8, num_stages=2 if wide else 3,
    )  # fmt: skip
    return total


@triton.jit
def expert_weight_gradients_kernel(
    d_out, rows, ends, total, height, width,
    ADD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, tile = tl.program_id(1), tl.program_id(0)
    across = tl.cdiv(width, BLOCK)
    i = (tile // across) * BLOCK + tl.arange(0, BLOCK)
    j = (tile % across) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    result = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(first, last, DEPTH):
        row = (start + tl.arange(0, DEPTH)).to(tl.int64)[:, None]
        inside = row < last
        g = tl.load(d_out + row * height + i[None, :], mask=inside & (i[None, :] < height), other=0.0)
        x = tl.load(rows + row * width + j[None, :], mask=inside & (j[None, :] < width), other=0.0)
        result = tl.dot(tl.trans(g), x, result, input_precision=PRECISION)
    at = total + (expert.to(tl.int64) * height + i[:, None]) * width + j[None, :]
    real = (i[:, None] < height) & (j[None, :] < width)
    if ADD:
        result += tl.load(at, mask=real, other=0.0)
    tl.store(at, result, mask=real)


def combine_rows(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    tokens, per_token = place.shape
    width = rows.shape[1]
    out = rows.new_empty(tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    combine_rows_kernel[(tokens, triton.cdiv(width, block))](
        rows, place, None if weights is None else weights.contiguous(), out, width, PER_TOKEN=per_token,
        WEIGHTED=weights is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def combine_rows_kernel(
    rows, place, weights, out, width, PER_TOKEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(PER_TOKEN):
        row = tl.load(place + token * PER_TOKEN + choice)
        value = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + token * PER_TOKEN + choice).to(tl.float32)
        total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def weighted_silu_and_mul_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, d_gate_up = gate_up.new_empty(rows, width), torch.empty_like(gate_up)
    d_weights = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    weighted_silu_and_mul_backward_kernel[(rows,)](
        gradient.contiguous(), gate_up, weights, out, d_gate_up, d_weights, width, BLOCK=1024, num_warps=4
    )
    return out, d_gate_up, d_weights


@triton.jit
def weighted_silu_and_mul_backward_kernel(
    gradient, gate_up, weights, out, d_gate_up, d_weights, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    weight = tl.load(weights + row).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        pair = row * 2 * width + column
        gate = tl.load(gate_up + pair, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + pair + width, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        active = ((gate * share).to(kind).to(tl.float32) * up).to(kind).to(tl.float32)
        d_weight += active * g
        g = g * weight
        tl.store(out + row * width + column, (active * weight).to(kind), mask=inside)
        tl.store(d_gate_up + pair, (g * up * share * (1.0 + gate * (1.0 - share))).to(kind), mask=inside)
        tl.store(d_gate_up + pair + width, (g * gate * share).to(kind), mask=inside)
    tl.store(d_weights + row, tl.sum(d_weight))
