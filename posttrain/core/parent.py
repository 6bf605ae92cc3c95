"""Signals that stop a run, and the end of a process together with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals after which a run saves and ends; its worker processes ignore them, because the controller handles them."""


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)
