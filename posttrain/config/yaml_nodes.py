"""Parses YAML into nodes, which know their lines. A file that stands for far more than it holds is refused."""

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
