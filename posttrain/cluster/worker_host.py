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
    """How a worker joins torch.distributed's default group, which all workers of its pool form."""

    rank: int
    size: int
    store: tuple[str, int]  # address and port of the controller's TCPStore
    name: str  # unique in that store
    timeout_seconds: float  # of a collective operation
    threads: int = 0  # CPU threads of this worker; 0: torch's default


class WorkerHost:
    """Holds a worker's objects. `run` calls a method of one of them, or of the host itself (role "")."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def run(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.objects[role] if role else self, method)(*args, **kwargs)

    def prepare(self, main: dict[str, Any] | None) -> None:
        """Import the controller's script as multiprocessing does: objects that are sent may refer to its classes."""
        if main is not None:
            spawn.prepare(main)

    def join(self, group: GroupSpec) -> str:
        """Join the process group; returns the host name."""
        if group.threads:
            import torch

            torch.set_num_threads(group.threads)
        if group.size > 1:
            import torch
            import torch.distributed as dist

            limit = timedelta(seconds=group.timeout_seconds)
            store = dist.TCPStore(*group.store, is_master=False, timeout=limit)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            named = dist.PrefixStore(group.name, store)
            dist.init_process_group(backend, store=named, rank=group.rank, world_size=group.size, timeout=limit)
        return socket.gethostname()

    def leave(self) -> None:
        """Delete all objects and leave the process group, so that this process can join another one."""
        import torch.distributed as dist

        self.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def start(self, role: str, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build the object of a role."""
        quiet_libraries()
        resolved = [self.objects[value.role] if isinstance(value, RoleRef) else value for value in args]
        self.objects[role] = factory(*resolved, **kwargs)

    def remove(self, role: str) -> None:
        """Close and delete the object of a role and free its device memory."""
        import gc

        import torch

        removed = self.objects.pop(role)
        if hasattr(removed, "close"):
            removed.close()
        del removed
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Close and delete all objects. Host memory is freed in time by itself; device memory is needed at once."""
        import torch

        for role in list(self.objects):
            if torch.cuda.is_initialized():
                self.remove(role)
            elif hasattr(removed := self.objects.pop(role), "close"):
                removed.close()


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends."""
    import ctypes
    import signal

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)
