"""Read a JSON array of objects one by one, in bounded memory, continuing after broken objects.

ijson parses such arrays two to three times faster, but stops at the first broken object, gives no line numbers, bounds
neither the size nor the depth of an object, replaces half of a surrogate pair by "?" without an error, and refuses NaN
and integers beyond 64 bits. The decoder of the standard library is used for each object instead.
"""

from __future__ import annotations

import codecs
import json
import re
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError
from posttrain.data.reading.records import BLOCK, RAW_KEPT, RECORD_LIMIT, BadRecord, Records, nul_error, size_error
from posttrain.data.reading.text_lines import TRUNCATED, json_error, read_jsonl, record_of

SPACE = re.compile(r"[ \t\n\r]*")
# Matches strings whole; a quote that matches by itself belongs to a string that does not end.
JSON_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+"|[][{},"]', re.DOTALL)
DECODER = json.JSONDecoder()


def read_json_records(file: Path, stream: BufferedIOBase) -> Records:
    """Read a list of objects; or one object per line, as files with this extension may also have."""
    window = TextWindow(stream)
    first = window.next()
    if first == "{":
        _refuse_long_object(file, window)
        stream.seek(0)
        yield from read_jsonl(file, stream)
        return
    if first not in ("", "["):
        found = window.text[window.at : window.at + 20]
        raise DataError(f"{file}:{window.line}: expected a list of objects, found {found!r}")
    window.skip(window.at + len(first))
    if window.next() == "]":
        window.skip(window.at + 1)
    elif first:
        yield from _read_elements(file, window)
    if window.next():
        rest = window.text[window.at : window.at + RAW_KEPT]
        yield BadRecord(f"{file}:{window.line}", "broken JSON: text after the end of the list", rest)


def _refuse_long_object(file: Path, window: TextWindow) -> None:
    """Raise a DataError if the file is one object over several lines, whose records are in a list inside."""
    line, _, _ = window.text[window.at :].partition("\n")
    if line.strip() != "{":
        return
    values, _, _ = window.value()
    lists = [name for name, value in (values or {}).items() if isinstance(value, list) and value]
    inside = next((name for name in lists if isinstance(values[name][0], dict)), "")
    take = f"the list {inside!r} of it: jq -c '.{inside}[]' FILE" if inside else "its records: jq -c . FILE"
    raise DataError(f"{file}:{window.line}: one object over several lines; write one record per line, of {take}")


def _read_elements(file: Path, window: TextWindow) -> Records:
    """Read the objects up to the end of the list; the window is at the first."""
    comma, line, number = True, 0, 0
    while True:
        number += 1
        # The first object of a line is named by the line, the others by their number.
        origin = f"{file}:{window.line}" if window.line != line else f"{file}:row {number}"
        line = window.line
        values, end, reason = window.value()
        if end < 0:
            raise DataError(f"{origin}: {reason}")  # where the next object begins is not known
        source = window.text[window.at : end]
        if window.suspect and (bad := _byte_error(source)):
            reason = bad
        if not reason and not comma:
            reason = f"broken JSON: expected ',' or ']' after an object, found {source[:1]!r}"
        if reason:
            yield BadRecord(origin, reason, _readable(source))
        else:
            yield record_of(values, source, origin)
        window.skip(end)
        found = window.next()
        comma = found == ","
        if not found:
            if not reason:
                message = f"broken JSON: expected ',' or ']' after an object{TRUNCATED}"
                yield BadRecord(f"{file}:{window.line}", message, "")
            return
        if comma:
            window.skip(window.at + 1)
            window.next()
        elif found == "]":
            window.skip(window.at + 1)
            return
        elif end == window.at and not source:  # a bracket that closes nothing
            raise DataError(f"{file}:{window.line}: broken JSON: {found!r} where an object should be")


class TextWindow:
    """Holds a part of a long text: it grows at its end, and text before `at` is dropped."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text = ""
        self.at = 0
        self.line = 1
        self.ended = False
        self.suspect = False  # NUL bytes or invalid UTF-8 were read

    def grow(self) -> None:
        """Double the held text, so that decoding it again after each growth costs at most twice as much."""
        block = self.stream.read(max(BLOCK, len(self.text) - self.at))
        more = self.decoder.decode(block, final=not block)
        self.ended = not block
        self.suspect = self.suspect or b"\0" in block or _has_escaped_bytes(more)
        self.text, self.at = self.text[self.at :] + more, 0

    def next(self) -> str:
        """Skip white space and return the next character; "" at the end."""
        while True:
            end = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it also matches nothing
            self.skip(end)
            if end < len(self.text) or self.ended:
                return self.text[end : end + 1]
            self.grow()

    def skip(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def value(self) -> tuple[Any, int, str]:
        """Decode the JSON value here; return it, where it ends, and what is wrong with it or ""."""
        while True:
            try:
                values, end = DECODER.raw_decode(self.text, self.at)
                if self.ended or self.text[self.at] in '{["':
                    return values, end, ""
            except (ValueError, RecursionError) as error:
                reason = self._describe(error)
                closed = _end_of_value(self.text, self.at)
                if closed is not None:
                    return None, closed, reason
                if self.ended:
                    return None, len(self.text), reason + TRUNCATED
            if len(self.text) - self.at > RECORD_LIMIT:
                return None, -1, size_error(len(self.text) - self.at, RECORD_LIMIT)
            self.grow()

    def _describe(self, error: Exception) -> str:
        if not isinstance(error, json.JSONDecodeError):
            return json_error(error)
        line = self.line + self.text.count("\n", self.at, error.pos)
        return f"broken JSON at line {line}: {error.msg}"


def _has_escaped_bytes(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _end_of_value(text: str, at: int) -> int | None:
    """Find where a value, valid or not, ends by its brackets; None if the text ends before."""
    depth = 0
    for mark in JSON_MARK.finditer(text, at):
        letter = text[mark.start()]
        if letter == '"':
            if mark.end() == mark.start() + 1:
                return None
        elif letter == ",":
            if depth == 0:
                return mark.start()
        else:
            depth += 1 if letter in "[{" else -1
            if depth <= 0:
                return mark.end() if depth == 0 else mark.start()
    return None


def _byte_error(source: str) -> str:
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        before = len(source[: error.start].encode())
        return f"invalid UTF-8 at byte {before + 1} of the example: byte 0x{ord(source[error.start]) - 0xDC00:02x}"
    return nul_error(source)


def _readable(source: str) -> str:
    return source.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
