"""The fused operations of a decoder layer and of the head in plain PyTorch, for every device.

kernels/triton/ has functions of the same names for GPUs, kernels/meta.py for the meta device. Half-precision results
are rounded where the stock modules round. A function that ends in `_backward` takes the gradients of what the forward
function returned, and some of its inputs or results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.nn.functional as F


def kernels_for(device: torch.device) -> ModuleType:
    """Return the module of kernels for a device: kernels/triton/ on a GPU that has Triton, else this module."""
    if device.type != "cuda":
        return sys.modules[__name__]
    try:
        from posttrain.nn.kernels import triton
    except ImportError:
        return sys.modules[__name__]
    return triton


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (RMS norm of the sum, the sum): [n, H] each."""
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate_and_store(
    qkv: torch.Tensor,  # [n, (heads + 2 kv_heads) * d]
    cos: torch.Tensor,  # [n, d]
    sin: torch.Tensor,
    places: torch.Tensor,  # [n], where keys and values are written in keys.flatten(0, 1)
    keys: torch.Tensor,  # [blocks, block size, kv_heads, d]
    values: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    exponents: Exponents | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values into the cache; returns the queries: [n, heads, d].

    `exponents`: of a cache of 8-bit floats, see `round_vectors`.
    """
    rows, (kv_heads, width) = len(qkv), keys.shape[2:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    rotated, value = qkv.view(rows, -1, width).split([heads + kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        query, key = rotated.split([heads, kv_heads], 1)
        rotated = torch.cat([rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)], 1)
    rotated = rotated * cos[:, None] + rotate_half(rotated) * sin[:, None]
    query, key = rotated.split([heads, kv_heads], 1)
    block, offset = places // keys.shape[1], places % keys.shape[1]
    write_vectors((keys, values), (key, value), block, offset, exponents)
    return query


Exponents = tuple[torch.Tensor, torch.Tensor]
"""Of the keys and of the values of a cache of 8-bit floats: [blocks, block size, kv_heads] int8 each."""


def round_vectors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round vectors [..., d] to 8-bit floats with one power of two each; returns them and its exponents, [...] int8.

    The scale is the smallest power of two with which no element is above the largest 8-bit float. Its product with an
    8-bit float is exact in half precision too, so that all passes that read the cache compute with the same numbers.
    """
    mantissa, exponent = torch.frexp(x.abs().amax(-1).float().clamp(min=SMALLEST_VECTOR))
    exponent = exponent - 9 + (mantissa > FP8_LARGEST / 2**9)
    return (x.float() * power_of_two(-exponent)[..., None]).to(FP8), exponent.to(torch.int8)


def restore_vectors(rounded: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that `round_vectors` rounded to."""
    return (rounded.float() * power_of_two(exponents)[..., None]).to(dtype)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent in float32, exactly."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def write_vectors(
    targets: tuple[torch.Tensor, torch.Tensor],  # keys and values of a cache
    streams: Sequence[torch.Tensor],  # [n, kv_heads, d] each
    block: torch.Tensor,  # [n], and the offset in each: where they are written
    offset: torch.Tensor,
    exponents: Exponents | None,
) -> None:
    """Write keys and values into a cache, rounded if it holds 8-bit floats."""
    for i, (target, stream) in enumerate(zip(targets, streams, strict=True)):
        if exponents is None:
            target[block, offset] = stream
        else:
            rounded, exponents[i][block, offset] = round_vectors(stream)
            target.view(torch.uint8)[block, offset] = rounded.view(torch.uint8)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def norm_backward(
    gradient: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, eps: float, carried: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `total` [n, H], including that of its other uses (`carried`), and of the weight [H]."""
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    d_total, d_weight = unit_backward(gradient.float(), wide * scale, scale, weight.float())
    if carried is not None:
        d_total = d_total + carried.float()
    return d_total.to(total.dtype), d_weight.flatten(0, -2).sum(0).to(weight.dtype)


def unit_backward(
    gradient: torch.Tensor, unit: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and, per row, of the weight, for the output weight * unit with unit = scale * x."""
    g = gradient * weight
    return scale * (g - unit * (g * unit).mean(-1, keepdim=True)), gradient * unit


def rotate_backward(
    d_query: torch.Tensor,  # [n, heads, d]
    d_key: torch.Tensor,  # [n, kv_heads, d]
    d_value: torch.Tensor,
    cos: torch.Tensor,  # [n, d]
    sin: torch.Tensor,
    qkv: torch.Tensor | None,  # [n, (heads + 2 kv_heads) * d], where queries and keys are normed
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the joined queries, keys and values before the rotation, and of the norms' weights."""
    kind, norms = d_query.dtype, (q_norm, k_norm)
    unrotated = [rotate_back(stream.float(), cos[:, None].float(), sin[:, None].float()) for stream in (d_query, d_key)]
    d_norms: list[torch.Tensor | None] = [None, None]
    if qkv is not None:
        heads, (kv_heads, width) = d_query.shape[1], d_key.shape[1:]
        streams = qkv.view(len(qkv), -1, width).float().split([heads, kv_heads, kv_heads], 1)[:2]
        for i, (stream, norm) in enumerate(zip(streams, norms, strict=True)):
            assert norm is not None
            scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + eps)
            unrotated[i], d_norm = unit_backward(unrotated[i], stream * scale, scale, norm.float())
            d_norms[i] = d_norm.flatten(0, -2).sum(0).to(norm.dtype)
    return torch.cat([*(stream.to(kind) for stream in unrotated), d_value], 1).flatten(1), *d_norms


def rotate_back(gradient: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the input of a rotation."""
    return gradient * cos - rotate_half(gradient * sin)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up: [n, 2 I] -> [n, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def silu_and_mul_backward(gradient: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `silu_and_mul` returned, [n, I], and the gradient of gate_up, [n, 2 I]."""
    gate, up = gate_up.float().chunk(2, -1)
    g, sigmoid = gradient.float(), gate.sigmoid()
    d_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    return silu_and_mul(gate_up), torch.cat([d_gate, g * gate * sigmoid], -1).to(gate_up.dtype)


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (target log-probability, entropy or 0, log-normalizer) of each row of logits [n, V]: float32 [n] each."""
    wide = scale_by_temperature(logits, temperature)
    normalizer = wide.logsumexp(-1)
    picked = wide.gather(-1, targets[:, None])[:, 0] - normalizer
    if not with_entropy:
        return picked, torch.zeros_like(picked), normalizer
    entropy = normalizer - (wide - normalizer[:, None]).exp_().mul_(wide).sum(-1)
    return picked, entropy, normalizer


def target_logprobs_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    d_picked: torch.Tensor,
    d_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of the logits [n, V], written over them. A target of -1 is not among these V tokens."""
    logp = scale_by_temperature(logits, temperature).sub_(normalizer[:, None])
    if d_entropy is None:
        gradient = logp.exp_().mul_(-d_picked[:, None])
    else:
        p = logp.exp()
        gradient = -p * (d_picked[:, None] + d_entropy[:, None] * (logp + entropy[:, None]))
    d_target = torch.where(targets < 0, 0.0, d_picked)
    gradient.scatter_add_(-1, targets.clamp(min=0)[:, None], d_target[:, None].to(gradient.dtype))
    if temperature != 1.0:
        gradient /= temperature
    return gradient if gradient.data_ptr() == logits.data_ptr() else logits.copy_(gradient)


def divergence(
    logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float, kind: str, jsd_beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the divergence of each row as nn/logprobs.py defines it, and what its gradient needs: float32 [n] each.

    The others are the log-normalizers of student and teacher, and KL(student || q), where q is the teacher's
    distribution, for jsd the mixture; 0 for forward_kl, whose gradient does not need it.
    """
    wide, teacher = (scale_by_temperature(each, temperature) for each in (logits, teacher_logits))
    normalizers = wide.logsumexp(-1), teacher.logsumexp(-1)
    logp, logq = wide - normalizers[0][:, None], teacher - normalizers[1][:, None]
    if kind == "forward_kl":
        found = (logq.exp() * (logq - logp)).sum(-1)
        return found, *normalizers, torch.zeros_like(found)
    if kind == "reverse_kl":
        found = (logp.exp() * (logp - logq)).sum(-1)
        return found, *normalizers, found
    mixture = torch.logaddexp(logq + math.log(jsd_beta), logp + math.log1p(-jsd_beta))
    own = (logp.exp() * (logp - mixture)).sum(-1)
    return jsd_beta * (logq.exp() * (logq - mixture)).sum(-1) + (1 - jsd_beta) * own, *normalizers, own


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
    """Return the gradient of the student's logits [n, V], written over them; `own`: the last result of `divergence`."""
    logp = scale_by_temperature(logits, temperature) - normalizer[:, None]
    logq = scale_by_temperature(teacher_logits, temperature) - teacher_normalizer[:, None]
    if kind == "forward_kl":
        by_logits = logp.exp() - logq.exp()
    elif kind == "reverse_kl":
        by_logits = logp.exp() * (logp - logq - own[:, None])
    else:
        mixture = torch.logaddexp(logq + math.log(jsd_beta), logp + math.log1p(-jsd_beta))
        by_logits = (1 - jsd_beta) * logp.exp() * (logp - mixture - own[:, None])
    return logits.copy_(by_logits * (gradient[:, None] / temperature))


def scale_by_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits / temperature in float32; the logits themselves if they need no change."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def gather_backward(gradient: torch.Tensor, places: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradient[places[first[i] : first[i + 1]]] for each i, accumulated in float32."""
    owner = torch.repeat_interleave(torch.arange(len(first) - 1, device=first.device), first.diff())
    total = gradient.new_zeros(len(first) - 1, *gradient.shape[1:], dtype=torch.float32)
    return total.index_add_(0, owner, gradient[places[: len(owner)]].float()).to(gradient.dtype)


# Mixtures of experts. A pair is a token and one of the k experts chosen for it; rows are pairs sorted by expert.


def sort_by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs by expert, stably, from the chosen experts [T, k] of each token.

    Returns the pair of each row [T * k], the row of each pair [T, k], and where each expert's rows end (int32 [E]).
    """
    of_pairs = chosen.reshape(-1)
    order = of_pairs.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(experts, dtype=torch.long, device=order.device)
    counts.scatter_add_(0, of_pairs.long(), torch.ones_like(order))
    return order, place.view(chosen.shape), counts.cumsum(0).int()


def expert_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    pairs: torch.Tensor | None = None,
    per_token: int = 1,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Multiply rows with the weights of their experts: [S, in], [E, out, in] -> [S, out].

    With `pairs` [S], row i is rows[pairs[i] // per_token] instead. `gated`: the weights are those of gate and up, and
    the result is silu(gate) * up, [S, out / 2].
    """
    if pairs is not None:
        rows = rows[pairs // per_token]
    out = rows.new_empty(len(rows), weight.shape[1])
    for expert, (first, last) in enumerate(expert_ranges(ends)):
        if last > first:
            out[first:last] = rows[first:last] @ weight[expert].t()
    return silu_and_mul(out) if gated else out


def expert_weight_gradients(
    d_out: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, total: torch.Tensor | None
) -> torch.Tensor:
    """Add the weight gradients of `expert_linear`, from [S, out] and [S, in], to total: float32 [E, out, in]."""
    if total is None:
        total = torch.zeros(len(ends), d_out.shape[1], rows.shape[1], dtype=torch.float32, device=rows.device)
    for expert, (first, last) in enumerate(expert_ranges(ends)):
        if last > first:
            total[expert].addmm_(d_out[first:last].t().float(), rows[first:last].float())
    return total


def expert_ranges(ends: torch.Tensor) -> list[tuple[int, int]]:
    """Return the first and the last row (exclusive) of each expert; waits for the device."""
    numbers = ends.tolist()
    return list(zip([0, *numbers[:-1]], numbers, strict=True))


def combine_rows(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sum the rows of each token's pairs, times their weights [T, k]: [S, H], [T, k] -> [T, H]."""
    of_tokens = rows[place].float()
    if weights is not None:
        of_tokens = of_tokens * weights[..., None].float()
    return of_tokens.sum(1).to(rows.dtype)


# Products in 8 bits

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
SMALLEST_VECTOR = 1e-30  # the largest element of vectors with a scale of their own; those of smaller ones round to 0


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit floats and one scale per row, whose product is x: [n, in] -> [n, in] and float32 [n, 1]."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_LARGEST
    return (x.float() / scale).to(FP8), scale


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, fast_sums: bool = True
) -> torch.Tensor:
    """Multiply x, quantized row by row, with a quantized weight: [n, in], [out, in] -> [n, out].

    `scale`: of the weight's rows, [out, 1]. `fast_sums`: a GPU may add up in less than float32, which is faster.
    """
    rows, own_scale = quantize_rows(x)
    out = rows.float() @ weight.float().t() * own_scale * scale.t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


# Low-rank adapters


@dataclass(slots=True, eq=False)
class LowRankParts:
    """Linear layers whose outputs are joined, and which of them have an adapter; all adapters have the same rank."""

    sizes: list[int]  # number of outputs of each layer
    adapted: list[bool]
    rank: int
    tables: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict)  # of kernels/triton/adapters.py

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return (first column, size, first row in the joined matrices B, first rank) of each layer.

        The row is -1 for a layer without an adapter.
        """
        found, column, row, rank = [], 0, 0, 0
        for size, adapted in zip(self.sizes, self.adapted, strict=True):
            found.append((column, size, row if adapted else -1, rank))
            column += size
            row, rank = (row + size, rank + self.rank) if adapted else (row, rank)
        return found


@dataclass(slots=True, frozen=True, eq=False)
class RowsByAdapter:
    """The rows of a pass, sorted by adapter; `order`, `place` and `ends` are those of sort_by_expert."""

    adapter: torch.Tensor  # [n] number of each row's adapter
    order: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor
    tiles: torch.Tensor  # of kernels/triton/adapters.py: rows that one program computes


def rows_by_adapter(adapter: torch.Tensor, adapters: int) -> RowsByAdapter:
    """Sort rows, whose adapters have these numbers below `adapters`."""
    order, place, ends = sort_by_expert(adapter[:, None], adapters)
    return RowsByAdapter(adapter, order, place, ends, ends.new_empty(0, 3))


def low_rank_inner(x: torch.Tensor, a: torch.Tensor, by: RowsByAdapter) -> torch.Tensor:
    """Multiply rows with the matrices A of their adapters: [n, in], [E, R, in] -> [n, R], sorted by adapter."""
    return expert_linear(x, a, by.ends, by.order)


def add_low_rank(
    base: torch.Tensor,  # [n, out]
    inner: torch.Tensor,  # [n, R]
    b: torch.Tensor,  # [E, rows, rank]
    parts: LowRankParts,
    scaling: float,
    by: RowsByAdapter | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Return base + scaling * inner B', where each layer of `parts` has its own ranks of `inner` and rows of `b`.

    With `by` the rows of `inner` are sorted by adapter, row i is that of base[by.order[i]], and each adapter has its
    own `b`; otherwise there is one adapter. `gated`: the layers are gate and up, and the result is silu(gate) * up.
    """
    out = base.clone()
    ranges = [(0, len(base))] if by is None else expert_ranges(by.ends)
    for adapter, (first, last) in enumerate(ranges):
        places = torch.arange(first, last, device=base.device) if by is None else by.order[first:last]
        for column, size, row, rank in parts.rows():
            if row < 0 or first == last:
                continue
            own = inner[first:last, rank : rank + parts.rank].float()
            added = own @ b[adapter, row : row + size].float().t() * scaling
            columns = slice(column, column + size)
            out[places, columns] = (out[places, columns].float() + added).to(out.dtype)
    return silu_and_mul(out) if gated else out


def weighted_silu_and_mul_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output [n, I] of `silu_and_mul` times weights [n], and the gradients of gate_up and of the weights.

    `gradient` [n, I] is that of the weighted output.
    """
    active, d_gate_up = silu_and_mul_backward(gradient.float() * weights[:, None].float(), gate_up)
    d_weights = (active.float() * gradient.float()).sum(-1)
    return (active.float() * weights[:, None].float()).to(gate_up.dtype), d_gate_up, d_weights


def route(
    logits: torch.Tensor, per_token: int, *, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the most probable experts of each token: router logits [T, E] -> weights and indices [T, k].

    The weights are probabilities, which sum to 1 if `renormalize`. Of equally probable experts, which half precision
    makes frequent, the first are chosen; torch.topk would not say which.
    """
    weights, chosen = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :per_token], chosen[:, :per_token]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), chosen
