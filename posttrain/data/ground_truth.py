"""Find the ground truth among the columns of an example: what reward functions compare a completion with."""

from __future__ import annotations

import re
from typing import Any

TRUTH_COLUMNS = ("ground_truth", "answer", "solution", "label", "labels")
"""Columns that may hold the ground truth, the most reliable first."""
TRUTH_SOURCES = (*TRUTH_COLUMNS, "reward_model")
"""The same with the column in which verl nests it."""

MOST_BOXES = 20
JOIN_CHARACTERS = 40
JOINED = re.compile(
    r"""(?<=\})(?:[\s$\\]|\\q?quad|\\[()\[\]])*
    (?:\\(?:text|textrm|mathrm|mbox)\{\s*)?(?:,|&|;|\b(?:and|or|und|oder|et|ou|y|o)\b|和|或)(?:\s*\})?
    (?:[\s$\\,}]|\\q?quad|\\[()\[\]]|\\text\{|\b(?:and|or)\b)*(?:[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*=\s*)?$""",
    re.VERBOSE,
)


def ground_truth_of(columns: dict[str, Any]) -> Any:
    """Return the ground truth of an example, or None if it has none.

    Where both `answer` and `solution` are texts, the shorter one is meant: the other one is the reasoning, and a number
    found in it may be any number.
    """
    answer, solution = columns.get("answer"), columns.get("solution")
    if columns.get("ground_truth") is None and isinstance(answer, str) and isinstance(solution, str):
        filled = [text for text in (answer, solution) if text.strip()]
        return min(filled, key=lambda text: len(text.strip()), default=None)
    for name in TRUTH_COLUMNS:
        if columns.get(name) is not None:
            return columns[name]
    nested = columns.get("reward_model")  # verl
    return nested.get("ground_truth") if isinstance(nested, dict) else None


def last_boxes(text: str) -> list[str]:
    r"""Return what the last \boxed{} contains, after those that "and", "or" or a comma join to it."""
    found: list[str] = []
    while len(found) < MOST_BOXES and (inside := last_boxed(text)) is not None:
        found.insert(0, inside)
        text = text[: text.rfind("boxed")].removesuffix("\\")
        joined = JOINED.search(text, max(0, len(text) - JOIN_CHARACTERS))
        if joined is None:
            break
        text = text[: joined.start()]
    return found


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, braces balanced; None if there is none or it is not closed."""
    at = text.rfind("boxed")
    if at < 0:
        return None
    rest = text[at + len("boxed") :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$", 1)[0].split("\n", 1)[0].strip() or None  # \boxed 5
    depth = 0
    for index, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:index].strip()
    return None
