"""Workers that torchrun or srun started, one process per device.

Rank 0 is the controller: it runs the loop, and its own share of the work in a child process, so that a worker that
hangs cannot hang the controller. The other ranks connect to it and serve. They find its port through torch's store at
MASTER_ADDR:MASTER_PORT; the connections are authenticated with a key that is generated for the run.

Each rank resolves MASTER_ADDR for itself: on the machine of rank 0 it may be a loopback address (Debian and Ubuntu
write the machine's own name to /etc/hosts as 127.0.1.1), which means nothing to the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from posttrain.cluster import messages
from posttrain.cluster.processes import LOOPBACK, form_group, start_process, threads_per_worker
from posttrain.cluster.worker import serve
from posttrain.cluster.worker_host import GroupSpec, WorkerHost
from posttrain.cluster.worker_pool import Channel, WorkerPool
from posttrain.config.checks import launched_size
from posttrain.core.accelerators import choose_device, visible_devices
from posttrain.core.errors import UsageError, WorkerError
from posttrain.core.lazy import torch
from posttrain.core.parent import STOP_SIGNALS

HANDSHAKE_SECONDS = 30.0
SERVE_SECONDS = 24 * 3600.0  # that the other ranks wait for the controller, which reads all data first
run_number = 0  # runs of this process so far; all ranks run the same script, so their counts agree


def rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def is_launched_worker() -> bool:
    """Whether a launcher started this process as another rank than 0, to serve the controller."""
    return launched_size() > 1 and rank() > 0


@dataclass(slots=True)
class LaunchedProcesses:
    """The connections of rank 0 to the other ranks."""

    size: int
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    store: Any = None
    name: str = ""  # of this run in the store
    group_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    connections: dict[int, Connection] = field(default_factory=dict)  # by rank, of those that are in no pool yet
    addresses: dict[int, str] = field(default_factory=dict)  # by rank, of the network that connects the machines

    @classmethod
    def detect(cls) -> LaunchedProcesses | None:
        return cls(launched_size()) if launched_size() > 1 else None

    def pool(
        self, ranks: Sequence[int], logs: Path, timeout_seconds: float, current_step: Callable[[], int]
    ) -> WorkerPool:
        """Build a pool of these ranks."""
        if self.store is None:
            self.accept_connections(timeout_seconds)
        logs.mkdir(parents=True, exist_ok=True)
        channels = []
        for index, number in enumerate(ranks):
            log = logs / f"worker-{number}.log"
            if number and number not in self.connections:
                raise WorkerError(
                    f"rank {number} was lost; processes that torchrun or srun started cannot be replaced", lost=True
                )
            process, connection = start_process(log, own_device(), 0, one_machine()) if not number else (None, None)
            channels.append(Channel(number, index, connection or self.connections.pop(number), log, process))
        pool = WorkerPool(channels, timeout_seconds, current_step)
        store, group = self.new_group()
        threads = threads_per_worker(local_size())
        for channel in channels:
            if channel.process is None:
                channel.send("log", 0, str(channel.log.resolve()))
        form_group(
            pool,
            [
                GroupSpec(index, len(ranks), store, group, timeout_seconds, threads, self.addresses.get(number, ""))
                for index, number in enumerate(ranks)
            ],
        )
        return pool

    def new_group(self) -> tuple[tuple[str, int], str]:
        """Return the address of the store and an unused group name."""
        return address(), f"{self.name}/group-{next(self.group_numbers)}"

    def accept_connections(self, timeout_seconds: float) -> None:
        """Publish this controller's port in the store and wait until all other ranks have connected."""
        global run_number
        run_number += 1
        self.name, self.store = f"posttrain-{run_number}", store(timeout_seconds, host=True)
        with socket.socket() as listener:
            listener.bind((listening_host(), 0))
            listener.listen(self.size)
            listener.settimeout(timeout_seconds)
            self.store.set(f"{self.name}/controller", f"{listener.getsockname()[1]} {self.key.hex()}")
            own = ""  # this machine's address, as other machines see it
            while len(self.connections) < self.size - 1:
                try:
                    accepted, (peer, _) = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - set(self.connections))
                    raise WorkerError(
                        f"ranks {missing} of the launcher did not connect within {timeout_seconds:g} s "
                        "(cluster.worker_timeout_seconds)",
                        lost=True,
                    ) from None
                reached = accepted.getsockname()[0]
                connection = Connection(accepted.detach())
                messages.set_timeout(connection, HANDSHAKE_SECONDS)
                try:
                    deliver_challenge(connection, self.key)
                    answer_challenge(connection, self.key)
                    number = int(connection.recv_bytes())
                except (AuthenticationError, EOFError, OSError):  # not one of our processes
                    connection.close()
                    continue
                self.connections[number] = connection
                if peer != reached:  # it is on another machine
                    self.addresses[number], own = peer, reached
            if own:
                self.addresses = {number: self.addresses.get(number, own) for number in range(self.size)}

    def close(self) -> None:
        """End the ranks that are in no pool."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                messages.send(connection, "end", 0, None)
            connection.close()
        self.connections.clear()


def serve_controller() -> None:
    """Serve rank 0 until its run ends."""
    global run_number
    run_number += 1
    if one_machine():
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= choose_device(own_device())
    published = store(SERVE_SECONDS, host=False).get(f"posttrain-{run_number}/controller").decode()
    port, key = published.split()
    connection = Connection(socket.create_connection((address()[0], int(port))).detach())
    answer_challenge(connection, bytes.fromhex(key))
    deliver_challenge(connection, bytes.fromhex(key))
    connection.send_bytes(str(rank()).encode())
    # Slurm and torchrun signal all processes to end; the controller saves first and then ends the others.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    worker_host = WorkerHost()
    serve(connection, worker_host)
    worker_host.leave()
    for number, handler in before.items():
        signal.signal(number, handler)


def address() -> tuple[str, int]:
    """Return where torch's store is: a name or an address that each rank resolves for itself, and the port."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError(
            f"{launched_size()} processes were started together, but MASTER_ADDR and MASTER_PORT, through which they "
            "find each other, are not set. Use torchrun, or the script that posttrain slurm writes."
        ) from None
    return LOOPBACK if one_machine() else host, port


def one_machine() -> bool:
    """Whether all ranks are on this machine: the launcher says so, or other machines could not reach rank 0."""
    host = os.environ.get("MASTER_ADDR", "")
    return local_size() >= launched_size() or host == "localhost" or host.startswith("127.")


def listening_host() -> str:
    """Return where rank 0 listens; empty, which means on all its addresses, if other machines are to reach it by a
    name that is a loopback address here."""
    host = socket.gethostbyname(address()[0])
    return "" if host.startswith("127.") and not one_machine() else host


@cache
def store(timeout_seconds: float, *, host: bool) -> Any:
    """Connect to torch's store: torchrun's own, or under srun one that rank 0 hosts as long as its process lives."""
    dist, limit = torch.distributed, timedelta(seconds=timeout_seconds)
    if not host or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(*address(), is_master=False, timeout=limit)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((listening_host(), address()[1]))
    listener.listen(socket.SOMAXCONN)
    descriptor = listener.detach()
    return dist.TCPStore(*address(), is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=limit)


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def local_size() -> int:
    """Return the number of processes that the launcher started on this machine."""
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
    return int(os.environ.get("LOCAL_WORLD_SIZE", per_node))


def own_device() -> str | None:
    """Return this rank's device among those visible on the machine; None without accelerators."""
    devices = visible_devices()
    return None if devices is None else devices[local_rank() % len(devices)]
