"""A worker process: reads calls from its connection, runs them and sends the results. It ends with the connection.

Calls run one after another, in the order in which they were sent. That order is the same for all workers of a pool, so
workers that wait for each other in collective operations cannot deadlock. Only `generate`, called from the thread that
makes batches ahead, runs in parallel with other calls: it needs no other worker. Where both use one model,
train.model_lock.ModelLock alternates between them.

A thread of its own sends heartbeats. A worker in a long computation sends them too; one that is stopped does not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from posttrain.cluster import messages
from posttrain.cluster.worker_host import WorkerHost
from posttrain.core.errors import PosttrainError
from posttrain.core.parent import STOP_SIGNALS, die_with_parent

BEAT_SECONDS = 5.0  # between two heartbeats; worker_pool.SILENCE_SECONDS is several times as long

Queue = queue.SimpleQueue[tuple[messages.Header, Any]]
SendReply = Callable[[str, int, Any], None]
"""Sends (kind, number of the call, body) to the controller."""

is_worker = False
"""Whether this process serves a controller; then it must not start a run of its own."""


def serve(connection: Connection, host: WorkerHost) -> None:
    """Run calls until the controller sends `end`. If the controller is gone, the process exits at once."""
    global is_worker
    is_worker = True
    queues: dict[bool, Queue] = {False: queue.SimpleQueue(), True: queue.SimpleQueue()}  # by Header.parallel
    lock = threading.Lock()

    def reply(kind: str, number: int, body: Any) -> None:
        with lock:
            messages.send(connection, kind, number, body)

    def read() -> None:
        while True:
            try:
                header, body = messages.receive(connection)
            except (EOFError, OSError):  # the controller is gone; nothing else would end this process
                os._exit(1)
            if header.kind == "ping":
                reply("pong", header.number, None)
            elif header.kind == "log":
                redirect_output(body)
            elif header.kind == "stacks":
                faulthandler.dump_traceback(all_threads=True)
            else:
                queues[header.parallel].put((header, body))
                if header.kind == "end":
                    return

    def work(parallel: bool) -> None:
        while True:
            header, body = queues[parallel].get()
            if header.kind == "end":
                return
            perform(host, header, body, reply)

    ended = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):  # the controller is gone; `read` notices it
            while not ended.wait(BEAT_SECONDS):
                reply("beat", 0, None)

    threading.Thread(target=read, name="calls", daemon=True).start()
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    threading.Thread(target=work, args=(True,), name="parallel calls", daemon=True).start()
    work(False)
    ended.set()
    is_worker = False


def redirect_output(file: str) -> None:
    """Append standard output and standard error of this process to a log file from now on."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def perform(host: WorkerHost, header: messages.Header, body: Any, reply: SendReply) -> None:
    """Run one call and send its result or its error."""
    try:
        if isinstance(body, messages.Unreadable):
            raise TypeError(f"the arguments of the call cannot be unpickled in this process: {body.reason}")
        reply("result", header.number, host.run(*body))
    except BaseException as error:
        traceback.print_exc()  # into the worker's log
        sys.stderr.flush()
        reply("error", header.number, describe_error(error))
        if not isinstance(error, Exception):
            raise


def describe_error(error: BaseException) -> tuple[str, str, float]:
    """Return (class name if the error is meant for users, else ""; text; time), in a form that can be sent.

    The time is wall-clock time: it is compared with that of workers on other machines.
    """
    if isinstance(error, PosttrainError):
        return type(error).__name__, str(error), time.time()
    lines = str(error).strip().splitlines()
    return "", f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "), time.time()


def main(argv: Sequence[str]) -> int:
    """Run a worker: `python -m posttrain.cluster.worker DESCRIPTOR PARENT`, started by cluster.processes."""
    descriptor, parent = map(int, argv)
    for number in STOP_SIGNALS:  # meant for the controller, which saves first
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    print(f"--- worker process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    serve(Connection(descriptor), WorkerHost())
    return 0


if __name__ == "__main__":
    # Import under the module's own name: `is_worker` of __main__ would be another variable.
    from posttrain.cluster import worker

    code = worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for threads of libraries
