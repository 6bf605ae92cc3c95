"""Rows from files: jsonl, json, csv, txt, parquet and arrow, also gzipped; a file, a folder or a glob.

Every row knows where it stands (`file:line`), and whatever is wrong with a file is said with that place.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypeAlias

from posttrain.errors import DataError, UsageError

BOM = b"\xef\xbb\xbf"
JSON_SPACE = " \t\n\r"
ARROW_BATCH = 1024  # rows turned into Python objects at a time


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it stands in its file."""

    values: dict[str, Any]
    origin: str  # file:line, or "file:row N" where a format has no lines


Lines: TypeAlias = Iterator[tuple[int, str]]


def read_rows(path: str | Path) -> Iterator[Row]:
    """All rows of a file, of the files of a folder, or of those that match a glob."""
    for file in find_files(path):
        empty = True
        for row in _read_file(file):
            empty = False
            yield row
        if empty:
            raise DataError(f"{file}: the file has no rows")


def find_files(path: str | Path) -> list[Path]:
    """The files that `path` names, in the order of their names; UsageError if there is none."""
    place = Path(path)
    if place.is_dir():
        visible = (
            file for file in place.rglob("*") if not any(part[0] == "." for part in file.relative_to(place).parts)
        )
        files = sorted(file for file in visible if file.is_file() and _extension(file) in READERS)
        if not files:
            raise UsageError(f"{place}: the folder has no data files; known are {known_extensions()}")
    elif place.is_file():
        files = [place]
    elif any(letter in str(path) for letter in "*?["):
        try:
            files = sorted(
                file for file in Path(place.anchor).glob(str(place.relative_to(place.anchor))) if file.is_file()
            )
        except ValueError as error:
            raise UsageError(f"{path}: not a pattern for files: {error}") from error
        if not files:
            raise UsageError(f"{path}: no file matches")
    else:
        raise UsageError(f"{path}: no such file or folder")
    for file in files:
        if _extension(file) not in READERS:
            raise UsageError(f"{file}: unknown kind of file; known are {known_extensions()}")
    kinds = sorted({_extension(file) for file in files})
    if len(kinds) > 1:
        raise UsageError(
            f"{path}: holds files of several kinds ({', '.join(kinds)}); name the ones you mean, as *{kinds[0]}"
        )
    return files


def known_extensions() -> str:
    """The extensions of files that can be read, for messages."""
    return ", ".join(READERS) + " (each also with .gz)"


def _extension(file: Path) -> str:
    return (file.with_suffix("") if file.suffix == ".gz" else file).suffix.lower()


def _read_file(file: Path) -> Iterator[Row]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield from READERS[_extension(file)](file, stream)
    except EOFError as error:
        raise DataError(f"{file}: the compressed file ends too early; it was cut off") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: not a valid gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _decode(raw: bytes, file: Path, line: int) -> str:
    """Text of bytes that begin at `line` of the file."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place, byte = _place(raw, error.start, line)
        raise DataError(f"{file}:{place}: invalid UTF-8 at byte {byte}: {error.reason}") from error
    if "\0" in text:
        place, byte = _place(raw, raw.index(0), line)
        raise DataError(f"{file}:{place}: NUL byte at byte {byte}; the file is damaged or not text")
    return text


def _place(raw: bytes, at: int, line: int) -> tuple[int, int]:
    """Line, and byte of that line from 1, of a position in bytes that begin at `line`."""
    return line + raw.count(b"\n", 0, at), at - raw.rfind(b"\n", 0, at)


def _lines(file: Path, stream: BufferedIOBase) -> Lines:
    """Numbered lines with their line ends, without a byte order mark."""
    for number, raw in enumerate(stream, start=1):
        yield number, _decode(raw.removeprefix(BOM) if number == 1 else raw, file, number)


def _read_jsonl(file: Path, stream: BufferedIOBase) -> Iterator[Row]:
    yield from _json_lines(file, _lines(file, stream))


def _json_lines(file: Path, lines: Lines) -> Iterator[Row]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Only the last line can lack its line end: then the writer was probably stopped in the middle of it.
            cut = "" if line.endswith("\n") else "; the file ends here: was it cut off?"
            raise DataError(f"{file}:{number}: {_json_fault(error)}{cut}") from error
        yield _object(values, line, f"{file}:{number}")


def _read_json(file: Path, stream: BufferedIOBase) -> Iterator[Row]:
    """A list of objects; or, as some name such files too, one object a line."""
    text = _decode(stream.read().removeprefix(BOM), file, 1)
    at = _skip_space(text, 0)
    if at == len(text):
        return
    if text[at] == "{":
        yield from _json_lines(file, enumerate(io.StringIO(text, newline="\n"), start=1))
        return
    line = 1 + text.count("\n", 0, at)
    if text[at] != "[":
        raise DataError(f"{file}:{line}: expected a list of objects, found {text[at : at + 20]!r}")
    decoder = json.JSONDecoder()
    at = _skip_space(text, at + 1)
    line = 1 + text.count("\n", 0, at)
    more = not text.startswith("]", at)
    while more:
        try:
            values, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            place = line + text.count("\n", at, error.pos) if isinstance(error, json.JSONDecodeError) else line
            raise DataError(f"{file}:{place}: {_json_fault(error)}") from error
        yield _object(values, text[at:end], f"{file}:{line}")
        comma = _skip_space(text, end)
        line += text.count("\n", at, comma)
        more = text.startswith(",", comma)
        at = _skip_space(text, comma + 1) if more else comma
        line += text.count("\n", comma, at)
    if not text.startswith("]", at):
        fault = f"found {text[at]!r}" if at < len(text) else "the file ends here: was it cut off?"
        raise DataError(f"{file}:{line}: broken JSON: expected ',' or ']' after an object, {fault}")
    rest = _skip_space(text, at + 1)
    if rest < len(text):
        raise DataError(f"{file}:{line + text.count(chr(10), at, rest)}: broken JSON: text after the end of the list")


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in JSON_SPACE:
        at += 1
    return at


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON at character {error.colno}: {error.msg}"
    if isinstance(error, RecursionError):
        return "broken JSON: nested too deeply"
    return f"broken JSON: {error}"


def _object(values: Any, source: str, origin: str) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{origin}: expected an object with named columns, found {type(values).__name__}")
    if "\\ud" in source or "\\uD" in source:  # half of a surrogate pair is valid JSON but not valid text
        try:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{origin}: invalid text: half of a surrogate pair ({error.object[error.start]!r})"
            ) from error
    return Row(values, origin)


def _read_csv(file: Path, stream: BufferedIOBase) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the library's own limit is 128 kB
    reader = csv.reader((line for _, line in _lines(file, stream)), strict=True)
    header: list[str] = []
    before = 0
    try:
        for fields in reader:
            origin, before = f"{file}:{before + 1}", reader.line_num  # a field may span lines: the row's first
            if not fields:
                continue
            if not header:
                header = _csv_header(fields, origin)
            elif len(fields) != len(header):
                raise DataError(f"{origin}: {len(fields)} fields, but the header names {len(header)} columns")
            else:
                yield Row(dict(zip(header, fields, strict=True)), origin)
    except csv.Error as error:
        raise DataError(f"{file}:{before + 1}: broken CSV: {error}") from error


def _csv_header(fields: list[str], origin: str) -> list[str]:
    header = [name.strip() for name in fields]
    if len(set(header)) < len(header):
        raise DataError(f"{origin}: two columns have the same name: {', '.join(header)}")
    return header


def _read_txt(file: Path, stream: BufferedIOBase) -> Iterator[Row]:
    """Each line is a text; blank lines only separate."""
    for number, line in _lines(file, stream):
        if line.strip():
            yield Row({"text": line.rstrip("\r\n")}, f"{file}:{number}")


def _read_arrow(file: Path, stream: BufferedIOBase) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise UsageError(f"{file}: needs the package pyarrow: pip install 'posttrain[parquet]'") from error
    number = 0
    if not stream.read(1):
        return
    stream.seek(0)
    try:
        data = pyarrow.BufferReader(stream.read()) if file.suffix == ".gz" else pyarrow.memory_map(str(file))
        if _extension(file) == ".parquet":
            batches = parquet.ParquetFile(data).iter_batches(batch_size=ARROW_BATCH)
        else:
            batches = _record_batches(pyarrow, ipc, data)
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would read foreign memory
            for start in range(0, batch.num_rows, ARROW_BATCH):
                for values in batch.slice(start, ARROW_BATCH).to_pylist():
                    number += 1
                    yield Row(values, f"{file}:row {number}")
    except (pyarrow.ArrowException, ValueError, OverflowError, KeyError) as error:
        raise DataError(f"{file}:row {number + 1}: damaged or unsupported file: {error}") from error


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


READERS: dict[str, Callable[[Path, BufferedIOBase], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_txt,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
}
