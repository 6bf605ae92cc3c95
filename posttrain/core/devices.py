"""Choose this process's device and copy tensors to it."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """Return the accelerator of this process, or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def copy_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to the device; on CUDA through pinned memory, so that the copy is asynchronous.

    A copy from pageable memory would wait until the device has finished its queued work.
    """
    on_cuda = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if on_cuda else tensor).to(device, non_blocking=on_cuda)
