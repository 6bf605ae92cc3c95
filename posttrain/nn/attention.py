"""Causal attention over packed samples, each of which attends to itself only. Registered in transformers as `NAME`.

Two routes give the same numbers. On an accelerator in half precision: the flash kernel for sequences of variable length
(varlen). Elsewhere: samples of similar length are padded on the right into one tensor [rows, width]. Causal queries
never attend to keys on their right, so the padding needs no mask and costs only its own arithmetic.

Where samples share a prefix (types.PrefixSharing), a piece also attends to the keys of its prefix, which are gathered
for each piece: only keys and values are repeated, everything else in the layers is computed once.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from posttrain.core.types import MicroBatch, PrefixSharing
from posttrain.nn.attention_blocks import FlashBlocks, PlainBlocks
from posttrain.nn.kernels.reference import kernels_for
from posttrain.nn.routing import Choice, RecordedRouting
from posttrain.parallel.context import ContextGroup
from posttrain.parallel.ring import BlockKernel, RingAttention, RingPlan

NAME = "posttrain_packed"
log = logging.getLogger("posttrain")


@dataclass(slots=True, eq=False)
class PaddedGroup:
    """Samples (or pieces) of similar length, one per row, padded on the right."""

    rows: int
    width: int
    source: torch.Tensor | None  # [rows * width] index of each token in the micro-batch; None: they are in order
    kept: torch.Tensor | None  # indices into [rows * width] that are not padding; None: nothing is padding
    keys: torch.Tensor | None = None  # [rows * key width] index of each key, where pieces attend to a prefix
    prefix_keys: torch.Tensor | None = None  # [rows] number of keys before a piece's own first one


class Cache(Protocol):
    """Keys and values of the sequences being generated; the engine implements it (engines/kv_cache.py)."""

    decoding: bool

    def store(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, packing: Packing | None
    ) -> tuple[torch.Tensor, torch.Tensor, Packing | None]:
        """Store the keys and values of a micro-batch of prompts; returns those to attend to, and their layout.

        They are the given ones, except where the micro-batch continues a prompt whose first tokens are in the cache.
        """

    def attend(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *how: Any
    ) -> torch.Tensor:
        """Add one token per sequence and attend to the whole sequence: [1, sequences, heads, d_value]."""

    def route(self, layer: int, router: Any, logits: torch.Tensor, choice: Choice) -> Choice:
        """Record the experts that a router chose; see nn/routing.py."""


@dataclass(slots=True, eq=False)
class Packing:
    """Where the samples of a micro-batch begin and what they attend to; computed once and read by every layer."""

    starts: torch.Tensor  # [pieces + 1] int32, cumulative lengths
    max_length: int
    keys: torch.Tensor | None = None  # [K] keys of each piece, where pieces attend to a prefix; see types.PrefixSharing
    key_starts: torch.Tensor | None = None  # [pieces + 1] int32, where there are more keys than queries
    max_keys: int = 0
    key_uses: tuple[torch.Tensor, torch.Tensor] | None = None  # see index_uses
    padding: int = 0  # tokens after the last sample that belong to no sample
    padded: bool = False  # there may be empty samples, and unused keys after those of the last
    groups: list[PaddedGroup] | None = None  # None: the varlen kernel is used
    order: torch.Tensor | None = None  # brings the groups' tokens back into the order of the micro-batch
    context: ContextGroup | None = None  # set where context-parallel ranks divide the tokens
    tokens: int = 0  # total that they divide
    ring: RingPlan | None = None  # set where some of them form a ring
    routing: RecordedRouting | None = None  # experts that the sampler chose; see nn/routing.py
    divided: bool = False  # tensor ranks divide the tokens between attention and MLPs; attention has all of them
    unattended: int = 0  # tokens after the padding, which only make their number divisible


def packing_for(batch: MicroBatch, *, varlen_kernel: bool, multiple_of: int = 1) -> Packing:
    """Compute the layout that attention needs for a micro-batch.

    For the varlen kernel the tokens are padded to a multiple of `multiple_of` by a dummy sample: with few different
    sizes, the allocator and the matrix products reuse the memory and the plans of earlier micro-batches.
    """
    row, sharing = batch.sharing or batch, batch.sharing
    if not varlen_kernel:
        groups, order = pad_by_length(row.lengths, row.tokens.device, sharing)
        return Packing(row.starts, max(row.lengths), groups=groups, order=order)
    padding = -sum(row.lengths) % multiple_of
    packing = Packing(append_padding(row.starts, padding), max(padding, *row.lengths), padding=padding)
    if sharing is not None:
        packing.keys, packing.key_starts = sharing.keys, append_padding(sharing.key_starts, padding)
        packing.max_keys = max(padding, *sharing.key_lengths)
        if padding:
            first = len(row.tokens)
            own = torch.arange(first, first + padding, device=row.tokens.device)
            packing.keys = torch.cat([sharing.keys, own.to(sharing.keys.dtype)])
        packing.key_uses = index_uses(packing.keys, sum(row.lengths) + padding)
    return packing


def packing_after_prefixes(
    prefixes: Sequence[int], lengths: Sequence[int], device: torch.device, *, varlen_kernel: bool
) -> Packing:
    """Compute the layout of samples that attend to the keys of a prefix and to their own, given sample by sample.

    `prefixes`: keys of each sample before its own; `lengths`: its queries.
    """
    lengths, key_lengths = tuple(lengths), tuple(map(sum, zip(prefixes, lengths, strict=True)))
    starts, key_starts = (
        torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        for sizes in (lengths, key_lengths)
    )
    if varlen_kernel:
        return Packing(starts, max(lengths), key_starts=key_starts, max_keys=max(key_lengths))
    classes: dict[tuple[int, int], list[int]] = {}
    for index, (length, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        classes.setdefault(((length - 1).bit_length(), (keys - 1).bit_length()), []).append(index)
    groups, places = [], []
    for members in classes.values():
        source, real = padded_indices(lengths, members)
        kept = real.reshape(-1).nonzero()[:, 0]
        places.append(source[kept])
        group = PaddedGroup(len(members), real.shape[1], source.to(device), kept.to(device))
        group.keys = padded_indices(key_lengths, members)[0].to(device)
        group.prefix_keys = torch.tensor([prefixes[i] for i in members]).to(device)
        groups.append(group)
    return Packing(starts, max(lengths), groups=groups, order=torch.cat(places).argsort().to(device))


def index_uses(keys: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert `keys` [K], whose values are below `size`: where in `keys` each value occurs.

    Returns indices into `keys`, sorted by value: [K], and where those of the values 0, 1, ... begin: [size + 1].
    """
    ordered, places = keys.sort(stable=True)
    return places, torch.searchsorted(ordered, torch.arange(size + 1, device=keys.device, dtype=keys.dtype))


def append_padding(starts: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([starts, starts[-1:] + padding]) if padding else starts


def pad_by_length(
    lengths: tuple[int, ...], device: torch.device, sharing: PrefixSharing | None = None
) -> tuple[list[PaddedGroup], torch.Tensor | None]:
    """Group samples (or pieces with a shared prefix) whose lengths round up to the same power of two."""
    if len(set(lengths)) == 1 and sharing is None:
        return [PaddedGroup(len(lengths), lengths[0], None, None)], None
    key_lengths = lengths if sharing is None else sharing.key_lengths
    classes: dict[tuple[bool, int, int], list[int]] = {}
    for index, (length, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        classes.setdefault((keys > length, (length - 1).bit_length(), (keys - 1).bit_length()), []).append(index)
    groups, places = [], []
    for (has_prefix, *_), members in classes.items():
        source, real = padded_indices(lengths, members)
        kept = real.reshape(-1).nonzero()[:, 0]
        places.append(source[kept])
        group = PaddedGroup(len(members), real.shape[1], source.to(device), kept.to(device))
        if has_prefix:
            assert sharing is not None
            group.keys = sharing.keys[padded_indices(key_lengths, members)[0].to(device)]
            group.prefix_keys = torch.tensor([key_lengths[i] - lengths[i] for i in members]).to(device)
        groups.append(group)
    return groups, torch.cat(places).argsort().to(device)


def padded_indices(lengths: tuple[int, ...], members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the members' token indices, padded on the right, [rows * width], and what is not padding [rows, width]."""
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
    """Compute causal attention inside each sample of the micro-batch; returns [1, T, heads, d_value].

    With a cache, keys and values are also stored (prefill), or one token per sequence is added to them (decode).
    """
    if cache is not None and cache.decoding:
        layer: Any = module.layer_idx
        return cache.attend(layer, query, key, value, scaling, sliding_window, softcap, s_aux), None
    if cache is not None:
        key, value, packing = cache.store(module.layer_idx, key, value, packing)
    assert packing is not None, "packed attention was called without a packing: use nn.forward"
    assert attention_mask is None, "packed attention takes no mask: the packing keeps samples apart"
    if packing.context is None:
        if packing.unattended:
            query, key, value = (stream[:, :, : -packing.unattended] for stream in (query, key, value))
            out = attend_within_samples(query, key, value, packing, scaling, sliding_window, softcap, s_aux)
            return F.pad(out, (0, 0, 0, 0, 0, packing.unattended)), None
        return attend_within_samples(query, key, value, packing, scaling, sliding_window, softcap, s_aux), None
    context = packing.context
    sinks = context.heads.local_heads(s_aux)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        within = attend_within_samples if packing.ring is None else attend_around_ring
        return within(q, k, v, packing, scaling, sliding_window, softcap, sinks)

    return context.attend(attend, query, key, value, packing.tokens), None


def attend_around_ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `packed_attention` on a rank of a ring, which holds some tokens of its heads."""
    assert packing.ring is not None and packing.context is not None and packing.context.ring is not None
    kernel: BlockKernel = FlashBlocks(scaling) if packing.groups is None else PlainBlocks(scaling, softcap)
    q, k, v = (stream.squeeze(0).transpose(0, 1) for stream in (query, key, value))
    width = v.shape[2]
    v = v if packing.groups is not None else as_wide_as_keys(v, k)
    out, lse = RingAttention.apply(q, k, v, packing.context.ring, packing.ring, sliding_window, kernel)
    out = out[..., :width]
    if s_aux is not None:  # a learnt score per head that takes probability away from all keys
        out = out * torch.sigmoid(lse - s_aux.float()[:, None]).T[..., None].to(out.dtype)
    return out[None]


def attend_within_samples(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `packed_attention` without a cache, on a rank that holds all tokens of its heads."""
    if packing.groups is None:
        return varlen_attention(query, key, value, packing, scaling, sliding_window)[None]
    if query.is_meta and softcap is None and s_aux is None:
        return MetaFlashAttention.apply(query, key, value)
    parts = []
    for group in packing.groups:
        keys = group.source if group.keys is None else group.keys
        q = gather_padded(query, group.rows, group.source)
        k, v = (gather_padded(stream, group.rows, keys) for stream in (key, value))
        # out: [rows, heads, width, d]
        out = causal_attention(q, k, v, scaling, sliding_window, softcap, s_aux, group.prefix_keys)
        flat = out.transpose(1, 2).reshape(group.rows * group.width, out.shape[1], out.shape[3])
        parts.append(flat if group.kept is None else flat.index_select(0, group.kept))
    if packing.order is None:
        return parts[0][None]
    return torch.cat(parts).index_select(0, packing.order)[None]


class MetaFlashAttention(torch.autograd.Function):
    """Allocates on the meta device what a fused kernel would (torch's own meta kernels save nothing).

    Queries, keys, values and the result are saved for the backward pass; scores are not.
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


def gather_padded(stream: torch.Tensor, rows: int, source: torch.Tensor | None) -> torch.Tensor:
    """Gather [1, heads, T, d] into padded rows: [rows, heads, width, d]."""
    flat = stream[0] if source is None else stream[0].index_select(1, source)
    return flat.reshape(flat.shape[0], rows, -1, flat.shape[2]).transpose(0, 1)


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    prefix_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention on padded rows; by the plain formula where the fused kernel lacks a feature.

    `prefix_keys` [rows]: the number of keys before the key at the first query's position.
    """
    heads_per_key = q.shape[1] // k.shape[1]
    if heads_per_key > 1:
        k, v = k.repeat_interleave(heads_per_key, 1), v.repeat_interleave(heads_per_key, 1)
    width, key_width = q.shape[2], k.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < key_width else None
    fused = softcap is None and sinks is None
    if fused and window is None and prefix_keys is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    if prefix_keys is None:
        mask = causal_mask(width, window, q.device)
    else:
        mask = causal_mask_after_prefix(prefix_keys, width, key_width, window)
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
    """Compute attention by its formula, for features that fused kernels lack; mask is True where a key counts."""
    scores = (q @ k.transpose(2, 3)) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # a learnt score per head that takes probability away from all keys
        column = sinks.reshape(1, q.shape[1], -1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        weights = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def causal_mask(width: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [width, width], True where query i attends to key j: j <= i, and i - j < window."""
    mask = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)


def causal_mask_after_prefix(prefix_keys: torch.Tensor, width: int, key_width: int, window: int | None) -> torch.Tensor:
    """Return [rows, 1, width, key_width] likewise, where query i of a row has the position of key prefix_keys + i."""
    position = prefix_keys[:, None] + torch.arange(width, device=prefix_keys.device)
    position = position.clamp(max=key_width - 1)  # padding: a query without any key would give NaN
    back = position[:, None, :, None] - torch.arange(key_width, device=prefix_keys.device)
    return back >= 0 if window is None else (back >= 0) & (back < window)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Run the flash kernel over samples of any length: [T, heads, d]. Queries are aligned with their last keys."""
    q, k, v = (stream.squeeze(0).transpose(0, 1) for stream in (query, key, value))  # [0] would copy its gradient
    key_starts, max_keys = packing.starts, packing.max_length
    if packing.key_starts is not None:
        key_starts, max_keys = packing.key_starts, packing.max_keys
    if packing.keys is not None:
        k, v = (GatherKeys.apply(stream, packing.keys, *(packing.key_uses or ())) for stream in (k, v))
    ranges = (packing.starts, key_starts, packing.max_length, max_keys)
    width = v.shape[2]
    v = as_wide_as_keys(v, k)
    generating = torch.is_inference_mode_enabled()  # prompts are short: flash-attn-4 takes longer to launch
    if not generating and flash_attn_4_is_verified(q, k, v, ranges, scaling, sliding_window, padded=packing.padded):
        return flash_attn_4_kernel(q, k, v, ranges, scaling, sliding_window)[..., :width]
    return torch_varlen_kernel(q, k, v, ranges, scaling, sliding_window)[..., :width]


def as_wide_as_keys(v: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Pad the values of latent attention with zeros: the flash kernels need values as wide as keys."""
    assert v.shape[2] <= k.shape[2], f"values of {v.shape[2]} numbers are wider than keys of {k.shape[2]}"
    return v if v.shape[2] == k.shape[2] else F.pad(v, (0, k.shape[2] - v.shape[2]))


Ranges = tuple[torch.Tensor, torch.Tensor, int, int]
"""Cumulative lengths of queries and of keys, and the largest length of each."""


def torch_varlen_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, scaling: float | None, window: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if needs_enable_gqa() else {}
    reach = (-1 if window is None else window - 1, 0)
    return varlen_attn(q, k, v, *ranges, scale=scaling, window_size=reach, **grouped)


def flash_attn_4_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Run the kernel of the optional package flash-attn-4, about twice as fast as torch's on Hopper."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    starts, key_starts, max_length, max_keys = ranges
    how: dict[str, Any] = {"causal": True} if window is None else {"window_size": (window - 1, 0)}
    found = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=starts,
        cu_seqlens_k=key_starts,
        max_seqlen_q=max_length,
        max_seqlen_k=max_keys,
        softmax_scale=scaling,
        **how,
    )
    return found[0] if isinstance(found, tuple) else found


verified: dict[tuple[Any, ...], bool] = {}
"""Kind of attention, including rounded lengths -> whether flash-attn-4 gave the same numbers as torch's kernel."""


def flash_attn_4_is_verified(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: Ranges,
    scaling: float | None,
    window: int | None,
    *,
    padded: bool = False,
) -> bool:
    """Whether flash-attn-4 can be used here; compares it with torch's kernel the first time a kind of input comes."""
    lengths = tuple((length - 1).bit_length() for length in ranges[2:])  # it has been wrong for long samples only
    kind = (q.shape[1:], k.shape[1:], v.shape[1:], q.dtype, window is None, ranges[0] is ranges[1], lengths, padded)
    if kind not in verified:
        verified[kind] = has_flash_attn_4(q) and kernels_agree(q, k, v, ranges, scaling, window)
    return verified[kind]


def has_flash_attn_4(q: torch.Tensor) -> bool:
    wide = q.shape[1] * q.shape[2] >= 768  # below, the launch takes longer than the kernel
    installed = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return wide and bool(installed) and torch.cuda.get_device_capability(q.device)[0] in (9, 10)


@torch.enable_grad()
def kernels_agree(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, scaling: float | None, window: int | None
) -> bool:
    """Whether both kernels give the same result and gradients on this input."""
    found: list[list[torch.Tensor]] = []
    used = int(ranges[1][-1])  # gradients of keys after the last sample are not written
    try:
        for kernel in (flash_attn_4_kernel, torch_varlen_kernel):
            a, b, c = (stream.detach().requires_grad_() for stream in (q, k, v))
            out = kernel(a, b, c, ranges, scaling, window)
            query, *of_keys = torch.autograd.grad(out, (a, b, c), q.detach())
            found.append([out.detach(), query, *(gradient[:used] for gradient in of_keys)])
    except (RuntimeError, ImportError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
        log.warning("flash-attn-4 is installed but does not work here; using torch's attention kernel: %s", error)
        return False
    errors = [float((x - y).float().norm() / y.float().norm()) for x, y in zip(*found, strict=True)]
    if not all(error < 0.02 for error in errors):  # unlike max(), this is False for NaN
        log.warning(
            "flash-attn-4 differs from torch's attention kernel (relative error %.3g); using torch's", max(errors)
        )
        return False
    return True


class GatherKeys(torch.autograd.Function):
    """index_select along the first dimension; gradients of a key that is used several times are summed in float32."""

    @staticmethod
    def forward(
        ctx: Any, stream: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places, first)
        return stream.index_select(0, keys)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return kernels_for(gradient.device).gather_backward(gradient, *ctx.saved_tensors), None, None, None


@cache
def needs_enable_gqa() -> bool:
    """Whether varlen_attn has the argument for keys with fewer heads than queries; older versions of torch lack it."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def supports_varlen_kernel(model: torch.nn.Module) -> bool:
    """Whether the varlen kernel supports this model: CUDA, half precision, plain scores, heads of at most 256."""
    config: Any = model.config
    parameter = next(model.parameters())
    plain = getattr(config, "attn_logit_softcapping", None) is None
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # a state-space model
        return False
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: values are padded to the width of keys
        head = config.qk_nope_head_dim + config.qk_rope_head_dim
        plain = plain and config.v_head_dim <= head
    half = parameter.dtype in (torch.bfloat16, torch.float16)
    return parameter.device.type == "cuda" and half and plain and not sinks and head <= 256 and head % 8 == 0


def use_packed(model: Any) -> None:
    """Let the model use packed attention, if its code lets its attention be replaced; else it keeps its own."""
    with suppress(ValueError):
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, packed_attention)
