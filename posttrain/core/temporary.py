"""Temporary files and folders of commands: output appears complete or not at all, and killed processes leave nothing.

A temporary path is named `.tmp-<name>-<pid>`, and the process that writes it holds a lock (flock) on it. The next
command that writes output of the same name removes the paths of processes that have ended.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("posttrain")


class TemporaryFolder:
    """A hidden folder for this process alone; removed by `close`, or by a later command if this process is killed."""

    def __init__(self, parent: Path, name: str) -> None:
        """Create it in `parent`, after removing what killed processes left there under the same name."""
        remove_leftovers(parent, name)
        for number in itertools.count():
            self.path = parent / f".tmp-{name}{f'-{number}' if number else ''}-{os.getpid()}"
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
                break
        self._lock = lock(self.path)

    def close(self) -> None:
        """Remove the folder, unless it was renamed."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def temporary_file(path: Path) -> Path:
    """Return the temporary name of a file that will replace `path`; the caller locks it with `lock`."""
    return path.with_name(f".tmp-{path.name}-{os.getpid()}")


def remove_leftovers(parent: Path, name: str = "", *, locked: bool = False) -> None:
    """Remove temporary paths that killed processes left in `parent`, and log what was removed.

    `name`: of the output that they were for; empty: any. `locked`: the caller holds a lock on the folder, so that on
    file systems without locks the process number alone shows whether a path is in use. Otherwise paths stay there.
    """
    pattern = re.compile(rf"\.tmp-{re.escape(name) if name else '.+'}(?:-\d+)?-(\d+)")
    removed, size = 0, 0
    try:
        matches = [(path, match) for path in parent.iterdir() if (match := pattern.fullmatch(path.name))]
    except OSError:  # there is no such folder, or it cannot be read
        return
    for path, match in matches:
        try:
            if is_abandoned(path, int(match[1]), locked=locked):
                count = _folder_size(path)
                _remove(path)
                removed, size = removed + 1, size + count
        except FileNotFoundError:  # its process removed it, or another one did
            continue
        except OSError as error:  # costs disk space, nothing else
            log.warning("could not remove %s, which a killed process left: %s", path, error.strerror)
    if removed:
        what = f"{removed} temporary {'file or folder' if removed == 1 else 'files or folders'}"
        log.warning("removed %s (%.1f MB) that killed processes had left in %s", what, size / 1e6, parent)


def is_abandoned(path: Path, pid: int, *, locked: bool = False) -> bool:
    """Whether the process `pid` that created a temporary path has ended."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks, so the process may run on another machine
        if not locked:
            return False
    finally:
        os.close(descriptor)
    # The lock is free. A process that is alive may be about to take it, unless it started after the path was written:
    # then another process had the same number before.
    started = process_start(pid)
    return started is None or started > path.stat().st_ctime + 1.0


def lock(path: Path) -> int | None:
    """Lock a file or folder until the returned descriptor is closed; None where the file system has no locks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def process_start(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None if there is no such process.

    Where the system does not tell, a living process counts as started at 0.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # the process of another user
        pass
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration, IndexError, ValueError):
        return 0.0
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folder_size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *path.rglob("*")) if each.is_file())
