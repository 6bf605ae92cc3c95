"""Read records from files: jsonl, json, csv, txt, parquet and arrow, optionally gzipped, each in bounded memory.

A record that cannot be read becomes a `BadRecord` with its position and the reason, and reading continues after it.
Where the next record cannot be found (a damaged gzip file, a quote that is never closed) a DataError ends the reading.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError
from posttrain.data.reading.arrow_files import read_arrow, read_parquet
from posttrain.data.reading.csv_files import read_csv
from posttrain.data.reading.json_array import read_json_records
from posttrain.data.reading.records import ReadProgress, Records
from posttrain.data.reading.text_lines import read_jsonl, read_txt

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
