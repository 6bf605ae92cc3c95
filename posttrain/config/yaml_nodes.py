"""Parses YAML into nodes, which know their lines, and describes why a file cannot be parsed.

A file that stands for far more than it holds is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_NODES = 100_000  # with aliases (*name) counted as often as they are used


def compose_yaml(file: Path) -> Any:
    """Return the root of a YAML file, None if it is empty; YAMLError if aliases repeat too much or lead in a circle."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is not None and count_nodes(root, {}) > MAX_NODES:
            raise yaml.YAMLError(f"its aliases (*name) stand for more than {MAX_NODES:,} values")
    except RecursionError:
        raise yaml.YAMLError("nested too deeply, or an alias (*name) that contains itself") from None
    return root


def count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many nodes a tree has if every alias is written out; `known`: counts by id."""
    if id(node) not in known:
        entries = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [one for entry in entries for one in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(count_nodes(one, known) for one in inner)
    return known[id(node)]


def yaml_problem(file: Path, error: Exception) -> str:
    """Describe on one line why a file cannot be read as YAML: `file:line: cannot be read as YAML: problem`."""
    mark = getattr(error, "problem_mark", None)
    where = f"{file}:{mark.line + 1}" if mark else f"{file}"
    reason = (error.strerror if isinstance(error, OSError) else getattr(error, "problem", "")) or str(error)
    advice = ""
    if "'\\t'" in reason:
        advice = "; a tab: indent with spaces"
    elif "<block end>" in reason:
        advice = "; check the indentation of this line and of the one before"
    return f"{where}: cannot be read as YAML: {' '.join(reason.split())}{advice}"
