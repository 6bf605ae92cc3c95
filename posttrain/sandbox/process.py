"""One child process that serves requests: started clean, asked with a deadline, killed with all its descendants.

Requests and replies are JSON lines over two pipes; the child's side is request_loop.py. Every request has a number, its
replies carry the same number, and the last reply is {"done": true}.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

START_SECONDS = 120.0  # to start a process, or to import a file that may import large libraries
REPLY_LIMIT = 2**20  # bytes of one reply
TAIL = 2000  # bytes kept of the child's standard output and error
FILE_BYTES = 64 * 2**20  # size limit of each file that the child writes
EXTRA_PROCESSES = 512  # beyond those that the user already runs
POLL_SECONDS = 0.1  # between checks that the process is still alive
INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
KILL_SECONDS = 5.0  # longest wait for killed processes to disappear
KILL_PAUSE = 0.005  # seconds between checks for that
REAPER = Path(__file__).with_name("reaper.py")
MARK = "POSTTRAIN_CHILD"  # environment variable that all descendants of a child inherit


class ProcessDiedError(Exception):
    """The process ended, or broke the protocol."""


class ProcessTimeoutError(Exception):
    """No reply arrived before the deadline."""


class ProcessRetiredError(Exception):
    """The process asks to be replaced, through no fault of the request that it was serving."""


class Cancellation(Protocol):
    """Says whether to stop waiting, as a threading.Event does."""

    def is_set(self) -> bool: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class ProcessLimits:
    """What a child process may use."""

    seconds: float = 10.0  # for each reply
    memory_gib: float = 2.0  # of address space
    env: tuple[str, ...] = ()  # environment variables of this process that the child inherits as well

    def request(self) -> dict[str, Any]:
        """Return the first request to every child process."""
        limits = {
            "RLIMIT_AS": int(self.memory_gib * 2**30),
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NPROC": tasks_of_this_user() + EXTRA_PROCESSES,
        }
        return {"op": "limits", "limits": limits, "seconds": self.seconds, "paths": [str(Path.cwd())]}


class ChildProcess:
    """A process that runs `python -m module`; `ask` sends a request and yields its replies."""

    def __init__(self, module: str, limits: ProcessLimits, cancelled: Cancellation) -> None:
        """`cancelled` ends every wait for a reply with a ProcessDiedError."""
        self.cancelled = cancelled
        self.mark = secrets.token_hex(16)
        self.folder = tempfile.mkdtemp(prefix="posttrain-child-")
        self.number = 0  # of the request
        self.received = b""  # not yet parsed
        self.printed = b""  # the end of what the child printed during this request
        self.output_closed = False
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        self.output, output = os.pipe()
        lifeline, self.lifeline = os.pipe()  # closed on any exit of this process: the reaper then kills all
        reaper = [sys.executable, "-I", "-S", "-B", str(REAPER), str(lifeline), f"{requests},{replies}"]
        command = [sys.executable, "-P", "-B", "-X", "faulthandler", "-m", module]
        self.process = subprocess.Popen(
            [*reaper, *command, str(requests), str(replies)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(requests, replies, lifeline),
            cwd=self.folder,
            env=self._environment(limits),
            start_new_session=True,
        )
        for theirs in (requests, replies, output, lifeline):
            os.close(theirs)
        for ours in (self.requests, self.replies, self.output):
            os.set_blocking(ours, False)
        try:
            list(self.ask(limits.request(), START_SECONDS))
        except BaseException:
            self.kill()
            raise

    def _environment(self, limits: ProcessLimits) -> dict[str, str]:
        """Return a clean environment without secrets; one thread per library, as several children share the cores."""
        package = Path(__file__).parents[2]
        paths = [str(package), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        return {
            **{name: os.environ[name] for name in (*INHERITED_VARIABLES, *limits.env) if name in os.environ},
            **dict.fromkeys(threads, "1"),
            "HOME": self.folder,
            "TMPDIR": self.folder,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONUTF8": "1",
            "PYTHONHASHSEED": "0",
            MARK: self.mark,
        }

    def ask(self, request: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
        """Send a request and yield its replies as they arrive; the deadline applies to each reply."""
        self.number += 1
        self.printed = b""
        unsent = memoryview(json.dumps({"number": self.number, **request}, default=_to_json).encode() + b"\n")
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self.received:
                reply = self._next_reply()
                if reply.get("done") is True:
                    return
                yield reply
                deadline = time.monotonic() + seconds
            unsent = self._exchange(unsent, deadline)

    def _next_reply(self) -> dict[str, Any]:
        line, self.received = self.received.split(b"\n", 1)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("number") != self.number:
            raise ProcessDiedError("something other than a reply was written to the reply pipe")
        return reply

    def _exchange(self, unsent: memoryview, deadline: float) -> memoryview:
        """Wait until a pipe can be read or written, and do it; returns the part of the request that is still unsent."""
        left = deadline - time.monotonic()
        if self.cancelled.is_set():
            raise ProcessDiedError("the run is being stopped")
        if left <= 0:
            raise ProcessTimeoutError
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        if not self.output_closed:
            poll.register(self.output, select.POLLIN)
        if unsent:
            poll.register(self.requests, select.POLLOUT)
        ready = dict(poll.poll(min(left, POLL_SECONDS) * 1000))
        if not ready and self.process.poll() is not None:
            raise ProcessDiedError(self._exit_reason())
        if self.output in ready:
            more = _read(self.output)
            self.output_closed = more == b""
            self.printed = (self.printed + (more or b""))[-TAIL:]
        if self.replies in ready:
            more = _read(self.replies)
            self.received += more or b""
            if more == b"":
                raise ProcessDiedError(self._exit_reason())
            if len(self.received) > REPLY_LIMIT:
                raise ProcessDiedError(f"a reply is larger than {REPLY_LIMIT // 2**20} MiB")
        if self.requests in ready:
            try:
                unsent = unsent[os.write(self.requests, unsent) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                raise ProcessDiedError(self._exit_reason()) from None
        return unsent

    def _exit_reason(self) -> str:
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the process closed its reply pipe" + self.output_tail()
        if code < 0:
            return f"the process was killed by {signal.Signals(-code).name}" + self.output_tail()
        return f"the process ended with exit code {code}" + self.output_tail()

    def output_tail(self) -> str:
        """Return the end of the child's output as a part of an error message; "" if it printed nothing."""
        with contextlib.suppress(BlockingIOError):
            while len(more := os.read(self.output, 2**16)) > 0:
                self.printed = (self.printed + more)[-TAIL:]
                if self.process.poll() is None:
                    break  # a living process may print without end
        text = self.printed.decode("utf-8", "replace").strip()
        return f"; the end of its output:\n{text}" if text else ""

    def kill(self) -> None:
        """Kill the process and all its descendants, and remove its folder."""
        os.close(self.lifeline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=KILL_SECONDS)
        self.process.kill()  # the reaper, which is gone unless it was stopped; the child ends with it
        self.process.wait()
        _kill_marked(self.mark)
        for pipe in (self.requests, self.replies, self.output):
            os.close(pipe)
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(pipe: int) -> bytes | None:
    """Return b"" at the end of the stream, None if nothing has arrived yet."""
    try:
        return os.read(pipe, 2**16)
    except BlockingIOError:
        return None


def _to_json(value: Any) -> Any:
    """Convert values of columns that JSON has no type for: numpy values and dates."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    return str(value)


def _processes() -> Iterator[Path]:
    proc = Path("/proc")
    if proc.is_dir():
        yield from (entry for entry in proc.iterdir() if entry.name.isdigit())


def _kill_marked(mark: str) -> None:
    """Kill descendants that are left if user code killed the reaper: they have the mark in their environment."""
    clean, until = 0, time.monotonic() + KILL_SECONDS
    while clean < 2 and time.monotonic() < until:  # twice: a process that is just being started has no environment yet
        found = False
        for entry in _processes():
            with contextlib.suppress(OSError):  # another user's process, or one that has ended
                if mark.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        clean = 0 if found else clean + 1
        time.sleep(KILL_PAUSE)


def tasks_of_this_user() -> int:
    """Count this user's threads: RLIMIT_NPROC counts all of them, not only those of one process tree."""
    tasks = 0
    for entry in _processes():
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid():
                tasks += sum(1 for _ in (entry / "task").iterdir())
    return tasks
