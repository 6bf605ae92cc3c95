"""Rotary queries and keys, the KV cache that they are written to, and keys that several pieces share."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803, N806  (code that Triton compiles has its own conventions)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.nn.kernels.reference import SMALLEST_VECTOR, Exponents
from posttrain.nn.kernels.triton.layers import PROGRAMS


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    exponents: Exponents | None = None,
) -> torch.Tensor:
    rows, (kv_heads, width) = len(qkv), keys.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = qkv.new_empty(rows, heads, width)
    rotate_and_store_kernel[(rows,)](
        qkv, cos, sin, places, q_norm, k_norm, query, keys, values, *(exponents or (None, None)), eps,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, ALL_HEADS=triton.next_power_of_2(heads + 2 * kv_heads),
        BLOCK=triton.next_power_of_2(width // 2), NORM=q_norm is not None, ROUNDED=exponents is not None,
        SMALLEST=SMALLEST_VECTOR, num_warps=4,
    )  # fmt: skip
    return query


@triton.jit
def rotate_and_store_kernel(
    qkv, cos, sin, places, q_norm, k_norm, query, keys, values, key_exponents, value_exponents, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ALL_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROUNDED: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = WIDTH // 2
    kind = qkv.dtype.element_ty
    head, low = tl.arange(0, ALL_HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    high = low + HALF
    inside = low < HALF
    real = inside & (head < HEADS + 2 * KV_HEADS)
    source = qkv + row * (HEADS + 2 * KV_HEADS) * WIDTH + head * WIDTH
    first = tl.load(source + low, mask=real, other=0.0).to(tl.float32)
    second = tl.load(source + high, mask=real, other=0.0).to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    turned_1, turned_2 = first, second
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + eps)[:, None]
        query_1 = tl.load(q_norm + low, mask=inside, other=0.0).to(tl.float32)
        query_2 = tl.load(q_norm + high, mask=inside, other=0.0).to(tl.float32)
        key_1 = tl.load(k_norm + low, mask=inside, other=0.0).to(tl.float32)
        key_2 = tl.load(k_norm + high, mask=inside, other=0.0).to(tl.float32)
        turned_1 = (first * scale).to(kind).to(tl.float32) * tl.where(is_query, query_1, key_1)
        turned_2 = (second * scale).to(kind).to(tl.float32) * tl.where(is_query, query_2, key_2)
        turned_1, turned_2 = turned_1.to(kind).to(tl.float32), turned_2.to(kind).to(tl.float32)
    angle = row * WIDTH
    cos_1 = tl.load(cos + angle + low, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + high, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle + low, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + high, mask=inside, other=0.0).to(tl.float32)
    out_1 = (turned_1 * cos_1).to(kind).to(tl.float32) - (turned_2 * sin_1).to(kind).to(tl.float32)
    out_2 = (turned_2 * cos_2).to(kind).to(tl.float32) + (turned_1 * sin_2).to(kind).to(tl.float32)
    to_query = query + row * HEADS * WIDTH + head * WIDTH
    tl.store(to_query + low, out_1.to(kind), mask=inside & is_query)
    tl.store(to_query + high, out_2.to(kind), mask=inside & is_query)
    place = tl.load(places + row).to(tl.int64)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    stored_1 = tl.where(is_value, first, out_1.to(kind).to(tl.float32))
    stored_2 = tl.where(is_value, second, out_2.to(kind).to(tl.float32))
    if ROUNDED:  # as reference.round_vectors, with the bits of float32: exponent and mantissa
        largest = tl.max(tl.where(inside, tl.maximum(tl.abs(stored_1), tl.abs(stored_2)), 0.0), 1)[:, None]
        bits = tl.maximum(largest, SMALLEST).to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) & 255) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        stored_1, stored_2 = stored_1 * inverse, stored_2 * inverse
        at = place * KV_HEADS + head - HEADS
        tl.store(key_exponents + at, exponent.to(tl.int8), mask=is_key)
        is_own_value = is_value & (head < HEADS + 2 * KV_HEADS)
        tl.store(value_exponents + at - KV_HEADS, exponent.to(tl.int8), mask=is_own_value)
    stored_1, stored_2 = stored_1.to(keys.dtype.element_ty), stored_2.to(keys.dtype.element_ty)
    to_key = keys + place * KV_HEADS * WIDTH + (head - HEADS) * WIDTH
    tl.store(to_key + low, stored_1, mask=real & is_key)
    tl.store(to_key + high, stored_2, mask=real & is_key)
    to_value = values + place * KV_HEADS * WIDTH + (head - HEADS - KV_HEADS) * WIDTH
    tl.store(to_value + low, stored_1, mask=real & is_value)
    tl.store(to_value + high, stored_2, mask=real & is_value)


def rotate_backward(
    d_query: torch.Tensor,
    d_key: torch.Tensor,
    d_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    rows, heads, width = d_query.shape
    kv_heads, programs, normed = d_key.shape[1], min(2 * PROGRAMS, len(d_query)), qkv is not None
    d_qkv = d_query.new_empty(rows, (heads + 2 * kv_heads) * width)
    parts = torch.empty(2, programs if normed else 0, width, dtype=torch.float32, device=d_query.device)
    rotate_backward_kernel[(programs,)](
        d_query.contiguous(), d_key.contiguous(), d_value.contiguous(), cos, sin, qkv, q_norm, k_norm, d_qkv, parts,
        eps, rows, HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, ALL_HEADS=triton.next_power_of_2(heads + 2 * kv_heads),
        BLOCK=triton.next_power_of_2(width // 2), NORM=normed, num_warps=4,
    )  # fmt: skip
    if q_norm is None or k_norm is None:
        return d_qkv, None, None
    d_q_norm, d_k_norm = parts.sum(1)
    return d_qkv, d_q_norm.to(q_norm.dtype), d_k_norm.to(k_norm.dtype)


@triton.jit(do_not_specialize=["rows"])
def rotate_backward_kernel(
    d_query, d_key, d_value, cos, sin, qkv, q_norm, k_norm, d_qkv, parts, eps, rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ALL_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    HALF: tl.constexpr = WIDTH // 2
    kind = d_qkv.dtype.element_ty
    head, low = tl.arange(0, ALL_HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    high, inside = low + HALF, low < HALF
    is_query, is_value = head < HEADS, (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    if NORM:
        weight_1 = tl.where(is_query, tl.load(q_norm + low, mask=inside, other=0.0).to(tl.float32),
                            tl.load(k_norm + low, mask=inside, other=0.0).to(tl.float32))  # fmt: skip
        weight_2 = tl.where(is_query, tl.load(q_norm + high, mask=inside, other=0.0).to(tl.float32),
                            tl.load(k_norm + high, mask=inside, other=0.0).to(tl.float32))  # fmt: skip
        gathered_1 = tl.zeros([ALL_HEADS, BLOCK], tl.float32)
        gathered_2 = tl.zeros([ALL_HEADS, BLOCK], tl.float32)
    for turn in range(tl.cdiv(rows - program, programs)):
        row = program.to(tl.int64) + turn * programs
        from_query = d_query + (row * HEADS + head) * WIDTH
        from_key = d_key + (row * KV_HEADS + head - HEADS) * WIDTH
        from_value = d_value + (row * KV_HEADS + head - HEADS - KV_HEADS) * WIDTH
        value_1 = tl.load(from_value + low, mask=inside & is_value, other=0.0).to(tl.float32)
        value_2 = tl.load(from_value + high, mask=inside & is_value, other=0.0).to(tl.float32)
        g_1 = (tl.load(from_query + low, mask=inside & is_query, other=0.0).to(tl.float32)
               + tl.load(from_key + low, mask=inside & is_key, other=0.0).to(tl.float32))  # fmt: skip
        g_2 = (tl.load(from_query + high, mask=inside & is_query, other=0.0).to(tl.float32)
               + tl.load(from_key + high, mask=inside & is_key, other=0.0).to(tl.float32))  # fmt: skip
        angle = row * WIDTH
        cos_1 = tl.load(cos + angle + low, mask=inside, other=0.0).to(tl.float32)
        cos_2 = tl.load(cos + angle + high, mask=inside, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin + angle + low, mask=inside, other=0.0).to(tl.float32)
        sin_2 = tl.load(sin + angle + high, mask=inside, other=0.0).to(tl.float32)
        d_1 = g_1 * cos_1 + g_2 * sin_2
        d_2 = g_2 * cos_2 - g_1 * sin_1
        if NORM:
            source = qkv + row * (HEADS + 2 * KV_HEADS) * WIDTH + head * WIDTH
            rotated = inside & (is_query | is_key)
            x_1 = tl.load(source + low, mask=rotated, other=0.0).to(tl.float32)
            x_2 = tl.load(source + high, mask=rotated, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x_1 * x_1, 1) + tl.sum(x_2 * x_2, 1)) / WIDTH + eps)[:, None]
            unit_1, unit_2 = x_1 * scale, x_2 * scale
            gathered_1 += d_1 * unit_1
            gathered_2 += d_2 * unit_2
            d_1, d_2 = d_1 * weight_1, d_2 * weight_2
            along = ((tl.sum(d_1 * unit_1, 1) + tl.sum(d_2 * unit_2, 1)) / WIDTH)[:, None]
            d_1, d_2 = scale * (d_1 - unit_1 * along), scale * (d_2 - unit_2 * along)
        to = d_qkv + row * (HEADS + 2 * KV_HEADS) * WIDTH + head * WIDTH
        real = inside & (is_query | is_key | is_value)
        tl.store(to + low, tl.where(is_value, value_1, d_1).to(kind), mask=real)
        tl.store(to + high, tl.where(is_value, value_2, d_2).to(kind), mask=real)
    if NORM:
        column = tl.arange(0, BLOCK)
        half = column < HALF
        of_query, of_key = parts + program * WIDTH + column, parts + (programs + program) * WIDTH + column
        tl.store(of_query, tl.sum(tl.where(is_query, gathered_1, 0.0), 0), mask=half)
        tl.store(of_query + HALF, tl.sum(tl.where(is_query, gathered_2, 0.0), 0), mask=half)
        tl.store(of_key, tl.sum(tl.where(is_key, gathered_1, 0.0), 0), mask=half)
        tl.store(of_key + HALF, tl.sum(tl.where(is_key, gathered_2, 0.0), 0), mask=half)


def gather_backward(gradient: torch.Tensor, places: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    rows, width = len(first) - 1, gradient[0].numel()
    total = gradient.new_empty(rows, *gradient.shape[1:])
    gather_backward_kernel[(rows,)](
        gradient.contiguous(), places, first, total, width, BLOCK=triton.next_power_of_2(width), num_warps=2
    )
    return total


@triton.jit
def gather_backward_kernel(gradient, places, first, total, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    gathered = tl.zeros([BLOCK], tl.float32)
    for use in range(tl.load(first + row), tl.load(first + row + 1)):
        at = tl.load(places + use).to(tl.int64) * width + column
        gathered += tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * width + column, gathered.to(total.dtype.element_ty), mask=inside)
