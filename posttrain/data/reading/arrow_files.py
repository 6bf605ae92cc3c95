"""Read records from Parquet and Arrow files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError, UsageError
from posttrain.data.reading.records import BLOCK, BadRecord, Record, Records

ROWS_AT_ONCE = 1024  # rows converted to Python objects at a time, at most
BYTES_AT_ONCE = 16 * BLOCK
TOOL_KEYS = ("tools", "tool_calls", "function_call")


def read_parquet(file: Path, stream: BufferedIOBase) -> Records:
    return _read_table(file, stream, is_parquet=True)


def read_arrow(file: Path, stream: BufferedIOBase) -> Records:
    return _read_table(file, stream, is_parquet=False)


def _read_table(file: Path, stream: BufferedIOBase, is_parquet: bool) -> Records:
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
        if file.suffix == ".gz":  # both formats need random access
            unzipped = stack.enter_context(tempfile.NamedTemporaryFile())
            shutil.copyfileobj(stream, unzipped)
            unzipped.flush()
            place = unzipped.name
        try:
            data = stack.enter_context(pyarrow.memory_map(place))
            if is_parquet:
                table = parquet.ParquetFile(data)
                batches = table.iter_batches(batch_size=_parquet_batch_size(table.metadata))
            else:
                batches = _arrow_batches(pyarrow, ipc, data)
            for batch in batches:
                size = batch.get_total_buffer_size() // max(1, batch.num_rows)
                step = max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(1, size)))
                for start in range(0, batch.num_rows, step):
                    for row in _read_rows(pyarrow, batch.slice(start, step)):
                        number += 1
                        origin = f"{file}:row {number}"
                        yield BadRecord(origin, row, "") if isinstance(row, str) else Record(row, origin, size)
        except (pyarrow.ArrowException, ValueError, OverflowError, KeyError) as error:
            raise DataError(f"{file}:row {number + 1}: damaged or unsupported file: {_first_line(error)}") from error


def _parquet_batch_size(metadata: Any) -> int:
    """Return the number of rows that take about BYTES_AT_ONCE."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(1, largest)))


def _read_rows(pyarrow: Any, batch: Any) -> Iterator[dict[str, Any] | str]:
    """Yield the values of each row, or what is wrong with it.

    The batch is validated first: with damaged offsets, to_pylist would read memory outside of the file.
    """
    try:
        batch.validate(full=True)
        values = batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        if batch.num_rows == 1:
            yield f"damaged: {_first_line(error)}"
            return
        for index in range(batch.num_rows):
            yield from _read_rows(pyarrow, batch.slice(index, 1))
        return
    has_tools = any(key in str(batch.schema) for key in TOOL_KEYS)
    yield from map(without_null_fields, values) if has_tools else values


def without_null_fields(value: Any, inside: bool = False) -> Any:
    """Return a row without the null fields in definitions and calls of tools.

    All structures of a column have the same fields in Arrow: a call that lacks one of another call has a null there,
    and would be trained on with it.
    """
    if isinstance(value, dict):
        fields = {name: without_null_fields(item, inside or name in TOOL_KEYS) for name, item in value.items()}
        return {name: item for name, item in fields.items() if item is not None} if inside else fields
    return [without_null_fields(item, inside) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _arrow_batches(pyarrow: Any, ipc: Any, data: Any) -> Iterator[Any]:
    """Read either layout that Arrow files have: with an index at the end, or as a stream."""
    try:
        table = ipc.open_file(data)
    except pyarrow.ArrowInvalid:
        data.seek(0)
        yield from ipc.open_stream(data)
        return
    for index in range(table.num_record_batches):
        yield table.get_batch(index)
