"""Ring attention over chunks of a row equals attention over the whole row, with its gradients."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from posttrain.nn.attention import causal_mask, plain_attention
from posttrain.nn.attention_blocks import PlainBlocks
from posttrain.parallel.ring import Ring, RingAttention, RingPlan
from tests.invariance.worlds import once, run_world

HALF, WIDTH, RANKS = 7, 8, 3
LENGTHS = {  # of samples in a row of 42 tokens
    "one sample": (42,),
    "padding at the end": (30,),
    "two halves": (21, 21),
    "many": (5, 2, 9, 1, 14, 3, 8),
    "borders of chunks": (7, 14, 7, 14),
    "short": (3, 3, 3),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaling": {"scaling": 0.7},
    "window": {"window": 9},
    "small window": {"window": 2},
    "cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 12, "softcap": 2.0, "sinks": True, "scaling": 0.5},
}


def streams() -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, sinks, and weights of the output, over the whole row."""
    generator = torch.Generator().manual_seed(0)
    size = 2 * RANKS * HALF
    shapes = (size, 4, WIDTH), (size, 2, WIDTH), (size, 2, WIDTH + 4), (4,), (size, 4, WIDTH + 4)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(lengths: tuple[int, ...], kind: dict[str, Any]) -> list[torch.Tensor]:
    """Return output and gradients by the formula, sample by sample; 0 where there is no sample."""
    q, k, v, sinks, weight = streams()
    leaves = [stream.requires_grad_() for stream in (q, k, v, sinks)]
    outputs = []
    for first, end in pairwise((0, *accumulate(lengths))):
        rows = (stream[first:end].transpose(0, 1)[None] for stream in (q, k, v))
        query, key, value = (row.repeat_interleave(4 // row.shape[1], 1) for row in rows)
        mask = causal_mask(end - first, kind.get("window"), q.device)
        used = sinks if kind.get("sinks") else None
        out = plain_attention(query, key, value, mask, kind.get("scaling"), kind.get("softcap"), used)
        outputs.append(out[0].transpose(0, 1))
    out = torch.cat(outputs)
    (out * weight[: len(out)]).sum().backward()
    return [out.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def as_rank(rank: int) -> dict[str, Any]:
    ring = Ring.from_group(dist.group.WORLD, torch.device("cpu"))
    places = torch.cat([torch.arange(HALF) + chunk * HALF for chunk in (rank, 2 * RANKS - 1 - rank)])
    found: dict[str, Any] = {"places": places.tolist()}
    for name, lengths in LENGTHS.items():
        for label, kind in KINDS.items():
            q, k, v, sinks, weight = streams()
            q, k, v, weight = (stream[places] for stream in (q, k, v, weight))
            leaves = [stream.requires_grad_() for stream in (q, k, v, sinks)]
            plan = RingPlan(rank, RANKS, HALF, (0, *accumulate(lengths)))
            kernel = PlainBlocks(kind.get("scaling"), kind.get("softcap"))
            out, lse = RingAttention.apply(q, k, v, ring, plan, kind.get("window"), kernel)
            if kind.get("sinks"):
                out = out * torch.sigmoid(lse - sinks[:, None]).T[..., None]
            counted = (places < sum(lengths))[:, None, None]
            (out * weight * counted).sum().backward()
            found[f"{name}, {label}"] = [out.tolist(), *(None if x.grad is None else x.grad.tolist() for x in leaves)]
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return once(tmp_path_factory, "ring", lambda place: run_world(RANKS, place / "world", as_rank))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_ring_computes_what_one_process_does(answers, lengths, kind):
    expected, total = whole(LENGTHS[lengths], KINDS[kind]), sum(LENGTHS[lengths])
    sinks = torch.zeros(4)
    for answer in answers:
        places = torch.tensor(answer["places"])
        counted = places < total
        out, *gradients = answer[f"{lengths}, {kind}"]
        found = torch.tensor(out)[counted]
        assert relative(found, expected[0][places[counted]]) < 1e-6
        for gradient, other in zip(gradients[:3], expected[1:4], strict=True):
            assert relative(torch.tensor(gradient), other[places]) < 1e-6
        sinks += torch.tensor(gradients[3] or [0.0] * 4)
    assert relative(sinks, expected[4]) < 1e-6


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-3))


def test_keys_are_sent_only_where_samples_reach():
    """Of samples within chunks nothing is sent, of others what follows their beginning."""
    within = RingPlan(0, 2, 4, (0, 4, 8, 12, 16))
    assert not any(within.sent_keys(rank, 1 - rank, None) for rank in range(2))
    across = RingPlan(0, 2, 4, (0, 3, 6, 16))  # chunks 0 and 3 on rank 0, 1 and 2 on rank 1
    assert across.sent_keys(1, 0, None) == [(3, 4)]
    assert across.sent_keys(0, 1, None) == [(2, 4), (4, 8)]
    assert across.sent_keys(0, 1, 2) == [(7, 8)]  # a window reaches one key back


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_work_of_a_long_sample_is_balanced(size):
    pairs = RingPlan(0, size, 128, (0, 2 * size * 128)).pairs()
    assert len(set(pairs)) == 1 and sum(pairs) == (2 * size * 128) * (2 * size * 128 + 1) // 2
