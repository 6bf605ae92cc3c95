"""Starts worker processes by fork, from a process that has imported the large libraries once.

A new process needs seconds of CPU time to import PyTorch and transformers, a fork milliseconds: workers start sooner,
also after a fault. The controller starts one server (`python -m posttrain.cluster.fork_server DESCRIPTOR MODULE...`)
and sends it requests over a socket. The server ends with the controller, and the workers with the server.

Only for workers that compute on a CPU: a process that has initialised CUDA cannot be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from posttrain.cluster import worker
from posttrain.core.imports import importing_libraries
from posttrain.core.parent import STOP_SIGNALS

START_SECONDS = 300.0  # to import the modules and fork; the machine may be busy
CLOSE_SECONDS = 2.0
MESSAGE_BYTES = 4096


class ForkedProcess:
    """A worker process that the server started; has the methods of subprocess.Popen that are needed here."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None  # -N after signal N

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self.server.changed:
            if not self.server.changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"worker process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The controller's side of the server process."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """`modules` are imported before the first fork; `environment`: of the server while it imports them."""
        self.modules = tuple(modules)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.changed = threading.Condition()
        self.processes: dict[int, ForkedProcess] = {}
        self.started: list[int] = []  # process numbers that no caller of `start` has taken yet
        self.lost = False
        self.lock = threading.Lock()
        with theirs:
            self.server = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # if an import fails, it fails in the worker too, which has a log
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=dict(environment),
                start_new_session=True,
            )
        threading.Thread(target=self.read, name="fork server", daemon=True).start()

    def start(self, log: Path, environment: Mapping[str, str]) -> tuple[ForkedProcess, Connection]:
        """Start a worker process; its output is appended to its log. OSError if the server has ended."""
        ours, theirs = socket.socketpair()
        settings = os.memfd_create("settings")
        with self.lock, theirs, log.open("ab") as output, os.fdopen(settings, "w+", encoding="utf-8") as file:
            json.dump({"environment": dict(environment), "folder": str(Path.cwd())}, file)
            file.flush()
            socket.send_fds(self.control, [b"start"], [settings, theirs.fileno(), output.fileno()])
            with self.changed:
                self.changed.wait_for(lambda: self.started or self.lost, START_SECONDS)
                if not self.started:
                    ours.close()
                    raise OSError("the process that forks workers has ended, or does not respond")
                process = self.processes[self.started.pop()]
        return process, Connection(ours.detach())

    def close(self) -> None:
        """End the server and its workers, and wait for it. One that has no workers may still be importing."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_RDWR)
        try:
            self.server.wait(CLOSE_SECONDS if self.processes else 0)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()

    def read(self) -> None:
        """Receive what the server reports, until it ends; then its workers have ended with it."""
        while message := self.receive():
            kind, pid, code = message.split()
            with self.changed:
                if kind == b"started":
                    self.processes[int(pid)] = ForkedProcess(self, int(pid))
                    self.started.append(int(pid))
                else:
                    self.processes.pop(int(pid)).returncode = int(code)
                self.changed.notify_all()
        with self.changed:
            self.lost = True
            for process in self.processes.values():
                process.returncode = -signal.SIGKILL
            self.changed.notify_all()

    def receive(self) -> bytes:
        try:
            return self.control.recv(MESSAGE_BYTES)
        except OSError:
            return b""


_servers: dict[tuple[int, tuple[str, ...], str], ForkServer] = {}  # by controller, modules and number of threads
_servers_lock = threading.Lock()


def fork_server(modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
    """Return the server of this process that has imported `modules`; start one if there is none."""
    key = (os.getpid(), tuple(modules), environment.get("OMP_NUM_THREADS", ""))
    with _servers_lock:
        if key not in _servers or _servers[key].lost:
            _servers[key] = ForkServer(modules, environment)
        return _servers[key]


@atexit.register
def close_servers() -> None:
    """End the servers of this process; if it is killed, they end by themselves."""
    for (controller, *_), server in _servers.items():
        if controller == os.getpid():
            server.close()


# In the server process


def serve_forks(control: socket.socket) -> None:
    """Fork a worker for each request and report which of them have ended, until the controller is gone."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, MESSAGE_BYTES)
            report_ended(control)
        if control.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                for own in (woken, wake):
                    os.close(own)
                become_worker(control, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(b"started %d 0" % pid)


def report_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):  # there are no workers
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            control.send(b"ended %d %d" % (pid, os.waitstatus_to_exitcode(status)))


def become_worker(control: socket.socket, settings: int, connection: int, output: int) -> NoReturn:
    """Serve the controller as cluster.worker does; the process has the environment and folder of the request."""
    code = 1
    try:
        control.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # a worker's children are killed with it
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        with os.fdopen(settings, encoding="utf-8") as file:
            file.seek(0)
            wanted = json.load(file)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        os.chdir(wanted["folder"])
        code = worker.main([str(connection), str(os.getppid())])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # does not wait for threads of libraries


def main(descriptor: int, modules: Sequence[str]) -> None:
    for number in STOP_SIGNALS:  # meant for the controller, which saves first
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    with importing_libraries():
        for module in modules:
            importlib.import_module(module)
    serve_forks(control)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
