"""The worker's side of every transport: a process that holds objects by role and calls their methods."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import spawn
from typing import Any

from posttrain.core import accelerators
from posttrain.core.lazy import torch
from posttrain.core.logging import quiet_libraries

SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


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
    address: str = ""  # of this worker's machine, where others reach it; empty: NCCL and gloo choose


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
            torch.set_num_threads(group.threads)
        if group.address and (interface := interface_of(group.address)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if group.size > 1:
            dist, limit = torch.distributed, timedelta(seconds=group.timeout_seconds)
            store = dist.TCPStore(*group.store, is_master=False, timeout=limit)
            named = dist.PrefixStore(group.name, store)
            dist.init_process_group(
                accelerators.collective_backend(), store=named, rank=group.rank, world_size=group.size, timeout=limit
            )
        return socket.gethostname()

    def leave(self) -> None:
        """Delete all objects and leave the process group, so that this process can join another one."""
        self.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def start(self, role: str, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build the object of a role."""
        quiet_libraries()
        resolved = [self.objects[value.role] if isinstance(value, RoleRef) else value for value in args]
        self.objects[role] = factory(*resolved, **kwargs)

    def remove(self, role: str) -> None:
        """Close and delete the object of a role and free its device memory."""
        removed = self.objects.pop(role)
        if hasattr(removed, "close"):
            removed.close()
        del removed
        gc.collect()
        if accelerators.is_in_use():
            torch.accelerator.empty_cache()

    def close(self) -> None:
        """Close and delete all objects. Host memory is freed in time by itself; device memory is needed at once."""
        for role in list(self.objects):
            if accelerators.is_in_use():
                self.remove(role)
            elif hasattr(removed := self.objects.pop(role), "close"):
                removed.close()


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address; empty if there is none."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return ""
