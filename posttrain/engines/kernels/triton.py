"""The kernels of a decode step in Triton, and those of a layer; reference.py documents the functions.

Imported only where there is a GPU with Triton. A row's work is one program (or one per head), so that no result of a
row depends on other rows.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803  (Triton kernels have untyped arguments and upper-case constants)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.nn.kernels.reference import Exponents
from posttrain.nn.kernels.triton import add_low_rank as add_low_rank
from posttrain.nn.kernels.triton import add_norm as add_norm
from posttrain.nn.kernels.triton import combine_rows as combine_rows
from posttrain.nn.kernels.triton import expert_linear as expert_linear
from posttrain.nn.kernels.triton import quantize_rows as quantize_rows
from posttrain.nn.kernels.triton import quantized_linear as quantized_linear
from posttrain.nn.kernels.triton import rotate_and_store as rotate_and_store
from posttrain.nn.kernels.triton import route as route
from posttrain.nn.kernels.triton import silu_and_mul as silu_and_mul
from posttrain.nn.kernels.triton import sort_by_expert as sort_by_expert

BLOCK = 4096
PROGRAMS = 264  # that keep a GPU busy; long caches of few rows are split to reach that number
SPLIT_FROM = 512  # positions per split, at least
LATENT_HEADS = 16  # query heads of a program that attends to latents

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    longest: int,  # not used: a CUDA graph must serve every length
    scaling: float | None,
    window: int | None,
    exponents: Exponents | None = None,
) -> torch.Tensor:
    rows, heads, width = query.shape
    size, kv_heads = keys.shape[1:3]
    capacity = table.shape[1] * size
    group, width_block = heads // kv_heads, max(16, triton.next_power_of_2(width))
    splits = max(1, min(-(-PROGRAMS // (rows * kv_heads)), capacity // SPLIT_FROM))
    out = torch.empty_like(query)
    partial = query.new_empty(splits, rows, heads, width, dtype=torch.float32) if splits > 1 else out
    weights = query.new_empty(2, splits, rows, heads, dtype=torch.float32) if splits > 1 else out
    block, warps, stages = tile(query.element_size() * width)
    block = min(block, size)
    assert size % block == 0 and block >= 16, f"blocks of {size} positions: the kernel reads {block} of one at a time"
    attend_kernel[(rows, kv_heads, splits)](
        query, keys, values, *(exponents or (None, None)), table, positions, partial, weights,
        width**-0.5 if scaling is None else scaling, table.stride(0), rows, window or capacity, splits,
        KV_HEADS=kv_heads, GROUP=group, GROUP_BLOCK=max(16, triton.next_power_of_2(group)), WIDTH=width,
        WIDTH_BLOCK=width_block, SIZE=size, BLOCK=block, SPLIT=splits > 1, ROUNDED=exponents is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows * heads,)](
            partial, weights, out, rows * heads, splits, WIDTH=width, BLOCK=width_block, num_warps=1
        )
    return out


def tile(bytes_per_key: int) -> tuple[int, int, int]:
    """(keys per iteration, warps, pipeline stages), as measured; the stages must fit in shared memory."""
    return (64, 4, 2) if bytes_per_key <= 256 else (32, 4, 2)


@triton.jit(do_not_specialize=["columns", "rows", "window", "splits"])
def attend_kernel(
    query, keys, values, key_exponents, value_exponents, table, positions, out, weights, scaling, columns, rows,
    window, splits, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    member, column = tl.arange(0, GROUP_BLOCK), tl.arange(0, WIDTH_BLOCK)
    head = kv_head * GROUP + member
    at = (row * KV_HEADS * GROUP + head)[:, None] * WIDTH + column[None, :]
    real = (member < GROUP)[:, None] & (column < WIDTH)[None, :]
    q = tl.load(query + at, mask=real, other=0.0)
    end = tl.load(positions + row).to(tl.int32) + 1
    first = tl.maximum(end - window, 0)
    begin = first // BLOCK * BLOCK  # the keys of an iteration are in one block of the cache
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK) * BLOCK
        begin += split * share
        end = tl.minimum(begin + share, end)
    most = tl.full([GROUP_BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    gathered = tl.zeros([GROUP_BLOCK, WIDTH_BLOCK], tl.float32)
    entries = table + row * columns
    inner = tl.arange(0, BLOCK)
    block = tl.load(entries + begin // SIZE, mask=begin < end, other=0)
    for start in range(begin, end, BLOCK):
        place = start + inner
        visible = (place >= first) & (place < end)
        there = visible[:, None] & (column < WIDTH)[None, :]
        stored = block.to(tl.int64) * SIZE + start % SIZE + inner
        spot = stored[:, None] * (KV_HEADS * WIDTH) + kv_head * WIDTH + column[None, :]
        # The next iteration's entry is loaded early: its keys can then be loaded without waiting for it.
        block = tl.load(entries + (start + BLOCK) // SIZE, mask=start + BLOCK < end, other=0)
        k = tl.load(keys + spot, mask=there, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if ROUNDED:
            scores *= power_of_two(key_exponents + stored * KV_HEADS + kv_head, visible)[None, :]
        scores = tl.where(visible[None, :], scores, -1.0e30)
        higher = tl.maximum(most, tl.max(scores, 1))
        mass = tl.exp(scores - higher[:, None])
        fade = tl.exp(most - higher)
        v = tl.load(values + spot, mask=there, other=0.0).to(q.dtype)
        total = total * fade + tl.sum(mass, 1)
        if ROUNDED:
            mass *= power_of_two(value_exponents + stored * KV_HEADS + kv_head, visible)[None, :]
        gathered = gathered * fade[:, None] + tl.dot(mass.to(v.dtype), v, input_precision="ieee")
        most = higher
    gathered = gathered / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + split * rows * KV_HEADS * GROUP * WIDTH + at, gathered.to(out.dtype.element_ty), mask=real)
    if SPLIT:
        flat = (split * rows + row) * KV_HEADS * GROUP + head
        tl.store(weights + flat, most, mask=member < GROUP)
        tl.store(weights + splits * rows * KV_HEADS * GROUP + flat, total, mask=member < GROUP)


@triton.jit
def power_of_two(exponents, mask):
    """As reference.power_of_two, of the exponents at these addresses."""
    exponent = tl.load(exponents, mask=mask, other=0).to(tl.int32)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


def attend_latents(
    query: torch.Tensor,
    rotated: torch.Tensor,
    latents: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    longest: int,  # not used, as in `attend`
    scaling: float,
) -> torch.Tensor:
    rows, heads, rank = query.shape
    size, width = latents.shape[1], latents.shape[3]
    query, rotated = query.contiguous(), rotated.contiguous()
    parts = triton.cdiv(heads, LATENT_HEADS)
    splits = max(1, min(-(-PROGRAMS // (rows * parts)), table.shape[1] * size // SPLIT_FROM))
    out = torch.empty_like(query)
    partial = query.new_empty(splits, rows, heads, rank, dtype=torch.float32) if splits > 1 else out
    weights = query.new_empty(2, splits, rows, heads, dtype=torch.float32) if splits > 1 else out
    block = min(32 if query.element_size() == 2 else 16, size)  # two stages of its latents fit in shared memory
    assert size % block == 0 and block >= 16, f"blocks of {size} positions: the kernel reads {block} of one at a time"
    attend_latents_kernel[(rows, parts, splits)](
        query, rotated, latents, table, positions, partial, weights, scaling, table.stride(0), rows, splits,
        HEADS=heads, HEADS_BLOCK=LATENT_HEADS, RANK=rank, RANK_BLOCK=max(16, triton.next_power_of_2(rank)),
        ROPE=width - rank, ROPE_BLOCK=max(16, triton.next_power_of_2(width - rank)), SIZE=size, BLOCK=block,
        SPLIT=splits > 1, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows * heads,)](
            partial, weights, out, rows * heads, splits, WIDTH=rank, BLOCK=triton.next_power_of_2(rank), num_warps=1
        )
    return out


@triton.jit(do_not_specialize=["columns", "rows", "splits"])
def attend_latents_kernel(
    query, rotated, latents, table, positions, out, weights, scaling, columns, rows, splits, HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend from some heads of a row. A block of latents is loaded once, as keys and as values."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    column, angle = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    at = (row * HEADS + head)[:, None] * RANK + column[None, :]
    real = (head < HEADS)[:, None] & (column < RANK)[None, :]
    q = tl.load(query + at, mask=real, other=0.0)
    turned = (head < HEADS)[:, None] & (angle < ROPE)[None, :]
    q_rot = tl.load(rotated + (row * HEADS + head)[:, None] * ROPE + angle[None, :], mask=turned, other=0.0)
    end = tl.load(positions + row).to(tl.int32) + 1
    begin = 0
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end, splits), BLOCK) * BLOCK
        begin = split * share
        end = tl.minimum(begin + share, end)
    most = tl.full([HEADS_BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([HEADS_BLOCK], tl.float32)
    gathered = tl.zeros([HEADS_BLOCK, RANK_BLOCK], tl.float32)
    entries = table + row * columns
    inner = tl.arange(0, BLOCK)
    block = tl.load(entries + begin // SIZE, mask=begin < end, other=0)
    for start in range(begin, end, BLOCK):
        visible = start + inner < end
        stored = latents + (block.to(tl.int64) * SIZE + start % SIZE + inner)[:, None] * (RANK + ROPE)
        block = tl.load(entries + (start + BLOCK) // SIZE, mask=start + BLOCK < end, other=0)  # of the next iteration
        c = tl.load(stored + column[None, :], mask=visible[:, None] & (column < RANK)[None, :], other=0.0)
        k_rot = tl.load(stored + RANK + angle[None, :], mask=visible[:, None] & (angle < ROPE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(c), input_precision="ieee")
        scores = tl.dot(q_rot, tl.trans(k_rot), acc=scores, input_precision="ieee") * scaling
        scores = tl.where(visible[None, :], scores, -1.0e30)
        higher = tl.maximum(most, tl.max(scores, 1))
        mass = tl.exp(scores - higher[:, None])
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(mass, 1)
        gathered = gathered * fade[:, None] + tl.dot(mass.to(c.dtype), c, input_precision="ieee")
        most = higher
    gathered = gathered / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + split * rows * HEADS * RANK + at, gathered.to(out.dtype.element_ty), mask=real)
    if SPLIT:
        flat = (split * rows + row) * HEADS + head
        tl.store(weights + flat, most, mask=head < HEADS)
        tl.store(weights + splits * rows * HEADS + flat, total, mask=head < HEADS)


@triton.jit(do_not_specialize=["items", "splits"])
def combine_kernel(partial, weights, out, items, splits, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Combine the splits of one head's attention, each weighted by its share of the softmax."""
    item, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    most, total = -1.0e30, 0.0
    gathered = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        flat = split * items + item
        part = tl.load(weights + flat)
        higher = tl.maximum(most, part)
        share = tl.exp(part - higher) * tl.load(weights + splits * items + flat)
        fade = tl.exp(most - higher)
        gathered = gathered * fade + share * tl.load(partial + flat * WIDTH + column, mask=inside, other=0.0)
        total = total * fade + share
        most = higher
    tl.store(out + item * WIDTH + column, (gathered / total).to(out.dtype.element_ty), mask=inside)


def draw(
    logits: torch.Tensor, temperature: float, least: torch.Tensor | None, seeds: torch.Tensor, counters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    largest = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(largest)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    truncated = least is not None
    block_sums_kernel[(rows, blocks)](
        logits, least, largest, sums, vocabulary, blocks, temperature, TRUNCATED=truncated, BLOCK=BLOCK, num_warps=8
    )
    pick_kernel[(rows,)](
        logits, least, largest, sums, seeds, counters, tokens, logprobs, vocabulary, blocks, temperature,
        TRUNCATED=truncated, BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def tempered_block(logits, least, row, column, vocabulary, temperature, TRUNCATED: tl.constexpr):
    """Tempered logits of a row, -inf where nothing is sampled."""
    z = tl.load(logits + row * vocabulary + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
    z = z / temperature
    if TRUNCATED:
        z = tl.where(z < tl.load(least + row), -float("inf"), z)
    return z


@triton.jit
def block_sums_kernel(
    logits, least, largest, sums, vocabulary, blocks, temperature, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    z = tempered_block(logits, least, row, column, vocabulary, temperature, TRUNCATED)
    top = tl.max(z)
    tl.store(largest + row * blocks + block, top)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(z - tl.where(top == -float("inf"), 0.0, top))))


@triton.jit
def pick_kernel(
    logits, least, largest, sums, seeds, counters, tokens, logprobs, vocabulary, blocks, temperature,
    TRUNCATED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    tops = tl.load(largest + row * blocks + index, mask=index < blocks, other=-float("inf"))
    parts = tl.load(sums + row * blocks + index, mask=index < blocks, other=0.0)
    top = tl.max(tops)
    mass = (parts * tl.exp(tops - top)).to(tl.float64)
    total = tl.sum(mass)
    wanted = uniform(tl.load(seeds + row), tl.load(counters + row)) * total
    reached = tl.cumsum(mass, 0)
    found = (reached > wanted) & (mass > 0)
    last = tl.max(tl.where(mass > 0, index, 0))  # if rounding leaves no block
    block = tl.minimum(tl.min(tl.where(found, index, BLOCKS)), last)
    wanted -= tl.sum(tl.where(index < block, mass, 0.0))
    inner = tl.arange(0, BLOCK)
    z = tempered_block(logits, least, row, block * BLOCK + inner, vocabulary, temperature, TRUNCATED)
    likely = tl.exp(z - top)
    found = (tl.cumsum(likely, 0) > wanted.to(tl.float32)) & (likely > 0)
    last = tl.max(tl.where(likely > 0, inner, 0))
    chosen = tl.minimum(tl.min(tl.where(found, inner, BLOCK)), last)
    tl.store(tokens + row, (block * BLOCK + chosen).to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(inner == chosen, z, 0.0)) - top - tl.log(total).to(tl.float32))


@triton.jit
def uniform(seed, counter):
    """As reference.uniforms."""
    x = seed.to(tl.uint64, bitcast=True) * GOLDEN + counter.to(tl.uint64, bitcast=True)
    for _ in tl.static_range(2):
        x = x + GOLDEN
        x = (x ^ (x >> 30)) * MIX_1
        x = (x ^ (x >> 27)) * MIX_2
        x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
