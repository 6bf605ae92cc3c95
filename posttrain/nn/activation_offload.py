"""Keeps the inputs that gradient checkpointing saves in host memory between the forward and the backward pass.

While a layer computes, its input is copied to pinned memory on a second stream; when the next layer begins, the copy is
complete and the device's memory is free. In the backward pass, while a layer is computed again, the input of the layer
before it comes back. Numbers do not change. The last layer's input stays: its backward pass comes first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

ATTRIBUTE = "_gradient_checkpointing_func"  # of transformers' layers: what computes them if they are checkpointed


class ActivationOffload:
    """Computes a model's checkpointed layers, and keeps their inputs in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None if device.type in ("cpu", "meta") else torch.Stream(device)
        self.last: weakref.ref[SavedInput] | None = None  # of the layer that was computed last

    def install(self, model: torch.nn.Module) -> None:
        """Let the layers of a model with gradient checkpointing be computed by `run_layer`."""
        layers = [module for module in model.modules() if hasattr(module, ATTRIBUTE)]
        for place, layer in enumerate(layers):
            setattr(layer, ATTRIBUTE, partial(self.run_layer, place))

    def run_layer(self, place: int, function: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:
        """Compute a layer that is computed again in the backward pass; `place`: its number."""
        if not torch.is_grad_enabled():
            return function(hidden, *others)
        before = None if self.last is None else self.last()
        if before is not None:
            before.leave()
        saved = SavedInput(self, place, hidden, before)
        self.last = weakref.ref(saved)

        def compute(_: torch.Tensor) -> Any:
            return function(saved.value(), *others)

        # The empty tensor says on which device random states are kept.
        return checkpoint(compute, hidden.new_empty(0), use_reentrant=False)

    # Copies

    def to_host(self, tensor: torch.Tensor) -> tuple[Any, torch.Event | None]:
        """Begin to copy a tensor to host memory; returns the copy, and what marks that it is complete."""
        if self.stream is None:
            return tensor.clone(), None
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host, self.copy(host, tensor)

    def to_device(self, host: Any) -> tuple[torch.Tensor, torch.Event | None]:
        """Begin to copy a tensor back; returns the copy, and what marks that it is complete."""
        if self.stream is None:
            return host.clone(), None
        tensor = torch.empty_like(host, device=self.device)
        return tensor, self.copy(tensor, host)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.Event:
        """Copy on the second stream, after all that was computed so far."""
        assert self.stream is not None
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, done: torch.Event | None) -> None:
        """Let what is computed from now on wait for a copy."""
        if done is not None:
            torch.accelerator.current_stream(self.device).wait_event(done)


class SavedInput:
    """The input of one layer in one pass."""

    def __init__(self, owner: ActivationOffload, place: int, tensor: torch.Tensor, before: SavedInput | None) -> None:
        self.owner, self.place, self.requires_grad = owner, place, tensor.requires_grad
        self.tensor: torch.Tensor | None = tensor  # on the device
        self.host, self.done = owner.to_host(tensor.detach())
        self.computed = self.left = False
        same_pass = before is not None and before.place < place
        self.before = weakref.ref(before) if before is not None and same_pass else None

    def leave(self) -> None:
        """Free the device's memory, once the copy is complete."""
        if not self.left:
            self.owner.wait(self.done)
            self.tensor, self.left = None, True

    def fetch(self) -> None:
        """Begin to bring it back, if it has left."""
        if self.left and self.tensor is None:
            self.tensor, self.done = self.owner.to_device(self.host)

    def value(self) -> torch.Tensor:
        """Return it to the layer; the second time, in the backward pass, also begin to fetch that of the one before."""
        self.fetch()
        tensor = self.tensor
        assert tensor is not None
        if self.left:
            self.owner.wait(self.done)
            self.tensor = None
            tensor.requires_grad_(self.requires_grad)
        before = self.before() if self.computed and self.before is not None else None
        if before is not None:
            before.fetch()
        self.computed = True
        return tensor


class CountedOffload(ActivationOffload):
    """Counts the bytes in host memory, for models on the meta device."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.host_bytes = 0

    def to_host(self, tensor: torch.Tensor) -> tuple[Any, torch.Event | None]:
        self.host_bytes += tensor.numel() * tensor.element_size()
        return (tensor.shape, tensor.dtype), None

    def to_device(self, host: Any) -> tuple[torch.Tensor, torch.Event | None]:
        return torch.empty(host[0], dtype=host[1], device="meta"), None


__all__ = ["ActivationOffload", "CountedOffload"]
