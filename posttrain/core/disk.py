"""Describes errors of a full disk: which output could not be written, how much was needed and is free, what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.core.errors import PosttrainError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, a quota, or a limit on the size of files
OS_ERROR = re.compile(r"os error (\d+)")  # how safetensors reports it, as text
TORCH_SAVE = "inline_container.cc"  # in a RuntimeError of torch.save if not all bytes were written
ADVICE = "Free some space, or choose another place for the output, and run the same command again."


class DiskFullError(PosttrainError):
    """Output could not be written because there is no space for it."""


@contextmanager
def disk_errors(
    path: Path, *, written_in: Path | None = None, needed: Callable[[], int] = lambda: 0, advice: str = ADVICE
) -> Iterator[None]:
    """Raise a DiskFullError that names the output `path` if the block fails because of a full disk.

    `written_in`: the file or folder that holds what was written so far; `needed`: returns the bytes of the whole
    output, 0 if that is not known.
    """
    try:
        yield
    except PosttrainError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise DiskFullError(
            f"{path}: cannot be written: {reason(error)} {space(path, written_in or path, needed())}. {advice}"
        ) from error


def is_disk_full(error: BaseException | None) -> bool:
    """Whether this error or one of its causes is a lack of disk space."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if isinstance(error, RuntimeError) and TORCH_SAVE in str(error):
            return True
        if "StorageFull" in str(error) or any(int(number) in FULL for number in OS_ERROR.findall(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason(error: BaseException) -> str:
    """Return the system's words for the error, or its first line."""
    if TORCH_SAVE in str(error):
        return "torch.save could not write all bytes"
    found = OS_ERROR.search(str(error))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return os.strerror(int(found[1])) if found else str(error).partition("\n")[0]


def space(path: Path, written_in: Path, needed: int = 0) -> str:
    """Describe how much was written, how much is needed, and how much is free, as far as that is known."""
    known = [f"written before the error: {format_bytes(bytes_in(written_in))}"]
    if needed:
        known.append(f"needed: about {format_bytes(needed)}")
    with suppress(OSError):
        folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
        known.append(f"free: {format_bytes(shutil.disk_usage(folder).free)}")
    return f"({'; '.join(known)})"


def bytes_in(path: Path) -> int:
    """Return the bytes that a file or a folder occupies; of a file with holes, only what was written."""
    try:
        return sum(
            min(each.stat().st_size, each.stat().st_blocks * 512)
            for each in (path, *path.rglob("*"))
            if each.is_file() and not each.is_symlink()
        )
    except OSError:
        return 0


def full_file_systems() -> str:
    """Name the usual places with less than 1% or 100 MB of free space; for errors that do not name a file."""
    places = {"the current folder": Path.cwd(), "the folder of temporary files": Path(tempfile.gettempdir())}
    found = []
    for name, place in places.items():
        with suppress(OSError):
            usage = shutil.disk_usage(place)
            if usage.free < max(1e8, usage.total / 100):
                found.append(f"{name} ({place}) has {format_bytes(usage.free)} free")
    return "; ".join(found)


def format_bytes(size: int) -> str:
    """Return a number of bytes as text, in GB or MB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
