"""Decoder layers of the models that most people train, with few and fat steps, forward and backward.

Llama, Qwen2, Qwen3 and Mistral share one shape: RMS norms, rotated queries and keys, grouped heads, a gated MLP. On an
accelerator their layers run the code here instead of their own, on the same weights: maps of one input are one matrix
product, what lies between the products is one kernel each, and what is cheap to compute again is not kept for the
backward pass. Every other model runs its own code. `forward.verify_against_stock` compares the two before any training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from posttrain.core.types import SamplingDistribution
from posttrain.nn import attention
from posttrain.nn.kernels.reference import kernels_for

FAMILIES = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
log = logging.getLogger("posttrain")
LOGITS_PER_CHUNK = 2**29  # half precision: 1 GiB
LOGITS_PER_CPU_CHUNK = 2**22  # float32: 16 MiB, which a CPU's cache holds while it is worked on
MASTER = "float32_master"
"""Attribute of a half-precision weight: the float32 tensor that the optimizer updates, whose `grad` adds up."""


def supports_fused_layers(model: Any) -> bool:
    """Whether the model has the shape that is walked here."""
    layers = getattr(getattr(model, model.base_model_prefix), "layers", None)
    if layers is None or not all(any(own in type(layer).__mro__[:3] for own in FAMILIES) for layer in layers):
        return False  # FSDP puts two classes in front
    config = model.config
    fixed_rope = config.rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope")
    return fixed_rope and config.hidden_act in ("silu", "swish")


def window_of(layer: Any) -> int | None:
    """How far back the layer looks; None: to the beginning."""
    if isinstance(layer, Qwen2DecoderLayer | Qwen3DecoderLayer):
        return layer.self_attn.sliding_window
    return layer.self_attn.config.sliding_window if isinstance(layer, MistralDecoderLayer) else None


def head_norms(layer: Any) -> tuple[torch.nn.Parameter | None, torch.nn.Parameter | None, float]:
    """Weights of the norms of queries and keys, and their epsilon."""
    if not isinstance(layer, Qwen3DecoderLayer):
        return None, None, 0.0
    own = layer.self_attn
    return own.q_norm.weight, own.k_norm.weight, own.q_norm.variance_epsilon


def use_fused_layers(model: Any, steps: ModuleType | None = None, *, join_weights: bool = True) -> bool:
    """Let the layers run the code here where it knows them and there are kernels; `kernels` forces the choice.

    `join_weights`: maps of one input become one; weights that are divided among processes stay as they are anyway.
    """
    if not supports_fused_layers(model) or (steps is None and not attention.supports_varlen_kernel(model)):
        if next(model.parameters()).device.type == "cuda":
            say_slower(type(model).__name__)
        return False
    steps = steps or kernels_for(next(model.parameters()).device)
    for layer in getattr(model, model.base_model_prefix).layers:
        for modules in (maps_to_heads(layer), maps_to_gate(layer)):
            if join_weights and all(is_plain(module) for module in modules):
                join_storage([module.weight for module in modules])
                if modules[0].bias is not None:
                    join_storage([module.bias for module in modules])
        if not isinstance(layer.forward, partial):
            layer.forward = partial(run_layer, layer, layer.forward, steps)
    return True


@cache
def say_slower(name: str) -> None:
    log.warning("%s runs its own code in training: the same numbers, more slowly.", name)


def maps_to_heads(layer: Any) -> list[Any]:
    own = layer.self_attn
    return [own.q_proj, own.k_proj, own.v_proj]


def maps_to_gate(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def is_plain(module: Any) -> bool:
    """A linear map and nothing else: adapters, quantized and split maps keep their own code."""
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


def run_layer(
    layer: Any,
    stock: Any,
    steps: ModuleType,
    hidden_states: torch.Tensor,
    *args: Any,
    packing: attention.Packing | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """One decoder layer over a pack: [1, T, H] -> [1, T, H]."""
    if packing is None or args or "cache" in kwargs:
        return stock(hidden_states, *args, **({"packing": packing} if packing else {}), **kwargs)
    own, norm, next_norm = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
    x = hidden_states.squeeze(0)  # not [0], whose gradient is a copy
    cos, sin = (angle[0] for angle in kwargs["position_embeddings"])
    qkv, x = normed_maps(steps, x, None, norm, maps_to_heads(layer))
    q_norm, k_norm, eps = head_norms(layer)
    config, all_heads = own.config, qkv.shape[1] // own.head_dim
    shares = config.num_attention_heads + 2 * config.num_key_value_heads
    heads = all_heads * config.num_attention_heads // shares  # of this tensor rank
    streams = Rotated.apply(qkv, cos, sin, q_norm, k_norm, eps, own.head_dim, heads, steps)
    query, key, value = (stream.transpose(0, 1)[None] for stream in streams)
    how = {"packing": packing, "scaling": own.scaling, "sliding_window": window_of(layer)}
    seen = attention.packed_attention(own, query, key, value, None, **how)[0].squeeze(0).flatten(1)
    out = own.o_proj
    mixed = Map.apply(seen, out.weight) if is_plain(out) and out.bias is None else out(seen)
    gate_up, x = normed_maps(steps, mixed, x, next_norm, maps_to_gate(layer))
    down = layer.mlp.down_proj
    if is_plain(down) and down.bias is None:
        return (x + GatedMap.apply(gate_up, down.weight, steps))[None]
    return (x + down(Gated.apply(gate_up, steps)))[None]


def normed_maps(
    steps: ModuleType, x: torch.Tensor, residual: torch.Tensor | None, norm: Any, modules: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modules' maps of the normed sum, side by side, and the sum."""
    weights = [module.weight for module in modules] if all(is_plain(module) for module in modules) else []
    joined = joined_view(weights)
    biases = [module.bias for module in modules if module.bias is not None] if weights else []
    bias = joined_view(biases)
    if joined is None or (biases and bias is None):
        normed, total = Normed.apply(x, residual, norm.weight, norm.variance_epsilon, steps)
        return torch.cat([module(normed) for module in modules], -1), total
    options = (norm.variance_epsilon, steps, joined, bias, len(weights))
    return NormedMaps.apply(x, residual, norm.weight, options, *weights, *biases)


# Weights that lie in a row


def joined_view(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of which the parameters are parts, or None where they do not lie in a row."""
    if not parameters:
        return None
    first = parameters[0].detach()
    ends = [parameter.storage_offset() + parameter.numel() for parameter in parameters]
    in_a_row = [parameter.storage_offset() for parameter in parameters[1:]] == ends[:-1]
    same_storage = len({parameter.untyped_storage()._cdata for parameter in parameters}) == 1
    if not (in_a_row and same_storage and all(parameter.is_contiguous() for parameter in parameters)):
        return None
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def join_storage(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """The same, after moving them there if they are not. Who writes them in place writes it."""
    found = joined_view(parameters)
    if found is not None:
        return found
    with torch.inference_mode(False), torch.no_grad():  # training goes on with these weights
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
    return joined


# The steps, with their gradients


class NormedMaps(torch.autograd.Function):
    """Sum, norm and joined maps: only the sum is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: torch.Tensor,
        options: tuple[float, ModuleType, torch.Tensor, torch.Tensor | None, int],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, steps, weight, bias, _ = options
        normed, total = steps.add_norm(x, residual, norm, eps)
        ctx.save_for_backward(total, norm)
        ctx.options, ctx.parameters = options, parameters
        return F.linear(normed, weight, bias), total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        d_out, d_total = gradients
        total, norm = ctx.saved_tensors
        eps, steps, weight, bias, maps = ctx.options
        grads: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        if any(ctx.needs_input_grad[4:]):
            normed = steps.add_norm(total, None, norm, eps)[0]
            grads[:maps] = weight_gradients(ctx.parameters[:maps], d_out, normed)
            if bias is not None:
                grads[maps:] = d_out.sum(0).split([len(parameter) for parameter in ctx.parameters[maps:]])
        d_total, d_norm = steps.norm_backward(d_out @ weight, total, norm, eps, d_total)
        return d_total, d_total if ctx.needs_input_grad[1] else None, d_norm, None, *grads


class Normed(torch.autograd.Function):
    """(norm of the sum, the sum)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, steps: ModuleType
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = steps.add_norm(x, residual, norm, eps)
        ctx.save_for_backward(total, norm)
        ctx.options = (eps, steps)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total, norm = ctx.saved_tensors
        eps, steps = ctx.options
        d_total, d_norm = steps.norm_backward(gradients[0], total, norm, eps, gradients[1])
        return d_total, d_total if ctx.needs_input_grad[1] else None, d_norm, None, None


class Rotated(torch.autograd.Function):
    """Queries, keys and values side by side [T, (h + 2 k) d] -> normed and rotated [T, h, d], [T, k, d]; [T, k, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        width: int,
        heads: int,
        steps: ModuleType,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kv_heads = (qkv.shape[1] // width - heads) // 2
        keys, values = (qkv.new_empty(len(qkv), 1, kv_heads, width) for _ in range(2))
        alone = torch.zeros(len(qkv), dtype=torch.int32, device=qkv.device)  # each token a row of its own
        query = steps.rotate_and_store(qkv, cos, sin, alone, keys, values, q_norm, k_norm, eps)
        ctx.save_for_backward(cos, sin, *(() if q_norm is None else (qkv, q_norm, k_norm)))
        ctx.options = (eps, steps)
        return query, keys[:, 0], values[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        cos, sin, *normed = ctx.saved_tensors
        eps, steps = ctx.options
        d_qkv, d_q_norm, d_k_norm = steps.rotate_backward(*gradients, cos, sin, *(normed or (None,) * 3), eps)
        return d_qkv, None, None, d_q_norm, d_k_norm, None, None, None, None


class GatedMap(torch.autograd.Function):
    """The gate and the map behind it: what the gate gives is computed again, not kept."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, weight: torch.Tensor, steps: ModuleType) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.weight, ctx.steps = weight, steps
        return steps.gated(gate_up) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_out,) = gradients
        out, d_gate_up = ctx.steps.gated_backward(d_out @ ctx.weight, *ctx.saved_tensors)
        return d_gate_up, *(weight_gradients([ctx.weight], d_out, out) if ctx.needs_input_grad[1] else [None]), None


class Map(torch.autograd.Function):
    """A matrix product whose weight's gradient goes straight to the master."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_out,) = gradients
        grads = weight_gradients([ctx.weight], d_out, *ctx.saved_tensors) if ctx.needs_input_grad[1] else [None]
        return d_out @ ctx.weight, *grads


class Gated(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, steps: ModuleType) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.steps = steps
        return steps.gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.steps.gated_backward(gradients[0], *ctx.saved_tensors)[1], None


# Log-probabilities


@dataclass(slots=True, frozen=True, eq=False)
class PlainHead:
    """A head that is one matrix and nothing behind it, with kernels for its log-probabilities."""

    head: torch.nn.Linear
    steps: ModuleType
    multiple: int = 256  # positions are padded to a multiple, so that products of few different sizes are asked for

    @classmethod
    def from_model(cls, model: Any, steps: ModuleType | None = None) -> PlainHead | None:
        """None where the model's head is something else, or there are no kernels for the device."""
        head, config = model.get_output_embeddings(), model.config
        scalings = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        plain = head is not None and is_plain(head) and head.bias is None
        if not plain or any(getattr(config, name, None) is not None for name in scalings):
            return None
        on_cpu = head.weight.device.type == "cpu"
        if steps is None and not on_cpu and not attention.supports_varlen_kernel(model):
            return None
        return cls(head, steps or kernels_for(head.weight.device), 1 if on_cpu else 256)

    def serves(self, distribution: SamplingDistribution) -> bool:
        return not distribution.top_k and distribution.top_p >= 1.0 and not distribution.min_p

    def logprobs(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        *,
        entropy: bool,
        entropy_gradient: bool,
        slopes: Slopes | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See nn/logprobs.py token_logprobs; the entropy is 0 where it is not asked for."""
        count = len(targets)
        padding = -count % self.multiple
        if padding:
            hidden, targets = F.pad(hidden, (0, 0, 0, padding)), F.pad(targets, (0, padding))
        options = (temperature or 1.0, self.steps, entropy, slopes)
        logprobs, entropies = Picked.apply(hidden, self.head.weight, targets, *options)
        return logprobs[:count], entropies[:count] if entropy_gradient else entropies[:count].detach()


class Slopes(Protocol):
    """Knows the gradient of a loss at a token as soon as the token's own log-probability and entropy are known."""

    def at(self, first: int, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients of log-probabilities and entropy at these tokens, of which `first` is the first."""

    def compare(self, d_logprobs: torch.Tensor) -> None:
        """With the gradients that the whole loss has in the end."""


class Picked(torch.autograd.Function):
    """Log-probability of each target and entropy, a chunk of logits at a time, forward and backward.

    With `slopes` the backward pass of a chunk follows its forward pass at once, so that logits are computed once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        steps: ModuleType,
        with_entropy: bool,
        slopes: Slopes | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at_once = LOGITS_PER_CPU_CHUNK if weight.device.type == "cpu" else LOGITS_PER_CHUNK
        size = max(1, at_once // len(weight))
        size -= size % 128 if size > 128 else 0  # products of whole tiles
        back = HeadGradient(hidden, weight, ctx.needs_input_grad[1]) if slopes is not None else None
        parts = []
        for start in range(0, max(1, len(hidden)), size):
            rows = slice(start, start + size)
            logits = hidden[rows] @ weight.t()
            picked, entropy, normalizer = steps.pick(logits, targets[rows], temperature, with_entropy=with_entropy)
            parts.append((picked, entropy, normalizer))
            if back is not None and slopes is not None:
                known = (normalizer, entropy, *slopes.at(start, picked, entropy))
                back.add(rows, steps.pick_backward(logits, targets[rows], temperature, *known))
            del logits  # before the next ones are there
        logprobs, entropy, normalizer = (torch.cat(streams) for streams in zip(*parts, strict=True))
        ctx.save_for_backward(*(() if back is not None else (hidden, targets, normalizer, entropy)))
        ctx.weight, ctx.options, ctx.slopes, ctx.back = weight, (temperature, steps, size), slopes, back
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        d_picked, d_entropy = gradients
        back: HeadGradient | None = ctx.back
        if back is None:
            hidden, targets, normalizer, entropy = ctx.saved_tensors
            weight, (temperature, steps, size) = ctx.weight, ctx.options
            if d_picked is None:
                d_picked = torch.zeros_like(normalizer)
            back = HeadGradient(hidden, weight, ctx.needs_input_grad[1])
            for start in range(0, len(hidden), size):
                rows = slice(start, start + size)
                known = (normalizer[rows], entropy[rows], d_picked[rows].contiguous())
                more = None if d_entropy is None else d_entropy[rows].contiguous()
                logits = hidden[rows] @ weight.t()
                back.add(rows, steps.pick_backward(logits, targets[rows], temperature, *known, more))
                del logits
        elif d_picked is not None:
            ctx.slopes.compare(d_picked)
        return back.d_hidden, back.d_weight, None, None, None, None, None


class HeadGradient:
    """Gradients of hidden states and of the head's weight, from those of a chunk of logits at a time."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, trains_weight: bool) -> None:
        self.hidden, self.weight, self.trains_weight = hidden, weight, trains_weight
        self.d_hidden = torch.empty_like(hidden)
        self.d_weight: torch.Tensor | None = None  # none where the weight's master has taken it

    def add(self, rows: slice, d_logits: torch.Tensor) -> None:
        torch.mm(d_logits, self.weight, out=self.d_hidden[rows])
        if not self.trains_weight:
            return
        if hasattr(self.weight, MASTER):
            weight_gradients([self.weight], d_logits, self.hidden[rows])
        else:
            self.d_weight = add_product(self.d_weight, d_logits.t(), self.hidden[rows])


# Gradients of weights


def weight_gradients(
    parameters: Sequence[torch.Tensor], d_out: torch.Tensor, x: torch.Tensor
) -> list[torch.Tensor | None]:
    """Gradients of maps of x that were computed as one, for autograd.

    Where the weights have float32 masters (see Optimizer) it is added to theirs instead, by the product itself: no
    rounding to half precision, and no pass over the weights to add it. Then there is nothing left for autograd.
    """
    sizes = [len(parameter) for parameter in parameters]
    masters = [getattr(parameter, MASTER) for parameter in parameters if hasattr(parameter, MASTER)]
    if len(masters) < len(parameters):
        return list((d_out.t() @ x).split(sizes))
    grads = [master.grad for master in masters]
    joined = None if any(grad is None for grad in grads) else joined_view(grads)
    if joined is not None:
        add_product(joined, d_out.t(), x)
        return [None] * len(sizes)
    parts = add_product(None, d_out.t(), x).split(sizes)
    for master, grad, part in zip(masters, grads, parts, strict=True):
        master.grad = part if grad is None else grad.add_(part)
    return [None] * len(sizes)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a @ b in place, added up in float32: rounded to half precision a hundred times it would lose much."""
    if a.is_meta:  # which knows no product of two types
        return a.new_empty(len(a), b.shape[1], dtype=torch.float32) if total is None else total
    if a.device.type == "cpu":
        return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


__all__ = ["MASTER", "PlainHead", "Slopes", "join_storage", "supports_fused_layers", "use_fused_layers"]
