"""Sends Python functions that no file contains, such as those of a notebook cell, to a child process.

The only module that uses cloudpickle, which it imports only for such functions. What it loads was written by this very
process to the request pipe of its own child, and never by anything else.
"""

from __future__ import annotations

import base64
import functools
import inspect
import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import UsageError

SIZE_LIMIT = 64 * 2**20  # bytes


@dataclass(slots=True, frozen=True)
class PackedFunction:
    """A function with all that it refers to, as text that JSON can hold."""

    name: str
    content: str  # base64
    paths: tuple[str, ...]  # where this process finds modules
    sources: dict[str, str]  # text of notebook cells, by their names in tracebacks


def file_of(function: Callable[..., Any]) -> str | None:
    """Return FILE.py:NAME if a new process can import the function from its file, else None.

    It must be at the top level of a module. A script's own functions do not count: to import them would run the script.
    """
    module, name = sys.modules.get(getattr(function, "__module__", None) or ""), getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or file is None or not file.endswith(".py"):
        return None
    if not name.isidentifier() or getattr(module, name, None) is not function or not Path(file).is_file():
        return None
    return f"{Path(file).absolute()}:{name}"


def pack_function(function: Callable[..., Any]) -> PackedFunction:
    """Pack a function; a UsageError if it refers to something that cannot be sent to another process."""
    import cloudpickle

    name = _name_of(function)
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # any object may refuse, in its own way
        raise UsageError(
            f"the function {name} runs in a process of its own and cannot be sent there: {error}. "
            "Create what it refers to inside the function, or put the function into a file"
        ) from error
    if len(content) > SIZE_LIMIT:
        raise UsageError(
            f"the function {name} refers to {len(content) / 2**20:.0f} MiB of data; at most {SIZE_LIMIT // 2**20} MiB "
            "can be sent to its process. Load large objects inside the function, or put it into a file"
        )
    return PackedFunction(name, base64.b64encode(content).decode(), tuple(filter(None, sys.path)), _sources(function))


def unpack_function(packed: dict[str, Any]) -> Callable[..., Any]:
    """Unpack a PackedFunction (as a dictionary) that the parent of this process sent."""
    import cloudpickle

    sys.path += [path for path in packed["paths"] if path not in sys.path]
    for name, text in packed["sources"].items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function: Callable[..., Any] = cloudpickle.loads(base64.b64decode(packed["content"]))
    return function


def _name_of(function: Callable[..., Any]) -> str:
    """Return an identifier: the function's name, or that of the class of a callable object."""
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"\W+", "_", name).strip("_") or "function"


def _sources(function: Callable[..., Any]) -> dict[str, str]:
    """Text of the cell that defines a function, so that tracebacks show its lines."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or Path(code.co_filename).is_file():
        return {}
    return {code.co_filename: "".join(linecache.getlines(code.co_filename))}
