"""Starts a child process and leaves none of its descendants behind: `python reaper.py LIFELINE PIPE,PIPE COMMAND...`.

The process stands between a ChildProcess and the child that runs user code. It is a child subreaper (prctl(2)):
descendants whose parents end become its children, whatever session, group or environment they have, so that it finds
and kills all. It does so when the child ends, or when the other end of the pipe LIFELINE is closed, which happens on
any exit of the trainer, and removes the child's folder, its current directory. It runs no user code that could
prevent that. It ends with the child's exit code or signal.

Only the standard library: it starts with `python -I -S` in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
POLL_MILLISECONDS = 20  # between checks whether the child has ended, where the kernel has no pidfd_open
REAP_MILLISECONDS = 1000  # between two collections of ended orphans
KILL_SECONDS = 5.0
KILL_PAUSE = 0.005


def main(lifeline: int, pipes: list[int], command: list[str]) -> None:
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, as the child would inherit that a signal is ignored
    folder = Path.cwd()
    os.set_inheritable(lifeline, False)
    child = os.posix_spawn(command[0], command, os.environ, setsid=True)
    for pipe in (*pipes, 0, 1, 2):
        os.close(pipe)  # only the child writes to them: their end is the child's
    status = wait(child, lifeline)
    kill_descendants(child)
    shutil.rmtree(folder, ignore_errors=True)  # the trainer may be gone, also where the child ended first
    if status is None:
        os._exit(1)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def wait(child: int, lifeline: int) -> int | None:
    """Wait until the child ends and return its status; None if the trainer ends first."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    pause = REAP_MILLISECONDS
    try:
        poll.register(os.pidfd_open(child), select.POLLIN)
    except (AttributeError, OSError):
        pause = POLL_MILLISECONDS
    while True:
        ready = dict(poll.poll(pause))
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)  # the child, or an orphan
            if ended == child:
                return status
            if ended == 0:
                break
        if lifeline in ready:
            return None


def kill_descendants(child: int) -> None:
    """Kill the child's process group and all other descendants, until none is left."""
    until = time.monotonic() + KILL_SECONDS
    while time.monotonic() < until:
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        for process in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # none is left
        time.sleep(KILL_PAUSE)


def descendants(ancestor: int) -> list[int]:
    """Return all descendants by /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")  # PID (NAME) STATE PARENT ...
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = list(children.get(ancestor, ()))
    for process in found:  # grows
        found += children.get(process, ())
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(number) for number in sys.argv[2].split(",") if number], sys.argv[3:])
