"""Workers as processes of this machine, started and watched by the controller."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path

from posttrain.cluster.fork_server import ForkedProcess, fork_server
from posttrain.cluster.worker_host import GroupSpec
from posttrain.cluster.worker_pool import Channel, WorkerPool
from posttrain.core.accelerators import choose_device, visible_devices
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch

LOOPBACK = "127.0.0.1"
LAUNCHER_VARIABLES: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHER_VARIABLES += ("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


class RendezvousStore:
    """A torch.distributed store in the controller, through which workers form groups. Listens on one address only."""

    def __init__(self, timeout_seconds: float, address: str = LOOPBACK) -> None:
        listener = socket.socket()
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        self.address = (address, listener.getsockname()[1])
        self.store = torch.distributed.TCPStore(
            *self.address,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.numbers = count(1)

    def new_group_name(self) -> str:
        """Return a name that no group has used."""
        return f"group-{next(self.numbers)}"


class ProcessPool(WorkerPool):
    """`size` processes, one per device; on a CPU each gets its share of the cores."""

    def __init__(
        self,
        size: int,
        logs: Path,
        *,
        timeout_seconds: float,
        rendezvous: RendezvousStore,
        first_number: int = 0,
        current_step: Callable[[], int] = lambda: 0,
        devices: Sequence[str] | None = None,
        threads: int = 0,
        preload: Sequence[str] = (),
    ) -> None:
        """`first_number`: N in worker-N.log of the first one; `devices`: the accelerator of each worker.

        `preload`: workers on a CPU are forked from a process that has imported these modules.
        """
        logs.mkdir(parents=True, exist_ok=True)
        # Linux kills a worker when the thread that started it ends, so that thread must live as long as the pool.
        self.starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
        channels: list[Channel] = []
        try:
            for rank in range(size):
                device = devices[rank] if devices else None
                log = logs / f"worker-{first_number + rank}.log"
                forked = preload if device is None else ()
                process, connection = self.starter.submit(start_worker, log, device, threads, forked).result()
                channels.append(Channel(first_number + rank, rank, connection, log, process))
        finally:
            super().__init__(channels, timeout_seconds, current_step)
        name = rendezvous.new_group_name()
        groups = [GroupSpec(rank, size, rendezvous.address, name, timeout_seconds, threads) for rank in range(size)]
        form_group(self, groups)

    def shut_down(self, seconds: float) -> None:
        super().shut_down(seconds)
        self.starter.shutdown(wait=False)


def form_group(pool: WorkerPool, groups: Sequence[GroupSpec]) -> None:
    """Let the workers import the controller's script and join their process group."""
    main = spawn.get_preparation_data("worker")
    main.pop("authkey")  # belongs to other connections

    def note_hosts(hosts: Sequence[str]) -> None:
        for channel, host in zip(pool.channels, hosts, strict=True):
            channel.host = channel.host or host

    scripts = [None if channel.runs_controller_script() else main for channel in pool.channels]
    pool.set_up("prepare", [(script,) for script in scripts], "new")
    pool.set_up("join", [(group,) for group in groups], "new", note_hosts)


def start_worker(
    log: Path, device: str | None, threads: int, preload: Sequence[str]
) -> tuple[subprocess.Popen[bytes] | ForkedProcess, Connection]:
    """Start a worker process: by fork where that is possible, which is faster."""
    if preload and sys.platform == "linux":
        environment = worker_environment(device, threads, loopback=True)
        with contextlib.suppress(OSError):  # the server ended, for lack of memory for instance
            return fork_server(preload, environment).start(log, environment)
    return start_process(log, device, threads)


def start_process(
    log: Path, device: str | None, threads: int, loopback: bool = True
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker process; its output is appended to its log."""
    ours, theirs = socket.socketpair()
    with log.open("ab") as output, theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "posttrain.cluster.worker", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            env=worker_environment(device, threads, loopback),
            start_new_session=True,  # Ctrl-C reaches the controller only; a worker's children are killed with it
        )
    return process, Connection(ours.detach())


def worker_environment(device: str | None, threads: int, loopback: bool) -> dict[str, str]:
    """Return the controller's environment without its launcher's variables. `loopback`: workers listen nowhere else."""
    package = str(Path(__file__).parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if loopback else {}
    variables["PYTHONUNBUFFERED"] = "1"
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    if threads:
        variables.setdefault("OMP_NUM_THREADS", str(threads))
    return variables | choose_device(device)


def start_importing(workers: int, preload: Sequence[str]) -> None:
    """Start the process that workers on a CPU are forked from, so that it imports libraries while this process does."""
    if workers > 1 and sys.platform == "linux" and devices_for_workers(workers) is None:
        fork_server(preload, worker_environment(None, worker_threads(workers), loopback=True))


def worker_threads(workers: int) -> int:
    """Return the number of CPU threads of each of `workers` processes; 0: OMP_NUM_THREADS says it."""
    return 0 if "OMP_NUM_THREADS" in os.environ else threads_per_worker(workers)


def threads_per_worker(workers: int) -> int:
    """Return the number of CPU threads for each of `workers` processes on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def devices_for_workers(count: int) -> list[str] | None:
    """Return the device of each of `count` workers; None on a machine without accelerators."""
    devices = visible_devices()
    if devices is None:
        return None
    if count > len(devices):
        raise UsageError(
            f"cluster.devices is {count}, but this machine has {len(devices)}. Lower it, or start one process per "
            "device on several machines: posttrain slurm, torchrun or cluster.ray_address."
        )
    return devices[:count]
