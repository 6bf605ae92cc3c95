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
from pathlib import Path

from posttrain.cli.options import Parser
from posttrain.cluster.ray import LocalCluster, is_ray, state_file
from posttrain.core.errors import PosttrainError, UsageError

COMMANDS = {
    "up": "start one here; --cluster.ray_address auto finds it",
    "down": "end it, and all that runs on it",
}
START_SECONDS = 300  # that a node may take
STOP_SECONDS = 20
STARTED = "Ray runtime started"


def run(args: list[str]) -> int:
    """`posttrain cluster up|down ...`."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: posttrain cluster COMMAND ...\n")
        print("\n".join(f"  {name:<6} {text}" for name, text in COMMANDS.items()))
        return 0
    if args[0] not in COMMANDS:
        raise UsageError(f"there is no `posttrain cluster {args[0]}`; there are {', '.join(COMMANDS)}")
    parser = Parser(prog=f"posttrain cluster {args[0]}", description=COMMANDS[args[0]])
    if args[0] == "down":
        parser.parse_args(args[1:])
        return down()
    parser.add_argument("--nodes", type=int, default=1, help="as many as if they were machines of their own")
    parser.add_argument("--workers", type=int, default=2, help="places for workers on each node (without GPUs)")
    parser.add_argument("--memory", type=int, default=200, help="MB of Ray's object store on each node")
    options = parser.parse_args(args[1:])
    return up(options.nodes, options.workers, options.memory)


def up(nodes: int, workers: int, memory: int) -> int:
    """Start the nodes. Only who knows the token can use them."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("Ray is not installed: pip install 'posttrain[ray]'")
    running = LocalCluster.running()
    if running is not None:
        raise UsageError(f"a cluster is up at {running.address}. End it: posttrain cluster down")
    if nodes < 1 or workers < 1:
        raise UsageError("--nodes and --workers must be at least 1")
    folder = tempfile.mkdtemp(prefix="ptray-")  # short: sockets in it have names of limited length
    address = f"{node_address(0)}:{free_port(node_address(0))}"
    cluster = LocalCluster(address, secrets.token_hex(32), (), folder)
    try:
        for number in range(nodes):
            process = start_node(number, cluster, workers, memory)
            cluster = LocalCluster(address, cluster.token, (*cluster.processes, process.pid), folder)
            cluster.write()
            wait_for(process, log_of(cluster, number))
    except BaseException:
        end(cluster)
        raise
    print(f"Ray is up at {address}: {nodes} node{'s' if nodes > 1 else ''} with {workers} workers each")
    print("use it: posttrain VERB ... --cluster.ray_address auto --cluster.devices N    end it: posttrain cluster down")
    return 0


def start_node(number: int, cluster: LocalCluster, workers: int, memory: int) -> subprocess.Popen[bytes]:
    here, port = node_address(number), cluster.address.rpartition(":")[2]
    client = free_port(here)
    first = ["--head", "--port", port, "--ray-client-server-port", str(client), "--include-dashboard", "false"]
    first += ["--temp-dir", cluster.folder]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", here, "--num-cpus", str(workers)]
    command += ["--object-store-memory", str(memory * 2**20)]
    command += first if not number else ["--address", cluster.address, "--num-gpus", "0"]
    # Its own session: Ctrl-C in this terminal is not for it. What was stopped does not linger.
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
    while STARTED not in (said := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None:
            raise PosttrainError(f"Ray did not start (exit code {process.returncode}):\n{said[-2000:]}")
        if time.monotonic() > until:
            raise PosttrainError(f"Ray did not start within {START_SECONDS} s:\n{said[-2000:]}")
        time.sleep(0.1)


def down() -> int:
    running = LocalCluster.running()
    if running is None:
        print("no cluster of `posttrain cluster up` is running")
        return 0
    end(running)
    print(f"the Ray cluster at {running.address} is down")
    return 0


def end(cluster: LocalCluster) -> None:
    """Only what we started; other Ray clusters of this machine stay."""
    for process in reversed(cluster.processes):
        if is_ray(process):
            os.kill(process, signal.SIGTERM)  # it ends what it started, and then itself
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
    """Loopback addresses, which Ray takes for different machines. 127.0.0.1 it would replace by the real one."""
    return f"127.0.0.{2 + number}"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def log_of(cluster: LocalCluster, number: int) -> Path:
    return Path(cluster.folder) / f"node-{number}.log"
