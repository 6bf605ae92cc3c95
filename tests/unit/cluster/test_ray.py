"""Parts of the Ray transport that need no Ray; the rest is in tests/ray."""

import importlib.util
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import pytest

from posttrain.cli.cluster import run as cluster
from posttrain.cluster.ray import (
    ActorHandle,
    LocalCluster,
    Node,
    accept_connections,
    connect,
    describe_death,
    forwarded_environment,
    state_file,
)
from posttrain.cluster.worker_host import interface_of
from posttrain.core.errors import UsageError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Where a cluster is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_without_ray(monkeypatch, capsys):
    monkeypatch.setenv("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # which it would set for good
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"cluster\.ray_address needs Ray: pip install 'posttrain\[ray\]'"):
        connect("auto")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Ray is not installed"):
        cluster(["up"])
    assert cluster(["down"]) == 0
    assert "no cluster" in capsys.readouterr().out


def test_a_remote_client_is_refused():
    with pytest.raises(UsageError, match="Run the command on a node of the cluster"):
        connect("ray://127.0.0.1:10001")


def test_a_cluster_that_is_gone_is_not_remembered():
    assert LocalCluster.running() is None
    program = [sys.executable, "-c", "print(flush=True); input()", "ray.scripts.scripts"]
    started = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started.stdout.readline()  # the system knows its command line a moment after it was started
    written = LocalCluster("127.0.0.2:1234", "secret", (started.pid,), "folder")
    written.write()
    assert state_file().stat().st_mode & 0o077 == 0, "it holds the token"
    assert LocalCluster.running() == written
    assert written.environment() == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}
    started.communicate(b"\n")
    assert LocalCluster.running() is None
    LocalCluster("127.0.0.2:1234", "secret", (os.getpid(),), "folder").write()
    assert LocalCluster.running() is None, "a process that is no Ray has its number now"


def test_forwarded_environment_variables(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert forwarded_environment()["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in forwarded_environment() and "PATH" not in forwarded_environment()


def test_interfaces():
    assert interface_of("127.0.0.3") == "lo"
    assert interface_of("192.0.2.77") == ""


# As Ray 2.5x writes it, here with a command line of another user.
MEMORY_REPORT = (
    """The actor died because its node ran out of memory.
Memory on the node (IP: 10.0.0.7, ID: e5d953ef03e5) where the lease (actor ID: 4f0, name=WorkerActor.__init__, pid=81,
memory used=12.41GB) was running was 243.38GB / 256.00GB (0.950703), which exceeds the memory usage threshold of 0.95.
Ray killed this worker (ID: 77aa) because it was the most recently scheduled task; `ray logs raylet.out -ip 10.0.0.7`.
Top 10 memory users:
PID\tMEM(GB)\tCOMMAND
410728\t60.47\tpython serve.py --token=hunter2 --database postgres://someone
"""
    + "510953\t7.19\tray::WorkerActor\n" * 40
)


def test_a_report_of_the_memory_monitor_becomes_one_line_without_others_commands():
    said = describe_death(MEMORY_REPORT)
    assert "memory monitor" in said and "243.38 GB of 256.00 GB" in said
    assert "hunter2" not in said and "\n" not in said and len(said) < 250
    other = describe_death(MEMORY_REPORT.replace("Memory on the node", "This node"))
    assert "hunter2" not in other and "\n" not in other and len(other) < 450
    preempted = "X. The actor is dead because its node was preempted. Some common causes"
    assert "Ray reports: its node was preempted" in describe_death(preempted)


def test_connections_without_the_key_are_refused():
    """A port scan must not end a run that is starting."""
    actors = [ActorHandle(rank, Node("id", "127.0.0.1", "here", True), Path("log"), None, None) for rank in range(2)]
    with socket.socket() as listener, ThreadPoolExecutor(4) as at_once:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)
        doors = [Connection(socket.create_connection(listener.getsockname()).detach()) for _ in range(4)]
        doors[0].close()
        at_once.submit(introduce, doors[1], b"guessed", 0)
        workers = [at_once.submit(introduce, doors[2 + i], b"secret", 1 - i) for i in range(2)]
        found = accept_connections(listener, b"secret", actors, 60.0)
        for worker in workers:
            worker.result()
        for rank, connection in enumerate(found):
            connection.send_bytes(b"you are")
            assert doors[3 - rank].recv_bytes() == b"you are", "by rank, not as they came"
            connection.close()
    for door in doors:
        door.close()


def introduce(connection, key, rank):
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(str(rank).encode())
