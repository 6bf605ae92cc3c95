"""The functions of kernels/reference.py, which documents each one, as Triton kernels.

Imported only where there is a GPU with Triton. In the forward direction one program works on one row (or one head of
it), so that the result of a row does not depend on the other rows.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803, N806  (code that Triton compiles has its own conventions)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.nn.kernels.reference import FP8, FP8_LARGEST, LowRankParts, RowsByAdapter

PROGRAMS = 1056  # each processes many rows and sums their part of a weight's gradient
VOCABULARY_BLOCK = 8192


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
) -> torch.Tensor:
    rows, (kv_heads, width) = len(qkv), keys.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = qkv.new_empty(rows, heads, width)
    rotate_and_store_kernel[(rows,)](
        qkv, cos, sin, places, q_norm, k_norm, query, keys, values, eps,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, ALL_HEADS=triton.next_power_of_2(heads + 2 * kv_heads),
        BLOCK=triton.next_power_of_2(width // 2), NORM=q_norm is not None, num_warps=4,
    )  # fmt: skip
    return query


@triton.jit
def rotate_and_store_kernel(
    qkv, cos, sin, places, q_norm, k_norm, query, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ALL_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
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
    spot = tl.load(places + row).to(tl.int64) * KV_HEADS * WIDTH
    to_key = keys + spot + (head - HEADS) * WIDTH
    is_key = real & (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(to_key + low, out_1.to(kind), mask=is_key)
    tl.store(to_key + high, out_2.to(kind), mask=is_key)
    to_value = values + spot + (head - HEADS - KV_HEADS) * WIDTH
    tl.store(to_value + low, first.to(kind), mask=real & is_value)
    tl.store(to_value + high, second.to(kind), mask=real & is_value)


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


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del with_entropy  # computing it costs nothing here
    rows, vocabulary = logits.shape
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    target_logprobs_kernel[(rows,)](
        logits, targets, found, rows, vocabulary, 1.0 / temperature, BLOCK=VOCABULARY_BLOCK, num_warps=8
    )
    return found[0], found[1], found[2]


@triton.jit(do_not_specialize=["rows", "inverse"])
def target_logprobs_kernel(logits, targets, found, rows, vocabulary, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * vocabulary
    most = tl.full([], -1.0e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighed = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(source + column, mask=column < vocabulary, other=-1.0e30).to(tl.float32) * inverse
        higher = tl.maximum(most, tl.max(z))
        mass = tl.exp(z - higher)
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(mass)
        weighed = weighed * fade + tl.sum(tl.where(mass > 0, mass * z, 0.0))
        most = higher
    normalizer = most + tl.log(total)
    target = tl.load(source + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(found + row, target - normalizer)
    tl.store(found + rows + row, normalizer - weighed / total)
    tl.store(found + 2 * rows + row, normalizer)


def target_logprobs_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    d_picked: torch.Tensor,
    d_entropy: torch.Tensor | None,
) -> torch.Tensor:
    rows, vocabulary = logits.shape
    target_logprobs_backward_kernel[(rows, triton.cdiv(vocabulary, VOCABULARY_BLOCK))](
        logits, targets, normalizer, entropy, d_picked, d_entropy, vocabulary, 1.0 / temperature,
        ENTROPY=d_entropy is not None, BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["inverse"])
def target_logprobs_backward_kernel(
    logits, targets, normalizer, entropy, d_picked, d_entropy, vocabulary, inverse,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = logits + row * vocabulary + column
    logp = tl.load(at, mask=inside, other=0.0).to(tl.float32) * inverse - tl.load(normalizer + row)
    p = tl.exp(logp)
    gradient = (tl.where(column == tl.load(targets + row), 1.0, 0.0) - p) * tl.load(d_picked + row)
    if ENTROPY:
        gradient -= tl.load(d_entropy + row) * p * (logp + tl.load(entropy + row))
    tl.store(at, (gradient * inverse).to(logits.dtype.element_ty), mask=inside)


KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}


def divergence(
    logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float, kind: str, jsd_beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    found = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    divergence_kernel[(rows,)](
        logits, teacher_logits, found, rows, vocabulary, 1.0 / temperature, jsd_beta, KIND=KINDS[kind],
        BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return found[0], found[1], found[2], found[3]


@triton.jit(do_not_specialize=["rows", "inverse", "beta"])
def divergence_kernel(
    logits, teacher_logits, found, rows, vocabulary, inverse, beta, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    most = tl.full([], -1.0e30, tl.float32)
    teacher_most = tl.full([], -1.0e30, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    teacher_total = tl.full([], 0.0, tl.float32)
    weighed = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        z = tl.load(logits + row * vocabulary + column, mask=inside, other=-1.0e30).to(tl.float32) * inverse
        q = tl.load(teacher_logits + row * vocabulary + column, mask=inside, other=-1.0e30).to(tl.float32) * inverse
        higher = tl.maximum(most, tl.max(z))
        teacher_higher = tl.maximum(teacher_most, tl.max(q))
        mass = tl.exp(z - higher)
        teacher_mass = tl.exp(q - teacher_higher)
        fade = tl.exp(most - higher)
        teacher_fade = tl.exp(teacher_most - teacher_higher)
        total = total * fade + tl.sum(mass)
        teacher_total = teacher_total * teacher_fade + tl.sum(teacher_mass)
        if KIND == 0:
            weighed = weighed * teacher_fade + tl.sum(tl.where(teacher_mass > 0, teacher_mass * (q - z), 0.0))
        if KIND == 1:
            weighed = weighed * fade + tl.sum(tl.where(mass > 0, mass * (z - q), 0.0))
        most = higher
        teacher_most = teacher_higher
    normalizer = most + tl.log(total)
    teacher_normalizer = teacher_most + tl.log(teacher_total)
    own = tl.full([], 0.0, tl.float32)
    if KIND == 0:
        value = weighed / teacher_total - (teacher_normalizer - normalizer)
    if KIND == 1:
        value = weighed / total - (normalizer - teacher_normalizer)
        own = value
    if KIND == 2:
        value = tl.full([], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocabulary
            z = tl.load(logits + row * vocabulary + column, mask=inside, other=0.0).to(tl.float32) * inverse
            q = tl.load(teacher_logits + row * vocabulary + column, mask=inside, other=0.0).to(tl.float32) * inverse
            logp = z - normalizer
            logq = q - teacher_normalizer
            mixture = log_mixture(logp, logq, beta)
            own += tl.sum(tl.where(inside, tl.exp(logp) * (logp - mixture), 0.0))
            value += tl.sum(tl.where(inside, tl.exp(logq) * (logq - mixture), 0.0))
        value = beta * value + (1.0 - beta) * own
    tl.store(found + row, value)
    tl.store(found + rows + row, normalizer)
    tl.store(found + 2 * rows + row, teacher_normalizer)
    tl.store(found + 3 * rows + row, own)


@triton.jit
def log_mixture(logp, logq, beta):
    """log(beta q + (1 - beta) p)"""
    higher = tl.maximum(logp, logq)
    return higher + tl.log(beta * tl.exp(logq - higher) + (1.0 - beta) * tl.exp(logp - higher))


def divergence_backward(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float,
    kind: str,
    jsd_beta: float,
    normalizer: torch.Tensor,
    teacher_normalizer: torch.Tensor,
    own: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    rows, vocabulary = logits.shape
    divergence_backward_kernel[(rows, triton.cdiv(vocabulary, VOCABULARY_BLOCK))](
        logits, teacher_logits, normalizer, teacher_normalizer, own, gradient, vocabulary, 1.0 / temperature, jsd_beta,
        KIND=KINDS[kind], BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits


@triton.jit(do_not_specialize=["inverse", "beta"])
def divergence_backward_kernel(
    logits, teacher_logits, normalizer, teacher_normalizer, own, gradient, vocabulary, inverse, beta,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = row * vocabulary + column
    logp = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * inverse - tl.load(normalizer + row)
    logq = tl.load(teacher_logits + at, mask=inside, other=0.0).to(tl.float32) * inverse
    logq -= tl.load(teacher_normalizer + row)
    p = tl.exp(logp)
    if KIND == 0:
        by_logits = p - tl.exp(logq)
    if KIND == 1:
        by_logits = p * (logp - logq - tl.load(own + row))
    if KIND == 2:
        by_logits = (1.0 - beta) * p * (logp - log_mixture(logp, logq, beta) - tl.load(own + row))
    scaled = by_logits * tl.load(gradient + row) * inverse
    tl.store(logits + at, scaled.to(logits.dtype.element_ty), mask=inside)


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


# Mixtures of experts


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


# Products in 8 bits


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


# Low-rank adapters

TILE_ROWS = 16  # rows of a tile, which have the same adapter
SINGLE_ROWS = 16  # if all rows have the same adapter


def adapter_tiles(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Divide rows that are sorted by adapter into tiles: [tiles, 3], adapter (-1: no tile), first and last row."""
    adapters, tiles = len(ends), triton.cdiv(rows, TILE_ROWS) + len(ends)
    found = torch.empty(tiles, 3, dtype=torch.int32, device=ends.device)
    adapter_tiles_kernel[(triton.cdiv(tiles, 64),)](
        ends, found, adapters, tiles, ROWS=TILE_ROWS, ADAPTERS=triton.next_power_of_2(adapters), TILES=64, num_warps=4
    )
    return found


@triton.jit(do_not_specialize=["tiles"])
def adapter_tiles_kernel(ends, found, adapters, tiles, ROWS: tl.constexpr, ADAPTERS: tl.constexpr, TILES: tl.constexpr):
    adapter = tl.arange(0, ADAPTERS)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    end = tl.load(ends + adapter, mask=adapter < adapters, other=0)
    begin = tl.load(ends + adapter - 1, mask=(adapter > 0) & (adapter < adapters), other=0)
    count = tl.where(adapter < adapters, tl.cdiv(end - begin, ROWS), 0)
    after = tl.cumsum(count, 0)
    own = (tile[:, None] >= (after - count)[None, :]) & (tile[:, None] < after[None, :])
    first = tl.sum(tl.where(own, begin[None, :] + (tile[:, None] - (after - count)[None, :]) * ROWS, 0), 1)
    last = tl.minimum(tl.sum(tl.where(own, end[None, :], 0), 1), first + ROWS)
    number = tl.sum(tl.where(own, adapter[None, :] + 1, 0), 1) - 1
    tl.store(found + tile * 3, number, mask=tile < tiles)
    tl.store(found + tile * 3 + 1, first, mask=tile < tiles)
    tl.store(found + tile * 3 + 2, last, mask=tile < tiles)


def rows_by_adapter(adapter: torch.Tensor, adapters: int) -> RowsByAdapter:
    order, place, ends = sort_by_expert(adapter[:, None], adapters)
    return RowsByAdapter(adapter, order, place, ends, adapter_tiles(ends, len(adapter)))


def low_rank_inner(x: torch.Tensor, a: torch.Tensor, by: RowsByAdapter) -> torch.Tensor:
    rows, (_, ranks, depth) = len(x), a.shape
    wide = x.dtype == torch.float32
    # Few programs would each read long rows: the depth is divided, and the parts are summed in order.
    splits = max(1, min(16, depth // 512))
    inner = torch.empty(splits, rows, ranks, dtype=torch.float32, device=x.device)
    low_rank_inner_kernel[(splits, len(by.tiles))](
        x, a, by.tiles, by.order, inner, rows, ranks, depth, a.stride(0), a.stride(1), SPLITS=splits,
        PRECISION="ieee" if wide else "tf32", ROWS=TILE_ROWS, RANKS=max(16, triton.next_power_of_2(ranks)),
        DEPTH=32 if wide else 64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return sum_parts(inner, x.dtype)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum over the first dimension in order, and round once."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    block = 1024
    sum_parts_kernel[(triton.cdiv(out.numel(), block),)](
        parts, out, out.numel(), PARTS=len(parts), BLOCK=block, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["count"])
def sum_parts_kernel(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + place, mask=place < count, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * count + place, mask=place < count, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["rows"])
def low_rank_inner_kernel(
    x, a, tiles, order, inner, rows, ranks, depth, stride_adapter, stride_rank,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0), tiles + tl.program_id(1) * 3
    adapter, start, last = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if adapter < 0:
        return
    rank = tl.arange(0, RANKS)
    share = tl.cdiv(tl.cdiv(depth, SPLITS), DEPTH) * DEPTH
    begin, end = split * share, tl.minimum(split * share + share, depth)
    own = a + adapter.to(tl.int64) * stride_adapter + rank[None, :] * stride_rank
    row = start + tl.arange(0, ROWS)
    inside = row < last
    source = x + tl.load(order + row, mask=inside, other=0)[:, None] * depth
    result = tl.zeros([ROWS, RANKS], tl.float32)
    for k in range(begin, end, DEPTH):
        deep = k + tl.arange(0, DEPTH)
        there = deep < end
        left = tl.load(source + deep[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        right = tl.load(own + deep[:, None], mask=there[:, None] & (rank < ranks)[None, :], other=0.0)
        result = tl.dot(left, right, result, input_precision=PRECISION)
    to = inner + (split.to(tl.int64) * rows + row[:, None]) * ranks + rank[None, :]
    tl.store(to, result, mask=inside[:, None] & (rank < ranks)[None, :])


def add_low_rank(
    base: torch.Tensor,
    inner: torch.Tensor,
    b: torch.Tensor,
    parts: LowRankParts,
    scaling: float,
    by: RowsByAdapter | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    rows, wide = len(base), base.dtype == torch.float32
    width = sum(parts.sizes) // (2 if gated else 1)
    out = base.new_empty(rows, width)
    assert rows * base.stride(0) < 2**31, "the kernel computes places in 32 bits, which need fewer registers"
    block = 64 if wide else 128
    height, count = (SINGLE_ROWS, triton.cdiv(rows, SINGLE_ROWS)) if by is None else (TILE_ROWS, len(by.tiles))
    table = column_blocks(parts, block, gated, base.device)
    add_low_rank_kernel[(len(table), count)](
        base, inner, b, table, None if by is None else by.tiles, None if by is None else by.order, out, rows, width,
        scaling, base.stride(0), inner.stride(0), b.stride(0), b.stride(1), GROUPED=by is not None, GATED=gated,
        PRECISION="ieee" if wide else "tf32", ROWS=height, WIDTH=block, RANK=parts.rank,
        RANKS=min(64, max(16, triton.next_power_of_2(parts.rank))), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def column_blocks(parts: LowRankParts, width: int, gated: bool, device: torch.device) -> torch.Tensor:
    """Return [blocks, 6]: first and last column, first row of B and first rank; of `up` the row and rank if gated."""
    if (width, gated) not in parts.tables:
        layers = parts.rows()
        found = []
        for column, size, row, rank in layers[:1] if gated else layers:
            _, _, up_row, up_rank = layers[1] if gated else (0, 0, -1, 0)
            for start in range(0, size, width):
                here, there = (found_row + start if found_row >= 0 else -1 for found_row in (row, up_row))
                found.append([column + start, min(column + start + width, column + size), here, rank, there, up_rank])
        parts.tables[width, gated] = torch.tensor(found, dtype=torch.int32, device=device)
    return parts.tables[width, gated]


@triton.jit
def low_rank_tile(
    inner, b, row, inside, b_row, real, first_rank, stride_inner, stride_b,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in tl.static_range(0, RANK, RANKS):  # most often once
        k = begin + tl.arange(0, RANKS)
        deep = k < RANK
        at = row[:, None] * stride_inner + first_rank + k[None, :]
        left = tl.load(inner + at, mask=inside[:, None] & deep[None, :], other=0.0)
        right = tl.load(b + (b_row[None, :] * stride_b + k[:, None]), mask=deep[:, None] & real[None, :], other=0.0)
        result = tl.dot(left, right, result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["rows", "scaling"])
def add_low_rank_kernel(
    base, inner, b, table, tiles, order, out, rows, width, scaling,
    stride_base, stride_inner, stride_adapter, stride_b,
    GROUPED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    entry, tile = table + tl.program_id(0) * 6, tl.program_id(1)
    kind: tl.constexpr = out.dtype.element_ty
    offset = tl.arange(0, WIDTH)
    column = tl.load(entry) + offset
    real = column < tl.load(entry + 1)
    b_row, first_rank = tl.load(entry + 2), tl.load(entry + 3)
    own = b
    row, last = tile * ROWS + tl.arange(0, ROWS), rows
    if GROUPED:
        adapter = tl.load(tiles + tile * 3)
        if adapter < 0:
            return
        own += adapter.to(tl.int64) * stride_adapter
        row, last = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS), tl.load(tiles + tile * 3 + 2)
    inside = row < last
    source = row
    if GROUPED:
        source = tl.load(order + row, mask=inside, other=0).to(tl.int32)
    here = inside[:, None] & real[None, :]
    at = source[:, None] * stride_base + column[None, :]
    value = tl.load(base + at, mask=here, other=0.0).to(tl.float32)
    value += scaling * low_rank_tile(
        inner, own, row, inside, b_row + offset, real & (b_row >= 0), first_rank, stride_inner, stride_b,
        PRECISION, ROWS, WIDTH, RANK, RANKS,
    )  # fmt: skip
    value = value.to(kind)
    if GATED:
        up_row, up_rank = tl.load(entry + 4), tl.load(entry + 5)
        up = tl.load(base + (at + width), mask=here, other=0.0).to(tl.float32)
        up += scaling * low_rank_tile(
            inner, own, row, inside, up_row + offset, real & (up_row >= 0), up_rank, stride_inner, stride_b,
            PRECISION, ROWS, WIDTH, RANK, RANKS,
        )  # fmt: skip
        gate = value.to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        value = (active * up.to(kind).to(tl.float32)).to(kind)
    tl.store(out + (source[:, None] * width + column[None, :]), value, mask=here)


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
