"""Which rule updates which weights with train.optimizer, the states that a rule keeps, and their size.

adamw        two moments of float32 for every weight
adamw_8bit   two moments of 8 bits with a float32 scale per 256 weights, by bitsandbytes (arXiv:2110.02861);
             embeddings, and tensors below 4,096 elements, have float32 moments as with adamw
muon         one momentum; the update of a matrix is orthogonalised (torch.optim.Muon). Its size is scaled to that
             of AdamW's updates (arXiv:2502.16982), so that one learning rate serves both; AdamW updates embeddings,
             heads, norms, biases and everything else that is not a matrix of a decoder layer
adafactor    means of squared gradients by row and by column, by transformers (arXiv:1804.04235), with the learning
             rate as given: no scaling by the weights, no relative steps, no momentum
schedule_free  AdamW at a constant learning rate, evaluated and saved at an average of the weights (schedule_free.py)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from posttrain.config.sections import TrainConfig
from posttrain.nn.schedule_free import ScheduleFreeAdamW

MIN_8BIT_ELEMENTS, BLOCK_ELEMENTS = 4096, 256  # bitsandbytes' own
STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "adamw_8bit": ("step", "state1", "state2", "absmax1", "absmax2"),
    "muon": ("step", "momentum_buffer"),
    "adafactor": ("step", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"),
    "schedule_free": ("step", "weight_sum", "lr_max", "z", "exp_avg_sq"),
}
"""Rule -> the names of the states that it keeps, of which a weight may have a part."""

# It warns about kernels of 4-bit layers that are not used.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def layer_of(name: str) -> str:
    """Return the decoder layer that a parameter belongs to: `model.layers.3` for model.layers.3.mlp.up_proj.weight."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def embedding_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the weights of embeddings; a tied head has the name of its embedding."""
    modules = model.named_modules()
    return frozenset(f"{name}.weight" for name, module in modules if isinstance(module, torch.nn.Embedding))


def rule_for(optimizer: str, name: str, shape: Sequence[int], embeddings: frozenset[str]) -> str:
    """Return the rule that updates a weight."""
    if optimizer == "muon" and not (len(shape) == 2 and layer_of(name)):
        return "adamw"
    if optimizer == "adamw_8bit" and (name in embeddings or math.prod(shape) < MIN_8BIT_ELEMENTS):
        return "adamw"
    return optimizer


def state_bytes(rule: str, shape: Sequence[int]) -> int:
    """Return the bytes of the states of one weight."""
    count = math.prod(shape)
    if rule == "muon":
        return 4 * count
    if rule == "schedule_free":
        return 8 * count
    if rule == "adamw_8bit":
        return 2 * count + 2 * 4 * -(-count // BLOCK_ELEMENTS)
    if rule == "adafactor":
        return 4 * (count if len(shape) < 2 else count // shape[-1] + count // shape[-2])
    return 8 * count + 4  # and a step counter


def make_optimizer(rule: str, masters: Sequence[torch.Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a rule; weight decay is not applied to norms and biases."""
    groups = [
        {"params": [master for master in masters if master.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [master for master in masters if master.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    if rule == "muon":
        return torch.optim.Muon(groups, lr=config.learning_rate, adjust_lr_fn="match_rms_adamw")
    if rule == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=config.learning_rate, betas=betas)  # type: ignore[no-any-return]
    if rule == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    if rule == "schedule_free":
        return ScheduleFreeAdamW(groups, lr=config.learning_rate, betas=betas)
    assert rule == "adamw", rule
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def saved_state(rule: str, state: Mapping[str, Any], steps: int) -> dict[str, torch.Tensor]:
    """Return the states of a weight as tensors; `steps`: for rules that do not count them."""
    found = {key: value for key, value in state.items() if key in STATES[rule]}
    if found and rule == "muon":
        found["step"] = steps
    return {key: value if isinstance(value, torch.Tensor) else scalar(value) for key, value in found.items()}


def scalar(value: float) -> torch.Tensor:
    """Return a number as a tensor that holds all its bits."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def restored_state(
    rule: str, optimizer: torch.optim.Optimizer, master: torch.Tensor, saved: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return what `saved_state` returned as the rule keeps it."""
    state: dict[str, Any] = {key: value.to(master.device).clone() for key, value in saved.items()}
    if rule in ("adamw_8bit", "adafactor", "schedule_free"):
        state["step"] = int(saved["step"])
    if rule == "schedule_free":
        state |= {key: float(saved[key]) for key in ("weight_sum", "lr_max")}
    if rule == "adafactor":
        state["RMS"] = 0  # written before it is read
    if rule == "adamw_8bit":
        if not optimizer.name2qmap:  # type: ignore[attr-defined]
            optimizer.fill_qmap()  # type: ignore[attr-defined]
        maps = optimizer.name2qmap  # type: ignore[attr-defined]
        for key, kind in (("qmap1", "dynamic"), ("qmap2", "udynamic")):
            maps[kind] = maps[kind].to(master.device)
            state[key] = maps[kind]
    if rule == "muon":
        del state["step"]
    return state
