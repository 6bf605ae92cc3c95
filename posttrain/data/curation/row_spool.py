"""Keep rows in an unnamed file until it is known which of them are written, and in which order."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.core.disk import disk_errors
from posttrain.core.files import atomic_write
from posttrain.core.jsonl import as_line


class RowSpool:
    """Rows as lines of JSON in a file that disappears when it is closed. Use as a context manager."""

    def __init__(self, output: Path) -> None:
        """`output`: the file that will be written; the rows wait in the same directory."""
        self.output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        self.file = tempfile.TemporaryFile(dir=output.parent)  # noqa: SIM115  closed by __exit__
        self.edges = array("q", [0])

    def __enter__(self) -> RowSpool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the rows."""
        with suppress(OSError):  # on a full disk the rest of the buffer cannot be written
            self.file.close()

    def __len__(self) -> int:
        return len(self.edges) - 1

    def add(self, row: dict[str, Any]) -> None:
        line = as_line(row).encode("utf-8", "backslashreplace")
        with disk_errors(self.output):
            self.file.write(line)
        self.edges.append(self.edges[-1] + len(line))

    def write(self, path: Path, order: Iterable[int]) -> None:
        """Write rows by their numbers, all or none: a kill leaves the old file, or no file."""
        with disk_errors(self.output):
            self.file.flush()
        atomic_write(path, self._lines(order))

    def _lines(self, order: Iterable[int]) -> Iterator[str]:
        for number in order:
            start, end = self.edges[number], self.edges[number + 1]
            yield os.pread(self.file.fileno(), end - start, start).decode()
