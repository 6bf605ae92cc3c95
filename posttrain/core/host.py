"""Memory of this machine and of this process. Imports no torch: `posttrain doctor` must work where torch does not."""

from __future__ import annotations

import os
import re
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


def out_of_memory_message(error: BaseException) -> str:
    """Describe a lack of host memory; empty if the error is another one. torch reports it as a RuntimeError."""
    if not isinstance(error, MemoryError) and "DefaultCPUAllocator: can't allocate memory" not in str(error):
        return ""
    allocation = re.search(r"tried to allocate (\d+) bytes", str(error))
    missing = f"{int(allocation[1]) / 2**30:,.1f} GiB more were needed; " if allocation else ""
    held = _peak_host_memory() / 2**30
    return (
        f"out of host memory: {missing}this process held up to {held:.1f} GiB, and may use {host_memory() / 2**30:.1f} "
        "GiB of this machine or container. Use less data, a smaller model or fewer workers, or a machine with more "
        "memory; `posttrain plan` estimates what a run needs."
    )


highest_device_peak = 0.0  # GiB, of the phases before the current one


def peak_memory_gib() -> float:
    """Return the most memory held so far: of the accelerator if there is one, else of this process."""
    peak = current_device_peak()
    return _peak_host_memory() / 2**30 if peak is None else max(peak, highest_device_peak)


def device_peak_gib() -> float | None:
    """Return the most memory of the accelerator since the last call; None without one."""
    global highest_device_peak
    peak = current_device_peak()
    if peak is not None:
        highest_device_peak = max(peak, highest_device_peak)
        sys.modules["torch"].accelerator.reset_peak_memory_stats()
    return peak


def current_device_peak() -> float | None:
    """Return the most memory of the accelerator since its counter was reset, in GiB; None without one."""
    torch = sys.modules.get("torch")  # a process with a model has imported it
    if torch is None or not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps":
        return None
    uncounted = sum(count() for count in UNCOUNTED_DEVICE_MEMORY)
    return float(torch.accelerator.max_memory_allocated() + uncounted) / 2**30


def _peak_host_memory() -> int:
    """Return the most bytes of host memory that this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():
        peak = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if peak is not None:
            return int(peak.split()[1]) * 2**10
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_rss * (1 if sys.platform == "darwin" else 2**10)
