"""What an answer to options of other libraries needs to know about this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What was asked for: the verb, its defaults, and how this library reads a name."""

    verb: str
    defaults: Any  # a dataclass with the default values of the verb
    known: Sequence[str]  # all options of the verb
    ours: Callable[[str, Any], dict[str, Any]]
    """Name and value -> the options that it is here, under their present names; empty if it is none."""
    nearest: Callable[[str], str]
    """Name -> the option here that is spelled almost alike, or an empty text."""
