"""Reads JSON files, replaces files atomically, and makes what was written survive a power cut."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posttrain.core.errors import CheckpointError


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
    temporary = path.with_name(f"{temporary_prefix(path)}{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def temporary_prefix(path: Path) -> str:
    """How the names of the temporary files begin that a killed `atomic_write` may leave beside `path`."""
    return f".tmp-{path.name}-"


def sync_folder(folder: Path) -> None:
    """Fsync a directory: files created, renamed or deleted in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path, sync: bool = False) -> str:
    """The sha256 of a file's content as hexadecimal digits; `sync` also brings the content to the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest
