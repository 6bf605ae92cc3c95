"""Low-rank adapters, one for all rows or one for each."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, N803  (code that Triton compiles has its own conventions)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.nn.kernels.reference import LowRankParts, RowsByAdapter
from posttrain.nn.kernels.triton.experts import sort_by_expert

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
