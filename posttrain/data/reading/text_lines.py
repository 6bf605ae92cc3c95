"""Read records from lines of text: jsonl, where each line is an object, and txt, where each line is a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.core.errors import DataError
from posttrain.data.reading.records import (
    BLOCK,
    RAW_KEPT,
    RECORD_LIMIT,
    BadRecord,
    Record,
    Records,
    nul_error,
    size_error,
)

BOM = b"\xef\xbb\xbf"
ENCODING = "; the file must be UTF-8: convert it, for example with iconv -f WINDOWS-1252 -t UTF-8"
ONE_PER_LINE = "each object must be on one line: jq -c . FILE writes them so, and jq -c '.[]' FILE those of a list"
TRUNCATED = "; the file ends here: is it truncated?"


class Line(NamedTuple):
    """A line with its line end, without a byte order mark."""

    number: int
    raw: bytes
    length: int
    cut: bool  # too long to be kept whole


def read_lines(stream: BufferedIOBase) -> Iterator[Line]:
    """Yield the lines of a stream; of a line longer than RECORD_LIMIT only the beginning is kept."""
    number = 0
    while raw := stream.readline(RECORD_LIMIT + 1):
        number += 1
        length = len(raw)
        cut = length > RECORD_LIMIT and not raw.endswith(b"\n")
        if number == 1:
            raw = raw.removeprefix(BOM)
        if cut:
            raw = raw[:RAW_KEPT]
            while more := stream.readline(BLOCK):
                length += len(more)
                if more.endswith(b"\n"):
                    break
        yield Line(number, raw, length, cut)


def decode_line(line: Line) -> tuple[str, str]:
    """Return the line's text, and what is wrong with it or ""."""
    if line.cut:
        return line.raw.decode("utf-8", "backslashreplace"), size_error(line.length, RECORD_LIMIT)
    try:
        text = line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return line.raw.decode("utf-8", "backslashreplace"), (
            f"invalid UTF-8 at byte {error.start + 1}: {error.reason}{ENCODING}"
        )
    return text, nul_error(text)


def read_jsonl(file: Path, stream: BufferedIOBase) -> Records:
    for line in read_lines(stream):
        origin = f"{file}:{line.number}"
        text, reason = decode_line(line)
        if not reason and not text.strip():
            continue
        if not reason and text.strip() in ("{", "["):
            raise DataError(f"{origin}: {ONE_PER_LINE}")
        if not reason:
            try:
                yield record_of(json.loads(text), text, origin)
                continue
            except (ValueError, RecursionError) as error:
                # Only the last line can lack its line end: then the writer was probably stopped in the middle of it.
                reason = json_error(error) + ("" if text.endswith("\n") else TRUNCATED)
        yield BadRecord(origin, reason, text)


def json_error(error: Exception) -> str:
    """Describe an error of the JSON decoder."""
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at character {error.colno}: {error.msg}"
    if isinstance(error, RecursionError):
        return "broken JSON: nested too deeply"
    return f"broken JSON: {error}"


def record_of(values: Any, source: str, origin: str) -> Record | BadRecord:
    """Return a record of decoded JSON, which must be an object with valid text.

    A list of objects has its positions as columns, "0", "1" and so on, as the hub shows such files.
    """
    if isinstance(values, list) and values and all(isinstance(value, dict) and value for value in values):
        values = {str(index): value for index, value in enumerate(values)}
    if not isinstance(values, dict):
        return BadRecord(origin, f"expected an object with named columns, found {type(values).__name__}", source)
    if "\\ud" in source or "\\uD" in source:  # half of a surrogate pair is valid JSON but not valid text
        try:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            return BadRecord(origin, f"invalid text: half of a surrogate pair ({half!r})", source)
    return Record(values, origin, len(source))


def read_txt(file: Path, stream: BufferedIOBase) -> Records:
    """Read each line as a text; blank lines only separate."""
    for line in read_lines(stream):
        text, reason = decode_line(line)
        if reason:
            yield BadRecord(f"{file}:{line.number}", reason, text)
        elif text.strip():
            yield Record({"text": text.rstrip("\r\n")}, f"{file}:{line.number}", line.length)
