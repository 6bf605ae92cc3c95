"""Read records from files: jsonl, json, csv, txt, parquet and arrow, optionally gzipped, each in bounded memory.

A record that cannot be read becomes a `BadRecord` with its position and the reason, and reading continues after it.
Where the next record cannot be found (a damaged gzip file, a quote that is never closed) a DataError ends the reading.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from posttrain.core.errors import DataError, UsageError

ROW_LIMIT = 64 * 2**20  # bytes of a row; more is refused without being read into memory
RAW_KEPT = 2**16  # characters of a refused row that are shown where it is too long for all of them
BLOCK = 2**20  # bytes read at a time
ROWS_AT_ONCE = 1024  # rows of arrow and parquet turned into Python objects at a time
BOM = b"\xef\xbb\xbf"
SPACE = re.compile(r"[ \t\n\r]*")
# Strings are skipped whole; a quote by itself is one that does not end.
JSON_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+"|[][{},"]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """One row as it stands in its file."""

    values: dict[str, Any]
    origin: str  # file:line, or "file:row N" where a format has no lines
    size: int = 0  # about so many bytes


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A row that cannot be read."""

    origin: str
    reason: str
    raw: str | dict[str, Any]  # its text, or its values if these were read

    @property
    def error(self) -> DataError:
        return DataError(f"{self.origin}: {self.reason}")


@dataclass(slots=True)
class ReadProgress:
    """How far a reader is, in bytes of its file."""

    total: int = 0
    done: int = 0


Records: TypeAlias = Iterator[Record | BadRecord]


def extension(file: Path) -> str:
    """`.jsonl` for a.jsonl and for a.jsonl.gz."""
    return (file.with_suffix("") if file.suffix == ".gz" else file).suffix.lower()


def read_file(file: Path, meter: ReadProgress | None = None) -> Records:
    """All rows of a file, the bad ones too; DataError where the file is damaged or has none."""
    meter = meter or ReadProgress()
    before, empty = meter.done, True
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(file.open("rb"))
            zipped = file.suffix == ".gz"
            stream: Any = stack.enter_context(gzip.GzipFile(fileobj=raw)) if zipped else raw
            for number, row in enumerate(READERS[extension(file)](file, stream)):
                if number % 256 == 0:
                    meter.done = before + raw.tell()
                empty = False
                yield row
            meter.done = before + raw.seek(0, 2)
    except EOFError as error:
        raise DataError(f"{file}: the compressed file ends too early; it was cut off") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: not a valid gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    if empty:
        raise DataError(f"{file}: the file has no rows")


# Lines


class Line(NamedTuple):
    """A line with its line end, without a byte order mark."""

    number: int
    raw: bytes
    length: int
    cut: bool  # it is too long to be kept whole


def _lines(stream: BufferedIOBase) -> Iterator[Line]:
    number = 0
    while raw := stream.readline(ROW_LIMIT + 1):
        number += 1
        length = len(raw)
        cut = length > ROW_LIMIT and not raw.endswith(b"\n")
        if number == 1:
            raw = raw.removeprefix(BOM)
        if cut:
            raw = raw[:RAW_KEPT]
            while more := stream.readline(BLOCK):
                length += len(more)
                if more.endswith(b"\n"):
                    break
        yield Line(number, raw, length, cut)


def _text(line: Line) -> tuple[str, str]:
    """The line's text, and what is wrong with it or ""."""
    if line.cut:
        return line.raw.decode("utf-8", "backslashreplace"), _too_long(line.length)
    try:
        text = line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return line.raw.decode("utf-8", "backslashreplace"), f"invalid UTF-8 at byte {error.start + 1}: {error.reason}"
    return text, _nul(text)


def _nul(text: str) -> str:
    at = text.find("\0")
    if at < 0:
        return ""
    return f"NUL byte at byte {len(text[:at].encode()) + 1}; the file is damaged or not text"


def _too_long(length: int) -> str:
    return f"the row has {length / 2**20:,.0f} MiB; at most {ROW_LIMIT // 2**20} MiB can be read"


def _read_jsonl(file: Path, stream: BufferedIOBase) -> Records:
    for line in _lines(stream):
        origin = f"{file}:{line.number}"
        text, reason = _text(line)
        if not reason and not text.strip():
            continue
        if not reason:
            try:
                yield _object(json.loads(text), text, origin)
                continue
            except (ValueError, RecursionError) as error:
                # Only the last line can lack its line end: then the writer was probably stopped in the middle of it.
                reason = _json_fault(error) + ("" if text.endswith("\n") else "; the file ends here: was it cut off?")
        yield BadRecord(origin, reason, text)


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at character {error.colno}: {error.msg}"
    if isinstance(error, RecursionError):
        return "broken JSON: nested too deeply"
    return f"broken JSON: {error}"


def _object(values: Any, source: str, origin: str) -> Record | BadRecord:
    if not isinstance(values, dict):
        return BadRecord(origin, f"expected an object with named columns, found {type(values).__name__}", source)
    if "\\ud" in source or "\\uD" in source:  # half of a surrogate pair is valid JSON but not valid text
        try:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            return BadRecord(origin, f"invalid text: half of a surrogate pair ({half!r})", source)
    return Record(values, origin, len(source))


def _read_txt(file: Path, stream: BufferedIOBase) -> Records:
    """Each line is a text; blank lines only separate."""
    for line in _lines(stream):
        text, reason = _text(line)
        if reason:
            yield BadRecord(f"{file}:{line.number}", reason, text)
        elif text.strip():
            yield Record({"text": text.rstrip("\r\n")}, f"{file}:{line.number}", line.length)


# A list of objects


class Window:
    """A part of a text that is too long to be held: it grows at its end, and what lies behind `at` is forgotten."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text = ""
        self.at = 0
        self.line = 1
        self.ended = False
        self.suspect = False  # bytes that are no text were seen

    def grow(self) -> None:
        """Read as much again as there is, so that looking at it again and again costs no more than twice."""
        block = self.stream.read(max(BLOCK, len(self.text) - self.at))
        more = self.decoder.decode(block, final=not block)
        self.ended = not block
        self.suspect = self.suspect or b"\0" in block or _has_escaped_bytes(more)
        self.text, self.at = self.text[self.at :] + more, 0

    def next(self) -> str:
        """Go on to the next character that is no space, and return it; "" at the end."""
        while True:
            end = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            self.skip(end)
            if end < len(self.text) or self.ended:
                return self.text[end : end + 1]
            self.grow()

    def skip(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def value(self) -> tuple[Any, int, str]:
        """The JSON value here, where it ends, and what is wrong with it or ""."""
        while True:
            try:
                values, end = json.JSONDecoder().raw_decode(self.text, self.at)
                if self.ended or self.text[self.at] in '{["':
                    return values, end, ""
            except (ValueError, RecursionError) as error:
                fault = self._fault(error)
                closed = _end_of_value(self.text, self.at)
                if closed is not None:
                    return None, closed, fault
                if self.ended:
                    return None, len(self.text), f"{fault}; the file ends here: was it cut off?"
            if len(self.text) - self.at > ROW_LIMIT:
                return None, -1, _too_long(len(self.text) - self.at)
            self.grow()

    def _fault(self, error: Exception) -> str:
        if not isinstance(error, json.JSONDecodeError):
            return _json_fault(error)
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
    """Where a value ends by its brackets, be it valid or not; None if that is not in sight."""
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


def _read_json(file: Path, stream: BufferedIOBase) -> Records:
    """A list of objects; or, as some name such files too, one object a line."""
    window = Window(stream)
    first = window.next()
    if first == "{":
        stream.seek(0)
        yield from _read_jsonl(file, stream)
        return
    if first not in ("", "["):
        found = window.text[window.at : window.at + 20]
        raise DataError(f"{file}:{window.line}: expected a list of objects, found {found!r}")
    window.skip(window.at + len(first))
    if window.next() == "]":
        window.skip(window.at + 1)
    elif first:
        yield from _elements(file, window)
    if window.next():
        rest = window.text[window.at : window.at + RAW_KEPT]
        yield BadRecord(f"{file}:{window.line}", "broken JSON: text after the end of the list", rest)


def _elements(file: Path, window: Window) -> Records:
    """The objects up to the end of the list; the window stands at the first."""
    comma, line, number = True, 0, 0
    while True:
        number += 1
        origin = f"{file}:{window.line}" if window.line != line else f"{file}:row {number}"  # several in a line
        line = window.line
        values, end, reason = window.value()
        if end < 0:
            raise DataError(f"{origin}: {reason}")  # where the next row begins is not known
        source = window.text[window.at : end]
        if window.suspect and (bad := _bad_bytes(source)):
            reason = bad
        if not reason and not comma:
            reason = f"broken JSON: expected ',' or ']' after an object, found {source[:1]!r}"
        if reason:
            yield BadRecord(origin, reason, _shown(source))
        else:
            yield _object(values, source, origin)
        window.skip(end)
        found = window.next()
        comma = found == ","
        if not found:
            if not reason:
                fault = "broken JSON: expected ',' or ']' after an object, the file ends here: was it cut off?"
                yield BadRecord(f"{file}:{window.line}", fault, "")
            return
        if comma:
            window.skip(window.at + 1)
            window.next()
        elif found == "]":
            window.skip(window.at + 1)
            return
        elif end == window.at and not source:  # a bracket that closes nothing
            raise DataError(f"{file}:{window.line}: broken JSON: {found!r} where an object should be")


def _bad_bytes(source: str) -> str:
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        before = len(source[: error.start].encode())
        return f"invalid UTF-8 at byte {before + 1} of the row: byte 0x{ord(source[error.start]) - 0xDC00:02x}"
    return _nul(source)


def _shown(source: str) -> str:
    return source.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# CSV


class CsvLines:
    """Lines for the csv module, which asks for as many as a row has; those of the current row are kept."""

    def __init__(self, file: Path, stream: BufferedIOBase) -> None:
        self.file = file
        self.lines = _lines(stream)
        self.row: list[str] = []
        self.faults: list[str] = []
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            text, reason = _text(line)
            self.size += line.length
            if self.size > ROW_LIMIT:
                first = line.number - len(self.row)
                raise DataError(f"{self.file}:{first}: {_too_long(self.size)}; is a quote not closed?")
            self.row.append(text)
            if reason:
                self.faults.append(reason if len(self.row) == 1 else f"line {line.number}: {reason}")
            yield text

    def start(self) -> None:
        self.row, self.faults, self.size = [], [], 0


def _read_csv(file: Path, stream: BufferedIOBase) -> Records:
    csv.field_size_limit(ROW_LIMIT)  # the library's own limit is 128 kB
    lines = CsvLines(file, stream)
    reader = csv.reader(iter(lines), strict=True)
    header: list[str] = []
    before = 0
    while True:
        origin, reason = f"{file}:{before + 1}", ""  # a field may span lines: the row's first
        lines.start()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if str(error).startswith("unexpected end"):
                raise DataError(f"{origin}: broken CSV: a quote is opened in this row and never closed") from error
            fields, reason = [], f"broken CSV: {error}"
        if fields is None:
            return
        before = reader.line_num
        reason = lines.faults[0] if lines.faults else reason
        if not header and (fields or reason):
            if reason:
                raise DataError(f"{origin}: {reason}")
            header = _csv_header(fields, origin)
        elif fields and not reason and len(fields) != len(header):
            reason = f"{len(fields)} fields, but the header names {len(header)} columns"
            yield BadRecord(origin, reason, "".join(lines.row))
        elif reason:
            yield BadRecord(origin, reason, "".join(lines.row))
        elif fields:
            yield Record(dict(zip(header, fields, strict=True)), origin, lines.size)


def _csv_header(fields: list[str], origin: str) -> list[str]:
    header = [name.strip() for name in fields]
    if len(set(header)) < len(header):
        raise DataError(f"{origin}: two columns have the same name: {', '.join(header)}")
    return header


# Parquet and arrow


def _read_arrow(file: Path, stream: BufferedIOBase) -> Records:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise UsageError(f"{file}: needs the package pyarrow: pip install 'posttrain[parquet]'") from error
    if not stream.read(1):
        return
    stream.seek(0)
    number = 0
    with ExitStack() as stack:
        place = str(file)
        if file.suffix == ".gz":  # both kinds need to be read from several places
            unzipped = stack.enter_context(tempfile.NamedTemporaryFile())
            shutil.copyfileobj(stream, unzipped)
            unzipped.flush()
            place = unzipped.name
        try:
            data = stack.enter_context(pyarrow.memory_map(place))
            if extension(file) == ".parquet":
                table = parquet.ParquetFile(data)
                batches = table.iter_batches(batch_size=_rows_at_once(table.metadata))
            else:
                batches = _record_batches(pyarrow, ipc, data)
            for batch in batches:
                size = batch.get_total_buffer_size() // max(1, batch.num_rows)
                step = max(1, min(ROWS_AT_ONCE, BLOCK * 16 // max(1, size)))
                for start in range(0, batch.num_rows, step):
                    for row in _arrow_rows(pyarrow, batch.slice(start, step)):
                        number += 1
                        origin = f"{file}:row {number}"
                        yield BadRecord(origin, row, "") if isinstance(row, str) else Record(row, origin, size)
        except (pyarrow.ArrowException, ValueError, OverflowError, KeyError) as error:
            raise DataError(f"{file}:row {number + 1}: damaged or unsupported file: {_first_line(error)}") from error


def _rows_at_once(metadata: Any) -> int:
    """So many that they take about 16 MiB."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    return max(1, min(ROWS_AT_ONCE, BLOCK * 16 // max(1, largest)))


def _arrow_rows(pyarrow: Any, batch: Any) -> Iterator[dict[str, Any] | str]:
    """Values of each row, or what is wrong with it. Damaged offsets would read foreign memory: all is checked first."""
    try:
        batch.validate(full=True)
        values = batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        if batch.num_rows == 1:
            yield f"damaged: {_first_line(error)}"
            return
        for index in range(batch.num_rows):
            yield from _arrow_rows(pyarrow, batch.slice(index, 1))
        return
    yield from values


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _record_batches(pyarrow: Any, ipc: Any, data: Any) -> Iterator[Any]:
    """Arrow knows two layouts under one extension: with an index at the end, and as a stream."""
    try:
        table = ipc.open_file(data)
    except pyarrow.ArrowInvalid:
        data.seek(0)
        yield from ipc.open_stream(data)
        return
    for index in range(table.num_record_batches):
        yield table.get_batch(index)


READERS: dict[str, Callable[[Path, Any], Records]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_txt,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
}
