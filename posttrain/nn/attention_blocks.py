"""Kernels for blocks of ring attention (parallel/ring.py): output and log-sum-exp of the scores, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from posttrain.parallel.ring import Cut

QUERIES_AT_A_TIME = 1024  # bounds the matrix of scores


@dataclass(slots=True, frozen=True)
class PlainBlocks:
    """Computes blocks by the formula, for every device and type, with capped scores too."""

    scaling: float | None = None
    softcap: float | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what parallel/ring.py::BlockKernel describes."""
        out = q.new_zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float32)
        lse = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
        for part, keys, mask in parts(cut, q.device):
            scores, _ = self.scores(q[part], k[keys], mask)
            found = scores.logsumexp(-1)  # [key heads, heads per key, queries]
            weights = (scores - found[..., None]).exp()
            out[part] = joined(weights @ heads_first(v[keys], v.shape[1]))
            lse[:, part] = found.flatten(0, 1)
        return out, lse

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        cut: Cut,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do what parallel/ring.py::BlockKernel describes."""
        d_q, d_k, d_v = (torch.zeros_like(stream, dtype=torch.float32) for stream in (q, k, v))
        scale, heads = self.scale(q), k.shape[1]
        inner = (d_out.float() * out.float()).sum(-1).T - (0 if d_lse is None else d_lse)  # [heads, queries]
        for part, keys, mask in parts(cut, q.device):
            scores, slope = self.scores(q[part], k[keys], mask)
            rows = (heads, -1, scores.shape[2], 1)
            weights = (scores - lse[:, part].reshape(rows)).exp()
            of_out, queries = heads_first(d_out[part], heads), heads_first(q[part], heads)
            d_v[keys] += (weights.mT @ of_out).sum(1).transpose(0, 1)
            d_scores = weights * (of_out @ heads_first(v[keys], heads).mT - inner[:, part].reshape(rows))
            d_scores = d_scores * scale if slope is None else d_scores * slope * scale
            d_q[part] += joined(d_scores @ heads_first(k[keys], heads))
            d_k[keys] += (d_scores.mT @ queries).sum(1).transpose(0, 1)
        return d_q, d_k, d_v

    def scale(self, q: torch.Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scores [key heads, heads per key, queries, keys], and the derivative of the cap at each."""
        heads, slope = k.shape[1], None
        scores = heads_first(q, heads) @ heads_first(k, heads).mT * self.scale(q)
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped.square()
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)), slope


def parts(cut: Cut, device: torch.device) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Yield some queries of a piece, the keys of that piece, and which of these each query sees; None: all."""
    for (q0, q1), (k0, k1) in zip(pairwise(cut.query_starts), pairwise(cut.key_starts), strict=True):
        for first in range(q0, q1, QUERIES_AT_A_TIME):
            end, mask = min(q1, first + QUERIES_AT_A_TIME), None
            if cut.causal or cut.left is not None:
                aligned = torch.arange(first, end, device=device) - q0 + (k1 - k0) - (q1 - q0)
                back = aligned[:, None] - torch.arange(k1 - k0, device=device)
                mask = back >= 0 if cut.causal else torch.ones_like(back, dtype=torch.bool)
                mask = mask if cut.left is None else mask & (back <= cut.left)
            yield slice(first, end), slice(k0, k1), mask


def heads_first(stream: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[n, heads, d] -> [key heads, heads per key, n, d], in float32."""
    return stream.float().unflatten(1, (key_heads, -1)).permute(1, 2, 0, 3)


def joined(stream: torch.Tensor) -> torch.Tensor:
    """[key heads, heads per key, n, d] -> [n, heads, d]."""
    return stream.permute(2, 0, 1, 3).flatten(1, 2)


@dataclass(slots=True, frozen=True)
class FlashBlocks:
    """Computes blocks by torch's flash kernel for sequences of variable length (CUDA, half precision)."""

    scaling: float | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what parallel/ring.py::BlockKernel describes."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *cut.starts(q.device), *cut.lengths(), 0.0, cut.causal, False, **self.how(cut)
        )
        assert lse.shape == (q.shape[1], len(q)), f"the flash kernel's log-sum-exp has the shape {tuple(lse.shape)}"
        return out, lse

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_lse: torch.Tensor | None,
        cut: Cut,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do what parallel/ring.py::BlockKernel describes."""
        assert d_lse is None, "models with attention sinks do not use the flash kernel"
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        found: Any = torch.ops.aten._flash_attention_backward(
            d_out.contiguous(),
            q,
            k,
            v,
            out,
            lse.contiguous(),
            *cut.starts(q.device),
            *cut.lengths(),
            0.0,
            cut.causal,
            state,
            torch.empty(0, device=q.device),
            **self.how(cut),
        )
        return found

    def how(self, cut: Cut) -> dict[str, Any]:
        """Return the scaling and the window, which the kernel takes by name: -1 is no limit."""
        left = -1 if cut.left is None else cut.left
        return {"scale": self.scaling, "window_size_left": left, "window_size_right": 0 if cut.causal else -1}


__all__ = ["FlashBlocks", "PlainBlocks"]
