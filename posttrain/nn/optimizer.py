"""The optimizer over float32 masters, with clipping, a finiteness check and an average of the weights.

AdamW unless train.optimizer says otherwise; optimizer_rules.py has the other rules.

Weights in half precision keep their addresses and are overwritten after each step; the masters, the accumulated
gradients and Adam's state are float32. Weights in float32 are their own masters.
With train.optimizer schedule_free the masters are the point at which gradients are taken; the model is evaluated and
saved at an average of the weights (see write_average).
A part of a weight may be frozen (see FROZEN_PART): it has no gradient and does not change.

In float16, gradients below 6e-8 would be 0, so the loss is multiplied by a scale and the gradients are divided by it.
The scale grows until gradients overflow; then it is halved and the step is repeated, so that no example is lost.

With cluster.offload moments, Adam's two moments are in host memory and pass through the device in each step.

If the model is sharded, its parameters are float32 and a master is this process's shard of one: AdamW is elementwise,
so only the norm of the gradients needs all processes.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.adamw import adamw

from posttrain.checkpoints.tensor_files import TensorFiles, save_sharded, save_tensors
from posttrain.config.sections import TrainConfig
from posttrain.core.errors import CheckpointError
from posttrain.nn.optimizer_rules import STATES, make_optimizer, restored_state, rule_for, saved_state, state_bytes
from posttrain.nn.schedule_free import ScheduleFreeAdamW
from posttrain.nn.weights import FROZEN_PART, MASTER
from posttrain.parallel.fsdp import ModelShards
from posttrain.parallel.shards import local_shard, read_shard

EVERY_STATE = tuple(dict.fromkeys(key for keys in STATES.values() for key in keys))
FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
SCALE_FILE = "loss-scale.json"
STAGED_ELEMENTS = 2**26  # of a moment that is in host memory: copied to the device and updated at a time
STAGED_BYTES = 3 * 2 * 4 * STAGED_ELEMENTS  # on the device: one part arrives, one is updated, one is copied back


@dataclass(slots=True)
class LossScale:
    """The factor of the loss: doubled after many steps without an overflow, halved at an overflow."""

    value: float = 1.0
    good_steps: int = 0  # consecutive steps without an overflow
    before: float = 0.0  # the value before this step overflowed; 0: it has not

    GROW_EVERY = 2000

    def halve(self) -> None:
        """Halve the scale after an overflow."""
        self.before = self.before or self.value
        self.value, self.good_steps = max(1.0, self.value / 2), 0

    def restore(self) -> None:
        """Restore the value from before the overflow: no scale gave finite gradients, so the scale is not the cause."""
        self.value, self.before = self.before or self.value, 0.0

    def count_good_step(self) -> None:
        """Double the scale after GROW_EVERY steps without an overflow."""
        self.before = 0.0
        self.good_steps += 1
        if self.good_steps == self.GROW_EVERY:
            self.value, self.good_steps = min(LARGEST_SCALE, self.value * 2), 0


class Optimizer:
    """Holds the masters, the optimizer's states and the averaged weights; updates the weights from their gradients."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        config: TrainConfig,
        shards: ModelShards | None = None,
        *,
        host_moments: bool = False,
        embeddings: frozenset[str] = frozenset(),
    ) -> None:
        """`host_moments`: keep Adam's moments in host memory; `embeddings`: names of weights of embeddings."""
        # A pipeline stage may be frozen as a whole.
        assert parameters or (shards is not None and shards.pipeline is not None), "nothing to train"
        assert config.optimizer == "adamw" or (shards is None and not host_moments), "checks.py refuses it"
        self.host_moments = host_moments
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
        self.rules = {n: rule_for(config.optimizer, n, m.shape, embeddings) for n, m in self.masters.items()}
        by_rule = {rule: [m for n, m in self.masters.items() if self.rules[n] == rule] for rule in self.rules.values()}
        self.by_rule = {rule: make_optimizer(rule, masters, config) for rule, masters in by_rule.items()}
        parts = {name: getattr(parameter, FROZEN_PART, None) for name, parameter in parameters.items()}
        self.frozen_parts = {name: part for name, part in parts.items() if part is not None}
        self.average = {n: m.detach().clone() for n, m in self.masters.items()} if config.ema_decay else {}
        self.trained: dict[str, torch.Tensor] = {}  # the weights, while an average is in their place
        self.steps = 0  # number of applied steps
        self.keep_gradients = False  # whether gradients have the same addresses in every step; see restore_gradients
        self.kept_gradients: dict[str, torch.Tensor] = {}  # their tensors, between steps
        types = {shards.dtype} if shards is not None else {parameter.dtype for parameter in parameters.values()}
        self.scale = LossScale(FIRST_SCALE) if torch.float16 in types else None

    @property
    def adam(self) -> torch.optim.Optimizer:
        """AdamW, which updates all or some of the weights."""
        return self.by_rule["adamw"]

    def states_of(self, name: str) -> dict[str, Any]:
        """Return the optimizer's states of a weight; empty before its first step."""
        return self.by_rule[self.rules[name]].state.get(self.masters[name], {})

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scale is None else self.scale.value

    def missing_bytes(self, device: torch.device) -> int:
        """Return the bytes that a step still needs on the device: not allocated yet, or in host memory."""
        wanted = 0
        for name, master in self.masters.items():
            gradient = self.kept_gradients.get(name, master.grad)
            for tensor in (master, gradient):
                wanted += 4 * master.numel() * (tensor is None or tensor.device.type != device.type)
            states = [
                value for value in self.states_of(name).values() if isinstance(value, torch.Tensor) and value.ndim
            ]
            if not self.host_moments and not (states and all(value.device.type == device.type for value in states)):
                wanted += state_bytes(self.rules[name], master.shape)
        return wanted

    @torch.no_grad()
    def step(self, learning_rate: float) -> dict[str, float]:
        """Clip, check and apply the gradients, then clear them.

        If they are not finite, nothing is applied and `skipped` is 1; or `rescaled` is 1: the loss scale was halved,
        and the caller should repeat the step.
        """
        scale = self.loss_scale
        for name, part in self.frozen_parts.items():
            if (gradient := self.masters[name].grad) is not None:
                gradient[part] = 0
        norm_value = float(self.gradient_norm()) / scale
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        finite = math.isfinite(norm_value)
        if self.scale is not None and not finite and scale > 1.0:
            self.scale.halve()
            self.clear_gradients()
            return {"rescaled": 1.0}
        if self.scale is not None and not finite:
            self.scale.restore()
        if finite:
            limit, factor = self.config.max_grad_norm, 1 / scale
            if limit and norm_value > limit:
                factor *= limit / (norm_value + 1e-6)
            if factor != 1.0 and grads:
                torch._foreach_mul_(grads, factor)
            kept = {name: self.masters[name][part].clone() for name, part in self.frozen_parts.items()}
            for optimizer in self.by_rule.values():
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                if self.host_moments:
                    self.step_with_host_moments()
                else:
                    optimizer.step()
            for name, values in kept.items():  # weight decay changed them
                self.masters[name][self.frozen_parts[name]] = values
            self.steps += 1
            if self.scale is not None:
                self.scale.count_good_step()
            self.write_weights()
            if self.average:
                masters = [master.detach() for master in self.masters.values()]
                torch._foreach_lerp_(list(self.average.values()), masters, 1 - self.config.ema_decay)
        self.clear_gradients()
        scales = {"loss_scale": scale} if self.scale is not None else {}
        return {"grad_norm": norm_value, "learning_rate": learning_rate, "skipped": float(not finite), **scales}

    def step_with_host_moments(self) -> None:
        """Update the masters part by part; AdamW is elementwise, so the result is that of `self.adam.step()`."""
        for group in self.adam.param_groups:
            for master in group["params"]:
                if master.grad is not None and not self.adam.state[master]:
                    self.adam.state[master] = {
                        "step": torch.zeros((), device=master.device),
                        **{name: host_zeros(master) for name in ("exp_avg", "exp_avg_sq")},
                    }
        staging = MomentStaging(next(iter(self.masters.values())).device)
        for group in self.adam.param_groups:
            for master in group["params"]:
                if master.grad is None:
                    continue
                state = self.adam.state[master]
                streams = [
                    master.view(-1),
                    master.grad.view(-1),
                    state["exp_avg"].view(-1),
                    state["exp_avg_sq"].view(-1),
                ]
                for first in range(0, master.numel(), STAGED_ELEMENTS):
                    parts = [stream[first : first + STAGED_ELEMENTS] for stream in streams]
                    staging.update(group, state["step"], *parts)
                state["step"] += 1
        staging.finish()

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
        """Whether the weights are rounded from a separate master instead of being their own."""
        return self.shards is None and self.masters[name] is not self.parameters[name]

    def saves_master(self, name: str) -> bool:
        """Whether a master is saved beside the model, because it has other values than the model's file."""
        return self.has_own_master(name) or self.rules[name] == "schedule_free"

    def write_weights(self) -> None:
        """Copy the masters into the weights that the model computes with."""
        for name, parameter in self.parameters.items():
            if self.has_own_master(name):
                parameter.data.copy_(self.masters[name])

    @torch.no_grad()
    def write_average(self) -> None:
        """Write the average of schedule_free into the weights, until `write_trained`; other rules have none.

        What the weights were is kept, not computed again, so that an evaluation does not change the training after it.
        """
        optimizer = self.by_rule.get("schedule_free")
        if isinstance(optimizer, ScheduleFreeAdamW):
            assert not self.trained, "write_trained comes first"
            self.trained = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            for name, parameter in self.parameters.items():
                parameter.data.copy_(optimizer.averaged(self.masters[name]))
            for name, part in self.frozen_parts.items():  # weight decay changed its z
                self.parameters[name].data[part] = self.trained[name][part]

    @torch.no_grad()
    def write_trained(self) -> None:
        """Write back the weights that `write_average` replaced."""
        for name, values in self.trained.items():
            self.parameters[name].data.copy_(values)
        self.trained = {}

    def restore_gradients(self) -> None:
        """Reuse the last step's gradient tensors, filled with zeros; called before a step's first backward pass.

        CUDA graphs add gradients at fixed addresses.
        """
        if self.kept_gradients and all(master.grad is None for master in self.masters.values()):
            torch._foreach_zero_(list(self.kept_gradients.values()))
            for name, gradient in self.kept_gradients.items():
                self.masters[name].grad = gradient
            self.kept_gradients = {}

    def clear_gradients(self) -> None:
        """Remove all gradients; their tensors are kept for the next step if `keep_gradients` is set."""
        gradients = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        self.kept_gradients = (gradients or self.kept_gradients) if self.keep_gradients else {}
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad = None

    def move(self, device: torch.device) -> None:
        """Move everything but the weights to another device; weights in float32 are their own masters and stay."""
        self.refresh_masters()
        for name, master in self.masters.items():
            if self.has_own_master(name):
                master.data = master.data.to(device, non_blocking=True)
            states = self.states_of(name)
            for key, value in states.items():
                if isinstance(value, torch.Tensor) and value.ndim and not self.host_moments:
                    states[key] = value.to(device, non_blocking=True)
        self.average = {name: tensor.to(device, non_blocking=True) for name, tensor in self.average.items()}
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def refresh_masters(self) -> None:
        """Point the masters of a sharded model at its parameters again, which may have been moved."""
        if self.shards is not None:
            for name, master in self.masters.items():
                master.data = local_shard(self.parameters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's states and the masters as flat tensors by name."""
        flat: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            for key, value in saved_state(self.rules[name], self.states_of(name), self.steps).items():
                flat[f"{key}/{name}"] = value
            if self.saves_master(name):
                flat[f"master/{name}"] = master
        return flat

    def save(self, folder: Path) -> None:
        """Write what a resume needs besides the weights; the tensors do not depend on the number of processes."""
        if self.scale is not None and (self.shards is None or self.shards.rank == 0):
            (folder / SCALE_FILE).write_text(json.dumps(asdict(self.scale)), encoding="utf-8")
        if self.shards is None:
            save_tensors(folder / "optimizer.safetensors", self.state())
            if self.average:
                save_tensors(folder / "ema.safetensors", self.average)
            return
        flat = {key: (value, self.parameters[key.split("/", 1)[1]]) for key, value in self.state().items()}
        if self.shards.dtype != torch.float32:  # the weights in model/ are rounded
            flat |= {f"master/{name}": (master, self.parameters[name]) for name, master in self.masters.items()}
        average = {name: (value, self.parameters[name]) for name, value in self.average.items()}
        for stem, parts in (("optimizer", flat), ("ema", average)):
            own = [self.shards.lazy_tensor(name, *part) for name, part in parts.items()]
            if entries := self.shards.of_all_stages(own):
                save_sharded(folder, stem, entries, self.shards.rank, self.shards.size)

    def placed(self, value: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        """Copy a part of Adam's state to where it is kept."""
        if value.ndim and self.host_moments:
            return host_zeros(master).copy_(value)
        return value.to(master.device).clone()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what `save` wrote with any number of processes; call it after the weights were loaded."""
        saved = TensorFiles(folder, "optimizer")
        if self.scale is not None and (folder / SCALE_FILE).exists():  # absent if the run was not in float16 before
            self.scale = LossScale(**json.loads((folder / SCALE_FILE).read_text(encoding="utf-8")))
        self.steps = 0
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if self.saves_master(name) or (self.shards is not None and f"master/{name}" in saved.places):
                master.copy_(read_shard(parameter, partial(saved.read, f"master/{name}")))
            rule, optimizer = self.rules[name], self.by_rule[self.rules[name]]
            written = [key for key in EVERY_STATE if f"{key}/{name}" in saved.places]
            if not set(written) <= set(STATES[rule]):
                raise CheckpointError(
                    f"{folder}: the states of {name} ({', '.join(written)}) are not those of {rule}. Resume with the "
                    "train.optimizer that the run began with."
                )
            state = {
                key: read_shard(parameter, partial(saved.read, f"{key}/{name}"))
                if rule == "adamw" and key != "step"  # other rules are of whole tensors
                else saved.read(f"{key}/{name}")
                for key in written
            }
            optimizer.state.pop(master, None)
            if state:  # absent before the first step
                self.steps = max(self.steps, int(state["step"]))
                if self.host_moments:
                    optimizer.state[master] = {key: self.placed(value, master) for key, value in state.items()}
                else:
                    optimizer.state[master] = restored_state(rule, optimizer, master, state)
        if "schedule_free" in self.by_rule:  # the model's file has the average
            self.write_weights()
        if self.average:
            saved = TensorFiles(folder, "ema")
            for name, tensor in self.average.items():
                tensor.copy_(read_shard(self.parameters[name], partial(saved.read, name)))


class MomentStaging:
    """Copies parts of the moments to the device, updates them there with their masters, and copies them back.

    On CUDA the copies in both directions overlap with the updates.
    """

    def __init__(self, device: torch.device) -> None:
        self.arriving, self.leaving = (torch.cuda.Stream() if device.type == "cuda" else None for _ in range(2))
        self.device = device
        self.in_flight: deque[torch.cuda.Event] = deque()  # end of the copies back

    def update(self, group: dict[str, Any], step: torch.Tensor, master: torch.Tensor, *parts: torch.Tensor) -> None:
        """Run AdamW on one part: `parts` are the gradient and the two moments in host memory."""
        gradient, *host = parts
        if self.arriving is None or self.leaving is None:
            moments = [part.to(self.device) for part in host]
            self.run(group, step, master, gradient, moments)
            for part, moment in zip(host, moments, strict=True):
                part.copy_(moment)
            return
        current = torch.cuda.current_stream()
        if len(self.in_flight) == 2:
            self.in_flight.popleft().synchronize()  # bounds the memory on the device
        with torch.cuda.stream(self.arriving):
            moments = [part.to(self.device, non_blocking=True) for part in host]
        current.wait_stream(self.arriving)
        self.run(group, step, master, gradient, moments)
        self.leaving.wait_stream(current)
        with torch.cuda.stream(self.leaving):
            for part, moment in zip(host, moments, strict=True):
                part.copy_(moment, non_blocking=True)
                moment.record_stream(self.leaving)
                moment.record_stream(current)
            self.in_flight.append(self.leaving.record_event())

    def run(
        self,
        group: dict[str, Any],
        step: torch.Tensor,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: list[torch.Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            [master],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [step.clone()],  # each part would count it
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def finish(self) -> None:
        """Wait until all moments are in host memory again."""
        if self.leaving is not None:
            self.leaving.synchronize()


def host_zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of the same shape in host memory; pinned where the device can copy from it asynchronously."""
    return torch.zeros(like.shape, dtype=torch.float32, pin_memory=like.device.type == "cuda")


def accumulate_into(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds a half-precision gradient to the master's float32 gradient and frees it."""

    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # it was added to the master directly: see weights.weight_gradients
            return
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
