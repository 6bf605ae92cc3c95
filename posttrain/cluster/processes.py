"""Workers as processes of this machine, which the command starts and watches."""

from __future__ import annotations

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

from posttrain.cluster.worker_host import GroupSpec
from posttrain.cluster.worker_pool import Channel, WorkerPool
from posttrain.core.errors import UsageError

LOOPBACK = "127.0.0.1"
LAUNCHERS: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS += ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


class RendezvousStore:
    """A store in the controller where workers find each other. Listens on one address alone."""

    def __init__(self, seconds: float, address: str = LOOPBACK) -> None:
        import torch.distributed as dist

        listener = socket.socket()
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
        self.address = (address, listener.getsockname()[1])
        self.store = dist.TCPStore(
            *self.address,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=seconds),
        )
        self.numbers = count(1)

    def name(self) -> str:
        """Of a group that nobody has met in yet."""
        return f"group-{next(self.numbers)}"


class ProcessPool(WorkerPool):
    """`size` processes, one a device; on a CPU each gets its share of the cores."""

    def __init__(
        self,
        size: int,
        logs: Path,
        *,
        seconds: float,
        meeting: RendezvousStore,
        first: int = 0,
        step: Callable[[], int] = lambda: 0,
        devices: Sequence[str] | None = None,
        threads: int = 0,
    ) -> None:
        """`first`: number of the first in the names of logs; `devices`: what each sees of CUDA_VISIBLE_DEVICES."""
        logs.mkdir(parents=True, exist_ok=True)
        # The system kills a worker when the thread that started it ends, so that thread must last as long as the pool.
        self.starter = ThreadPoolExecutor(1, thread_name_prefix="starter")
        channels: list[Channel] = []
        try:
            for rank in range(size):
                device = devices[rank] if devices else None
                log = logs / f"worker-{first + rank}.log"
                process, connection = self.starter.submit(launch, log, device, threads).result()
                channels.append(Channel(first + rank, rank, connection, log, process))
        finally:
            super().__init__(channels, seconds, step)
        name = meeting.name()
        greet(self, [GroupSpec(rank, size, meeting.address, name, seconds, threads) for rank in range(size)])

    def end(self, seconds: float) -> None:
        super().end(seconds)
        self.starter.shutdown(wait=False)


def greet(crew: WorkerPool, groups: Sequence[GroupSpec]) -> None:
    """Tell each worker who it is and whom to meet."""
    main = spawn.get_preparation_data("worker")
    main.pop("authkey")  # of other connections

    def know(hosts: Sequence[str]) -> None:
        for channel, host in zip(crew.channels, hosts, strict=True):
            channel.host = channel.host or host

    crew.begin("prepare", [(None if channel.runs_script() else main,) for channel in crew.channels], "new")
    crew.begin("join", [(group,) for group in groups], "new", know)


def launch(
    log: Path, device: str | None, threads: int, loopback: bool = True
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker process; what it prints goes into its log."""
    ours, theirs = socket.socketpair()
    with log.open("ab") as output, theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "posttrain.cluster.worker", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            env=environment(device, threads, loopback),
            start_new_session=True,  # Ctrl-C is for the controller; and what a worker starts is killed with it
        )
    return process, Connection(ours.detach())


def environment(device: str | None, threads: int, loopback: bool) -> dict[str, str]:
    """The controller's, without what a launcher told it about itself. `loopback`: the workers listen nowhere else."""
    package = str(Path(__file__).parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if loopback else {}
    found["PYTHONUNBUFFERED"] = "1"
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    if threads:
        found.setdefault("OMP_NUM_THREADS", str(threads))
    if device is not None:
        found["CUDA_VISIBLE_DEVICES"] = device
    return found


def share_of_cores(workers: int) -> int:
    """Threads for each of so many workers of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def devices_here(count: int) -> list[str] | None:
    """What each of `count` workers is to see; None on a machine without accelerators."""
    import torch

    if not torch.cuda.is_available():
        return None
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    there = [name for name in chosen.split(",") if name] or [str(i) for i in range(torch.cuda.device_count())]
    if count > len(there):
        raise UsageError(
            f"cluster.devices is {count}, but this machine has {len(there)}. Lower it, or start one process a device "
            "on several machines: posttrain slurm, torchrun or cluster.ray."
        )
    return there[:count]
