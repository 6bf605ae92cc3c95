"""Attention over packed rows: each sample sees itself alone. Registered with transformers under `NAME`.

Two routes give the same numbers. On an accelerator in half precision: the flash kernel for ragged rows. Elsewhere:
samples of similar length are laid into a rectangle, padded on the right. Causal queries never look to the right, so
the padding needs no mask and costs nothing but its own arithmetic.

Where samples share their beginning (types.Sharing) a piece also sees the keys before it, gathered for each piece: only
keys and values are repeated, all else of the layers is computed once.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from posttrain.core.types import Batch, Sharing
from posttrain.nn.kernels.reference import steps_for
from posttrain.parallel.context import Context

NAME = "posttrain_packed"
log = logging.getLogger("posttrain")


@dataclass(slots=True, eq=False)
class Bucket:
    """Samples laid into a rectangle: `source` [rows * width] picks tokens, `kept` the places that hold one."""

    rows: int
    width: int
    source: torch.Tensor | None  # None: the samples lie in the pack as they are needed
    kept: torch.Tensor | None  # None: nothing is padding
    keys: torch.Tensor | None = None  # [rows * key width], where a piece sees more than itself
    seen_before: torch.Tensor | None = None  # [rows], how many keys each piece sees before its own first


class Cache(Protocol):
    """Keys and values of sequences under way; the engine has one."""

    decoding: bool

    def keep(self, layer: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        """Remember a pack's keys and values."""

    def attend(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *how: Any
    ) -> torch.Tensor:
        """Add one token a sequence and attend to all of each sequence: [1, sequences, heads, d_value]."""


@dataclass(slots=True, eq=False)
class Packing:
    """The layout of one pack, worked out once and read by every layer."""

    starts: torch.Tensor
    longest: int
    keys: torch.Tensor | None = None  # what each piece sees, where that is more than itself; see types.Sharing
    key_starts: torch.Tensor | None = None
    most_keys: int = 0
    seen: tuple[torch.Tensor, torch.Tensor] | None = None  # where in `keys` each token is, and [U + 1] from where on
    padding: int = 0  # tokens behind the last sample that belong to none
    padded: bool = False  # there may be empty samples, and keys behind those of the last
    buckets: list[Bucket] | None = None  # None: the ragged kernel is used
    order: torch.Tensor | None = None  # brings the buckets' tokens back into the pack's order
    context: Context | None = None  # whose ranks divide the row
    tokens: int = 0  # of the row that they divide


def layout(batch: Batch, *, ragged_kernel: bool, whole: int = 1) -> Packing:
    """Decide how the samples of a pack are attended to.

    `whole`: the ragged kernel's row is padded to a multiple of it, by a sample that is nobody's. Rows of few different
    lengths find their memory and the matrix products' plans where the last one left them.
    """
    row, sharing = batch.sharing or batch, batch.sharing
    if not ragged_kernel:
        buckets, order = rectangles(row.lengths, row.tokens.device, sharing)
        return Packing(row.starts, max(row.lengths), buckets=buckets, order=order)
    padding = -sum(row.lengths) % whole
    packing = Packing(lengthened(row.starts, padding), max(padding, *row.lengths), padding=padding)
    if sharing is not None:
        packing.keys, packing.key_starts = sharing.keys, lengthened(sharing.key_starts, padding)
        packing.most_keys = max(padding, *sharing.key_lengths)
        if padding:
            first = len(row.tokens)
            own = torch.arange(first, first + padding, device=row.tokens.device)
            packing.keys = torch.cat([sharing.keys, own.to(sharing.keys.dtype)])
        packing.seen = where_each_is(packing.keys, sum(row.lengths) + padding)
    return packing


def where_each_is(keys: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of 0, 1, 2 ... in `keys`, one after the other, and where those of each begin: [K] and [size + 1]."""
    ordered, places = keys.sort(stable=True)
    return places, torch.searchsorted(ordered, torch.arange(size + 1, device=keys.device, dtype=keys.dtype))


def lengthened(starts: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([starts, starts[-1:] + padding]) if padding else starts


def rectangles(
    lengths: tuple[int, ...], device: torch.device, sharing: Sharing | None = None
) -> tuple[list[Bucket], torch.Tensor | None]:
    """Group samples, or pieces that share, whose lengths round up to the same power of two."""
    if len(set(lengths)) == 1 and sharing is None:
        return [Bucket(len(lengths), lengths[0], None, None)], None
    key_lengths = lengths if sharing is None else sharing.key_lengths
    classes: dict[tuple[bool, int, int], list[int]] = {}
    for index, (length, seen) in enumerate(zip(lengths, key_lengths, strict=True)):
        classes.setdefault((seen > length, (length - 1).bit_length(), (seen - 1).bit_length()), []).append(index)
    buckets, places = [], []
    for (sees_more, *_), members in classes.items():
        source, real = rectangle_of(lengths, members)
        kept = real.reshape(-1).nonzero()[:, 0]
        places.append(source[kept])
        bucket = Bucket(len(members), real.shape[1], source.to(device), kept.to(device))
        if sees_more:
            assert sharing is not None
            bucket.keys = sharing.keys[rectangle_of(key_lengths, members)[0].to(device)]
            bucket.seen_before = torch.tensor([key_lengths[i] - lengths[i] for i in members]).to(device)
        buckets.append(bucket)
    return buckets, torch.cat(places).argsort().to(device)


def rectangle_of(lengths: tuple[int, ...], members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the members' tokens, padded on the right: [rows * width], and which of them are real: [rows, width]."""
    firsts = torch.tensor((0, *lengths)).cumsum(0)[members]
    member_lengths = torch.tensor([lengths[i] for i in members])
    column = torch.arange(int(member_lengths.max()))
    real = column < member_lengths[:, None]
    return torch.where(real, firsts[:, None] + column, 0).reshape(-1), real


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, d]
    key: torch.Tensor,  # [1, kv_heads, T, d]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing | None = None,
    cache: Cache | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sample of the pack; returns [1, T, heads, d_value].

    With a cache, keys and values are also remembered (prefill) or one token a sequence is added to them (decode).
    """
    if cache is not None and cache.decoding:
        layer: Any = module.layer_idx
        return cache.attend(layer, query, key, value, scaling, sliding_window, softcap, s_aux), None
    if cache is not None:
        cache.keep(module.layer_idx, key, value)
    assert packing is not None, "packed attention was called without a layout: use models.forward"
    assert attention_mask is None, "packed attention takes no mask: samples are kept apart by the layout"
    if packing.context is None:
        return attended(query, key, value, packing, scaling, sliding_window, softcap, s_aux), None
    sinks, context = packing.context.my_heads(s_aux), packing.context

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attended(q, k, v, packing, scaling, sliding_window, softcap, sinks)

    return context.attend(attend, query, key, value, packing.tokens), None


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """The same, of a whole row."""
    if packing.buckets is None:
        return ragged(query, key, value, packing, scaling, sliding_window)[None]
    if query.is_meta and softcap is None and s_aux is None:
        return FlashLike.apply(query, key, value)
    parts = []
    for bucket in packing.buckets:
        keys = bucket.source if bucket.keys is None else bucket.keys
        q = rectangle(query, bucket.rows, bucket.source)
        k, v = (rectangle(stream, bucket.rows, keys) for stream in (key, value))
        out = causal(q, k, v, scaling, sliding_window, softcap, s_aux, bucket.seen_before)  # [rows, heads, width, d]
        flat = out.transpose(1, 2).reshape(bucket.rows * bucket.width, out.shape[1], out.shape[3])
        parts.append(flat if bucket.kept is None else flat.index_select(0, bucket.kept))
    if packing.order is None:
        return parts[0][None]
    return torch.cat(parts).index_select(0, packing.order)[None]


class FlashLike(torch.autograd.Function):
    """What a fused kernel takes of memory, where tensors have no storage (torch would use none there).

    Queries, keys, values and the result are kept for the backward pass; scores are not.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])  # [1, T, heads, d_value]
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def rectangle(stream: torch.Tensor, rows: int, source: torch.Tensor | None) -> torch.Tensor:
    """[1, heads, T, d] -> [rows, heads, width, d]."""
    flat = stream[0] if source is None else stream[0].index_select(1, source)
    return flat.reshape(flat.shape[0], rows, -1, flat.shape[2]).transpose(0, 1)


def causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    seen_before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention on a rectangle; the plain formula where the fused one lacks a feature.

    `seen_before` [rows]: the first query stands behind so many keys, not at the first.
    """
    heads_per_key = q.shape[1] // k.shape[1]
    if heads_per_key > 1:
        k, v = k.repeat_interleave(heads_per_key, 1), v.repeat_interleave(heads_per_key, 1)
    width, key_width = q.shape[2], k.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < key_width else None
    fused = softcap is None and sinks is None
    if fused and window is None and seen_before is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    if seen_before is None:
        mask = visible(width, window, q.device)
    else:
        mask = visible_behind(seen_before, width, key_width, window)
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return plain_attention(q, k, v, mask, scaling, softcap, sinks)


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The formula, for families whose scores the fused kernels do not know; mask is True where a key is seen."""
    scores = (q @ k.transpose(2, 3)) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # a learnt score a head that takes probability away from all keys
        column = sinks.reshape(1, q.shape[1], -1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        weights = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def visible(width: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[width, width] True where query i may see key j: j <= i, and i - j < window."""
    mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def visible_behind(seen_before: torch.Tensor, width: int, key_width: int, window: int | None) -> torch.Tensor:
    """[rows, 1, width, key_width] likewise, where query i of a row stands at that row's key seen_before + i."""
    stand = seen_before[:, None] + torch.arange(width, device=seen_before.device)
    stand = stand.clamp(max=key_width - 1)  # padding: a query that sees no key at all would be not a number
    back = stand[:, None, :, None] - torch.arange(key_width, device=seen_before.device)
    return back >= 0 if window is None else (back >= 0) & (back < window)


def ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """The flash kernel over samples of any length: [T, heads, d]. Its queries stand at the last of their keys."""
    q, k, v = (stream.squeeze(0).transpose(0, 1) for stream in (query, key, value))  # [0] would copy its gradient
    key_starts, most_keys = packing.starts, packing.longest
    if packing.keys is not None and packing.key_starts is not None:
        key_starts, most_keys = packing.key_starts, packing.most_keys
        k, v = (Gather.apply(stream, packing.keys, *(packing.seen or ())) for stream in (k, v))
    ranges = (packing.starts, key_starts, packing.longest, most_keys)
    generating = torch.is_inference_mode_enabled()  # prompts are short: starting its kernels would take longer
    if not generating and newer_kernel_serves(q, k, v, ranges, scaling, sliding_window, padded=packing.padded):
        return newer_kernel(q, k, v, ranges, scaling, sliding_window)
    return torchs_kernel(q, k, v, ranges, scaling, sliding_window)


Ranges = tuple[torch.Tensor, torch.Tensor, int, int]
"""Cumulative lengths of queries and of keys, and the largest length of each."""


def torchs_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, scaling: float | None, window: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if grouped_heads_must_be_named() else {}
    reach = (-1 if window is None else window - 1, 0)
    return varlen_attn(q, k, v, *ranges, scale=scaling, window_size=reach, **grouped)


def newer_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, scaling: float | None, window: int | None
) -> torch.Tensor:
    """The package flash-attn-4, where it is installed: about twice as quick as torch's on Hopper."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    starts, key_starts, longest, most_keys = ranges
    how: dict[str, Any] = {"causal": True} if window is None else {"window_size": (window - 1, 0)}
    found = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=starts,
        cu_seqlens_k=key_starts,
        max_seqlen_q=longest,
        max_seqlen_k=most_keys,
        softmax_scale=scaling,
        **how,
    )
    return found[0] if isinstance(found, tuple) else found


trusted: dict[tuple[Any, ...], bool] = {}
"""Kinds of attention, lengths among them -> whether the newer kernel gave what torch's gives."""


def newer_kernel_serves(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: Ranges,
    scaling: float | None,
    window: int | None,
    *,
    padded: bool = False,
) -> bool:
    longest = tuple((length - 1).bit_length() for length in ranges[2:])  # it has been wrong for long samples alone
    kind = (q.shape[1:], k.shape[1:], v.shape[1:], q.dtype, window is None, ranges[0] is ranges[1], longest, padded)
    if kind not in trusted:
        trusted[kind] = has_newer_kernel(q) and agree(q, k, v, ranges, scaling, window)
    return trusted[kind]


def has_newer_kernel(q: torch.Tensor) -> bool:
    wide = q.shape[1] * q.shape[2] >= 768  # below, starting a kernel takes longer than the kernel
    installed = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return wide and bool(installed) and torch.cuda.get_device_capability(q.device)[0] in (9, 10)


@torch.enable_grad()
def agree(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, scaling: float | None, window: int | None
) -> bool:
    """Whether both kernels give the same result and gradients, here and now."""
    found: list[list[torch.Tensor]] = []
    used = int(ranges[1][-1])  # what lies behind the last sample's keys nobody writes
    try:
        for kernel in (newer_kernel, torchs_kernel):
            a, b, c = (stream.detach().requires_grad_() for stream in (q, k, v))
            out = kernel(a, b, c, ranges, scaling, window)
            query, *of_keys = torch.autograd.grad(out, (a, b, c), q.detach())
            found.append([out.detach(), query, *(gradient[:used] for gradient in of_keys)])
    except (RuntimeError, ImportError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
        log.warning("flash-attn-4 is installed and does not work here, so torch's kernel is used: %s", error)
        return False
    errors = [float((x - y).float().norm() / y.float().norm()) for x, y in zip(*found, strict=True)]
    if not all(error < 0.02 for error in errors):  # max() would pass over what is not a number
        log.warning("flash-attn-4 differs from torch's kernel by %.3g, so the latter is used", max(errors))
        return False
    return True


class Gather(torch.autograd.Function):
    """index_select along the first dimension. A key may be seen by many: their gradients are added up in float32."""

    @staticmethod
    def forward(
        ctx: Any, stream: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places, first)
        return stream.index_select(0, keys)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return steps_for(gradient.device).gather_backward(gradient, *ctx.saved_tensors), None, None, None


@cache
def grouped_heads_must_be_named() -> bool:
    """Newer torch wants to be told that keys have fewer heads than queries; older torch has no such argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def has_ragged_kernel(model: torch.nn.Module) -> bool:
    """Whether the flash kernel can serve this model: an accelerator, half precision, plain scores, equal head sizes."""
    config: Any = model.config
    parameter = next(model.parameters())
    plain = getattr(config, "attn_logit_softcapping", None) is None and not hasattr(config, "kv_lora_rank")
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    half = parameter.dtype in (torch.bfloat16, torch.float16)
    return parameter.device.type == "cuda" and half and plain and not sinks and head <= 256 and head % 8 == 0


AttentionInterface.register(NAME, packed_attention)
