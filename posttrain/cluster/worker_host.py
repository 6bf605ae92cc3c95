"""The worker's side of every transport: a process that holds objects by role and calls their methods."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import spawn
from typing import Any

from posttrain.core.logging import quiet_libraries


@dataclass(slots=True, frozen=True)
class RoleRef:
    """Stands in the arguments of `start` for an object that the same worker already holds."""

    role: str


@dataclass(slots=True, frozen=True)
class GroupSpec:
    """The workers of a pool, as torch.distributed's default group."""

    rank: int
    size: int
    store: tuple[str, int]  # where the controller's TCPStore listens
    name: str  # of no other group of this store
    seconds: float  # that an exchange may take
    threads: int = 0  # of this worker on a CPU; 0: as torch decides


class WorkerHost:
    """What a worker holds. `run` calls a method of one of its objects, or one of its own (role "")."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.objects[role] if role else self, method)(*args, **kwargs)

    def prepare(self, main: dict[str, Any] | None) -> None:
        """Know what the controller's own script defines, such as an algorithm: objects that are sent refer to it."""
        if main is not None:
            spawn.prepare(main)

    def join(self, group: GroupSpec) -> str:
        """Meet the other workers; returns this machine's name."""
        if group.threads:
            import torch

            torch.set_num_threads(group.threads)
        if group.size > 1:
            import torch
            import torch.distributed as dist

            limit = timedelta(seconds=group.seconds)
            store = dist.TCPStore(*group.store, is_master=False, timeout=limit)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            named = dist.PrefixStore(group.name, store)
            dist.init_process_group(backend, store=named, rank=group.rank, world_size=group.size, timeout=limit)
        return socket.gethostname()

    def leave(self) -> None:
        """Part from the others, so that the process can join another group."""
        import torch.distributed as dist

        self.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def start(self, role: str, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build an object and hold it under its role."""
        quiet_libraries()
        found = [self.objects[value.role] if isinstance(value, RoleRef) else value for value in args]
        self.objects[role] = factory(*found, **kwargs)

    def forget(self, role: str) -> None:
        """Let go of an object and of what it held on the device."""
        import gc

        import torch

        found = self.objects.pop(role)
        if hasattr(found, "close"):
            found.close()
        del found
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Let go of all objects. What they held in this process's memory is found in time; a device is wanted now."""
        import torch

        for role in list(self.objects):
            if torch.cuda.is_initialized():
                self.forget(role)
            elif hasattr(found := self.objects.pop(role), "close"):
                found.close()


def die_with_parent(parent: int) -> None:
    """Ask the system to kill this process when the thread that started it is gone; Linux knows how."""
    import ctypes
    import signal

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before
        os._exit(1)
