"""Keeps the garbage collector from looking through large libraries, when a command imports them and when it ends."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_libraries() -> Iterator[None]:
    """Import PyTorch and transformers without passes of the garbage collector; for commands and worker processes.

    The libraries create more than a million objects that stay. Passes over them while they are created take a fifth of
    the CPU time of the start. Afterwards the collector works as before and leaves these objects out of its passes.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def prepare_exit() -> None:
    """Leave all objects out of the passes of the garbage collector that Python makes when a process ends.

    These passes look for cycles of objects, module by module, and take a second after PyTorch and transformers were
    imported. Memory is returned in any case, and what has to be done at the end is in `with` blocks and `atexit`.
    """
    gc.freeze()
