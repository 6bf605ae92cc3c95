"""Counts the work of a model per token: matrix products, attention, memory traffic. Nothing is loaded or run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from posttrain.models.memory import experts_of, layer_of


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelWork:
    """What one token costs in a pass through a model."""

    layers: int
    hidden: int
    gates: int  # sum over the layers of the width between the MLP's matrices, of the experts that a token uses
    dense_weights: int  # in the matrices of the layers, without experts
    expert_weights: int  # in all experts
    used_share: float  # of the experts' weights that one token is multiplied with
    head_weights: int
    vocabulary: int
    attention_width: int  # sum over heads of the sizes of a key and of a value, of one layer
    exchanged_width: int  # of queries, keys, values and outputs of one layer: what context ranks exchange
    heads: int
    kv_heads: int
    kv_width: int  # of keys and values of one layer: what ranks of a ring send each other
    experts_per_token: int
    expert_layers: int
    trained_share: float  # of the matrices of the layers, whose gradient is computed
    parameters: int
    trained: int
    element_size: int

    @property
    def used_weights(self) -> float:
        """Weights in the layers that one token is multiplied with."""
        return self.dense_weights + self.used_share * self.expert_weights

    def model_flops(self, tokens: float, counted: float, squares: float) -> float:
        """Return the FLOPs of a forward and backward pass as model FLOP utilisation counts them: nothing twice.

        `counted`: tokens that have logits; `squares`: the sum of squared sample lengths.
        """
        passes = 2 + 2 + 2 * self.trained_share
        head = 6 if self.trained_share == 1 else 4
        attention = 3 * self.attention_flops(squares)
        return passes * self.used_weights * tokens + head * self.head_weights * counted + attention

    def attention_flops(self, squares: float) -> float:
        """Return the FLOPs of causal attention in a forward pass: half of all pairs of tokens."""
        return self.layers * self.attention_width * squares


def work_of(model: Any) -> ModelWork:
    """Count the work of a model, which may be on the meta device."""
    config = model.config.get_text_config()
    stacks: dict[str, Any] = dict(experts_of(model))
    dense = trained = gates = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        inside = layer_of(name) and name not in stacks and not isinstance(module, torch.nn.Embedding)
        if not inside or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            continue
        # 4-bit layers store two numbers per element.
        size = module.in_features * module.out_features if isinstance(module, torch.nn.Linear) else weight.numel()
        dense += size
        trained += size * weight.requires_grad
        if name.removesuffix(".base_layer").endswith(("mlp.down_proj", "mlp.c_proj", "experts.down_proj")):
            gates += size // config.hidden_size
    experts = sum(p.numel() for stack in stacks.values() for p in stack.parameters())
    trained += sum(p.numel() for stack in stacks.values() for p in stack.parameters() if p.requires_grad)
    per_token = experts_per_token(config) if stacks else 0
    share = 0.0
    for stack in stacks.values():
        share = per_token / stack.num_experts
        gates += per_token * stack.down_proj.numel() // (stack.num_experts * config.hidden_size)
    heads, kv_heads, keys, values = head_sizes(config)
    head = model.get_output_embeddings()
    parameters = list(model.parameters())
    return ModelWork(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        gates=gates,
        dense_weights=dense,
        expert_weights=experts,
        used_share=share,
        head_weights=0 if head is None else head.weight.numel(),
        vocabulary=0 if head is None else head.weight.shape[0],
        attention_width=heads * (keys + values),
        exchanged_width=heads * keys + kv_heads * (keys + values) + heads * values,
        heads=heads,
        kv_heads=kv_heads,
        kv_width=kv_heads * (keys + values),
        experts_per_token=per_token,
        expert_layers=len(stacks),
        trained_share=trained / max(1, dense + experts),
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        element_size=parameters[0].element_size(),
    )


def head_sizes(config: Any) -> tuple[int, int, int, int]:
    """Return the numbers of heads and key-value heads, and the sizes of a key and a value; 0 without attention."""
    heads = getattr(config, "num_attention_heads", None) or 0
    if not heads:
        return 0, 0, 0, 0
    if getattr(config, "kv_lora_rank", None) and getattr(config, "v_head_dim", None):  # keys and values of each head
        return heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, size, size


def experts_per_token(config: Any) -> int:
    """Return the number of experts that a token is sent to, by the names that families use."""
    for name in ("num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token"):
        if value := getattr(config, name, None):
            return int(value)
    return 1
