"""`posttrain cluster up|down`: a small Ray cluster on this machine, to try --cluster.ray_address without a real one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.cluster.ray import LocalCluster, is_ray, state_file
from posttrain.config.tools import ToolArgs, check_at_least, read_tool
from posttrain.core.errors import PosttrainError, UsageError

COMMANDS = {
    "up": "start a Ray cluster on this machine; --cluster.ray_address auto finds it",
    "down": "stop the cluster and everything that runs on it",
}
START_SECONDS = 300  # limit for the start of a node
STOP_SECONDS = 20
STARTED = "Ray runtime started"


@dataclass(kw_only=True)
class ClusterUpArgs(ToolArgs):
    """Options of `posttrain cluster up`."""

    verb: ClassVar[str] = "cluster up"
    about: ClassVar[str] = COMMANDS["up"]
    example: ClassVar[str] = "posttrain cluster up --nodes 2 --workers 3"

    nodes: int = 1
    """Number of nodes; each acts like a machine of its own."""
    workers: int = 2
    """Worker slots on each node without GPUs."""
    object_store_mib: int = 200
    """Memory of Ray's object store on each node, in MiB."""


@dataclass(kw_only=True)
class ClusterDownArgs(ToolArgs):
    """Options of `posttrain cluster down`: none."""

    verb: ClassVar[str] = "cluster down"
    about: ClassVar[str] = COMMANDS["down"]
    example: ClassVar[str] = "posttrain cluster down"


ARGS = (ClusterUpArgs, ClusterDownArgs)


def run(args: list[str]) -> int:
    """`posttrain cluster up|down ...`."""
    if not args or args[0] in ("-h", "--help", "--help-all", "--help_all"):
        print("usage: posttrain cluster COMMAND ...\n")
        print("\n".join(f"  {name:<6} {text}" for name, text in COMMANDS.items()))
        print("\nposttrain cluster COMMAND --help lists the options of a command.")
        return 0
    if args[0] == "down":
        read_tool(ClusterDownArgs(), args[1:])
        return down()
    if args[0] == "up":
        options = read_tool(ClusterUpArgs(), args[1:])
        check_at_least(options, nodes=1, workers=1, object_store_mib=1)
        return up(options.nodes, options.workers, options.object_store_mib)
    raise UsageError(f"there is no `posttrain cluster {args[0]}`; the commands are {', '.join(COMMANDS)}")


def up(nodes: int, workers: int, object_store_mib: int) -> int:
    """Start the nodes. Only processes that know the token can use them."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("Ray is not installed: pip install 'posttrain[ray]'")
    running = LocalCluster.running()
    if running is not None:
        raise UsageError(f"a cluster is running at {running.address}. Stop it with: posttrain cluster down")
    folder = tempfile.mkdtemp(prefix="ptray-")  # short: sockets in it have names of limited length
    address = f"{node_address(0)}:{free_port(node_address(0))}"
    cluster = LocalCluster(address, secrets.token_hex(32), (), folder)
    try:
        for number in range(nodes):
            process = start_node(number, cluster, workers, object_store_mib)
            cluster = LocalCluster(address, cluster.token, (*cluster.processes, process.pid), folder)
            cluster.write()
            wait_for(process, log_of(cluster, number))
    except BaseException:
        end(cluster)
        raise
    print(f"Ray is running at {address}: {nodes} node{'s' if nodes > 1 else ''} with {workers} workers each")
    print(
        "use it: posttrain VERB ... --cluster.ray_address auto --cluster.devices N    stop it: posttrain cluster down"
    )
    return 0


def start_node(number: int, cluster: LocalCluster, workers: int, object_store_mib: int) -> subprocess.Popen[bytes]:
    here, port = node_address(number), cluster.address.rpartition(":")[2]
    client = free_port(here)
    first = ["--head", "--port", port, "--ray-client-server-port", str(client), "--include-dashboard", "false"]
    first += ["--temp-dir", cluster.folder]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", here, "--num-cpus", str(workers)]
    command += ["--object-store-memory", str(object_store_mib * 2**20)]
    command += first if not number else ["--address", cluster.address, "--num-gpus", "0"]
    # In its own session, Ctrl-C in this terminal does not reach it. The setting ends stopped workers after a second.
    settings = {"RAY_kill_worker_timeout_milliseconds": "1000"}
    with log_of(cluster, number).open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | cluster.environment() | settings,
            start_new_session=True,
        )


def wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while STARTED not in (output := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None:
            raise PosttrainError(f"Ray did not start (exit code {process.returncode}):\n{output[-2000:]}")
        if time.monotonic() > until:
            raise PosttrainError(f"Ray did not start within {START_SECONDS} s:\n{output[-2000:]}")
        time.sleep(0.1)


def down() -> int:
    running = LocalCluster.running()
    if running is None:
        print("no cluster of `posttrain cluster up` is running")
        return 0
    end(running)
    print(f"the Ray cluster at {running.address} was stopped")
    return 0


def end(cluster: LocalCluster) -> None:
    """Stop the processes of `posttrain cluster up`; other Ray clusters of this machine keep running."""
    for process in reversed(cluster.processes):
        if is_ray(process):
            os.kill(process, signal.SIGTERM)  # Ray stops its child processes, then itself
    until = time.monotonic() + STOP_SECONDS
    for process in cluster.processes:
        while is_ray(process) and time.monotonic() < until:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)  # where it is a child of ours
            time.sleep(0.1)
        if is_ray(process):
            os.killpg(process, signal.SIGKILL)
    state_file().unlink(missing_ok=True)
    shutil.rmtree(cluster.folder, ignore_errors=True)


def node_address(number: int) -> str:
    """Return a loopback address. Ray treats each as a machine, and replaces 127.0.0.1 by the machine's real address."""
    return f"127.0.0.{2 + number}"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def log_of(cluster: LocalCluster, number: int) -> Path:
    return Path(cluster.folder) / f"node-{number}.log"
