"""Both kernels for blocks of ring attention give the output, log-sum-exp and gradients of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.nn.attention_blocks import FlashBlocks, PlainBlocks
from posttrain.parallel.ring import Cut

CUTS = {
    "causal pieces": Cut((0, 5, 64, 128), (0, 5, 64, 128), True),
    "causal pieces, window": Cut((0, 5, 64, 128), (0, 5, 64, 128), True, 8),
    "rectangle": Cut((0, 128), (0, 80), False),
    "rectangle, window": Cut((0, 40), (0, 90), False, 10),
    "one query": Cut((0, 1), (0, 33), False),
}


def streams(cut: Cut, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, and a gradient of the output."""
    generator, a, b = torch.Generator().manual_seed(0), cut.query_starts[-1], cut.key_starts[-1]
    shapes = ((a, 4, 32), (b, 2, 32), (b, 2, 32), (a, 4, 32))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def outcome(kernel: Any, cut: Cut, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    q, k, v, d_out = streams(cut, device, dtype)
    out, lse = kernel.forward(q, k, v, cut)
    return [out, lse, *kernel.backward(d_out, q, k, v, out.to(dtype), lse, None, cut)]


@pytest.mark.parametrize("name", CUTS)
def test_the_plain_kernel_is_differentiated_correctly(name, monkeypatch):
    monkeypatch.setattr("posttrain.nn.attention_blocks.QUERIES_AT_A_TIME", 16)
    cut = CUTS[name]
    q, k, v, d_out = (stream.requires_grad_() for stream in streams(cut, "cpu", torch.float32))
    out, lse = PlainBlocks().forward(q, k, v, cut)
    expected = torch.autograd.grad((out * d_out.detach()).sum(), (q, k, v))
    found = outcome(PlainBlocks(), cut, "cpu", torch.float32)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    for gradient, other in zip(found[2:], expected, strict=True):
        assert float((gradient - other).norm() / other.norm()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUTS)
def test_the_flash_kernel_gives_the_same(name):
    exact = outcome(PlainBlocks(), CUTS[name], "cuda", torch.float32)
    found = outcome(FlashBlocks(), CUTS[name], "cuda", torch.bfloat16)
    for ours, theirs in zip(found, exact, strict=True):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.02
