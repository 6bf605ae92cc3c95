"""Tensor parallelism: tensor ranks divide the heads, the feed-forward layers, and optionally tokens and vocabulary.

Dense models are divided by Hugging Face's plan of their family, one linear layer at a time, so that the fused layers of
nn/layers.py work on them. Mixtures of experts, and all models with cluster.sequence_parallel, are divided by *blocks*:

    norm -> [ enter -> attention or MLP, with this rank's heads and columns -> leave ] -> residual sum -> norm -> ...

Inside a block each rank sees all tokens and computes one term of the block's output. `enter` adds up the partial
gradients of the block's input, `leave` adds up the terms: one exchange per block in each direction, whatever is inside.
A parameter in a block that all ranks hold (a router, the norms of heads, the first half of latent attention) has a
partial gradient too. With sequence parallelism tokens are divided outside of blocks (arXiv:2205.05198): `enter` gathers
them and `leave` reduce-scatters the terms, which sends as many bytes, and what is outside is divided. Embedding and
head are then divided by the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from posttrain.core.errors import UsageError
from posttrain.parallel.expert import adapters_of, expert_tensors, experts_of, run_with_weights
from posttrain.parallel.pipeline import AbsentModule, SkippedLayer
from posttrain.parallel.shards import chunk_bounds, divide
from posttrain.parallel.tensor_group import GATHERED_FROM, IN_BLOCKS, GatheredLinear, TensorGroup

DENSE = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*DENSE, *MIXTURES)
"""Families that were compared with one process."""

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The plan's words: split the outputs; split the inputs; replicated, but used on local heads, so that each rank's
gradient is one term of a sum."""
COLUMN_LAYERS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
ROW_LAYERS = ("o_proj", "down_proj")
"""Linear layers in blocks whose outputs or inputs are divided. Hugging Face's plans lack some: the shared experts of
Qwen2-MoE, the attention of DeepSeek-V3."""
BLOCKS = ("self_attn", "mlp")  # attributes of a decoder layer
SIZES = (
    *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)


def apply_tensor_parallel(
    model: Any, mesh: DeviceMesh, device: torch.device, ranks: TensorGroup, *, with_experts: bool = True
) -> frozenset[str]:
    """Leave each tensor rank its heads and its part of the feed-forward layers.

    Returns the names of replicated parameters whose gradients must be summed over the tensor ranks. Experts are left
    alone if not `with_experts`: expert parallelism divides them.
    """
    if runs_in_blocks(model.config, sequence=ranks.sequence):
        return divide_blocks(model, mesh, device, ranks, with_experts=with_experts)
    prefix, plan = model.base_model_prefix, model.config.base_model_tp_plan
    layers = getattr(model, prefix)
    for parameter in layers.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    styles: dict[str, Any] = {}
    for pattern, word in plan.items():
        if word in (COLUMNS, ROWS):
            styles |= parallel_styles(layers, pattern, word)
    parallelize_module(layers, mesh, styles, src_data_rank=None)
    summed = [pattern.split("*.")[-1] for pattern, word in plan.items() if word == SUMMED]
    names = (name for name, _ in model.named_parameters())
    return frozenset(name for name in names if any(f".{part}." in name for part in summed))


def check_tensor_parallel(model: Any, size: int, *, sequence: bool = False) -> None:
    """Raise UsageError if `size` ranks cannot divide the heads and the feed-forward layers of this model."""
    config = model.config
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"cluster.tensor_parallel_size is {size}, but {type(model).__name__} ({config.model_type}) cannot be "
            f"split over tensor ranks here; {', '.join(FAMILIES)} can. Leave it at 1: cluster.zero_stage 3 shards "
            "every model."
        )
    for what in SIZES:
        number = getattr(config, what, None) or 0
        if number % size:
            raise UsageError(
                f"cluster.tensor_parallel_size is {size}, which does not divide the model's {what.replace('_', ' ')}, "
                f"which is {number}"
            )
    vocabulary = model.get_input_embeddings(), model.get_output_embeddings()
    if sequence and any(hasattr(module, "base_layer") for module in vocabulary):
        raise UsageError(
            "cluster.sequence_parallel divides embedding and head by the vocabulary, which is not possible where they "
            "have adapters. Leave them out of model.lora_target_modules, or leave out cluster.sequence_parallel."
        )
    has_lengths = any(getattr(module, "lora_magnitude_vector", ()) for module in model.modules())
    if has_lengths and runs_in_blocks(config, sequence=sequence):
        raise UsageError(
            f"model.use_dora and cluster.tensor_parallel_size {size} cannot be combined here: the lengths of a "
            "divided matrix's rows are not known to one rank. Leave out one of them."
        )


def runs_in_blocks(config: Any, *, sequence: bool) -> bool:
    """Whether a model is divided by blocks, and so runs its own code instead of fused layers."""
    return sequence or config.model_type in MIXTURES


def mark_blocks(model: Any, *, sequence: bool) -> None:
    """Mark the layers of a model that would be divided by blocks, so that they run their own code."""
    if runs_in_blocks(model.config, sequence=sequence):
        for layer in getattr(model, model.base_model_prefix).layers:
            setattr(layer, IN_BLOCKS, True)


def parallel_styles(layers: Any, pattern: str, word: str) -> dict[str, Any]:
    """Return the styles of one entry of the plan, by module; a pipeline stage has some of the layers.

    Of an adapted layer, lora_B is split like the layer's outputs, or lora_A like its inputs.
    """
    style = ColwiseParallel if word == COLUMNS else RowwiseParallel
    styles: dict[str, Any] = {}
    for name, module in layers.named_modules():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            if hasattr(module, "base_layer"):
                adapter = f"{name}.lora_{'B' if word == COLUMNS else 'A'}.default"
                styles |= {f"{name}.base_layer": style(), adapter: style()}
            else:
                styles[name] = style()
    return styles


# Blocks


def divide_blocks(
    model: Any, mesh: DeviceMesh, device: torch.device, ranks: TensorGroup, *, with_experts: bool
) -> frozenset[str]:
    """Divide the blocks of all decoder layers, with sequence parallelism also tokens and vocabulary.

    Returns the names of replicated parameters with partial gradients.
    """
    mark_blocks(model, sequence=ranks.sequence)
    summed: set[int] = set()
    trunk = getattr(model, model.base_model_prefix)
    for layer in trunk.layers:
        if isinstance(layer, SkippedLayer):
            continue
        for block in (getattr(layer, name) for name in BLOCKS):
            divide_linears(block, mesh, device, ranks)
            if with_experts:
                divide_experts(block, mesh, device)
            summed |= {id(parameter) for parameter in block.parameters()}
            block.forward = partial(run_block, ranks, block.forward)
        if ranks.sequence:
            summed |= {id(parameter) for parameter in layer.parameters()}
            layer.register_forward_pre_hook(partial(before_layer, ranks), with_kwargs=True)
    if ranks.sequence:
        summed |= {id(parameter) for parameter in getattr(trunk, "norm", torch.nn.Module()).parameters()}
        divide_vocabulary(model, mesh, device, ranks)
    return frozenset(name for name, p in model.named_parameters() if id(p) in summed and not isinstance(p, DTensor))


def divide_linears(block: Any, mesh: DeviceMesh, device: torch.device, ranks: TensorGroup) -> None:
    """Leave this rank its heads, columns and rows of a block's linear layers."""
    for module in block.modules():
        if isinstance(module, torch.nn.Linear):  # also those that all ranks hold, which read gathered tokens
            module.forward = partial(local_linear, module, 1.0)
    for owner, name, linear in divided_linears(block):
        columns = name in COLUMN_LAYERS
        linear.weight = divide(linear.weight, mesh, [(0 if columns else 1, 1)], device)
        if columns and linear.bias is not None:
            linear.bias = divide(linear.bias, mesh, [(0, 1)], device)
        if not columns and ranks.rank:  # the bias of a sum of terms is added once
            linear.forward = partial(local_linear, linear, 0.0)
        for adapter in adapters_of(owner):
            matrix = owner.lora_B[adapter] if columns else owner.lora_A[adapter]
            matrix.weight = divide(matrix.weight, mesh, [(0 if columns else 1, 1)], device)


def divide_experts(block: Any, mesh: DeviceMesh, device: torch.device) -> None:
    """Leave this rank its part of each expert."""
    for _, experts in experts_of(block):
        for tensor in expert_tensors(experts):
            if tensor.tensor_division is not None:
                tensor.replace(divide(tensor.parameter, mesh, [tensor.tensor_division], device))
        experts.forward = partial(run_with_weights, experts, experts.forward)


def divided_linears(block: Any) -> Iterator[tuple[Any, str, torch.nn.Linear]]:
    """Yield the linear layers of a block that ranks divide: the layer or its adapted form, its name, the layer."""
    for name, module in block.named_modules():
        last = name.split(".")[-1]
        if last in COLUMN_LAYERS + ROW_LAYERS:
            linear = getattr(module, "base_layer", module)
            if isinstance(linear, torch.nn.Linear):
                yield module, last, linear


def local_linear(linear: torch.nn.Linear, bias_factor: float, x: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer in a block: this rank's columns of it, its term of the sum over all rows, or all of it."""
    weight, bias = (local(tensor) for tensor in (linear.weight, linear.bias))
    assert weight is not None
    if bias is not None and bias_factor != 1.0:
        bias = bias * bias_factor  # multiplied, so that it has a gradient on every rank
    gathered = getattr(x, GATHERED_FROM, None)
    if gathered is not None and torch.is_grad_enabled():
        return GatheredLinear.apply(x, weight, bias, *gathered)
    return F.linear(x, weight, bias)


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's part of a parameter, with gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def before_layer(ranks: TensorGroup, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Note whether the tokens of the pass are divided; a layer that is recomputed is called with the same arguments."""
    packing = kwargs.get("packing")
    ranks.divides_tokens = packing is not None and packing.divided


def run_block(
    ranks: TensorGroup, stock: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run attention or an MLP with this rank's part of it, between the exchanges with the other ranks."""
    output = stock(ranks.enter(hidden_states), *args, **kwargs)
    if isinstance(output, tuple):
        return ranks.leave(output[0]), *output[1:]
    return ranks.leave(output)


# The vocabulary


def divide_vocabulary(model: Any, mesh: DeviceMesh, device: torch.device, ranks: TensorGroup) -> None:
    """Leave this rank its part of the vocabulary in the embedding and in the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is not None and head.weight is getattr(embedding, "weight", None)
    if not isinstance(embedding, AbsentModule):
        embedding.weight = divide(embedding.weight, mesh, [(0, 1)], device)
        embedding.forward = partial(embed_tokens, embedding, ranks)
    if head is not None and not isinstance(head, AbsentModule):
        head.weight = embedding.weight if tied else divide(head.weight, mesh, [(0, 1)], device)
        head.tensor_group = ranks
        head.forward = partial(gathered_logits, head, ranks)


def embed_tokens(embedding: Any, ranks: TensorGroup, ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of tokens: the sum over ranks of those in its part of the vocabulary."""
    weight = embedding.weight.to_local()
    index, inside = local_ids(ids, len(embedding.weight), ranks)
    rows = F.embedding(index, weight) * inside[..., None]
    if hasattr(embedding, "embed_scale"):  # Gemma
        rows = rows * embedding.embed_scale.to(rows.dtype)
    return ranks.leave(rows)


def local_ids(ids: torch.Tensor, vocabulary: int, ranks: TensorGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids as indices into this rank's part of the vocabulary, 0 for others, and which ones are in it."""
    first, end = chunk_bounds((0, vocabulary), ranks.size, ranks.rank)
    inside = (ids >= first) & (ids < end)
    return (ids - first) * inside, inside


def gathered_logits(head: Any, ranks: TensorGroup, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the whole vocabulary; nn/lm_head.py computes log-probabilities without gathering them."""
    logits = local_logits(head, ranks, hidden.reshape(-1, hidden.shape[-1]))
    return ranks.joined_columns(logits, len(head.weight)).view(*hidden.shape[:-1], -1)


def local_logits(head: Any, ranks: TensorGroup, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the logits of this rank's part of the vocabulary: [n, H] -> [n, V / size]."""
    return F.linear(ranks.partial(hidden), head.weight.to_local())


__all__ = [
    "FAMILIES",
    "apply_tensor_parallel",
    "check_tensor_parallel",
    "local_ids",
    "local_logits",
    "mark_blocks",
    "runs_in_blocks",
]
