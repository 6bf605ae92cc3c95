"""The size of host memory. Imports no torch: `posttrain doctor` must work where torch does not."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # v2, v1


def host_memory() -> int:
    """Return the bytes of memory that this process may use: of the machine, or of its container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in map(Path, CGROUP_LIMITS):
        if file.is_file() and (limit := file.read_text(encoding="utf-8").strip()).isdigit():  # v2: "max" if unlimited
            total = min(total, int(limit))
    return total
