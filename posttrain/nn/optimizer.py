"""AdamW over float32 masters, with clipping, a finiteness check and an average of the weights.

Weights in half precision stay at one address and are overwritten after each step; the masters, the accumulated
gradients and Adam's state are float32. Weights in float32 are their own masters.

In float16 gradients below 6e-8 would be 0, so the loss is multiplied by a scale and the gradients divided by it. The
scale grows until they overflow; then it is halved and the step is made again, so that no row is lost.

Where a model is held by many processes its parameters are float32, and a master is this process's part of one: AdamW
works number by number, so only the norm of the gradients is asked of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from posttrain.checkpoints.tensor_files import TensorFiles, save_sharded, save_tensors
from posttrain.config.sections import UpdateConfig
from posttrain.nn.layers import MASTER
from posttrain.parallel.fsdp import ModelShards
from posttrain.parallel.shards import local_shard, shard_slices

ADAM = ("step", "exp_avg", "exp_avg_sq")
FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
SCALE_FILE = "loss-scale.json"


@dataclass(slots=True)
class LossScale:
    """What the loss is multiplied by: doubled after many steps without an overflow, halved at one."""

    value: float = 1.0
    good_steps: int = 0  # in a row
    before: float = 0.0  # its value before this step overflowed; 0: it has not

    GROW_EVERY = 2000

    def lower(self) -> None:
        self.before = self.before or self.value
        self.value, self.good_steps = max(1.0, self.value / 2), 0

    def give_up(self) -> None:
        """No scale helps: it was not the scale that was wrong."""
        self.value, self.before = self.before or self.value, 0.0

    def count(self) -> None:
        self.before = 0.0
        self.good_steps += 1
        if self.good_steps == self.GROW_EVERY:
            self.value, self.good_steps = min(LARGEST_SCALE, self.value * 2), 0


class Optimizer:
    """Owns everything that changes the weights."""

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter], config: UpdateConfig, shards: ModelShards | None = None
    ) -> None:
        assert parameters, "nothing to train"
        self.config = config
        self.parameters = parameters
        self.shards = shards
        self.masters: dict[str, torch.Tensor] = {}
        for name, parameter in parameters.items():
            if shards is not None:
                assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
                self.masters[name] = local_shard(parameter)
            elif parameter.dtype == torch.float32:
                self.masters[name] = parameter
            else:
                self.masters[name] = parameter.detach().float()
                setattr(parameter, MASTER, self.masters[name])
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
        self.steps = 0  # that were applied
        self.stay_put = False  # whether gradients have the same addresses in every step; see begin
        self.places: dict[str, torch.Tensor] = {}  # where they were, between steps
        types = {shards.dtype} if shards is not None else {parameter.dtype for parameter in parameters.values()}
        self.scale = LossScale(FIRST_SCALE) if torch.float16 in types else None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scale is None else self.scale.value

    def bytes_to_come(self, device: torch.device) -> int:
        """Of what a step needs on the device, and is not there now: it does not exist yet, or is in host memory."""
        wanted = 0
        for name, master in self.masters.items():
            state = self.adam.state.get(master, {})
            gradient = self.places.get(name, master.grad)
            for tensor in (master, gradient, state.get("exp_avg"), state.get("exp_avg_sq")):
                wanted += 4 * master.numel() * (tensor is None or tensor.device.type != device.type)
        return wanted

    @torch.no_grad()
    def step(self, learning_rate: float) -> dict[str, float]:
        """Clip, check and apply the gradients, then forget them. Not finite: nothing is applied, `skipped` is 1.

        Or `rescaled` is 1: they may be finite with the loss scale that there is now.
        """
        scale = self.loss_scale
        norm_value = float(self.gradient_norm()) / scale
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        finite = math.isfinite(norm_value)
        if self.scale is not None and not finite and scale > 1.0:
            self.scale.lower()
            self.forget_gradients()
            return {"rescaled": 1.0}
        if self.scale is not None and not finite:
            self.scale.give_up()
        if finite:
            limit, factor = self.config.max_grad_norm, 1 / scale
            if limit and norm_value > limit:
                factor *= limit / (norm_value + 1e-6)
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            for group in self.adam.param_groups:
                group["lr"] = learning_rate
            self.adam.step()
            self.steps += 1
            if self.scale is not None:
                self.scale.count()
            self.write_weights()
            if self.average:
                masters = [master.detach() for master in self.masters.values()]
                torch._foreach_lerp_(list(self.average.values()), masters, 1 - self.config.ema_decay)
        self.forget_gradients()
        scales = {"loss_scale": scale} if self.scale is not None else {}
        return {"grad_norm": norm_value, "learning_rate": learning_rate, "skipped": float(not finite), **scales}

    def gradient_norm(self) -> torch.Tensor:
        if self.shards is None:
            grads = [master.grad for master in self.masters.values() if master.grad is not None]
            return torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        found = {name: local_shard(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self.shards.reduce_replicated(found, self.parameters)
        for name, gradient in found.items():
            self.masters[name].grad = gradient
        return self.shards.gradient_norm(found, self.parameters)

    def has_own_master(self, name: str) -> bool:
        """Whether the weights are rounded from a master, and not the master themselves."""
        return self.shards is None and self.masters[name] is not self.parameters[name]

    def write_weights(self) -> None:
        """Masters -> the weights the model computes with, in place."""
        for name, parameter in self.parameters.items():
            if self.has_own_master(name):
                parameter.data.copy_(self.masters[name])

    def begin(self) -> None:
        """Before gradients are added: where they must stay at their addresses, which graphs know, put zeros there."""
        if self.places and all(master.grad is None for master in self.masters.values()):
            torch._foreach_zero_(list(self.places.values()))
            for name, gradient in self.places.items():
                self.masters[name].grad = gradient
            self.places = {}

    def forget_gradients(self) -> None:
        there = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        self.places = (there or self.places) if self.stay_put else {}
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None

    def move(self, device: torch.device) -> None:
        """All but the weights to another device; weights in float32 are their own masters and stay."""
        self.find_masters()
        for name, master in self.masters.items():
            if self.has_own_master(name):
                master.data = master.data.to(device, non_blocking=True)
            for key, value in self.adam.state[master].items():
                if value.ndim:
                    self.adam.state[master][key] = value.to(device, non_blocking=True)
        self.average = {name: tensor.to(device, non_blocking=True) for name, tensor in self.average.items()}
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def find_masters(self) -> None:
        """Where they are parts of parameters, these may have been moved."""
        if self.shards is not None:
            for name, master in self.masters.items():
                master.data = local_shard(self.parameters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Adam's state and the masters as flat tensors by name."""
        flat: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adam.state[master].items():
                flat[f"{key}/{name}"] = value
            if self.has_own_master(name):
                flat[f"master/{name}"] = master
        return flat

    def save(self, folder: Path) -> None:
        """What training needs to go on, besides the weights; the same tensors, however many processes hold them."""
        if self.scale is not None and (self.shards is None or self.shards.rank == 0):
            (folder / SCALE_FILE).write_text(json.dumps(asdict(self.scale)), encoding="utf-8")
        if self.shards is None:
            save_tensors(folder / "optimizer.safetensors", self.state())
            if self.average:
                save_tensors(folder / "ema.safetensors", self.average)
            return
        flat = {key: (value, self.parameters[key.split("/", 1)[1]]) for key, value in self.state().items()}
        if self.shards.dtype != torch.float32:  # what lies in model/ is rounded
            flat |= {f"master/{name}": (master, self.parameters[name]) for name, master in self.masters.items()}
        average = {name: (value, self.parameters[name]) for name, value in self.average.items()}
        for stem, parts in (("optimizer", flat), ("ema", average)):
            if parts:
                entries = [self.shards.lazy_tensor(name, *part) for name, part in parts.items()]
                save_sharded(folder, stem, entries, self.shards.rank, self.shards.size)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """The inverse of `save`, of any number of processes; call it after the weights themselves were loaded."""
        saved = TensorFiles(folder, "optimizer")
        if self.scale is not None and (folder / SCALE_FILE).exists():  # not where the run was in another type before
            self.scale = LossScale(**json.loads((folder / SCALE_FILE).read_text(encoding="utf-8")))
        self.steps = 0
        for name, master in self.masters.items():
            part = shard_slices(self.parameters[name])
            if self.has_own_master(name) or (self.shards is not None and f"master/{name}" in saved.places):
                master.copy_(saved.read(f"master/{name}", part))
            state = {
                key: saved.read(f"{key}/{name}", part if key != "step" else None)
                for key in ADAM
                if f"{key}/{name}" in saved.places
            }
            self.adam.state.pop(master, None)
            if state:  # absent before the first step
                self.steps = max(self.steps, int(state["step"]))
                device = master.device
                self.adam.state[master] = {key: value.to(device).clone() for key, value in state.items()}
        if self.average:
            saved = TensorFiles(folder, "ema")
            for name, tensor in self.average.items():
                tensor.copy_(saved.read(name, shard_slices(self.parameters[name])))


def accumulate_into(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Add a half-precision gradient to the master's float32 one and free it, as soon as it is there."""

    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # it went straight to the master: see layers.weight_gradients
            return
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
