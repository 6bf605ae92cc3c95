"""The kernels of a decode step in plain PyTorch, for every device; triton.py has the same functions for a GPU.

Row i of every argument is slot i of the cache, whose blocks are in row i of its table. Half-precision results are
rounded where the stock modules round, so that the trainer's forward pass over the same tokens gives nearly the same
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from posttrain.nn.kernels.reference import Exponents, restore_vectors
from posttrain.nn.kernels.reference import add_low_rank as add_low_rank
from posttrain.nn.kernels.reference import add_norm as add_norm
from posttrain.nn.kernels.reference import combine_rows as combine_rows
from posttrain.nn.kernels.reference import expert_linear as expert_linear
from posttrain.nn.kernels.reference import quantize_rows as quantize_rows
from posttrain.nn.kernels.reference import quantized_linear as quantized_linear
from posttrain.nn.kernels.reference import rotate_and_store as rotate_and_store
from posttrain.nn.kernels.reference import route as route
from posttrain.nn.kernels.reference import silu_and_mul as silu_and_mul
from posttrain.nn.kernels.reference import sort_by_expert as sort_by_expert

ROWS_PER_BLOCK = 16  # rows that attend together on a CPU
BLOCK = 4096  # tokens of the vocabulary whose probabilities are summed in float32

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed integer
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(slots=True, frozen=True, eq=False)
class RowBlock:
    """Neighbouring rows that attend together, over as many keys as the longest of them has."""

    rows: slice
    longest: int
    mask: torch.Tensor  # [n, 1, 1, longest]: 0 where a key is visible, else -inf


def attend(
    query: torch.Tensor,  # [n, heads, d]
    keys: torch.Tensor,  # [blocks, block size, kv_heads, d]
    values: torch.Tensor,
    table: torch.Tensor,  # [n, blocks of a slot]
    positions: torch.Tensor,  # [n], of the newest key
    longest: int,  # no row has more keys
    scaling: float | None,
    window: int | None,
    exponents: Exponents | None = None,  # of a cache of 8-bit floats
) -> torch.Tensor:
    """Attend from each row to its own slot: [n, heads, d_value]. Each key is read once for all its query heads."""
    blocks = row_blocks(positions, longest, window, query.dtype)
    return torch.cat([attend_block(query, keys, values, table, block, scaling, exponents) for block in blocks])


def attend_latents(
    query: torch.Tensor,  # [n, heads, rank]
    rotated: torch.Tensor,  # [n, heads, rope]: the part of the queries that meets the rotated part of the keys
    latents: torch.Tensor,  # [blocks, block size, 1, rank + rope]
    table: torch.Tensor,
    positions: torch.Tensor,
    longest: int,
    scaling: float,
) -> torch.Tensor:
    """Attend from each row to the latents of its own slot: [n, heads, rank]. Their first `rank` numbers are values."""
    values = latents[..., : query.shape[2]]
    return attend(torch.cat([query, rotated], 2), latents, values, table, positions, longest, scaling, None)


def gather_blocks(stream: torch.Tensor, table: torch.Tensor, longest: int) -> torch.Tensor:
    """Copy the first positions of each slot out of their blocks, [blocks, size, heads, d]: [n, heads, longest, d]."""
    _, size, heads, width = stream.shape
    used = table[:, : -(-longest // size)]
    if stream.stride(1) < stream.stride(2):  # a block is stored by head
        flat = stream.transpose(1, 2).reshape(-1, size * width)
        by_head = used[:, None].long() * heads + torch.arange(heads, device=table.device)[:, None]
        return flat.index_select(0, by_head.view(-1)).view(len(table), heads, -1, width)[:, :, :longest]
    found = stream.index_select(0, used.reshape(-1)).view(len(table), -1, heads, width)
    return found[:, :longest].transpose(1, 2)


def gather_streams(
    streams: Sequence[torch.Tensor], table: torch.Tensor, longest: int, exponents: Exponents | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Copy keys and values out of their blocks, see `gather_blocks`; of 8-bit floats what they stand for."""
    if exponents is None:
        return [gather_blocks(stream, table, longest) for stream in streams]
    found = []
    for stream, exponent in zip(streams, exponents, strict=True):
        rounded = gather_blocks(stream.view(torch.uint8), table, longest).view(stream.dtype)
        found.append(restore_vectors(rounded, gather_blocks(exponent[..., None], table, longest)[..., 0], dtype))
    return found


def row_blocks(positions: torch.Tensor, longest: int, window: int | None, dtype: torch.dtype) -> list[RowBlock]:
    """Divide rows into small blocks on a CPU, where masked keys cost as much as others; elsewhere into one block."""
    count, size = len(positions), ROWS_PER_BLOCK if positions.device.type == "cpu" else len(positions)
    mask = torch.zeros(count, longest, dtype=dtype, device=positions.device)
    mask = mask.masked_fill_(~visible_mask(positions, longest, window), -torch.inf)[:, None, None]
    blocks = []
    for first in range(0, count, size):
        most = longest if size == count else int(positions[first : first + size].max()) + 1
        blocks.append(RowBlock(slice(first, first + size), most, mask[first : first + size, ..., :most]))
    return blocks


def attend_block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    block: RowBlock,
    scaling: float | None,
    exponents: Exponents | None,
) -> torch.Tensor:
    """Attend from the rows of one block."""
    heads, width = query.shape[1:]
    kv_heads = keys.shape[2]
    q = query[block.rows].view(-1, kv_heads, heads // kv_heads, width)
    k, v = gather_streams((keys, values), table[block.rows], block.longest, exponents, query.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=block.mask, scale=scaling).reshape(len(q), heads, -1)


class EmbeddingBagAttention:
    """Attention of one decode step in float32 on a CPU, with an embedding bag as the weighted sum of values.

    torch's kernel for embedding bags reads each value once, in order and where it is; its attention kernel is made for
    many queries. Keys are copied out of their blocks, a few rows at a time, into memory that stays in the CPU's cache.
    """

    def __init__(self, blocks: Sequence[RowBlock], heads: int, values: torch.Tensor, table: torch.Tensor) -> None:
        _, size, kv_heads, width = values.shape
        self.blocks, self.heads = blocks, heads
        self.indices: list[torch.Tensor] = []  # of each head's values, [n * heads * longest]
        self.starts: list[torch.Tensor] = []  # where the values of the next head begin
        self.key_blocks: list[torch.Tensor] = []  # of each row and head, [n * kv_heads * blocks]
        self.copied_keys = values.new_empty(0)  # reused by all layers
        dtype = torch.int32 if values.numel() // width < 2**31 else torch.int64
        table = table.to(dtype)
        kv_head = torch.arange(kv_heads, dtype=dtype)
        head = torch.arange(heads, dtype=dtype) // (heads // kv_heads)
        position = torch.arange(max(block.longest for block in blocks), dtype=dtype)
        column, offset = position // size, position % size
        for block in blocks:
            rows, longest = table[block.rows], block.longest
            first = (rows * (kv_heads * size)).index_select(1, column[:longest]) + offset[:longest]  # [n, longest]
            self.indices.append((first[:, None] + (head * size)[:, None]).view(-1))
            self.starts.append(torch.arange(0, len(self.indices[-1]), longest, dtype=dtype))
            used = rows[:, None, : -(-longest // size)]
            self.key_blocks.append((used * kv_heads + kv_head[:, None]).view(-1))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Return [n, heads, d_value]; the memory layout of keys and values is [blocks, kv_heads, block size, d]."""
        rows, heads, width = query.shape
        _, size, kv_heads, _ = keys.shape
        flat_keys = keys.transpose(1, 2).view(-1, size * width)
        flat_values = values.transpose(1, 2).view(-1, values.shape[3])
        grouped = (query * (width**-0.5 if scaling is None else scaling)).view(rows, kv_heads, -1, width)
        outputs = []
        for i, block in enumerate(self.blocks):
            copied = self.copy_keys(flat_keys, self.key_blocks[i]).view(len(block.mask), kv_heads, -1, width)
            k = copied[:, :, : block.longest].transpose(2, 3)
            weights = torch.matmul(grouped[block.rows], k).add_(block.mask).softmax(-1).view(-1)
            bag = F.embedding_bag(self.indices[i], flat_values, self.starts[i], mode="sum", per_sample_weights=weights)
            outputs.append(bag)
        return torch.cat(outputs).view(rows, heads, -1)

    def copy_keys(self, keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return keys[indices], which is valid until the next call."""
        size = len(indices) * keys.shape[1]
        if self.copied_keys.numel() < size:
            self.copied_keys = keys.new_empty(max(map(len, self.key_blocks)) * keys.shape[1])
        out = self.copied_keys[:size].view(len(indices), -1)
        return torch.index_select(keys, 0, indices, out=out)


def visible_mask(positions: torch.Tensor, longest: int, window: int | None) -> torch.Tensor:
    """Return [n, longest], True where a row's newest token attends."""
    distance = positions[:, None] - torch.arange(longest, device=positions.device)
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)


def draw(
    logits: torch.Tensor,  # [n, V]
    temperature: float,
    least: torch.Tensor | None,  # [n, 1]: tempered logits below it are never sampled
    seeds: torch.Tensor,  # [n]
    counters: torch.Tensor,  # [n]: index of the token in its completion
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row, where the cumulative probability passes a random number; with its log-probability.

    Probabilities are summed in blocks, and the blocks in double precision: the sum over a large vocabulary stays
    exact enough, and little is computed in double precision.
    """
    rows, vocabulary = logits.shape
    z = logits.float()
    if temperature != 1.0:
        z = z / temperature
    if least is not None:
        z = z.masked_fill(z < least, -torch.inf)
    mass = z.softmax(-1)  # sums to 1 up to rounding, which is corrected below
    whole = vocabulary // BLOCK * BLOCK
    sums = [mass[:, :whole].view(rows, -1, BLOCK).sum(-1), mass[:, whole:].sum(-1, keepdim=True)]
    by_block = torch.cat(sums, 1).double().cumsum(-1)
    total = by_block[:, -1:]
    wanted = below(uniforms(seeds, counters)[:, None] * total, total)
    block = torch.searchsorted(by_block, wanted, right=True)
    before = torch.where(block > 0, by_block.gather(1, (block - 1).clamp(min=0)), 0.0)
    columns = block * BLOCK + torch.arange(BLOCK, device=z.device)
    inside = mass.gather(1, columns.clamp(max=vocabulary - 1)).masked_fill_(columns >= vocabulary, 0.0)
    inside = inside.double().cumsum(-1)
    token = block * BLOCK + torch.searchsorted(inside, below(wanted - before, inside[:, -1:]), right=True)
    return token[:, 0], (mass.gather(1, token).double().log() - total.log())[:, 0].float()


def below(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Clip to less than the limit: sums and products may round up to it, where no token is left."""
    return torch.minimum(x, limit.nextafter(torch.zeros_like(limit)))


def uniforms(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each (seed, counter), independent of the other rows: splitmix64, applied twice.

    Twice, so that neighbouring seeds and counters give unrelated numbers.
    """
    x = seeds * GOLDEN + counters
    for _ in range(2):
        x = x + GOLDEN
        x = (x ^ shifted(x, 30)) * MIX_1
        x = (x ^ shifted(x, 27)) * MIX_2
        x = x ^ shifted(x, 31)
    return shifted(x, 11).double() * 2.0**-53


def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, filling with zeros; torch has that for unsigned integers only."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
