"""AdamW without a learning-rate schedule: it trains at one point and is evaluated at an average (arXiv:2405.15682).

Three points: z follows AdamW's updates, x is the average of all z, and gradients are taken at y = (1 - beta1) z +
beta1 x. The weights in training are y. Only y and z are stored; x follows from them. The update is that of
AdamWScheduleFree in the package schedulefree with its defaults: a z counts in the average by the square of the largest
learning rate so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

EPSILON = 1e-8


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Updates float32 weights y and their states z and exp_avg_sq; `averaged` gives x."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step with the learning rate of each group."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group, self.state[weight])

    def update(self, y: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "weight_sum": 0.0, "lr_max": 0.0, "z": y.clone(), "exp_avg_sq": torch.zeros_like(y)}
        (beta1, beta2), lr = group["betas"], group["lr"]
        state["step"] += 1
        state["lr_max"] = max(lr, state["lr_max"])
        state["weight_sum"] += state["lr_max"] ** 2
        # Part of the newest z in the average; 0 while the learning rate is still 0.
        share = state["lr_max"] ** 2 / state["weight_sum"] if state["weight_sum"] else 0.0
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(y.grad, y.grad, value=1 - beta2)
        update = y.grad / (second / (1 - beta2 ** state["step"])).sqrt_().add_(EPSILON)
        if group["weight_decay"]:
            update.add_(y, alpha=group["weight_decay"])
        y.lerp_(state["z"], share).add_(update, alpha=lr * (beta1 * (1 - share) - 1))
        state["z"].sub_(update, alpha=lr)

    def averaged(self, y: torch.Tensor) -> torch.Tensor:
        """Return x of a weight; the weight itself before its first step."""
        group = next(group for group in self.param_groups if any(weight is y for weight in group["params"]))
        return y.lerp(self.state[y]["z"], 1 - 1 / group["betas"][0]) if self.state.get(y) else y.clone()
