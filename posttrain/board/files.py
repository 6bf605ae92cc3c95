"""Reads files inside a run directory: no symbolic link is followed, nothing but regular files is opened."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 4 * 2**20
MAX_LINE_BYTES = 64 * 2**20  # of a line that is parsed; a longer one is counted, and shown as too long
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A directory below `root`, reached through `parts`; each of them must be a real directory at every access."""

    root: Path  # named by the user, with its symbolic links resolved
    parts: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.root.joinpath(*self.parts)

    def open(self, *names: str) -> BinaryIO:
        """Open a regular file; raises OSError for anything else."""
        *folders, name = names
        with self._folder(*folders) as parent:
            descriptor = os.open(_plain(name), FILE_FLAGS, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name}: not a regular file")
        return os.fdopen(descriptor, "rb")

    def read(self, *names: str, limit: int, from_end: bool = False) -> bytes:
        """Return the first (or last) `limit` bytes of a file; nothing if it cannot be opened."""
        try:
            with self.open(*names) as file:
                if from_end:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
                return file.read(limit)
        except OSError:
            return b""

    def stat(self, *names: str) -> os.stat_result | None:
        """Return the state of a regular file; None if there is none."""
        *folders, name = names
        try:
            with self._folder(*folders) as parent:
                found = os.stat(_plain(name), dir_fd=parent, follow_symlinks=False)
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def entries(self, *folders: str, limit: int = 10_000) -> tuple[list[str], list[str]]:
        """Return the names of the directories and of the regular files in a directory, sorted; empty if it is none."""
        inside: list[str] = []
        files: list[str] = []
        try:
            with self._folder(*folders) as descriptor, os.scandir(descriptor) as scan:
                for _, entry in zip(range(limit), scan, strict=False):
                    if entry.is_dir(follow_symlinks=False):
                        inside.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        files.append(entry.name)
        except OSError:
            return [], []
        return sorted(inside), sorted(files)

    @contextlib.contextmanager
    def _folder(self, *names: str) -> Iterator[int]:
        descriptor = os.open(self.root, FOLDER_FLAGS)
        try:
            for name in (*self.parts, *names):
                inner = os.open(_plain(name), FOLDER_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise OSError(f"{name!r}: not the name of a file in a directory")
    return name


def complete_lines(file: BinaryIO, offset: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield offset, size and content of each line that ends in a line feed; None for one that is too long."""
    file.seek(offset)
    rest, skipped = b"", 0
    while block := file.read(BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            size = skipped + len(line) + 1
            yield offset, size, None if size > MAX_LINE_BYTES else line
            offset, skipped = offset + size, 0
        if skipped + len(rest) > MAX_LINE_BYTES:
            skipped, rest = skipped + len(rest), b""
