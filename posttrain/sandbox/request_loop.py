"""The child's side of a ChildProcess: reads requests, runs user code, writes replies.

`python -m some.module REQUESTS REPLIES` gets two pipes and runs a subclass of RequestLoop. Everything that Python can
catch is caught here and sent as a reply; what it cannot catch (a hang, a crash), the parent detects and ends. What user
code prints goes to standard output, which the parent reads, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.core.parent import die_with_parent

REASON_LIMIT = 3000  # characters
FIRST_DESCRIPTOR = 200  # the pipes are moved up here, away from numbers that user code may write to or close
PACKAGE = str(Path(__file__).parents[1])

Reply = dict[str, Any]


class CatchAll:
    """Catches every exception, also SystemExit and KeyboardInterrupt: user code must not end its process."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> CatchAll:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return True

    @property
    def text(self) -> str:
        """The message of a UsageError; of any other error the traceback without our own frames, cut at the start."""
        error = self.error
        assert error is not None
        if isinstance(error, UsageError):
            return str(error)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
            trace = trace.tb_next
        text = type(error).__name__
        with CatchAll():  # an error's own __str__ may fail
            text = "".join(traceback.format_exception(type(error), error, trace, limit=-20)).strip()
        return text if len(text) <= REASON_LIMIT else "... " + text[-REASON_LIMIT:]


class RequestLoop:
    """Serves requests until the parent closes the pipe; subclasses define `load` and `serve`."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = fcntl.fcntl(requests, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        self.replies = fcntl.fcntl(replies, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        os.close(requests)
        os.close(replies)
        self.pid = os.getpid()
        self.folder = Path.cwd()
        self.seconds = 10.0  # until the parent kills this process, for each reply
        self.number = 0

    def load(self, request: dict[str, Any]) -> Reply:
        """Load user code; an exception becomes the reply."""
        raise NotImplementedError

    def serve(self, request: dict[str, Any]) -> None:
        """Run user code and send its results with `reply`."""
        raise NotImplementedError

    def set_limits(self, request: dict[str, Any]) -> None:
        """Apply the parent's limits to this process and all that it starts."""
        self.seconds = request["seconds"]
        sys.path += [path for path in request["paths"] if path not in sys.path]
        for name, value in request["limits"].items():
            with contextlib.suppress(ValueError, OSError, AttributeError):  # not every system has each of them
                kind = getattr(resource, name)
                hard = resource.getrlimit(kind)[1]
                limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(kind, (limit, limit))

    def run(self) -> None:
        """Serve requests until there are no more; then the process ends, and its reaper kills what it has started."""
        die_with_parent(os.getppid())  # the reaper
        lines = os.fdopen(self.requests, "rb", closefd=False)
        while line := lines.readline():
            self._restore_folder()
            request = json.loads(line)
            self.number = request["number"]
            if request["op"] == "limits":
                self.set_limits(request)
            elif request["op"] == "load":
                self._load(request)
            else:
                self.serve(request)
            self.reply({"done": True})
        os._exit(0)  # threads of user code may be left

    def _load(self, request: dict[str, Any]) -> None:
        with CatchAll() as caught:
            self.reply(self.load(request))
        if caught.error is not None:
            self.reply({"error": caught.text})

    def _restore_folder(self) -> None:
        """Return to the working directory: user code may have changed or removed it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(self.folder)

    def reply(self, reply: Reply) -> None:
        """Send one reply to the current request."""
        if os.getpid() != self.pid:
            os._exit(0)  # user code forked and returned in both processes
        unsent = json.dumps({"number": self.number, **reply}).encode() + b"\n"
        while unsent:
            unsent = unsent[os.write(self.replies, unsent) :]

    def start_clock(self) -> float:
        """Return the time; limit processor time, which ends a loop in C that outlives a killed parent."""
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        limit = int(used + 8 * self.seconds + 60)
        resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        return time.perf_counter()
