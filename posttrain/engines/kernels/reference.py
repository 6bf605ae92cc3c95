"""The small steps of decoding in plain PyTorch, for every device; kernels.py has the same names for a GPU.

Row i of every argument is slot i of the cache. Half-precision results are rounded where the stock modules round, so
that the trainer's pass over the same tokens gives nearly the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from posttrain.nn.kernels.reference import add_norm as add_norm
from posttrain.nn.kernels.reference import gated as gated
from posttrain.nn.kernels.reference import rotate_and_store as rotate_and_store

PART = 16  # rows that attend together on a CPU
BLOCK = 4096  # tokens of the vocabulary whose probabilities are added first

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed number
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(slots=True, frozen=True, eq=False)
class Part:
    """Neighbouring rows that attend together, to as many keys as the longest of them has."""

    rows: slice
    longest: int
    mask: torch.Tensor  # [n, 1, 1, longest]: 0 where a key is seen, else -inf


def attend(
    query: torch.Tensor,  # [n, heads, d]
    keys: torch.Tensor,  # [slots, capacity, kv_heads, d]
    values: torch.Tensor,
    positions: torch.Tensor,  # [n], of the newest key
    longest: int,  # keys beyond are nobody's
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Each row's query over its own slot: [n, heads, d_value]. Each key is read once for all its query heads."""
    parts = parts_of(positions, longest, window, query.dtype)
    return torch.cat([attend_part(query, keys, values, part, scaling) for part in parts])


def parts_of(positions: torch.Tensor, longest: int, window: int | None, dtype: torch.dtype) -> list[Part]:
    """Few rows each on a CPU, where keys that nobody sees cost as much as others; elsewhere all rows at once."""
    count, size = len(positions), PART if positions.device.type == "cpu" else len(positions)
    mask = torch.zeros(count, longest, dtype=dtype, device=positions.device)
    mask = mask.masked_fill_(~visible(positions, longest, window), -torch.inf)[:, None, None]
    parts = []
    for first in range(0, count, size):
        most = longest if size == count else int(positions[first : first + size].max()) + 1
        parts.append(Part(slice(first, first + size), most, mask[first : first + size, ..., :most]))
    return parts


def attend_part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, scaling: float | None
) -> torch.Tensor:
    """The same for the rows of one part."""
    heads, width = query.shape[1:]
    kv_heads = keys.shape[2]
    q = query[part.rows].view(-1, kv_heads, heads // kv_heads, width)
    k, v = (stream[part.rows][: len(q), : part.longest].transpose(1, 2) for stream in (keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=part.mask, scale=scaling).reshape(len(q), heads, -1)


class Bags:
    """Attention of the same rows in float32 on a CPU: a sum of weighted values is what an embedding bag computes.

    torch has a kernel for those that reads each value once, in order; its attention is made for many queries.
    """

    def __init__(self, parts: Sequence[Part], heads: int, values: torch.Tensor) -> None:
        _, capacity, kv_heads, _ = values.shape
        self.parts, self.heads = parts, heads
        self.places: list[torch.Tensor] = []  # of each head's values, [n * heads * longest]
        self.starts: list[torch.Tensor] = []  # where the next head's begin
        head = torch.arange(heads, dtype=torch.int32) // (heads // kv_heads)
        for part in parts:
            rows = torch.arange(part.rows.start, part.rows.start + len(part.mask), dtype=torch.int32)
            first = (rows[:, None] * kv_heads + head) * capacity  # [n, heads]
            self.places.append((first[..., None] + torch.arange(part.longest, dtype=torch.int32)).view(-1))
            self.starts.append(torch.arange(0, len(self.places[-1]), part.longest, dtype=torch.int32))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """[n, heads, d_value]; keys and values lie in memory as [slots, kv_heads, capacity, d]."""
        rows, heads, width = query.shape
        kv_heads, flat = keys.shape[2], values.transpose(1, 2).flatten(0, 2)
        grouped = (query * (width**-0.5 if scaling is None else scaling)).view(rows, kv_heads, -1, width)
        found = []
        for part, places, starts in zip(self.parts, self.places, self.starts, strict=True):
            k = keys[:rows][part.rows, : part.longest].permute(0, 2, 3, 1)
            weights = torch.matmul(grouped[part.rows], k).add_(part.mask).softmax(-1)
            found.append(F.embedding_bag(places, flat, starts, mode="sum", per_sample_weights=weights.view(-1)))
        return torch.cat(found).view(rows, heads, -1)


def visible(positions: torch.Tensor, longest: int, window: int | None) -> torch.Tensor:
    """True where a row's newest token may look: [n, longest]."""
    distance = positions[:, None] - torch.arange(longest, device=positions.device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def draw(
    logits: torch.Tensor,  # [n, V]
    temperature: float,
    least: torch.Tensor | None,  # [n, 1]: tempered logits below it are never drawn
    seeds: torch.Tensor,  # [n]
    places: torch.Tensor,  # [n]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token a row and its log-probability: the place where the cumulative probability passes a random number.

    Probabilities are added in blocks, the blocks in double precision: the sum over a large vocabulary stays exact
    enough, and little has to be computed in double precision.
    """
    rows, vocabulary = logits.shape
    z = logits.float()
    if temperature != 1.0:
        z = z / temperature
    if least is not None:
        z = z.masked_fill(z < least, -torch.inf)
    mass = z.softmax(-1)  # but for the rounding of its sum, which is taken back below
    whole = vocabulary // BLOCK * BLOCK
    sums = [mass[:, :whole].view(rows, -1, BLOCK).sum(-1), mass[:, whole:].sum(-1, keepdim=True)]
    by_block = torch.cat(sums, 1).double().cumsum(-1)
    total = by_block[:, -1:]
    wanted = below(uniforms(seeds, places)[:, None] * total, total)
    block = torch.searchsorted(by_block, wanted, right=True)
    before = torch.where(block > 0, by_block.gather(1, (block - 1).clamp(min=0)), 0.0)
    columns = block * BLOCK + torch.arange(BLOCK, device=z.device)
    inside = mass.gather(1, columns.clamp(max=vocabulary - 1)).masked_fill_(columns >= vocabulary, 0.0)
    inside = inside.double().cumsum(-1)
    token = block * BLOCK + torch.searchsorted(inside, below(wanted - before, inside[:, -1:]), right=True)
    return token[:, 0], (mass.gather(1, token).double().log() - total.log())[:, 0].float()


def below(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Sums and products may round up to the limit, where there is nothing left to draw."""
    return torch.minimum(x, limit.nextafter(torch.zeros_like(limit)))


def uniforms(seeds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each (seed, place), the same whoever else is asked for: splitmix64, twice.

    Twice: neighbouring seeds and places must not resemble each other.
    """
    x = seeds * GOLDEN + places
    for _ in range(2):
        x = x + GOLDEN
        x = (x ^ shifted(x, 30)) * MIX_1
        x = (x ^ shifted(x, 27)) * MIX_2
        x = x ^ shifted(x, 31)
    return shifted(x, 11).double() * 2.0**-53


def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that brings zeros in, which torch has for unsigned numbers only."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
