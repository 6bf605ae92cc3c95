"""Memory of this machine and of this process. Imports no torch: `posttrain doctor` must work where torch does not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # v2, v1

UNCOUNTED_DEVICE_MEMORY: list[Callable[[], int]] = []
"""Functions that return bytes of device memory that torch does not count as allocated; modules append theirs."""


def host_memory() -> int:
    """Return the bytes of memory that this process may use: of the machine, or of its container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in map(Path, CGROUP_LIMITS):
        if file.is_file() and (limit := file.read_text(encoding="utf-8").strip()).isdigit():  # v2: "max" if unlimited
            total = min(total, int(limit))
    return total


def peak_memory_gib() -> float:
    """Return the most memory held so far: of the accelerator if there is one, else of this process."""
    torch = sys.modules.get("torch")  # a process with a model has imported it
    if torch is not None and torch.accelerator.is_available() and torch.accelerator.current_accelerator().type != "mps":
        uncounted = sum(count() for count in UNCOUNTED_DEVICE_MEMORY)
        return float(torch.accelerator.max_memory_allocated() + uncounted) / 2**30
    status = Path("/proc/self/status")
    if status.exists():
        peak = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if peak is not None:
            return int(peak.split()[1]) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_rss / (2**30 if sys.platform == "darwin" else 2**20)
