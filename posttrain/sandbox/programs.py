"""Runs one Python program that a model wrote, isolated from this machine by jail.py.

Each program has processes, a file system, a network and a user of its own, limits on memory, time, processes, files and
output, and is killed at its deadline. docs/rewards.md says what is closed. Where the system does not allow the
isolation, an IsolationError says why.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from posttrain.sandbox.cgroups import ControlGroup
from posttrain.sandbox.process import tasks_of_this_user
from posttrain.sandbox.seccomp import compile_filter

MEMORY = 2**29  # bytes, for each process and for all together
PROCESSES = 64
OUTPUT_LIMIT = 2**20  # bytes
FILE_BYTES = 2**24
PROBE_SECONDS = 20.0
JAIL = Path(__file__).with_name("jail.py")
INSIDE = "/tmp"  # the program's folder inside, where it alone exists
NPROC_PER_NAMESPACE = (5, 14)  # from this kernel on, RLIMIT_NPROC counts the processes of a user namespace alone
SYSTEM_PATHS = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64"),
    *("/etc/ld.so.cache", "/etc/alternatives", "/usr/share/zoneinfo"),
)
SITE_FOLDERS = ("site-packages", "dist-packages")

Mode = Literal["root", "user", "unprotected"]


class IsolationError(Exception):
    """The system does not allow the isolation, so no program was started."""


@dataclass(slots=True, frozen=True)
class ProgramResult:
    """How a program ended."""

    code: int | None  # exit code, 128 + N for signal N; None: killed at its deadline, or because it printed too much
    output: str
    errors: str


def run_program(program: str, given: str, deadline: float, *, allow_unprotected: bool = False) -> ProgramResult:
    """Run a program with `given` on its standard input, until `deadline` (time.monotonic) at the latest.

    `allow_unprotected`: where it cannot be isolated, it runs with limits alone and can read and write the user's files.
    """
    mode, problem = isolation()
    if mode == "unprotected" and not allow_unprotected:
        raise IsolationError(problem)
    return _run(program, given, deadline, mode)


@cache
def isolation() -> tuple[Mode, str]:
    """Find out, once per process, how programs can be isolated here; if they cannot, "unprotected" and why not."""
    modes: tuple[Mode, ...] = ("root", "user") if os.geteuid() == 0 else ("user",)
    problem = ""
    for mode in modes:
        try:
            result = _run("print(1)", "", time.monotonic() + PROBE_SECONDS, mode)
        except (OSError, IsolationError) as error:
            problem = problem or str(error)
            continue
        if (result.code, result.output) == (0, "1\n"):
            return mode, ""
        problem = problem or f"exit code {result.code}: {result.errors.strip()[-500:]}"
    return "unprotected", problem


def _run(program: str, given: str, deadline: float, mode: Mode) -> ProgramResult:
    with contextlib.ExitStack() as stack:
        folder, paths, links = "", list[str](), dict[str, str]()
        group = ControlGroup(MEMORY, PROCESSES)
        stack.callback(group.remove)
        if mode == "unprotected":
            folder = tempfile.mkdtemp(prefix="program-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        else:
            paths, links = visible_paths()
        seconds = max(0.0, deadline - time.monotonic())
        settings = {
            "mode": mode,
            "parent": os.getpid(),
            "seconds": seconds,
            "base": os.path.realpath(tempfile.gettempdir()),
            "folder": folder,
            "paths": paths,
            "links": links,
            "source": program,
            "program": f"{folder or INSIDE}/program.py",
            "python": sys.executable,
            "env": _environment(folder or INSIDE),
            "limits": _limits(mode, seconds),
            "memory": MEMORY,
            "watched_memory": 0 if group.limits_memory else MEMORY,
            "groups": group.entries,
            "seccomp": _filter(mode).hex(),
        }
        settings_file = _memory_file(json.dumps(settings))
        stack.callback(os.close, settings_file)
        source = _memory_file(given)
        stack.callback(os.close, source)
        status, their_status = os.pipe()
        stack.callback(os.close, status)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(JAIL), str(settings_file), str(their_status)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(settings_file, their_status),
                cwd="/",
                env=_environment("/"),
                start_new_session=True,
            )
        finally:
            os.close(their_status)
        with process:
            return _watch(process, status, deadline)


def _memory_file(text: str) -> int:
    """Make a file in memory that cannot be changed, not even if it is opened again under /proc."""
    file = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    unsent = text.encode("utf-8", "replace")
    while unsent:
        unsent = unsent[os.write(file, unsent) :]
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _environment(folder: str) -> dict[str, str]:
    """Make an environment with only what the interpreter needs to start."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}


def _limits(mode: Mode, seconds: float) -> dict[str, int]:
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    shared_count = mode == "unprotected" or (mode == "user" and kernel < NPROC_PER_NAMESPACE)
    return {
        "RLIMIT_AS": MEMORY,
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_MEMLOCK": 2**16,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NPROC": PROCESSES + (tasks_of_this_user() if shared_count else 0),
    }


def _filter(mode: Mode) -> bytes:
    """Compile the filter of system calls; only a program that may run unprotected runs without libseccomp."""
    try:
        return compile_filter()
    except OSError:
        if mode == "unprotected":
            return b""
        raise


def _watch(process: subprocess.Popen[bytes], status: int, deadline: float) -> ProgramResult:
    """Collect the output; kill the program at its deadline or when it prints too much, and what it left at the end."""
    assert process.stdout is not None and process.stderr is not None
    streams = {process.stdout.fileno(): b"", process.stderr.fileno(): b"", status: b""}
    poll = select.poll()
    for stream in streams:
        poll.register(stream, select.POLLIN)
    opened = len(streams)
    killed = False
    while opened and not killed:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
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
            process.wait(max(0.0, deadline - time.monotonic()))
    killed = killed or process.returncode is None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the first process inside dies with this one, and all others with it
    process.wait()
    output, errors, failure = (raw.decode("utf-8", "replace") for raw in streams.values())
    if failure:
        raise IsolationError(failure)
    code = process.returncode
    return ProgramResult(None if killed else code if code >= 0 else 128 - code, output, errors)


@cache
def visible_paths() -> tuple[list[str], dict[str, str]]:
    """List what a program sees of this machine: files and directories, and the symbolic links on the way to them.

    These are the interpreter, its standard library, installed packages, and the system's shared libraries.
    """
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    wanted = [
        sys.executable,
        f"{sys.prefix}/pyvenv.cfg",
        f"{sys.base_prefix}/lib",
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
        *(path for path in sys.path if Path(path).name in SITE_FOLDERS),
        *(path for path in libraries if path),
        *SYSTEM_PATHS,
    ]
    links: dict[str, str] = {}
    paths = {_resolve(path, links) for path in wanted if Path(path).exists()}
    covered = [path for path in paths if any(str(parent) in paths for parent in Path(path).parents)]
    return sorted(paths - set(covered)), links


def _resolve(path: str, links: dict[str, str]) -> str:
    """Follow symbolic links, and add each of them to `links`."""
    done, parts = Path("/"), list(Path(path).absolute().parts[1:])
    while parts:
        part = parts.pop(0)
        done = done.parent if part == ".." else done / part
        if done.is_symlink():
            target = done.readlink()
            links[str(done)] = str(target)
            parts = [*target.parts[target.is_absolute() :], *parts]
            done = Path("/") if target.is_absolute() else done.parent
    return str(done)
