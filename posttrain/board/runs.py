"""Finds run directories and reads what they hold: state, configuration, metrics, logs, rendered examples."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from posttrain.algorithms import ALGORITHMS
from posttrain.board.files import RunFolder, complete_lines
from posttrain.checkpoints.checkpoint import CHECKPOINT_NAME
from posttrain.config.compare import flat
from posttrain.core.errors import UsageError
from posttrain.plots.runs import Row, RunMetrics, is_number, usual_metrics
from posttrain.rollout.records import FILE as ROLLOUTS

METRICS, CONFIG, LOG, REPORT = "metrics.jsonl", "config.yaml", "run.log", "report.json"
MAX_DEPTH = 4  # directories between one that was named and a run
MAX_RUNS = 2_000
MAX_FOLDERS = 20_000  # that are looked into
INNER = {"checkpoints", "samples", "logs", "bad-batches", "data", "initial_model", "tokenizer", "evals"}
CONFIG_BYTES = 2**18
MAX_NESTING = 32  # brackets in a configuration
TAIL_BYTES = 2**18
EXAMPLES_BYTES = 4 * 2**20
MAX_NAMES = 500  # metrics of a step
SPARK_POINTS = 40  # of the small curve in the list of runs
RECENT_STEPS = 20  # over which speed is averaged

LOG_LINE = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (info|warning|error): (.*)$", re.MULTILINE)
STEPS_LINE = re.compile(rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d info: steps: ([\d,]{1,15}) of ", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last):"
CAUSE = re.compile(r"\n\n(?:During handling of|The above exception was) .*:\n\n(?=Traceback )")
LOCK = re.compile(r"process (\d{1,10}) on (\S{1,255})")

T = TypeVar("T")
RunState = Literal["running", "finished", "stopped", "failed", "killed", "unknown"]


@dataclass(slots=True)
class MetricsReader:
    """The logged steps of a run; `update` reads what was added, or everything again after a resume cut lines off."""

    folder: RunFolder
    rows: list[Row] = field(default_factory=list)
    bad_lines: int = 0
    end: int = 0
    last: tuple[int, int, int] | None = None  # offset, size and checksum of the last line
    lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self) -> list[Row]:
        with self.lock:
            try:
                with self.folder.open(METRICS) as file:
                    if self.last is not None:
                        offset, size, checksum = self.last
                        file.seek(offset)
                        if zlib.crc32(file.read(size)) != checksum:
                            self.rows, self.bad_lines, self.end, self.last = [], 0, 0, None
                    rows = list(self.rows)  # readers keep the list that they were given
                    for offset, size, line in complete_lines(file, self.end):
                        row = metrics_row(line)
                        if row is None:
                            self.bad_lines += 1
                        else:
                            rows.append(row)
                        self.end = offset + size
                        self.last = (offset, size, zlib.crc32((line or b"") + b"\n"))
                    self.rows = rows
            except OSError:
                self.rows, self.bad_lines, self.end, self.last = [], 0, 0, None
            return self.rows


def metrics_row(line: bytes | None) -> Row | None:
    """Return the numbers of a step by name; None for a line that is not one."""
    row = parse(line)
    if row is None or not is_number(row.get("step")):
        return None
    numbers = {name: value if is_number(value) else None for name, value in list(row.items())[:MAX_NAMES]}
    return {name: value for name, value in numbers.items() if name != "not_finite"} | {"step": int(row["step"])}


def parse(line: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in a line; None for anything else."""
    try:
        value = json.loads(line, parse_int=whole_number) if line is not None else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)  # a longer one may have any size


class BoardRun:
    """One run directory, as it is now."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.folder, self.name = folder, name
        self.id = hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:16]  # names may hold any character
        self.metrics = MetricsReader(folder)
        self._known: dict[str, tuple[Any, Any]] = {}  # by name: the state of a file, and what was read from it

    # Configuration

    def config_text(self) -> str:
        return self.folder.read(CONFIG, limit=CONFIG_BYTES).decode("utf-8", "replace")

    def config_mapping(self) -> dict[str, Any]:
        """Return the configuration as it is written; empty if there is none, or none that can be read."""
        return self._remembered("config", (CONFIG,), lambda: read_config(self.config_text()))

    def config(self) -> dict[str, Any]:
        """Return section.option -> value."""
        return flat(self.config_mapping())

    def _remembered(self, name: str, file: tuple[str, ...], read: Callable[[], T]) -> T:
        """Return what was read from a file, read again only if the file has changed."""
        found = self.folder.stat(*file)
        key = (found.st_ino, found.st_size, found.st_mtime_ns) if found is not None else None
        if self._known.get(name, (0, None))[0] != key:
            self._known[name] = (key, read())
        value: T = self._known[name][1]
        return value

    # State

    def owner(self) -> tuple[int, str]:
        """Return process and host of the lock file; 0 if it names none."""
        text = self.folder.read("lock", limit=400).decode("utf-8", "replace")
        found = LOCK.match(text)
        return (int(found[1]), found[2]) if found else (0, "")

    def is_locked(self) -> bool:
        """Whether a process of this machine holds the lock. Taking it, to try, could refuse a run that starts now."""
        lock, (process, _) = self.folder.stat("lock"), self.owner()
        return lock is not None and any(
            inode == lock.st_ino and (device == lock.st_dev or holder == process)
            for holder, device, inode in held_locks()
        )

    def state(self) -> tuple[RunState, str]:
        """Return the state, and why."""
        if self.is_locked():
            return "running", ""
        if self.folder.stat(REPORT) is not None:  # of an evaluation or a pipeline, written at its end
            return "finished", ""
        level, text = self.last_event()
        if level == "done":
            return ("finished" if text.startswith("done") else "stopped"), text
        if level == "stopped":
            return "stopped", text
        if level == "error":
            return "failed", text
        _, host = self.owner()
        if host and host != socket.gethostname():
            return "unknown", f"its process is on {host}, which cannot be asked from here"
        if str(self.config().get("verb")) not in ALGORITHMS and self.folder.stat("logs", LOG) is None:
            return "unknown", "it has ended without a result and keeps no log: what the command printed says why"
        return "killed", "its process is gone, and has not written why"

    def last_event(self) -> tuple[str, str]:
        """Return how the log ends: done, stopped, error or nothing, with the message."""
        return self._remembered("event", ("logs", LOG), self._read_last_event)

    def _read_last_event(self) -> tuple[str, str]:
        tail = self.folder.read("logs", LOG, limit=TAIL_BYTES, from_end=True)
        for found in reversed(list(LOG_LINE.finditer(tail))):
            level, text = found[1], found[2].decode("utf-8", "replace")
            if level == b"error":
                kind, message = raised(tail[found.start(2) :].decode("utf-8", "replace"))
                return ("stopped" if kind.endswith("errors.Stopped") else "error"), message
            if text.startswith(("done: ", "stopped early after ")):
                return "done", text
            if level == b"info":
                break
        return "", ""

    def total_steps(self, config: dict[str, Any]) -> int:
        """Return the steps that the run will have: max_steps, or what its log states; 0 if unknown."""
        steps = config.get("train.max_steps")
        if isinstance(steps, int) and steps > 0:
            return steps
        return self._remembered("steps", ("logs", LOG), self._read_steps)

    def _read_steps(self) -> int:
        stated = STEPS_LINE.findall(self.folder.read("logs", LOG, limit=64 * TAIL_BYTES, from_end=True))
        return int(stated[-1].replace(b",", b"")) if stated else 0

    def summary(self) -> dict[str, Any]:
        """Return what the list of runs shows."""
        rows, config = self.metrics.update(), self.config()
        state, reason = self.state()
        total, step = self.total_steps(config), rows[-1]["step"] if rows else 0
        seconds = step_seconds(rows)
        files = [self.folder.stat(name) for name in (METRICS, CONFIG, "lock")]
        rollouts = self.folder.stat(ROLLOUTS)
        metric = (usual_metrics(rows[-50:]) or [""])[0]
        return {
            "id": self.id,
            "name": self.name,
            "path": str(self.folder.path),
            "verb": str(config.get("verb", ""))[:100],
            "model": str(config.get("model.path", ""))[:400],
            "state": state,
            "reason": reason[:2000],
            "step": step,
            "total_steps": total,
            "eta_seconds": seconds * max(total - step, 0) if state == "running" and total and seconds else None,
            "seconds_per_step": seconds or None,
            "tokens_per_second": next(
                (r["tokens_per_second"] for r in rows[:-6:-1] if r.get("tokens_per_second")), None
            ),
            "memory_gib": rows[-1].get("memory_gib") if rows else None,
            "updated": max((found.st_mtime for found in files if found is not None), default=None),
            "created": next((found.st_mtime for found in files[1:2] if found is not None), None),
            "last": rows[-1] if rows else {},
            "main_metric": metric,
            "spark": [row[metric] for row in rows[:: max(1, len(rows) // SPARK_POINTS)] if row.get(metric) is not None],
            "bad_metric_lines": self.metrics.bad_lines,
            "has_rollouts": rollouts is not None and rollouts.st_size > 0,
            "resumed_at": self.resumed_at(),
        }

    def resumed_at(self) -> list[int]:
        """Return the steps from which the run was resumed."""
        return self._remembered("resumed", ("logs", LOG), self._read_resumed)

    def _read_resumed(self) -> list[int]:
        tail = self.folder.read("logs", LOG, limit=TAIL_BYTES, from_end=True)
        return [int(step) for step in re.findall(rb" info: resuming from step (\d{1,12}) ", tail)]

    # Files

    def checkpoints(self) -> list[int]:
        inside, _ = self.folder.entries("checkpoints")
        return sorted({int(found[1]) for name in inside if (found := CHECKPOINT_NAME.fullmatch(name))})

    def tokenizer_files(self) -> Iterator[tuple[str, ...]]:
        """Yield where tokenizer.json may be, the newest checkpoint first."""
        inside, _ = self.folder.entries("checkpoints")
        for name in sorted((name for name in inside if CHECKPOINT_NAME.fullmatch(name)), reverse=True):
            yield ("checkpoints", name, "model", "tokenizer.json")
        yield ("tokenizer", "tokenizer.json")
        yield ("initial_model", "tokenizer.json")

    def log_files(self) -> list[str]:
        _, files = self.folder.entries("logs")
        return sorted((name for name in files if name.endswith((".log", ".txt"))), key=lambda name: (name != LOG, name))

    def log_text(self, name: str, limit: int = TAIL_BYTES) -> tuple[str, int]:
        """Return the end of a log, and its size."""
        if name not in self.log_files():
            return "", 0
        found = self.folder.stat("logs", name)
        text = self.folder.read("logs", name, limit=limit, from_end=True).decode("utf-8", "replace")
        return text, found.st_size if found else 0

    def examples(self) -> list[dict[str, Any]]:
        """Return the examples that the run rendered at its start, and other rows of its folder samples."""
        _, files = self.folder.entries("samples")
        found: list[dict[str, Any]] = []
        for name in files[:50]:
            if step := re.fullmatch(r"step-(\d{1,12})\.jsonl", name):
                text = self.folder.read("samples", name, limit=EXAMPLES_BYTES)
                rows = (parse(line) for line in text.split(b"\n")[:50])
                found += [{"step": int(step[1]), "row": row} for row in rows if row is not None]
        return found[:200]

    def phases(self) -> dict[str, Any]:
        """Return time and memory of each phase: in all, and in the last steps."""
        rows = self.metrics.update()
        names = dict.fromkeys(name for row in (*rows[:5], *rows[-RECENT_STEPS:]) for name in row)
        phases = [name.removeprefix("time/") for name in names if name.startswith("time/")]
        recent = rows[-RECENT_STEPS:]
        return {
            "phases": [
                {
                    "name": name,
                    "seconds": sum(row.get(f"time/{name}") or 0 for row in rows),
                    "recent": sum(row.get(f"time/{name}") or 0 for row in recent) / max(1, len(recent)),
                    "memory_gib": max((row.get(f"memory/{name}") or 0 for row in rows), default=0) or None,
                }
                for name in phases
            ],
            "steps": len(rows),
            "peak_gib": max((row.get("memory_gib") or 0 for row in rows), default=0) or None,
        }

    def as_plot(self) -> RunMetrics:
        return RunMetrics(self.name, self.folder.path / METRICS, self.metrics.update())


def raised(text: str) -> tuple[str, str]:
    """Return class and message of the error at the end of a traceback."""
    last = CAUSE.split(text)[-1]  # a message may quote another traceback, so the first one of this part counts
    lines = last.strip().removeprefix(TRACEBACK).strip("\n").split("\n")
    while len(lines) > 1 and lines[0].startswith(" "):  # frames are indented
        lines.pop(0)
    kind, _, message = lines[0].partition(": ")
    if not kind.startswith("posttrain."):  # not made for users, so its name matters
        return kind, "\n".join(lines)
    return kind, "\n".join([message, *lines[1:]])


def read_config(text: str) -> dict[str, Any]:
    depth = deepest = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:  # the time that YAML takes grows with the square of it
        return {}
    try:
        found = yaml.load(text, PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


class PlainLoader(yaml.SafeLoader):
    """Reads YAML without aliases, with which a small file describes an enormous value."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a configuration has no aliases")
        return super().compose_node(parent, index)


def step_seconds(rows: Sequence[Row]) -> float:
    """Return the mean time of the last steps; the first one counts only if there is no other."""
    recent = (rows[1:] or rows)[-RECENT_STEPS:]
    times = [sum(v for name, v in row.items() if name.startswith("time/") and v is not None) for row in recent]
    return sum(times) / len(times) if times else 0.0


def held_locks() -> list[tuple[int, int, int]]:
    """Return process, device and inode of the locks on whole files that processes of this machine hold."""
    try:
        text = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return []
    found: list[tuple[int, int, int]] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].count(":") == 2:
            major, minor, inode = words[5].split(":")
            found.append((int(words[4]), os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


class RunList:
    """The runs below the directories that the user named; looks again whenever it is asked."""

    def __init__(self, names: Sequence[str]) -> None:
        self.roots: list[Path] = []
        for name in names:
            path = Path(name).expanduser()
            if not path.is_dir():
                raise UsageError(f"{name}: no such directory. Name run directories, or a directory that holds some.")
            self.roots.append(path.resolve())
        self.runs: dict[str, BoardRun] = {}
        self.lock = threading.Lock()

    def find(self) -> list[BoardRun]:
        """Return all runs; those that were known stay the same objects."""
        with self.lock:
            found: dict[str, BoardRun] = {}
            looked = 0
            for root in self.roots:
                waiting = [RunFolder(root)]
                while waiting and len(found) < MAX_RUNS and looked < MAX_FOLDERS:
                    folder = waiting.pop(0)
                    looked += 1
                    inside, files = folder.entries()
                    is_run = CONFIG in files or METRICS in files
                    if is_run:
                        run = BoardRun(folder, "/".join(folder.parts or (root.name,)))
                        found.setdefault(run.id, self.runs.get(run.id, run))
                    if len(folder.parts) < MAX_DEPTH:
                        skipped = INNER if is_run else {"checkpoints"}
                        names = [name for name in inside if name not in skipped and not name.startswith(".")]
                        waiting += [RunFolder(root, (*folder.parts, name)) for name in names]
            same = Counter(run.name for run in found.values())
            for run in found.values():
                run.name = run.name if same[run.name] == 1 else str(run.folder.path)
            self.runs = found
            return list(found.values())

    def get(self, run_id: str) -> BoardRun | None:
        if run_id not in self.runs:
            self.find()
        return self.runs.get(run_id)
