"""Files with one JSON object per line: safe lines, whole appends, and dropping what a killed run wrote too much."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.core.errors import PosttrainError

# Some readers (str.splitlines is one) take these for the end of a line, and terminals take some for commands.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


def as_line(row: dict[str, Any]) -> str:
    """One line, for every reader, whatever text a model generated."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def as_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return map(as_line, rows)


def append_text(file: BinaryIO, text: str) -> None:
    """Write all of a text to an unbuffered file, which may take it in parts; PosttrainError if the disk is full."""
    data = memoryview(text.encode())
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        raise PosttrainError(f"{file.name}: cannot write: {error.strerror}. Free some space, then --resume") from error


def cut_after(path: Path, start_step: int | None) -> None:
    """Drop a last line that a kill left incomplete, and the lines of steps after `start_step`: they are done again."""
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
