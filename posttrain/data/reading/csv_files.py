"""Read records from CSV files with a header."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from posttrain.core.errors import DataError
from posttrain.data.reading.records import RECORD_LIMIT, BadRecord, Record, Records, size_error
from posttrain.data.reading.text_lines import decode_line, read_lines


class CsvLines:
    """Feeds lines to the csv module, which consumes as many as a row has, and keeps those of the current row."""

    def __init__(self, file: Path, stream: BufferedIOBase) -> None:
        self.file = file
        self.lines = read_lines(stream)
        self.row: list[str] = []
        self.errors: list[str] = []
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            text, reason = decode_line(line)
            self.size += line.length
            if self.size > RECORD_LIMIT:
                first = line.number - len(self.row)
                raise DataError(f"{self.file}:{first}: {size_error(self.size, RECORD_LIMIT)}; is a quote not closed?")
            self.row.append(text)
            if reason:
                self.errors.append(reason if len(self.row) == 1 else f"line {line.number}: {reason}")
            yield text

    def start_row(self) -> None:
        self.row, self.errors, self.size = [], [], 0


def read_csv(file: Path, stream: BufferedIOBase) -> Records:
    csv.field_size_limit(RECORD_LIMIT)  # the library's default is 128 kB
    lines = CsvLines(file, stream)
    reader = csv.reader(iter(lines), strict=True)
    header: list[str] = []
    before = 0
    while True:
        origin, reason = f"{file}:{before + 1}", ""  # a field may span lines: the first line of the row
        lines.start_row()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if str(error).startswith("unexpected end"):
                raise DataError(f"{origin}: broken CSV: a quote is opened in this row and never closed") from error
            fields, reason = [], f"broken CSV: {error}"
        if fields is None:
            return
        before = reader.line_num
        reason = lines.errors[0] if lines.errors else reason
        if not header and (fields or reason):
            if reason:
                raise DataError(f"{origin}: {reason}")
            header = _parse_header(fields, origin)
        elif fields and not reason and len(fields) != len(header):
            reason = f"{len(fields)} fields, but the header names {len(header)} columns"
            yield BadRecord(origin, reason, "".join(lines.row))
        elif reason:
            yield BadRecord(origin, reason, "".join(lines.row))
        elif fields:
            yield Record(dict(zip(header, fields, strict=True)), origin, lines.size)


def _parse_header(fields: list[str], origin: str) -> list[str]:
    header = [name.strip() for name in fields]
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), "")):
        raise DataError(f"{origin}: the columns are separated by {other!r}; write the file with commas")
    if len(set(header)) < len(header):
        raise DataError(f"{origin}: two columns have the same name: {', '.join(header)}")
    return header
