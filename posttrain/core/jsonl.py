"""Rows as lines of a .jsonl file, whatever a model said in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

# Some readers (str.splitlines is one) take these for the end of a line, and terminals take some for commands.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


def as_line(row: dict[str, Any]) -> str:
    """One line, for every reader."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def as_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return map(as_line, rows)
