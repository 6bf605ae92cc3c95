"""Keeps one child process running and replaces it: what reward functions and environments run in.

supervisor = ProcessSupervisor("posttrain.rewards.child", ProcessLimits(seconds=10), threading.Event())
supervisor.load("my.py:score", {...})          # UsageError says why it cannot be loaded
for reply in supervisor.ask({"op": "run"}):    # ProcessDiedError, ProcessTimeoutError, ProcessRetiredError
    ...
supervisor.stop()                              # the next request starts a new process
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.sandbox.process import (
    START_SECONDS,
    Cancellation,
    ChildProcess,
    ProcessDiedError,
    ProcessLimits,
    ProcessRetiredError,
    ProcessTimeoutError,
)

STOP_SECONDS = 2.0  # that work which cannot be repeated with the same result may go on after a stop was requested


class RunStoppedError(PosttrainError):
    """Waiting for child processes was ended because the run was asked to stop; their work can be repeated."""


class StopFlag:
    """Ends all waiting for child processes: after an interrupt, or after a stop of the run was requested."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()
        self.stop_requested: Callable[[], bool] = lambda: False
        self.started = 0.0  # when the work in progress began
        self.seconds: float | None = None  # that it may take if a stop is requested; None: nothing is in progress

    @contextmanager
    def work(self, seconds: float) -> Iterator[None]:
        """Mark work: once a stop is requested, it ends when it has taken `seconds`; 0: at once."""
        self.started, self.seconds = time.monotonic(), seconds
        try:
            yield
        except BaseException:
            self.interrupted.set()  # other threads must not go on waiting
            raise
        finally:
            self.seconds = None

    def is_set(self) -> bool:
        if self.interrupted.is_set():
            return True
        seconds = self.seconds
        return seconds is not None and self.stop_requested() and time.monotonic() - self.started >= seconds


class ProcessSupervisor:
    """Starts a child process when it is needed, loads code into it, sends requests, and kills it on `stop`."""

    def __init__(self, module: str, limits: ProcessLimits, cancelled: Cancellation) -> None:
        """`module` is run by `python -m` and contains a RequestLoop; `cancelled` ends all waiting."""
        self.module, self.limits, self.cancelled = module, limits, cancelled
        self.process: ChildProcess | None = None
        self.loaded: dict[str, dict[str, Any]] = {}  # replies to load requests, by name, of the current process

    def start(self) -> ChildProcess:
        """Return the current process; start one if there is none."""
        if self.process is None:
            self.process = ChildProcess(self.module, self.limits, self.cancelled)
        return self.process

    def load(self, name: str, request: dict[str, Any], *, again: bool = False) -> dict[str, Any]:
        """Load user code unless the current process has it already (`again`: in any case), and return the reply.

        UsageError, which begins with `name`, says why the code cannot be loaded; the process is then stopped.
        """
        process = self.start()
        if name not in self.loaded or again:
            try:
                self.loaded[name] = self._load(process, name, request)
            except UsageError:
                self.stop()
                raise
        return self.loaded[name]

    def _load(self, process: ChildProcess, name: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            (reply,) = process.ask({"op": "load", **request}, START_SECONDS)
        except ProcessTimeoutError:
            raise UsageError(f"{name}: loading took more than {START_SECONDS:.0f} s") from None
        except ProcessDiedError as error:
            raise UsageError(f"{name}: loading ended its process: {error}") from None
        if "error" in reply:
            raise UsageError(f"{name}: {reply['error']}")
        return reply

    def ask(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield its replies; the caller stops the process after any of the three errors."""
        process = self.start()
        try:
            for reply in process.ask({"op": "run", **request}, self.limits.seconds):
                if "retire" in reply:
                    raise ProcessRetiredError
                yield reply
        except ProcessTimeoutError:
            message = f"no result within {self.limits.seconds:g} s (timeout_seconds){process.output_tail()}"
            raise ProcessTimeoutError(message) from None

    def stop(self) -> None:
        """Kill the process with all its descendants, if one is running."""
        process, self.process = self.process, None
        self.loaded.clear()
        if process is not None:
            process.kill()
