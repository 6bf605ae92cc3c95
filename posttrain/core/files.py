"""Reads JSON files, writes files and folders atomically, and makes what was written survive a power cut."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.core.disk import disk_errors
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.temporary import TemporaryFolder, lock, remove_leftovers, temporary_file


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; CheckpointError if the file cannot be read or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged: its content is not a JSON object")
    return value


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON does not have: `parse_constant` of json."""
    raise ValueError(f"{name} is not a number in JSON")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object. Not atomic: for a file of a directory that is renamed only once it is complete."""
    path.write_text(_json_text(value), encoding="utf-8")


def atomic_write_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON value, as `atomic_write_text` does."""
    atomic_write_text(path, _json_text(value))


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file so that after a kill or a power cut it holds the old content or the new, complete."""
    atomic_write(path, [text])


def atomic_write(path: Path, parts: Iterable[str]) -> None:
    """Write a text in parts, as `atomic_write_text` does.

    A lone surrogate, which a model may generate, is written as the escape that JSON uses for it.
    """
    atomic_write_bytes(path, (part.encode("utf-8", "backslashreplace") for part in parts))


def atomic_write_bytes(path: Path, parts: Iterable[bytes]) -> None:
    """Write bytes in parts, as `atomic_write_text` does."""
    remove_leftovers(path.parent, path.name)
    temporary = temporary_file(path)
    locked: int | None = None
    try:
        with (
            disk_errors(path, written_in=temporary),
            temporary.open("wb") as file,
        ):
            locked = lock(temporary)
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        if locked is not None:
            os.close(locked)
    sync_folder(path.parent)


@contextmanager
def new_folder(out: Path, needed: Callable[[], int] = lambda: 0) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, which is renamed to `out` when the block ends without an error.

    `needed`: returns the size of the output in bytes, for the message of a full disk; 0 if it is not known.
    """
    check_new_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryFolder(out.parent, out.name) as unfinished,
        disk_errors(out, written_in=unfinished, needed=needed),
    ):
        yield unfinished
        unfinished.chmod(0o755)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    sync_folder(out.parent)


def check_new_folder(out: Path) -> None:
    """Raise UsageError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists and is not empty: choose another output folder")


def sync_folder(folder: Path) -> None:
    """Fsync a directory: files created, renamed or deleted in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path, sync: bool = False) -> str:
    """Return the sha256 of a file's content in hexadecimal; `sync` also flushes the file to the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest
