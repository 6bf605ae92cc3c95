"""Rows as lines of a .jsonl file, whatever a model said in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

# Some readers (str.splitlines is one) take these for the end of a line, and terminals take some for commands.
ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


def as_line(row: dict[str, Any]) -> str:
    """One line, for every reader."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    plain = text.isascii() and "\x7f" not in text  # most are, and looking is quicker than translating
    return (text if plain else text.translate(ESCAPED)) + "\n"


def as_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return map(as_line, rows)
