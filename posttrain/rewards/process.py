"""One child process that calls reward functions: started clean, asked with a deadline, killed with all it left."""

from __future__ import annotations

import contextlib
import dataclasses
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
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rewards.specs import Spec

LOAD_SECONDS = 120.0  # to start a process and import a file, which may import large libraries
REPLY_LIMIT = 2**20  # bytes of one reply
TAIL = 2000  # bytes kept of what a function printed
FILE_BYTES = 64 * 2**20  # of a file that a function writes
EXTRA_PROCESSES = 512  # beyond those that the user already runs
TICK = 0.1  # seconds between looks at whether the process is still there
KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
KILL_SECONDS = 5.0  # until we give up waiting for killed processes to be gone
KILL_PAUSE = 0.005  # seconds between looks at that
MARK = "POSTTRAIN_REWARD_CHILD"


class DeadError(Exception):
    """The process ended, or broke the protocol."""


class LateError(Exception):
    """No reply before the deadline."""


class RetiredError(Exception):
    """The process asks to be replaced; nobody is to blame."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """What a child may use."""

    seconds: float = 10.0
    memory_gib: float = 2.0
    env: tuple[str, ...] = ()  # variables of our environment that functions may see

    def message(self) -> dict[str, Any]:
        limits = {
            "RLIMIT_AS": int(self.memory_gib * 2**30),
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NPROC": _tasks_of_this_user() + EXTRA_PROCESSES,
        }
        return {"do": "limits", "limits": limits, "seconds": self.seconds, "paths": [str(Path.cwd())]}


class Child:
    """One process; `ask` sends a message and yields its replies."""

    module = "posttrain.rewards.child"

    def __init__(self, limits: Limits, closing: threading.Event) -> None:
        self.closing = closing
        self.mark = secrets.token_hex(16)
        self.folder = tempfile.mkdtemp(prefix="posttrain-reward-")
        self.number = 0
        self.judged = 0  # completions; a process that judged some may carry what they left behind
        self.loaded: dict[str, bool] = {}  # spec -> takes batches
        self.received = b""
        self.printed = b""
        self.silent = False  # it closed its standard output
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        self.output, output = os.pipe()
        command = [sys.executable, "-P", "-B", "-X", "faulthandler", "-m", self.module]
        self.process = subprocess.Popen(
            [*command, str(requests), str(replies)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(requests, replies),
            cwd=self.folder,
            env=self._environment(limits),
            start_new_session=True,
        )
        for theirs in (requests, replies, output):
            os.close(theirs)
        for ours in (self.requests, self.replies, self.output):
            os.set_blocking(ours, False)
        try:
            list(self.ask(limits.message(), LOAD_SECONDS))
        except BaseException:
            self.kill()
            raise

    def _environment(self, limits: Limits) -> dict[str, str]:
        """No secrets of ours; libraries that start a thread a core would only get in each other's way."""
        package = Path(__file__).parents[2]
        paths = [str(package), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        return {
            **{name: os.environ[name] for name in (*KEPT, *limits.env) if name in os.environ},
            **dict.fromkeys(threads, "1"),
            "HOME": self.folder,
            "TMPDIR": self.folder,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONUTF8": "1",
            "PYTHONHASHSEED": "0",
            MARK: self.mark,
        }

    def load(self, spec: Spec, columns: Sequence[str] = ()) -> bool:
        """Whether it takes batches; UsageError if it cannot be loaded."""
        if spec.text not in self.loaded or columns:  # which columns there are is known only later
            message = {"do": "load", "spec": dataclasses.asdict(spec), "columns": list(columns)}
            try:
                (reply,) = self.ask(message, LOAD_SECONDS)
            except LateError:
                raise UsageError(f"reward {spec.text}: loading it took more than {LOAD_SECONDS:.0f} s") from None
            except DeadError as error:
                raise UsageError(f"reward {spec.text}: loading it ended its process: {error}") from None
            if "fault" in reply:
                raise UsageError(f"reward {spec.text}: {reply['fault']}")
            self.loaded[spec.text] = reply["batch"]
        return self.loaded[spec.text]

    def ask(self, message: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
        """Replies as they come, up to the last; every wait for the next has this deadline."""
        self.number += 1
        self.printed = b""
        rest = memoryview(json.dumps({"number": self.number, **message}, default=_plain).encode() + b"\n")
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self.received:
                reply = self._reply()
                if reply.get("done") is True:
                    return
                yield reply
                deadline = time.monotonic() + seconds
            rest = self._exchange(rest, deadline)

    def _reply(self) -> dict[str, Any]:
        line, self.received = self.received.split(b"\n", 1)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("number") != self.number:
            raise DeadError("something else wrote into the channel of replies")
        return reply

    def _exchange(self, rest: memoryview, deadline: float) -> memoryview:
        """Wait until something can be read or written, and do it; returns what is still to be written."""
        left = deadline - time.monotonic()
        if self.closing.is_set():
            raise DeadError("the run is being stopped")
        if left <= 0:
            raise LateError
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        if not self.silent:
            poll.register(self.output, select.POLLIN)
        if rest:
            poll.register(self.requests, select.POLLOUT)
        ready = dict(poll.poll(min(left, TICK) * 1000))
        if not ready and self.process.poll() is not None:
            raise DeadError(self._obituary())
        if self.output in ready:
            more = _read(self.output)
            self.silent = more == b""
            self.printed = (self.printed + (more or b""))[-TAIL:]
        if self.replies in ready:
            more = _read(self.replies)
            self.received += more or b""
            if more == b"":
                raise DeadError(self._obituary())
            if len(self.received) > REPLY_LIMIT:
                raise DeadError(f"a reply of more than {REPLY_LIMIT // 2**20} MiB")
        if self.requests in ready:
            try:
                rest = rest[os.write(self.requests, rest) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                raise DeadError(self._obituary()) from None
        return rest

    def _obituary(self) -> str:
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the process closed the channel of replies" + self.tail()
        if code < 0:
            return f"the process was killed by {signal.Signals(-code).name}" + self.tail()
        return f"the process ended itself with exit code {code}" + self.tail()

    def tail(self) -> str:
        """The end of what was printed, for messages."""
        with contextlib.suppress(BlockingIOError):
            while len(more := os.read(self.output, 2**16)) > 0:
                self.printed = (self.printed + more)[-TAIL:]
                if self.process.poll() is None:
                    break  # it may print for ever
        text = self.printed.decode("utf-8", "replace").strip()
        return f"; it printed at last:\n{text}" if text else ""

    def kill(self) -> None:
        """The process and all that descends from it, and its folder."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        _kill_marked(self.mark)
        for pipe in (self.requests, self.replies, self.output):
            os.close(pipe)
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(pipe: int) -> bytes | None:
    """b"" at the end, None if there is nothing yet."""
    try:
        return os.read(pipe, 2**16)
    except BlockingIOError:
        return None


def _plain(value: Any) -> Any:
    """Columns that JSON does not know: numpy values, dates."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    return str(value)


def _processes() -> Iterator[Path]:
    proc = Path("/proc")
    if proc.is_dir():
        yield from (entry for entry in proc.iterdir() if entry.name.isdigit())


def _kill_marked(mark: str) -> None:
    """Descendants that left the process group still carry the mark in their environment."""
    clean, until = 0, time.monotonic() + KILL_SECONDS
    while clean < 2 and time.monotonic() < until:  # one that is just being started shows no environment: look twice
        found = False
        for entry in _processes():
            with contextlib.suppress(OSError):  # not ours, or gone
                if mark.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        clean = 0 if found else clean + 1
        time.sleep(KILL_PAUSE)


def _tasks_of_this_user() -> int:
    """Threads of this user: the system's limit counts all of them, not those of a child alone."""
    tasks = 0
    for entry in _processes():
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid():
                tasks += sum(1 for _ in (entry / "task").iterdir())
    return tasks
