"""Files with one JSON object per line: writes lines, appends them whole, and drops lines that a run repeats."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger("posttrain")

KEPT_BYTES = 64 * 2**20  # of lines that cannot be written yet
# Some readers (such as str.splitlines) treat these as the end of a line, and terminals interpret some as control codes.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


def as_line(row: dict[str, Any]) -> str:
    """Encode a row as one line, which stays one line for every reader."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def as_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return map(as_line, rows)


class LineFile:
    """Appends lines to a log of a run. Lines that cannot be written, as on a full disk, are kept and written later.

    A run must not end because of its logs: the first failure is a warning, and so is the loss of lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = path.open("ab", buffering=0)
        self.kept: deque[bytes] = deque()  # not written yet; the first may be the rest of a line
        self.kept_bytes = 0
        self.rest = False  # whether a part of the first is written
        self.lost = 0  # lines for which there was no room in memory
        self.failing = False
        self.lock = threading.Lock()

    def append(self, text: str) -> None:
        """Append whole lines."""
        with self.lock:
            lines = text.encode().splitlines(keepends=True)
            self.kept.extend(lines)
            self.kept_bytes += sum(map(len, lines))
            failure = self._write()
            while self.kept_bytes > KEPT_BYTES and len(self.kept) > self.rest:
                self.kept_bytes -= len(self.kept[self.rest])
                del self.kept[self.rest]
                self.lost += 1
            was_failing, self.failing = self.failing, failure is not None
            lost = self.lost if failure is None else 0
            self.lost -= lost
        # After the lock is released: a warning may be a line of this file.
        if failure is not None and not was_failing:
            log.warning(
                "%s: cannot be written: %s. The run goes on and keeps up to %d MiB of lines to write them later",
                *(self.path, failure.strerror, KEPT_BYTES // 2**20),
            )
        elif failure is None and was_failing:
            log.warning(
                "%s: can be written again; %s", self.path, f"{lost} lines are lost" if lost else "no line is lost"
            )

    def _write(self) -> OSError | None:
        """Write all lines, in several calls if needed; return what prevented it."""
        data = memoryview(b"".join(self.kept))
        written = 0
        failure: OSError | None = None
        try:
            while written < len(data):
                written += self.file.write(data[written:])
        except OSError as error:
            failure = error
        self.kept_bytes -= written
        while written and self.kept and written >= len(self.kept[0]):
            written -= len(self.kept.popleft())
            self.rest = False
        if written:
            self.kept[0], self.rest = self.kept[0][written:], True
        return failure

    def close(self) -> None:
        """Write what is left, if that is possible now, and close the file."""
        if self.kept:
            self.append("")
        self.file.close()
        if self.kept or self.lost:
            log.warning("%s: %d lines are missing: they could not be written", self.path, len(self.kept) + self.lost)


def cut_after(path: Path, start_step: int | None) -> None:
    """Drop an incomplete last line, and the lines of steps after `start_step`, which a resumed run writes again."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"}\n") or (start_step is not None and json.loads(line)["step"] > start_step):
                break
            kept += len(line)
    if kept < path.stat().st_size:
        os.truncate(path, kept)
