"""Measures how the time of a step is divided among its phases, and the most device memory that each of them held."""

from __future__ import annotations

import time
from collections.abc import Callable

from posttrain.core.host import device_peak_gib


class PhaseTimer:
    """Splits wall time among phases: at any moment it counts for the innermost open phase, or for `other`."""

    def __init__(self, device_peak: Callable[[], float | None] = device_peak_gib) -> None:
        """`device_peak`: returns the most GiB that the device held since its last call; None without a device."""
        self.device_peak = device_peak
        self.peaks: dict[str, float] = {}
        self.open = ["other"]
        self.seconds: dict[str, float] = {}
        self.since = time.perf_counter()

    def enter(self, name: str) -> None:
        self._count()
        self.open.append(name)

    def leave(self) -> None:
        self._count()
        self.open.pop()

    def add(self, name: str, seconds: float) -> None:
        """Add time that passed before this object was made."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def restart(self) -> dict[str, float]:
        """Return the seconds of each phase since the last restart, `other` last; their sum is the wall time."""
        self._count()
        seconds, self.seconds = self.seconds, {}
        seconds["other"] = seconds.pop("other", 0.0)
        return seconds

    def take_peaks(self) -> dict[str, float]:
        """Return the peak memory of each phase since the last call, in GiB; empty without an accelerator."""
        peaks, self.peaks = self.peaks, {}
        return peaks

    def _count(self) -> None:
        peak = self.device_peak()
        if peak is not None:
            self.peaks[self.open[-1]] = max(peak, self.peaks.get(self.open[-1], 0.0))
        now = time.perf_counter()
        self.seconds[self.open[-1]] = self.seconds.get(self.open[-1], 0.0) + now - self.since
        self.since = now
