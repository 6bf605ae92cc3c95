"""The accelerators of this machine, of any vendor that torch knows. Imports torch only when something is asked."""

from __future__ import annotations

import os

from posttrain.core.lazy import torch

VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}
"""By type of accelerator: the environment variable that chooses the devices of a process."""


def accelerator_type() -> str:
    """Return the type of accelerator that processes can divide among themselves; empty if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and found.type in VISIBLE_DEVICES else ""


def visible_devices() -> list[str] | None:
    """Return the names of this machine's accelerators, as their variable spells them; None if there are none."""
    kind = accelerator_type()
    if not kind:
        return None
    chosen = os.environ.get(VISIBLE_DEVICES[kind], "")
    return [name for name in chosen.split(",") if name] or [str(i) for i in range(torch.accelerator.device_count())]


def choose_device(device: str | None) -> dict[str, str]:
    """Return the environment of a process that uses this device only; None: it has no accelerator."""
    return {} if device is None else {VISIBLE_DEVICES[accelerator_type() or "cuda"]: device}


def collective_backend() -> str:
    """Return the backends of a process group: gloo for tensors in host memory, and the accelerator's own."""
    kind = accelerator_type()
    return f"cpu:gloo,{kind}:{torch.distributed.get_default_backend_for_device(kind)}" if kind else "gloo"


def is_in_use() -> bool:
    """Whether this process has used its accelerator."""
    kind = accelerator_type()
    return bool(kind) and bool(torch.get_device_module(kind).is_initialized())
