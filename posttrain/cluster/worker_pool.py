"""The controller's side of a pool of worker processes: calls, timeouts, and which worker caused a failure.

One thread reads the messages of all workers, so that two threads of the controller may have calls in flight and a
process that dies is noticed at once. The first failure ends the whole pool: its workers wait for each other in
collective operations, so the others cannot continue without the one that failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from posttrain.cluster import messages
from posttrain.cluster.fork_server import ForkedProcess
from posttrain.core import errors
from posttrain.core.errors import PosttrainError, WorkerError

GRACE_SECONDS = 1.0  # after the first failure report: the report of an earlier failure may still be on its way
PING_SECONDS = 2.0  # a process that runs at all answers a ping within this time
STACK_SECONDS = 0.5  # to write stack traces into the logs
POLL_SECONDS = 0.5  # between checks whether the processes still exist
SILENCE_SECONDS = 25.0  # without a heartbeat, after which a worker counts as stopped; with the polls, within 30 s
CLOSE_SECONDS = 3.0  # for a worker to end by itself
CLOSE_WHILE_STARTING_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class Channel:
    """The connection to one worker."""

    number: int  # N of worker-N.log
    rank: int
    connection: Connection
    log: Path
    process: subprocess.Popen[bytes] | ForkedProcess | None = None  # None: not started by this process
    host: str = ""
    lost: str = ""  # why nothing more can be received; empty while the connection is open
    silent_seconds: float = 0.0  # since its last message
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, kind: str, number: int, body: Any = None, *, parallel: bool = False) -> None:
        with self.lock:
            messages.send(self.connection, kind, number, body, parallel=parallel)

    def runs_controller_script(self) -> bool:
        """Whether the worker has imported the controller's script: torchrun and srun start it in every process."""
        return self.process is None

    def has_exited(self) -> bool:
        """Whether the process is known to have ended."""
        return self.process is not None and self.process.poll() is not None

    def is_stopped(self) -> bool:
        """Whether a worker that sends no heartbeats is stopped.

        A process of this machine may just hold Python's lock in a long call of a library, which delays its heartbeats:
        the kernel knows whether it is stopped.
        """
        if self.process is None:
            return True
        try:
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:  # not Linux
            return True

    def exit_reason(self) -> str:
        """Describe how the process ended, as the end of a sentence; empty if unknown."""
        if self.process is None or self.silent_seconds >= SILENCE_SECONDS:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=1)
            if code == -signal.SIGKILL:
                return "was killed by SIGKILL, by hand or by the kernel because memory ran out"
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ""

    def terminate(self, deadline: float) -> None:
        """Let the process end by itself until the deadline; then kill it and all processes that it started."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(slots=True, eq=False)
class Call:
    """A call in flight."""

    pool: WorkerPool
    role: str
    method: str
    number: int
    started: float = field(default_factory=time.monotonic)
    results: dict[int, Any] = field(default_factory=dict)  # by rank
    errors: dict[int, tuple[str, str, float]] = field(default_factory=dict)  # by rank: see worker.describe_error

    def result(self) -> list[Any]:
        self.pool.wait(self)
        return [self.results[rank] for rank in range(self.pool.size)]


class WorkerPool:
    """Worker processes that serve this controller, however they were started."""

    def __init__(
        self, channels: Sequence[Channel], timeout_seconds: float, current_step: Callable[[], int] = lambda: 0
    ) -> None:
        """`timeout_seconds`: of every call; `current_step`: the run's step, named in error messages."""
        self.channels, self.timeout_seconds, self.current_step = list(channels), timeout_seconds, current_step
        self.size = len(self.channels)
        self.changed = threading.Condition()  # a message arrived, or a worker was lost
        self.send_lock = threading.Lock()  # calls reach all workers in the same order
        self.calls: dict[int, Call] = {}
        self.pongs: set[int] = set()
        self.number = 0
        self.owner = ""  # the role whose devices these are; empty: the role of each call
        self.setup_thread = ThreadPoolExecutor(1, thread_name_prefix="worker setup")
        self.setups: list[Future[None]] = []
        self.failure: PosttrainError | None = None
        self.closed = False
        for channel in self.channels:
            # A worker that runs reads and finishes its messages at once; a stopped one may stop within a message.
            messages.set_timeout(channel.connection, max(min(timeout_seconds, SILENCE_SECONDS), 1.0))
        self.reader = threading.Thread(target=self.read, name="worker results", daemon=True)
        self.reader.start()

    # Calls

    def start(self, role: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> PoolWorkers:
        """Build the objects of a role without waiting, so that pools load in parallel; the next call raises errors."""
        self.set_up("start", [(role, factory, args, kwargs)] * self.size, role)
        return PoolWorkers(self, role)

    def set_up(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        role: str,
        done: Callable[[list[Any]], None] = lambda results: None,
    ) -> None:
        """Call a method of the worker hosts in the background, after all earlier set-up calls; `done` gets the results.

        One at a time: in a worker, two threads that import the same library (one of them while it unpickles a call)
        interfere with each other.
        """
        self.setups.append(self.setup_thread.submit(lambda: done(self.submit("", method, args, role).result())))

    def wait_until_set_up(self) -> None:
        """Wait for all set-up calls; raises the error of the first that failed."""
        for setup in self.setups:
            setup.result()

    def submit(
        self, role: str, method: str, args: Sequence[tuple[Any, ...]], named_role: str = "", **kwargs: Any
    ) -> Call:
        """Send a call with `args[rank]` for each rank. `named_role`: to name in errors instead of `role`."""
        with self.send_lock:
            self.check_usable()
            self.number += 1
            call = Call(self, named_role or role, method, self.number)
            with self.changed:
                self.calls[call.number] = call
            # Only generation needs no other worker, so only it may run in parallel with other calls.
            parallel = method in ("generate", "advance") and threading.current_thread() is not threading.main_thread()
            for channel, own in zip(self.channels, args, strict=True):
                try:
                    channel.send("call", call.number, (role, method, own, kwargs), parallel=parallel)
                except OSError as error:  # the process is gone, or stopped and does not read
                    self.mark_lost(channel, "no longer reads messages" if isinstance(error, BlockingIOError) else "")
        return call

    def wait(self, call: Call) -> None:
        """Wait for the results of all ranks; raises at the first failure or at the timeout."""
        deadline = call.started + self.timeout_seconds
        with self.changed:
            while not self.has_failed(call) and len(call.results) < self.size and time.monotonic() < deadline:
                self.changed.wait(deadline - time.monotonic())
            del self.calls[call.number]
            if len(call.results) == self.size:
                return
            if self.has_failed(call):  # the first report may be a consequence of one that is still on its way
                self.changed.wait_for(lambda: self.all_reported(call), GRACE_SECONDS)
        raise self.fail(call)

    def has_failed(self, call: Call) -> bool:
        return bool(call.errors) or self.failure is not None or any(channel.lost for channel in self.channels)

    def all_reported(self, call: Call) -> bool:
        reported = call.results.keys() | call.errors.keys()
        return all(channel.lost or channel.rank in reported for channel in self.channels)

    def check_usable(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:  # while another thread was starting a worker
            raise WorkerError("the pool is closed", lost=False)

    # Messages from the workers

    def read(self) -> None:
        """Read messages until all connections are closed."""
        last_poll = last_round = time.monotonic()
        while open_channels := [channel for channel in self.channels if not channel.lost]:
            ready = set(connections.wait([channel.connection for channel in open_channels], POLL_SECONDS))
            poll = time.monotonic() - last_poll >= POLL_SECONDS
            last_poll = time.monotonic() if poll else last_poll
            # If this process itself did not run for a while, messages may be on their way: a round counts little.
            waited = min(time.monotonic() - last_round, 2 * POLL_SECONDS)
            last_round = time.monotonic()
            for channel in open_channels:
                channel.silent_seconds = 0.0 if channel.connection in ready else channel.silent_seconds + waited
                if channel.connection not in ready:
                    if channel.silent_seconds >= SILENCE_SECONDS and poll and channel.is_stopped():
                        self.mark_lost(channel, f"sent no heartbeat for {SILENCE_SECONDS:g} s: it is stopped")
                        continue
                    # A child of a dead worker may keep the worker's end of the connection open.
                    if poll and channel.has_exited():
                        self.mark_lost(channel)
                    continue
                try:
                    header, body = messages.receive(channel.connection)
                except (EOFError, OSError):
                    self.mark_lost(channel)
                    continue
                with self.changed:
                    self.handle(channel, header, body)
                    self.changed.notify_all()

    def handle(self, channel: Channel, header: messages.Header, body: Any) -> None:
        """Record a message with the call that it belongs to."""
        if header.kind == "beat":
            return
        if header.kind == "pong":
            self.pongs.add(channel.rank)
            return
        call = self.calls.get(header.number)
        if call is None:  # its caller no longer waits
            return
        if isinstance(body, messages.Unreadable):
            call.errors[channel.rank] = ("", f"its result cannot be unpickled: {body.reason}", time.time())
        elif header.kind == "error":
            call.errors[channel.rank] = body
        else:
            call.results[channel.rank] = body

    def mark_lost(self, channel: Channel, reason: str = "") -> None:
        if self.closed:
            channel.lost = "closed"
            return
        with self.changed:
            channel.lost = channel.lost or reason or "closed its connection"
            self.changed.notify_all()

    # Failure

    def fail(self, call: Call) -> PosttrainError:
        """End the pool; returns the error that names the worker that failed first."""
        with self.send_lock:
            if self.failure is None and self.closed:
                return WorkerError(f"{call.method} of {call.role} was cancelled: the pool is closed", lost=False)
            if self.failure is None:
                self.failure = self.first_failure(call)
                self.write_stacks()
                self.shut_down(0.0)
            return self.failure

    def first_failure(self, call: Call) -> PosttrainError:
        """Return the first cause: a lost process (others then fail in their collectives), else the earliest error."""
        for channel in self.channels:
            if channel.lost:
                what = channel.exit_reason() or channel.lost
                if self.owner and self.owner != role_of(call):
                    what += f", found by {call.method} of {role_of(call)}, which shares its devices"
                return WorkerError(self.describe(channel, call, what, self.owner), lost=True)
        if call.errors:
            rank = min(call.errors, key=lambda rank: call.errors[rank][2])
            kind, text, _ = call.errors[rank]
            if kind:  # meant for users as it is, whichever worker raised it
                known: Any = getattr(errors, kind)
                return known(text)
            return WorkerError(self.describe(self.channels[rank], call, f"failed: {text}"), lost=False)
        late = [channel for channel in self.channels if channel.rank not in call.results]
        unresponsive = self.unresponsive(late)
        worst = unresponsive[0] if unresponsive else late[0]
        what = f"did not finish {call.method} within {self.timeout_seconds:g} s (cluster.worker_timeout_seconds)"
        what += " and does not answer a ping: it is stopped or stuck" if unresponsive else "; it is still running"
        others = [str(channel.rank) for channel in late if channel is not worst]
        waiting = f". Ranks that did not finish either: {', '.join(others)}" if others else ""
        return WorkerError(self.describe(worst, call, what + waiting), lost=True)

    def unresponsive(self, channels: Sequence[Channel]) -> list[Channel]:
        """Ping these workers; returns those that do not answer."""
        self.pongs.clear()
        for channel in channels:
            with contextlib.suppress(OSError):
                channel.send("ping", 0)
        with self.changed:
            self.changed.wait_for(lambda: self.pongs >= {channel.rank for channel in channels}, PING_SECONDS)
        return [channel for channel in channels if channel.rank not in self.pongs]

    def describe(self, channel: Channel, call: Call, what: str, role: str = "") -> str:
        """Return a sentence with role, rank, host, step, `what` happened, and the path of the log."""
        step = f", step {self.current_step()}" if self.current_step() else ""
        host, role = channel.host or "this host", role or role_of(call)
        return f"{role} worker, rank {channel.rank} (on {host}{step}) {what}. Its log: {channel.log}"

    def write_stacks(self) -> None:
        """Let each worker write the stack traces of its threads into its log."""
        for channel in self.channels:
            if channel.process is not None and channel.process.poll() is None:
                channel.process.send_signal(signal.SIGUSR1)
            elif channel.process is None and not channel.lost:
                with contextlib.suppress(OSError):
                    channel.send("stacks", 0)
        time.sleep(STACK_SECONDS)

    def close(self) -> None:
        with self.send_lock:
            if not self.closed:
                # A worker that is still loading would end only afterwards, and it has no state to save.
                set_up = all(setup.done() for setup in self.setups)
                self.shut_down(CLOSE_SECONDS if set_up else CLOSE_WHILE_STARTING_SECONDS)

    def shut_down(self, seconds: float) -> None:
        """Ask all workers to end and kill those that have not done so after `seconds`."""
        self.closed = True
        for channel in self.channels if seconds else ():
            if not channel.lost:
                with contextlib.suppress(OSError):
                    channel.send("end", 0)
        deadline = time.monotonic() + seconds
        for channel in self.channels:
            channel.terminate(deadline)
        self.reader.join(CLOSE_SECONDS)
        for channel in self.channels:
            channel.lost = channel.lost or "closed"
            channel.connection.close()
        self.setup_thread.shutdown(wait=False)
        with self.changed:
            self.changed.notify_all()


def role_of(call: Call) -> str:
    """Return the role of a call: actor.sender is a part of the actor."""
    return call.role.partition(".")[0]


class PoolWorkers:
    """The objects of one role in the workers of a pool."""

    def __init__(self, pool: WorkerPool, role: str) -> None:
        self.pool, self.role, self.size = pool, role, pool.size

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.submit(method, *args, **kwargs).result()

    def scatter(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        self.pool.wait_until_set_up()
        return self.pool.submit(self.role, method, [(shard, *args) for shard in shards], **kwargs).result()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Call:
        self.pool.wait_until_set_up()
        return self.pool.submit(self.role, method, [args] * self.size, **kwargs)

    def close(self) -> None:
        self.pool.wait_until_set_up()
        self.pool.submit("", "remove", [(self.role,)] * self.size, self.role).result()
