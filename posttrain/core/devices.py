"""Choose this process's device and copy tensors to it."""

from __future__ import annotations

import torch

from posttrain.core.host import host_memory


def default_device() -> torch.device:
    """Return the accelerator of this process, or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def device_memory(device: torch.device) -> tuple[str, int]:
    """Return a device's name and memory in bytes; for the CPU, the memory that this process may use."""
    if device.type == "cpu":
        return "CPU", host_memory()
    module = torch.get_device_module(device)
    if device.type == "mps":
        return "Apple GPU", int(module.recommended_max_memory())
    properties = module.get_device_properties(device)
    return str(properties.name), int(properties.total_memory)


def copy_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to the device; on CUDA through pinned memory, so that the copy is asynchronous.

    A copy from pageable memory would wait until the device has finished its queued work.
    """
    on_cuda = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if on_cuda else tensor).to(device, non_blocking=on_cuda)
