"""The controller's side of a pool of processes: calls, deadlines, and who is to blame when one fails.

One thread reads what all workers send, so that two threads of the controller may have calls under way, and so that a
process that dies is noticed at once. The first failure ends the whole pool: its workers wait for each other, and what
one of them lost the others cannot go on without.
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
from posttrain.core import errors
from posttrain.core.errors import PosttrainError, WorkerError

GRACE = 1.0  # seconds after the first bad news in which an earlier one may still arrive
PING_SECONDS = 2.0  # in which a process that runs at all answers
STACK_SECONDS = 0.5  # to write stacks into the logs
LOOK_SECONDS = 0.5  # between looks at whether the processes are there
CLOSE_SECONDS = 3.0  # to end by itself
CUT_SHORT_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class Channel:
    """The connection to one worker, and what is known of it."""

    number: int  # N of worker-N.log
    rank: int
    connection: Connection
    log: Path
    process: subprocess.Popen[bytes] | None = None  # where it is a child of ours
    host: str = ""
    gone: str = ""  # why there is nobody at the other end
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, kind: str, number: int, body: Any = None, *, side: bool = False) -> None:
        with self.lock:
            messages.send(self.connection, kind, number, body, side=side)

    def runs_script(self) -> bool:
        """What a launcher started runs the controller's script already."""
        return self.process is None

    def ended(self) -> bool:
        """Whether the process is known to be gone."""
        return self.process is not None and self.process.poll() is not None

    def exit_reason(self) -> str:
        """How the process ended; empty where that is not known."""
        if self.process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=1)
            if code == -signal.SIGKILL:
                return "was killed by SIGKILL: by hand, or by the system for want of memory"
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ""

    def finish(self, until: float) -> None:
        """Let the process end by itself until then; kill it, with all that it started."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(slots=True, eq=False)
class Call:
    """A call under way."""

    crew: WorkerPool
    role: str
    method: str
    number: int
    began: float = field(default_factory=time.monotonic)
    answers: dict[int, Any] = field(default_factory=dict)
    faults: dict[int, tuple[str, str, float]] = field(default_factory=dict)  # rank -> see worker.described

    def result(self) -> list[Any]:
        self.crew.wait(self)
        return [self.answers[rank] for rank in range(self.crew.size)]


class WorkerPool:
    """Worker processes of one pool, however they were started; they all serve one controller."""

    def __init__(self, channels: Sequence[Channel], seconds: float, step: Callable[[], int] = lambda: 0) -> None:
        """`seconds`: the deadline of every wait; `step`: the run's step now, for messages."""
        self.channels, self.seconds, self.step = list(channels), seconds, step
        self.size = len(self.channels)
        self.news = threading.Condition()
        self.order = threading.Lock()  # calls reach all workers in the same order
        self.calls: dict[int, Call] = {}
        self.pongs: set[int] = set()
        self.number = 0
        self.beginner = ThreadPoolExecutor(1, thread_name_prefix="beginnings")
        self.beginnings: list[Future[None]] = []
        self.broken: PosttrainError | None = None
        self.closed = False
        for channel in self.channels:
            messages.bound(channel.connection, max(seconds, 1.0))
        self.reader = threading.Thread(target=self.read, name="answers", daemon=True)
        self.reader.start()

    # Calls

    def start(self, role: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> PoolWorkers:
        """Without waiting, so that pools load at the same time; what goes wrong is raised by the next call."""
        self.begin("start", [(role, factory, args, kwargs)] * self.size, role)
        return PoolWorkers(self, role)

    def begin(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        blamed: str,
        done: Callable[[list[Any]], None] = lambda answers: None,
    ) -> None:
        """Call a method of the workers themselves as soon as what was begun before is there; its answers go to `done`.

        One at a time: two threads of a worker that import the same library, one reading a call, trip over each other.
        """
        self.beginnings.append(self.beginner.submit(lambda: done(self.submit("", method, args, blamed).result())))

    def settle(self) -> None:
        """Wait until all that was begun is there; raises what kept it from being so."""
        for beginning in self.beginnings:
            beginning.result()

    def submit(self, role: str, method: str, args: Sequence[tuple[Any, ...]], blamed: str = "", **kwargs: Any) -> Call:
        """Send a call: `args` for each rank. `blamed`: the role to name in errors, if not the one that is called."""
        with self.order:
            self.check()
            self.number += 1
            call = Call(self, blamed or role, method, self.number)
            with self.news:
                self.calls[call.number] = call
            # Only generating needs no other worker, and so may happen beside what they do together.
            side = method == "generate" and threading.current_thread() is not threading.main_thread()
            for channel, own in zip(self.channels, args, strict=True):
                try:
                    channel.send("call", call.number, (role, method, own, kwargs), side=side)
                except OSError as error:  # it is gone, or was stopped and reads no more
                    self.lose(channel, "reads no more" if isinstance(error, BlockingIOError) else "")
        return call

    def wait(self, call: Call) -> None:
        """Until all have answered; raises at the first failure, or when the deadline is over."""
        until = call.began + self.seconds
        with self.news:
            while not self.failed(call) and len(call.answers) < self.size and time.monotonic() < until:
                self.news.wait(until - time.monotonic())
            del self.calls[call.number]
            if len(call.answers) == self.size:
                return
            if self.failed(call):  # what came first may be the consequence of what comes next
                self.news.wait_for(lambda: self.all_told(call), GRACE)
        raise self.break_down(call)

    def failed(self, call: Call) -> bool:
        return bool(call.faults) or self.broken is not None or any(channel.gone for channel in self.channels)

    def all_told(self, call: Call) -> bool:
        told = call.answers.keys() | call.faults.keys()
        return all(channel.gone or channel.rank in told for channel in self.channels)

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken
        assert not self.closed, "the pool is closed"

    # News

    def read(self) -> None:
        """Until all connections are closed."""
        looked = time.monotonic()
        while open_ones := [channel for channel in self.channels if not channel.gone]:
            ready = set(connections.wait([channel.connection for channel in open_ones], LOOK_SECONDS))
            look = time.monotonic() - looked >= LOOK_SECONDS
            looked = time.monotonic() if look else looked
            for channel in open_ones:
                if channel.connection not in ready:
                    # What it started may hold its end of the connection open.
                    if look and channel.ended():
                        self.lose(channel)
                    continue
                try:
                    head, body = messages.receive(channel.connection)
                except (EOFError, OSError):
                    self.lose(channel)
                    continue
                with self.news:
                    self.take(channel, head, body)
                    self.news.notify_all()

    def take(self, channel: Channel, head: messages.Header, body: Any) -> None:
        if head.kind == "pong":
            self.pongs.add(channel.rank)
            return
        call = self.calls.get(head.number)
        if call is None:  # nobody waits for it any more
            return
        if isinstance(body, messages.Unreadable):
            call.faults[channel.rank] = ("", f"its answer cannot be read: {body.reason}", time.time())
        elif head.kind == "error":
            call.faults[channel.rank] = body
        else:
            call.answers[channel.rank] = body

    def lose(self, channel: Channel, why: str = "") -> None:
        if self.closed:
            channel.gone = "closed"
            return
        with self.news:
            channel.gone = channel.gone or why or "closed its connection"
            self.news.notify_all()

    # Failure

    def break_down(self, call: Call) -> PosttrainError:
        """End the pool; the error that says who failed first."""
        with self.order:
            if self.broken is None and self.closed:
                return WorkerError(f"{call.method} of {call.role} was given up", lost=False)
            if self.broken is None:
                self.broken = self.blame(call)
                self.write_stacks()
                self.end(0.0)
            return self.broken

    def blame(self, call: Call) -> PosttrainError:
        """A process that is gone comes before those that miss it; then the first that raised; then who is silent."""
        for channel in self.channels:
            if channel.gone:
                return WorkerError(self.about(channel, call, channel.exit_reason() or channel.gone), lost=True)
        if call.faults:
            rank = min(call.faults, key=lambda rank: call.faults[rank][2])
            kind, text, _ = call.faults[rank]
            if kind:  # meant for users as it is, whichever worker found out
                known: Any = getattr(errors, kind)
                return known(text)
            return WorkerError(self.about(self.channels[rank], call, f"failed: {text}"), lost=False)
        late = [channel for channel in self.channels if channel.rank not in call.answers]
        silent = self.silent(late)
        worst = silent[0] if silent else late[0]
        how = f"did not answer to {call.method} within {self.seconds:g} s (cluster.limits)"
        how += ", nor to a ping: it is stopped or stuck" if silent else "; it is still at work"
        others = [str(channel.rank) for channel in late if channel is not worst]
        waiting = f". Waiting with it: {', '.join(others)}" if others else ""
        return WorkerError(self.about(worst, call, how + waiting), lost=True)

    def silent(self, channels: Sequence[Channel]) -> list[Channel]:
        self.pongs.clear()
        for channel in channels:
            with contextlib.suppress(OSError):
                channel.send("ping", 0)
        with self.news:
            self.news.wait_for(lambda: self.pongs >= {channel.rank for channel in channels}, PING_SECONDS)
        return [channel for channel in channels if channel.rank not in self.pongs]

    def about(self, channel: Channel, call: Call, what: str) -> str:
        step = f", step {self.step()}" if self.step() else ""
        host, role = channel.host or "this host", call.role.partition(".")[0]  # actor.sender is a part of the actor
        return f"{role} worker, rank {channel.rank} (on {host}{step}) {what}. Its log: {channel.log}"

    def write_stacks(self) -> None:
        """Where each worker is, into its log."""
        for channel in self.channels:
            if channel.process is not None and channel.process.poll() is None:
                channel.process.send_signal(signal.SIGUSR1)
            elif channel.process is None and not channel.gone:
                with contextlib.suppress(OSError):
                    channel.send("stacks", 0)
        time.sleep(STACK_SECONDS)

    def close(self) -> None:
        with self.order:
            if not self.closed:
                # One that still loads would end only after that, and has nothing to lose.
                self.end(CLOSE_SECONDS if all(beginning.done() for beginning in self.beginnings) else CUT_SHORT_SECONDS)

    def end(self, seconds: float) -> None:
        """Ask all to end, and after so long kill those that did not."""
        self.closed = True
        for channel in self.channels if seconds else ():
            if not channel.gone:
                with contextlib.suppress(OSError):
                    channel.send("end", 0)
        until = time.monotonic() + seconds
        for channel in self.channels:
            channel.finish(until)
        self.reader.join(CLOSE_SECONDS)
        for channel in self.channels:
            channel.gone = channel.gone or "closed"
            channel.connection.close()
        self.beginner.shutdown(wait=False)
        with self.news:
            self.news.notify_all()


class PoolWorkers:
    """The objects of one role."""

    def __init__(self, crew: WorkerPool, role: str) -> None:
        self.crew, self.role, self.size = crew, role, crew.size

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.submit(method, *args, **kwargs).result()

    def scatter(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        self.crew.settle()
        return self.crew.submit(self.role, method, [(shard, *args) for shard in shards], **kwargs).result()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Call:
        self.crew.settle()
        return self.crew.submit(self.role, method, [args] * self.size, **kwargs)

    def close(self) -> None:
        self.crew.settle()
        self.crew.submit("", "forget", [(self.role,)] * self.size, self.role).result()
