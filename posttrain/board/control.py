"""Stops and resumes runs, for a board that was started with --allow_control."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from posttrain.algorithms import ALGORITHMS
from posttrain.board.runs import BoardRun, held_locks
from posttrain.endpoint.errors import ApiError

OUTPUT_BYTES = 64 * 2**10


@dataclass(slots=True)
class StartedRun:
    """A process that this board has started, and what it printed."""

    process: subprocess.Popen[bytes]
    output: BinaryIO
    command: str

    def describe(self) -> dict[str, Any]:
        exit_code = self.process.poll()  # first: what it printed before it ended is then all there
        return {"command": self.command, "exit_code": exit_code, "output": self.end_of_output(OUTPUT_BYTES)}

    def end_of_output(self, limit: int) -> str:
        """Return the last bytes that the process has printed, as text."""
        size = os.fstat(self.output.fileno()).st_size
        return os.pread(self.output.fileno(), limit, max(0, size - limit)).decode("utf-8", "replace")


@dataclass(slots=True)
class RunControl:
    """Stops and resumes runs. Processes that it started live on when the board ends."""

    started: dict[str, StartedRun] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self, run: BoardRun) -> int:
        """Send SIGTERM to the process of a run, which then saves and ends; return its number."""
        process, host = run.owner()
        if not process or host != socket.gethostname():
            raise ApiError(409, f"{run.name}: its process is not on this machine: {host or 'no lock file names it'}")
        try:
            handle = os.pidfd_open(process)
        except OSError:
            raise ApiError(409, f"{run.name}: is not running") from None
        try:
            # The handle keeps meaning this process: if its number were given to another now, nothing would be sent.
            if not holds_lock(run, process):
                raise ApiError(409, f"{run.name}: is not running: process {process} does not hold its lock")
            try:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            except OSError as error:
                raise ApiError(409, f"{run.name}: process {process}: {error.strerror}") from None
        finally:
            os.close(handle)
        return process

    def resume(self, run: BoardRun) -> str:
        """Start `posttrain VERB --resume` for a run that is not running; return the command."""
        verb = str(run.config().get("verb", ""))
        if verb not in ALGORITHMS:
            raise ApiError(409, f"{run.name}: its configuration names no trainer, so it cannot be resumed from here")
        with self.lock:
            earlier = self.started.get(run.id)
            if run.is_locked() or (earlier is not None and earlier.process.poll() is None):
                raise ApiError(409, f"{run.name}: is running already")
            arguments = [verb, "--output_dir", str(run.folder.path), "--resume"]
            self.started[run.id] = start(arguments)
        return self.started[run.id].command

    def describe(self, run: BoardRun) -> dict[str, Any] | None:
        found = self.started.get(run.id)
        return found.describe() if found is not None else None


def start(arguments: list[str]) -> StartedRun:
    """Start a command of posttrain in a session of its own: Ctrl-C for the board does not reach it."""
    output = tempfile.TemporaryFile()  # noqa: SIM115  read until the board ends
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, UnicodeError) as error:
        with contextlib.suppress(OSError):
            output.close()
        if isinstance(error, UnicodeError):
            raise ApiError(400, "the values have a letter that no command can have: half of a surrogate pair") from None
        raise ApiError(500, f"cannot be started: {error.strerror}") from None
    return StartedRun(process, output, shlex.join(["posttrain", *arguments]))


def holds_lock(run: BoardRun, process: int) -> bool:
    """Whether this process, and no other, holds the lock of the run."""
    lock = run.folder.stat("lock")
    return lock is not None and any(holder == process and inode == lock.st_ino for holder, _, inode in held_locks())
