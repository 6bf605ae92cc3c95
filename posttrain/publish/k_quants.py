"""Quantizes weights to GGUF's Q4_K and Q6_K, which the package gguf reads but does not write.

The search for scales is that of llama.cpp's reference (ggml-quants.c: make_qkx2_quants, make_qx_quants), over all
blocks at once. A block has 256 weights of one row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 256
CHUNK = 2**11  # blocks that are quantized together: their temporary tensors stay in the processor's cache
SMALLEST = 1e-15  # a group whose weights are all smaller is zero


def quantize(weights: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the bytes of a matrix [rows, columns] as Q4_K or Q6_K: [rows, bytes]; columns is a multiple of 256."""
    rows, columns = weights.shape
    assert columns % BLOCK == 0, "a row must consist of whole blocks"
    quantize_blocks: Callable[[torch.Tensor], torch.Tensor] = {"Q4_K": q4_k_blocks, "Q6_K": q6_k_blocks}[kind]
    blocks = weights.reshape(-1, BLOCK)
    return torch.cat([quantize_blocks(chunk.float()) for chunk in blocks.split(CHUNK)]).view(rows, -1)


def q4_k_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Quantize blocks [N, 256] to Q4_K [N, 144]: w = d * scale * q - dmin * min, with 8 scales and minima per block."""
    groups = blocks.view(-1, 8, 32)
    scales, minima = affine_scales(groups)
    largest_scale, largest_min = (found.amax(1, keepdim=True).clamp(min=0) for found in (scales, minima))
    d, d_min = (largest_scale / 63).half(), (largest_min / 63).half()
    scale_codes = codes_of(scales, largest_scale, 63)
    min_codes = codes_of(minima, largest_min, 63)
    step = (d.float() * scale_codes)[..., None]
    offset = (d_min.float() * min_codes)[..., None]
    codes = ((groups + offset) / step.where(step != 0, torch.ones(()))).round_().clamp_(0, 15) * (step != 0)
    low, high = codes.to(torch.uint8).view(-1, 4, 2, 32).unbind(2)
    return torch.cat(
        [
            d.view(torch.uint8),
            d_min.view(torch.uint8),
            pack_six_bits(scale_codes.to(torch.uint8), min_codes.to(torch.uint8)),
            (low | high << 4).flatten(1),
        ],
        1,
    )


def codes_of(values: torch.Tensor, largest: torch.Tensor, limit: int) -> torch.Tensor:
    """Round values to integers from 0 to `limit`, which stands for the largest."""
    inverse = torch.where(largest > 0, limit / largest, 0.0)
    return (values * inverse).round_().clamp_(0, limit)


def pack_six_bits(scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """Pack eight scales and eight minima of 6 bits into 12 bytes, as llama.cpp does."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return torch.cat([first, second, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], 1)


def affine_scales(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and negated minimum of each group of 32 that minimise the weighted squared error of 4-bit codes."""
    importance = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True)
    constant = high == low
    span = torch.where(constant, torch.ones(()), high - low)
    sum_w = importance.sum(-1, keepdim=True)
    weighted = importance * groups
    sum_x = weighted.sum(-1, keepdim=True)
    scale, minimum = span / 15, low
    codes = ((groups - low) * (15 / span)).round_().clamp_(0, 15)
    error = (importance * (scale * codes + minimum - groups).square_()).sum(-1, keepdim=True)
    for number in range(21):  # each starts from the best minimum so far
        span = torch.where(constant, torch.ones(()), high - minimum)
        codes = ((groups - minimum) * ((14 + 0.1 * number) / span)).round_().clamp_(0, 15)
        product = importance * codes
        sum_l, sum_l2 = product.sum(-1, keepdim=True), (product * codes).sum(-1, keepdim=True)
        sum_xl = (weighted * codes).sum(-1, keepdim=True)
        determinant = sum_w * sum_l2 - sum_l.square()
        usable = determinant > 0
        divisor = torch.where(usable, determinant, 1.0)
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / divisor
        new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / divisor
        positive = new_minimum > 0  # the format has no positive minimum
        new_scale = torch.where(positive, sum_xl / sum_l2, new_scale)
        new_minimum = new_minimum.clamp(max=0)
        new_error = (importance * (new_scale * codes + new_minimum - groups).square_()).sum(-1, keepdim=True)
        better = usable & (new_error < error)
        scale, minimum, error = (
            torch.where(better, new, old)
            for new, old in ((new_scale, scale), (new_minimum, minimum), (new_error, error))
        )
    scale = torch.where(constant, 0.0, scale)
    return scale.squeeze(-1), -minimum.squeeze(-1)


def q6_k_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Quantize blocks [N, 256] to Q6_K [N, 210]: w = d * scale * q, with 16 scales of 8 bits per block."""
    groups = blocks.view(-1, 16, 16)
    scales = symmetric_scales(groups)
    largest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    zero = largest.abs() < SMALLEST
    inverse = -128 / torch.where(zero, torch.ones(()), largest)
    d = torch.where(zero, 0.0, 1 / inverse).half()
    scale_codes = torch.where(zero, 0.0, scales * inverse).round_().clamp_(-128, 127)
    step = (d.float() * scale_codes)[..., None]
    codes = (groups / step.where(step != 0, torch.ones(()))).round_().clamp_(-32, 31) * (step != 0) + 32
    codes = torch.where(zero[..., None], 0.0, codes).to(torch.uint8)
    one, two, three, four = codes.view(-1, 2, 4, 32).unbind(2)  # halves of a block, of four rows of 32 each
    low = torch.stack([one & 15 | (three & 15) << 4, two & 15 | (four & 15) << 4], 2)
    high = one >> 4 | (two >> 4) << 2 | (three >> 4) << 4 | (four >> 4) << 6
    return torch.cat(
        [low.flatten(1), high.flatten(1), scale_codes.to(torch.int8).view(torch.uint8), d.view(torch.uint8)], 1
    )


def symmetric_scales(groups: torch.Tensor) -> torch.Tensor:
    """Return the scale of each group of 16 that minimises the squared error of 6-bit codes, weighted by the squares."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    zero = largest.abs() < SMALLEST
    largest = torch.where(zero, torch.ones(()), largest)
    importance = groups.square()
    weighted = importance * groups
    scale = best = torch.zeros_like(largest)
    for number in (0, *range(-9, 0), *range(1, 10)):
        codes = (groups * (-(32 + 0.1 * number) / largest)).round_().clamp_(-32, 31)
        sum_xl = (weighted * codes).sum(-1, keepdim=True)
        sum_l2 = (importance * codes.square()).sum(-1, keepdim=True)
        found = sum_l2 > 0
        new_scale = torch.where(found, sum_xl / torch.where(found, sum_l2, 1.0), 0.0)
        better = found & (sum_xl.square() > best * sum_l2)
        scale, best = (torch.where(better, new, old) for new, old in ((new_scale, scale), (new_scale * sum_xl, best)))
    return torch.where(zero, 0.0, scale).squeeze(-1)
