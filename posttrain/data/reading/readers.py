"""Read records from files: jsonl, json, csv, txt, parquet and arrow, optionally gzipped, each in bounded memory.

A record that cannot be read becomes a `BadRecord` with its position and the reason, and reading continues after it.
Where the next record cannot be found (a damaged gzip file, a quote that is never closed) a DataError ends the reading.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError
from posttrain.data.reading.arrow_files import read_arrow, read_parquet
from posttrain.data.reading.csv_files import read_csv
from posttrain.data.reading.json_array import read_json_records
from posttrain.data.reading.records import ReadProgress, Records
from posttrain.data.reading.text_lines import read_jsonl, read_txt

LFS = "a pointer of Git LFS, not the data itself: run git lfs pull"
PAGE = "a web page, not data: download the file itself"
UTF_16 = "text in UTF-16: convert it, for example with iconv -f UTF-16 -t UTF-8"
CONTENTS = {
    b"\x1f\x8b\x08": (".gz", "compressed with gzip: its name must end in .gz"),
    b"(\xb5/\xfd": (".zst", "compressed with zstd: decompress it with zstd -d"),
    b"PAR1": (".parquet", "a parquet file: its name must end in .parquet"),
    b"PK\x03\x04": (".zip", "a zip archive or an Excel file: unpack it, or save it as CSV"),
    b"version https://git-lfs": ("", LFS),
    b"<!DOCTYPE html": ("", PAGE),
    b"<html": ("", PAGE),
}
"""What the first bytes of a file say: the extension that it must have, and what it is."""
READERS: dict[str, Callable[[Path, Any], Records]] = {
    ".jsonl": read_jsonl,
    ".json": read_json_records,
    ".csv": read_csv,
    ".txt": read_txt,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


def extension(file: Path) -> str:
    """Return `.jsonl` for a.jsonl and for a.jsonl.gz."""
    return (file.with_suffix("") if file.suffix == ".gz" else file).suffix.lower()


def read_file(file: Path, progress: ReadProgress | None = None) -> Records:
    """Read all records of a file, bad ones included; DataError if the file is damaged or empty."""
    progress = progress or ReadProgress()
    before, empty = progress.done, True
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(file.open("rb"))
            _check_content(file, raw)
            zipped = file.suffix == ".gz"
            stream: Any = stack.enter_context(gzip.GzipFile(fileobj=raw)) if zipped else raw
            for number, record in enumerate(READERS[extension(file)](file, stream)):
                if number % 256 == 0:
                    progress.done = before + raw.tell()
                empty = False
                yield record
            progress.done = before + raw.seek(0, 2)
    except EOFError as error:
        raise DataError(f"{file}: the compressed file is truncated") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: not a valid gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    if empty:
        raise DataError(f"{file}: the file has no examples")


def _check_content(file: Path, raw: BufferedIOBase) -> None:
    """Raise a DataError if a file begins like one of another type than its name says."""
    start = raw.read(max(map(len, CONTENTS)))
    raw.seek(0)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") and start.count(0) >= len(start) // 3:  # every second byte of a letter
        raise DataError(f"{file}: the file is {UTF_16}")
    marks = {} if extension(file) == ".txt" else CONTENTS  # a text may begin like any of them
    for mark, (suffix, content) in marks.items():
        if start.startswith(mark) and file.suffix.lower() != suffix:
            raise DataError(f"{file}: the file is {content}")
