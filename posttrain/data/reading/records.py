"""Define what readers return: records with their values and position, and records that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from posttrain.core.errors import DataError

RECORD_LIMIT = 64 * 2**20  # bytes; a longer record is refused without being read into memory
RAW_KEPT = 2**16  # characters kept of a refused record that is too long to be kept whole
BLOCK = 2**20  # bytes per read


@dataclass(frozen=True, slots=True)
class Record:
    """One example as it is stored in its file: named columns."""

    values: dict[str, Any]
    origin: str  # file:line, or "file:row N" where a format has no lines
    size: int = 0  # approximate number of bytes


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be read."""

    origin: str
    reason: str
    raw: str | dict[str, Any]  # its text, or its values if these could be read

    @property
    def error(self) -> DataError:
        return DataError(f"{self.origin}: {self.reason}")


@dataclass(slots=True)
class ReadProgress:
    """How far a reader is, in bytes of its file."""

    total: int = 0
    done: int = 0


Records: TypeAlias = Iterator[Record | BadRecord]


def size_error(length: int, limit: int) -> str:
    """Describe a record that is too long."""
    return f"the example has {length / 2**20:,.0f} MiB; at most {limit // 2**20} MiB can be read"


def nul_error(text: str) -> str:
    """Describe the first NUL character of a text; "" if there is none."""
    at = text.find("\0")
    if at < 0:
        return ""
    return f"NUL byte at byte {len(text[:at].encode()) + 1}; the file is damaged or not text"
