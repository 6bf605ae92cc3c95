"""Seeds, saves and restores the global random generators of this process: Python, NumPy, torch and the accelerator."""

from __future__ import annotations

import base64
import logging
import random
from typing import Any

import numpy as np
import torch

log = logging.getLogger("posttrain")


def seed_everything(seed: int) -> None:
    """Seed every global random generator of this process with one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # the accelerator's too


def rng_state() -> dict[str, Any]:
    """Return the state of every global random generator of this process, as values that JSON can hold."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
        "torch": _encode(torch.get_rng_state()),
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = _encode(torch.get_device_module(accelerator).get_rng_state())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator into the state that `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator is not None else "cpu"
    saved = next((kind for kind in state if kind not in ("python", "numpy", "torch")), "cpu")
    if device != saved:
        log.warning(
            "the checkpoint was written on %s and the run resumes on %s: results will not be bit-identical",
            saved,
            device,
        )
    elif accelerator is not None:
        torch.get_device_module(accelerator).set_rng_state(_decode(state[device]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
