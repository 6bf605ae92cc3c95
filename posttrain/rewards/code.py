"""Programs that a model wrote, judged by tests in a sandbox.

Each program runs as a process of its own: no network, own process table, files read-only but for a folder in memory
(where the system allows user namespaces), limits on memory, time, files and output, killed at its deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
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
from typing import Any

from posttrain.rewards.verdict import Completion, label_of
from posttrain.rewards.verifier import allowed_seconds, verifier

FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)```", re.DOTALL)
PYTHON = ("python", "py", "python3")
SHARE = 0.6  # of the time that a verifier has: for all tests of one program
MEMORY = 2**29  # bytes
OUTPUT_LIMIT = 2**20  # bytes
REASON_LIMIT = 500  # characters
JAIL = Path(__file__).with_name("jail.py")
NAMESPACES = ("--user", "--map-root-user", "--net", "--ipc", "--uts", "--pid", "--mount", "--fork", "--kill-child")


@dataclass(slots=True, frozen=True)
class Outcome:
    """How a program ended."""

    code: int | None  # None: killed at its deadline
    output: str
    errors: str


@dataclass(slots=True, frozen=True)
class Tests:
    """Either statements that fail by an exception, or inputs with the outputs they must give."""

    statements: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


@verifier("code")
def judge_code(completion: Completion) -> tuple[float, str]:
    """1 if the program in the answer passes all tests of the row (asserts, or inputs and outputs), else 0."""
    tests = find_tests(completion.columns)
    program = program_of(completion.text)
    if not program.strip():
        return 0.0, "no program"
    end = time.monotonic() + SHARE * allowed_seconds()
    if tests.statements:
        fault = fault_of_statements(program, tests.statements, end)
        return (0.0, fault) if fault else (1.0, "all tests passed")
    for number, (given, wanted) in enumerate(tests.pairs, start=1):
        fault = fault_of_pair(program, given, wanted, end)
        if fault:
            return 0.0, f"test {number} of {len(tests.pairs)}: {fault}"
    return 1.0, f"all {len(tests.pairs)} tests passed"


def program_of(text: str) -> str:
    """The last fenced block of Python, else the last fenced block, else the whole text."""
    blocks = FENCE.findall(text)
    python = [body for language, body in blocks if language.lower() in PYTHON]
    if python:
        return python[-1]
    return blocks[-1][1] if blocks else text


def find_tests(columns: dict[str, Any]) -> Tests:
    """Tests as common data sets keep them; LookupError if the row has none."""
    source = dict(columns)
    for nested in (label_of(columns), columns.get("input_output"), columns.get("tests")):
        if isinstance(nested, str) and nested.lstrip().startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                nested = json.loads(nested)
        if isinstance(nested, dict):
            source |= nested
    if source.get("inputs") is not None and source.get("outputs") is not None:
        pairs = zip(map(_text, source["inputs"]), map(_text, source["outputs"]), strict=True)
        return _not_empty(Tests(pairs=tuple(pairs)))
    if isinstance(source.get("test"), str) and source.get("entry_point"):  # HumanEval
        return Tests(statements=(source["test"], f"check({source['entry_point']})"))
    for name in ("tests", "test_list", "test", "ground_truth"):
        found = source.get(name)
        if isinstance(found, str) and found.lstrip().startswith("["):
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(found)
        if isinstance(found, str) and "assert" in found:
            found = [found]
        if isinstance(found, list) and found and all(isinstance(test, str) for test in found):
            setup = source.get("test_setup_code")
            return Tests(statements=(*([setup] if setup else []), *found))
    return _not_empty(Tests(), columns)


def _not_empty(tests: Tests, columns: dict[str, Any] | None = None) -> Tests:
    if not tests.pairs:
        there = f"; its columns are {', '.join(columns)}" if columns else ""
        raise LookupError(f"the row has no tests: give `tests` (asserts), or `inputs` and `outputs`{there}")
    return tests


def _text(value: Any) -> str:
    """Inputs may be a text or a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def fault_of_statements(program: str, statements: tuple[str, ...], end: float) -> str:
    """What went wrong, or "". The last line shows that the program did not end before the tests."""
    token = secrets.token_hex(8)
    outcome = run_program("\n\n".join((program, *statements, f'print("\\n{token}")')), "", end)
    if outcome.code == 0 and outcome.output.rstrip().endswith(token):
        return ""
    return _fault(outcome) or "the program ended before the tests did"


def fault_of_pair(program: str, given: str, wanted: str, end: float) -> str:
    outcome = run_program(program, given, end)
    fault = _fault(outcome)
    if fault:
        return fault
    found, right = _lines(outcome.output), _lines(wanted)
    return "" if found == right else f"printed {outcome.output[:100]!r}, wanted {wanted[:100]!r}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _fault(outcome: Outcome) -> str:
    if outcome.code is None:
        return "it took too long, or printed too much"
    if outcome.code != 0:
        return f"exit code {outcome.code}: {outcome.errors.strip()[-REASON_LIMIT:]}"
    return ""


def run_program(program: str, given: str, end: float) -> Outcome:
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


def _watch(process: subprocess.Popen[bytes], end: float) -> Outcome:
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
    return Outcome(None if killed else process.returncode, output, errors)


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
