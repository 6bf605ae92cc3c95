"""The small steps of decoding in plain PyTorch, for every device; kernels.py has the same names for a GPU.

Row i of every argument is slot i of the cache. Half-precision results are rounded where the stock modules round, so
that the trainer's pass over the same tokens gives nearly the same numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from posttrain.models.steps import add_norm as add_norm
from posttrain.models.steps import gated as gated
from posttrain.models.steps import rotate_and_store as rotate_and_store

BLOCK = 4096  # tokens of the vocabulary whose probabilities are added first

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed number
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


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
    rows, heads, width = query.shape
    k, v = (stream[:rows, :longest].transpose(1, 2) for stream in (keys, values))
    grouped = query.view(rows, k.shape[1], heads // k.shape[1], width)
    mask = visible(positions, longest, window)[:, None, None]
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scaling).reshape(rows, heads, -1)


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
    top = z.amax(-1, keepdim=True)
    mass = F.pad((z - top).exp_(), (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    by_block = mass.sum(-1).double().cumsum(-1)
    total = by_block[:, -1:]
    wanted = below(uniforms(seeds, places)[:, None] * total, total)
    block = torch.searchsorted(by_block, wanted, right=True)
    before = torch.where(block > 0, by_block.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = mass[torch.arange(rows, device=z.device), block[:, 0]].double().cumsum(-1)
    token = block * BLOCK + torch.searchsorted(inside, below(wanted - before, inside[:, -1:]), right=True)
    return token[:, 0], (z.gather(1, token) - top - total.log())[:, 0].float()


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
