"""The run directory: its name, its lock, its files; and the signals that stop a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from posttrain.checkpoints.checkpoint import is_run_directory, remove_temporaries
from posttrain.core.errors import UsageError
from posttrain.core.files import atomic_write_text, sync_folder
from posttrain.core.parent import STOP_SIGNALS

RUNS = Path("runs")

log = logging.getLogger("posttrain")


class RunDirectory:
    """A run directory, locked while it is open. Subdirectories are created when the first file is written to them."""

    def __init__(self, path: Path, lock: BinaryIO) -> None:
        self.path = path
        self._lock = lock
        _open_folders.add(self)

    @classmethod
    def open(cls, out: str, verb: str, resume: bool) -> RunDirectory:
        """Open `out`, or by default a new runs/<verb>-NNN (with `resume`: the newest run there)."""
        if resume:
            path = find_run(out, verb)
        else:
            path = Path(out).expanduser() if out else _new_numbered(verb)
        try:
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
            lock = _lock(path / "lock")
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be used as run directory: {error.strerror}. Give another --output_dir."
            ) from error
        # Checked only with the lock held: another process may be starting a run here at this moment.
        if not resume and is_run_directory(path):
            lock.close()
            raise UsageError(
                f"{path}: already holds a run. Add --resume to continue it, or give another --output_dir to start anew."
            )
        folder = cls(path, lock)
        remove_temporaries(folder.checkpoints)
        return folder

    def close(self) -> None:
        """Release the lock, and remove the directory if the start failed before it held a run."""
        lock, inputs = self.path / "lock", (self.path / "data", self.path / "initial_model", self.path / "tokenizer")
        if {lock} <= set(self.path.iterdir()) <= {lock, *inputs}:
            for written in inputs:  # given in memory: see inputs.py
                shutil.rmtree(written, ignore_errors=True)
            lock.unlink()
            self.path.rmdir()
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def bad_batches(self) -> Path:
        return self.path / "bad-batches"

    def write_config(self, text: str) -> None:
        """Write config.yaml, which makes the directory that of a run."""
        atomic_write_text(self.config_file, text)

    def write_bad_batch(self, step: int, rows: list[dict[str, Any]]) -> Path:
        """Write the samples of a step that was skipped, one JSON object per line."""
        path = self.bad_batches / f"step-{step:08d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        return path


class StopSignals:
    """The first SIGINT, SIGTERM or SIGHUP sets a stop flag, `received`; a second signal exits immediately.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            for number in STOP_SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            # Not print, which is not reentrant: the signal may have interrupted it.
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; send the signal again to stop immediately\n")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)


def find_run(out: str, verb: str) -> Path:
    """Return the directory of an existing run: `out`, or by default the runs/<verb>-NNN with the highest number."""
    if out:
        path = Path(out).expanduser()
        if not is_run_directory(path):
            raise UsageError(
                f"{path}: no run to resume in this directory. Start one without --resume, or correct --output_dir."
            )
        return path
    runs = {number: path for number, path in _numbered(verb).items() if is_run_directory(path)}
    if not runs:
        raise UsageError(
            f"no run to resume in {RUNS}/{verb}-*. Start one without --resume, or name its directory with --output_dir."
        )
    return runs[max(runs)]


def _numbered(verb: str) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(verb)}-(\d+)")
    matches = [(pattern.fullmatch(path.name), path) for path in RUNS.iterdir()] if RUNS.is_dir() else []
    return {int(match[1]): path for match, path in matches if match is not None}


def _new_numbered(verb: str) -> Path:
    number = max(_numbered(verb), default=0)
    while True:
        number += 1
        path = RUNS / f"{verb}-{number:03d}"
        try:
            RUNS.mkdir(exist_ok=True)
            path.mkdir()
        except FileExistsError:  # another process was quicker
            if not RUNS.is_dir():
                raise UsageError(f"{RUNS}: not a directory. Give another place with --output_dir.") from None
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be created: {error.strerror}. Give another place with --output_dir."
            ) from error
        else:
            return path


def _lock(path: Path) -> BinaryIO:
    """Lock a file until it is closed; the system releases the lock of a process that dies."""
    lock = path.open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().decode("utf-8", "replace").strip() or "another process"
        lock.close()
        raise UsageError(
            f"{path.parent}: in use by {owner}. Wait for it or stop it, or give another --output_dir."
        ) from None
    except OSError as error:  # some network file systems have no locks
        log.warning("%s: cannot be locked (%s): make sure that no second run uses this directory", path, error.strerror)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    lock.flush()
    return lock


_open_folders: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


def _forget_locks() -> None:
    for folder in _open_folders:
        folder.close()


# A forked child shares its parent's lock and would hold it after the parent was killed.
os.register_at_fork(after_in_child=_forget_locks)
