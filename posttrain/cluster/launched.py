"""The processes that torchrun or srun started: the first one controls, and all of them work.

Rank 0 runs the loop, and its own share of the work in a child process, so that a worker that hangs cannot hang the
controller. The others connect to it and serve. They find it through torch's store at MASTER_ADDR:MASTER_PORT; the
connections themselves need a key that is made for this run.
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
from posttrain.cluster.processes import LOOPBACK, greet, launch, share_of_cores
from posttrain.cluster.worker import serve
from posttrain.cluster.worker_host import GroupSpec, WorkerHost
from posttrain.cluster.worker_pool import Channel, WorkerPool
from posttrain.config.sections import launched_size
from posttrain.core.errors import UsageError, WorkerError

HANDSHAKE_SECONDS = 30.0
FOLLOW_SECONDS = 24 * 3600.0  # that the others wait for the controller, which reads all data first
runs = 0  # of this process; ranks that run one script count alike


def rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def is_follower() -> bool:
    """Whether this process was started to serve another."""
    return launched_size() > 1 and rank() > 0


@dataclass(slots=True)
class LaunchedProcesses:
    """What rank 0 knows of the others."""

    size: int
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    store: Any = None
    name: str = ""  # of this run in the store
    groups: Iterator[int] = field(default_factory=lambda: count(1))
    connections: dict[int, Connection] = field(default_factory=dict)

    @classmethod
    def detect(cls) -> LaunchedProcesses | None:
        return cls(launched_size()) if launched_size() > 1 else None

    def pool(self, ranks: Sequence[int], logs: Path, seconds: float, step: Callable[[], int]) -> WorkerPool:
        """A pool of these ranks."""
        if self.store is None:
            self.gather(seconds)
        logs.mkdir(parents=True, exist_ok=True)
        channels = []
        for place, number in enumerate(ranks):
            log = logs / f"worker-{number}.log"
            if number and number not in self.connections:
                raise WorkerError(
                    f"rank {number} was lost, and what torchrun or srun started is not replaced", lost=True
                )
            process, connection = launch(log, own_device(), 0, on_loopback()) if not number else (None, None)
            channels.append(Channel(number, place, connection or self.connections.pop(number), log, process))
        crew = WorkerPool(channels, seconds, step)
        store, group = self.meeting()
        threads = share_of_cores(local_size())
        for channel in channels:
            if channel.process is None:
                channel.send("log", 0, str(channel.log.resolve()))
        greet(crew, [GroupSpec(place, len(ranks), store, group, seconds, threads) for place in range(len(ranks))])
        return crew

    def meeting(self) -> tuple[tuple[str, int], str]:
        """Where a new group can form, and its name."""
        return address(), f"{self.name}/group-{next(self.groups)}"

    def gather(self, seconds: float) -> None:
        """Let all others connect."""
        global runs
        runs += 1
        self.name, self.store = f"posttrain-{runs}", store(seconds, host=True)
        with socket.socket() as listener:
            listener.bind((LOOPBACK if on_loopback() else address()[0], 0))
            listener.listen(self.size)
            listener.settimeout(seconds)
            place = f"{listener.getsockname()[0]}:{listener.getsockname()[1]}"
            self.store.set(f"{self.name}/controller", f"{place} {self.key.hex()}")
            while len(self.connections) < self.size - 1:
                try:
                    connected, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - set(self.connections))
                    message = f"ranks {missing} of the launcher did not connect within {seconds:g} s (cluster.limits)"
                    raise WorkerError(message, lost=True) from None
                connection = Connection(connected.detach())
                messages.bound(connection, HANDSHAKE_SECONDS)
                try:
                    deliver_challenge(connection, self.key)
                    answer_challenge(connection, self.key)
                    self.connections[int(connection.recv_bytes())] = connection
                except (AuthenticationError, EOFError, OSError):  # none of ours
                    connection.close()

    def close(self) -> None:
        """Those that no pool has taken are let go too."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                messages.send(connection, "end", 0, None)
            connection.close()
        self.connections.clear()


def follow() -> None:
    """Serve rank 0 until its run is over."""
    global runs
    runs += 1
    if on_loopback():
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    device = own_device()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    found = store(FOLLOW_SECONDS, host=False).get(f"posttrain-{runs}/controller").decode()
    place, key = found.split()
    host, port = place.rsplit(":", 1)
    connection = Connection(socket.create_connection((host, int(port))).detach())
    answer_challenge(connection, bytes.fromhex(key))
    deliver_challenge(connection, bytes.fromhex(key))
    connection.send_bytes(str(rank()).encode())
    # Slurm and torchrun ask all processes to end; the controller saves first, and then ends the others.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    host = WorkerHost()
    serve(connection, host)
    host.leave()
    for number, handler in before.items():
        signal.signal(number, handler)


def address() -> tuple[str, int]:
    """Where torch's store is."""
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UsageError(
            f"{launched_size()} processes were started together, but MASTER_ADDR and MASTER_PORT do not say where they "
            "meet. Use torchrun, or the script that posttrain slurm writes."
        ) from None


def on_loopback() -> bool:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(address()[0]).startswith("127.")
    return False


@cache
def store(seconds: float, *, host: bool) -> Any:
    """Torch's store: torchrun's own, or under srun one of rank 0, which lasts as long as the process."""
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    if not host or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(*address(), is_master=False, timeout=limit)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address())
    listener.listen(socket.SOMAXCONN)
    handed = listener.detach()
    return dist.TCPStore(*address(), is_master=True, wait_for_workers=False, master_listen_fd=handed, timeout=limit)


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def local_size() -> int:
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
    return int(os.environ.get("LOCAL_WORLD_SIZE", per_node))


def own_device() -> str | None:
    """This process's accelerator among those it sees, if there are any."""
    import torch

    if not torch.cuda.is_available():
        return None
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    there = [name for name in chosen.split(",") if name] or [str(i) for i in range(torch.cuda.device_count())]
    return there[local_rank() % len(there)]
