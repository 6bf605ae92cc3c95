"""AdamW over float32 masters, with clipping, a finiteness check and an average of the weights.

Weights in half precision stay at one address and are overwritten after each step; the masters, the accumulated
gradients and Adam's state are float32. Weights in float32 are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from posttrain.config import UpdateConfig


class Optimizer:
    """Owns everything that changes the weights."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], config: UpdateConfig) -> None:
        assert parameters, "nothing to train"
        self.config = config
        self.parameters = parameters
        self.masters: dict[str, torch.Tensor] = {}
        for name, parameter in parameters.items():
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
            else:
                self.masters[name] = parameter.detach().float()
                parameter.register_post_accumulate_grad_hook(accumulate_into(self.masters[name]))
        matrices = [master for master in self.masters.values() if master.ndim >= 2]
        others = [master for master in self.masters.values() if master.ndim < 2]  # norms and biases
        self.adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )
        self.average = {n: m.detach().clone() for n, m in self.masters.items()} if config.ema_decay else {}

    @torch.no_grad()
    def step(self, learning_rate: float) -> dict[str, float]:
        """Clip, check and apply the gradients, then forget them. Not finite: nothing is applied, `skipped` is 1."""
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        norm_value = float(norm)
        finite = math.isfinite(norm_value)
        if finite:
            limit = self.config.max_grad_norm
            if limit and norm_value > limit:
                torch._foreach_mul_(grads, limit / (norm_value + 1e-6))
            for group in self.adam.param_groups:
                group["lr"] = learning_rate
            self.adam.step()
            self.write_weights()
            if self.average:
                masters = [master.detach() for master in self.masters.values()]
                torch._foreach_lerp_(list(self.average.values()), masters, 1 - self.config.ema_decay)
        self.forget_gradients()
        return {"grad_norm": norm_value, "learning_rate": learning_rate, "skipped": float(not finite)}

    def write_weights(self) -> None:
        """Masters -> the weights the model computes with, in place."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.data.copy_(self.masters[name])

    def forget_gradients(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def move(self, device: torch.device) -> None:
        """All but the weights to another device; weights in float32 are their own masters and stay."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.data = master.data.to(device, non_blocking=True)
            for key, value in self.adam.state[master].items():
                if value.ndim:
                    self.adam.state[master][key] = value.to(device, non_blocking=True)
        self.average = {name: tensor.to(device, non_blocking=True) for name, tensor in self.average.items()}
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def state(self) -> dict[str, torch.Tensor]:
        """Adam's state and the masters as flat tensors by name."""
        flat: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adam.state[master].items():
                flat[f"{key}/{name}"] = value
            if master is not self.parameters[name]:
                flat[f"master/{name}"] = master
        return flat

    @torch.no_grad()
    def load_state(self, flat: dict[str, torch.Tensor]) -> None:
        """The inverse of `state`; call it after the weights themselves were loaded."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(flat[f"master/{name}"])
            state = {key: flat[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in flat}
            self.adam.state.pop(master, None)
            if state:  # absent before the first step
                device = master.device
                self.adam.state[master] = {key: value.to(device).clone() for key, value in state.items()}

    @torch.no_grad()
    def load_average(self, flat: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.average.items():
            tensor.copy_(flat[name])


def accumulate_into(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Add a half-precision gradient to the master's float32 one and free it, as soon as it is there."""

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
