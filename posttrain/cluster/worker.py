"""A worker process: reads calls from its connection, runs them, answers. It lives as long as the connection.

Calls run one after the other, in the order they were sent, which is the same for all workers of a pool: so those that
wait for each other cannot do so crosswise. Only `generate`, called from the thread that makes batches ahead, runs
beside them: it needs nobody else. Where both use one model they take turns: see samplers.ModelLock.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from posttrain.cluster import messages
from posttrain.cluster.worker_host import WorkerHost, die_with_parent
from posttrain.core.errors import PosttrainError

Queue = queue.SimpleQueue[tuple[messages.Header, Any]]

is_worker = False
"""Whether this process serves a controller; then it must not train by itself."""


def serve(connection: Connection, host: WorkerHost) -> None:
    """Answer calls until the controller says `end`; without a controller the process ends at once."""
    global is_worker
    is_worker = True
    queues: dict[bool, Queue] = {False: queue.SimpleQueue(), True: queue.SimpleQueue()}
    lock = threading.Lock()

    def answer(kind: str, number: int, body: Any) -> None:
        with lock:
            messages.send(connection, kind, number, body)

    def read() -> None:
        while True:
            try:
                head, body = messages.receive(connection)
            except (EOFError, OSError):  # the controller is gone, and nobody else will end this process
                os._exit(1)
            if head.kind == "ping":
                answer("pong", head.number, None)
            elif head.kind == "log":
                log_into(body)
            elif head.kind == "stacks":
                faulthandler.dump_traceback(all_threads=True)
            else:
                queues[head.side].put((head, body))
                if head.kind == "end":
                    return

    def work(side: bool) -> None:
        while True:
            head, body = queues[side].get()
            if head.kind == "end":
                return
            perform(host, head, body, answer)

    threading.Thread(target=read, name="calls", daemon=True).start()
    threading.Thread(target=work, args=(True,), name="side", daemon=True).start()
    work(False)
    is_worker = False


def log_into(file: str) -> None:
    """What this process prints from now on goes there."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def perform(host: WorkerHost, head: messages.Header, body: Any, answer: Any) -> None:
    try:
        if isinstance(body, messages.Unreadable):
            raise TypeError(f"the call cannot be read here: {body.reason}")
        answer("answer", head.number, host.run(*body))
    except BaseException as error:
        traceback.print_exc()  # into the worker's log
        sys.stderr.flush()
        answer("error", head.number, described(error))
        if not isinstance(error, Exception):
            raise


def described(error: BaseException) -> tuple[str, str, float]:
    """Class of an error that is meant for users, its text, and when it came up (other machines know that time too)."""
    if isinstance(error, PosttrainError):
        return type(error).__name__, str(error), time.time()
    lines = str(error).strip().splitlines()
    return "", f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "), time.time()


def main(argv: Sequence[str]) -> int:
    """`python -m posttrain.cluster.worker DESCRIPTOR PARENT`: started by runtime.processes."""
    descriptor, parent = map(int, argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the controller, which saves first
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    print(f"--- worker process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
    serve(Connection(descriptor), WorkerHost())
    return 0


if __name__ == "__main__":
    # Under its proper name, so that `is_worker` is the one that others import.
    from posttrain.cluster import worker

    code = worker.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads of libraries
