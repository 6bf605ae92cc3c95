"""Where the time of a step goes."""

from __future__ import annotations

import time


class PhaseTimer:
    """Splits wall time among phases: at any moment it counts for the innermost open phase, or for `other`."""

    def __init__(self) -> None:
        self.open = ["other"]
        self.seconds: dict[str, float] = {}
        self.since = time.perf_counter()

    def enter(self, name: str) -> None:
        self._count()
        self.open.append(name)

    def leave(self) -> None:
        self._count()
        self.open.pop()

    def restart(self) -> dict[str, float]:
        """Return the seconds of each phase since the last restart, `other` last; their sum is the wall time."""
        self._count()
        seconds, self.seconds = self.seconds, {}
        seconds["other"] = seconds.pop("other", 0.0)
        return seconds

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds[self.open[-1]] = self.seconds.get(self.open[-1], 0.0) + now - self.since
        self.since = now
