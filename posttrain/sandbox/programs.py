"""Runs one Python program that a model wrote, isolated from this machine.

Each program is a process of its own: no network, own process table, files read-only but for a folder in memory (where
the system allows user namespaces), limits on memory, time, files and output, killed at its deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MEMORY = 2**29  # bytes
OUTPUT_LIMIT = 2**20  # bytes
JAIL = Path(__file__).with_name("jail.py")
NAMESPACES = ("--user", "--map-root-user", "--net", "--ipc", "--uts", "--pid", "--mount", "--fork", "--kill-child")


@dataclass(slots=True, frozen=True)
class ProgramResult:
    """How a program ended."""

    code: int | None  # exit code; None: killed at its deadline, or because it printed too much
    output: str
    errors: str


def run_program(program: str, given: str, end: float) -> ProgramResult:
    """Run it with this on its standard input, until `end` (time.monotonic) at the latest."""
    folder = tempfile.mkdtemp(prefix="program-")
    file = Path(folder) / "program.py"
    file.write_text(program, encoding="utf-8", errors="replace")
    (Path(folder) / "input").write_text(given, encoding="utf-8", errors="replace")
    try:
        with (Path(folder) / "input").open("rb") as source:
            process = subprocess.Popen(
                command(folder, str(file), end - time.monotonic(), can_isolate()),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", "")},
                start_new_session=True,
            )
        with process:
            return _watch(process, end)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(folder: str, program: str, seconds: float, isolated: bool) -> list[str]:
    limits = {
        "RLIMIT_AS": MEMORY,
        "RLIMIT_CPU": max(1, int(seconds) + 1),
        "RLIMIT_FSIZE": 2**24,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 64,
        **({"RLIMIT_NPROC": 64} if isolated else {}),  # counted within the namespace alone
    }
    env = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
    }
    settings = {"folder": folder, "program": program, "limits": limits, "isolated": isolated, "env": env}
    inside = [sys.executable, "-I", "-S", "-B", str(JAIL), json.dumps(settings)]
    return ["unshare", *NAMESPACES, "--", *inside] if isolated else inside


def _watch(process: subprocess.Popen[bytes], end: float) -> ProgramResult:
    """Collect what it prints; kill it at its deadline or when that is too much, and in any case at the end."""
    assert process.stdout is not None and process.stderr is not None
    streams = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    poll = select.poll()
    for stream in streams:
        poll.register(stream, select.POLLIN)
    opened = len(streams)
    killed = False
    while opened and not killed:
        ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
        killed = not ready
        for stream, _ in ready:
            more = os.read(stream, 2**16)
            streams[stream] += more
            killed = killed or len(streams[stream]) > OUTPUT_LIMIT
            if not more:
                poll.unregister(stream)
                opened -= 1
    if not killed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    killed = killed or process.returncode is None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the first of the process namespace dies, and all in it
    process.wait()
    output, errors = (raw.decode("utf-8", "replace") for raw in streams.values())
    return ProgramResult(None if killed else process.returncode, output, errors)


@cache
def can_isolate() -> bool:
    """Whether this system lets us make the namespaces; found out once in a process by trying."""
    if shutil.which("unshare") is None:
        return False
    folder = tempfile.mkdtemp(prefix="program-")
    try:
        file = Path(folder) / "program.py"
        file.write_text("", encoding="utf-8")
        done = subprocess.run(command(folder, str(file), 5.0, True), capture_output=True, timeout=5, cwd=folder)
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
