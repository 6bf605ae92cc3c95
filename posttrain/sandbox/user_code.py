"""Where user code is: `FILE.py:NAME` or `package.module:NAME`, found by the parent and imported by the child."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import UsageError

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(slots=True, frozen=True)
class CodeLocation:
    """A function or class of a file or module."""

    place: str  # absolute path of a file that ends in .py, or a module's dotted name
    name: str


def parse_location(text: str, where: str, noun: str) -> CodeLocation:
    """Read `FILE.py:NAME` or `package.module:NAME`; a UsageError, which begins with `where`, if there is no such file.

    `noun` says what NAME is: "function" or "class".
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise UsageError(f"{where}: expected FILE.py:{noun.upper()} or package.module:{noun.upper()}")
    if place.endswith(".py"):
        file = Path(place).absolute()
        if not file.is_file():
            others = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
            raise UsageError(f"{where}: there is no file {place}.{did_you_mean(file.name, others)}")
        return CodeLocation(str(file), name)
    if not MODULE.fullmatch(place):
        raise UsageError(f"{where}: {place!r} is neither a file that ends in .py nor a module")
    return CodeLocation(place, name)


def did_you_mean(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def import_location(location: CodeLocation, noun: str, is_candidate: Callable[[Any], bool]) -> Any:
    """Import what a location names; a UsageError lists the candidates if the file or module has no such name."""
    place = location.place
    module = _import_file(place) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, location.name):
        known = [name for name, value in vars(module).items() if is_candidate(value) and not name.startswith("_")]
        raise UsageError(f"{place} has no {noun} {location.name!r}; it has {', '.join(known) or 'none'}")
    return getattr(module, location.name)


def _import_file(place: str) -> Any:
    name = f"user_code_{Path(place).stem}"
    if (found := sys.modules.get(name)) is not None and found.__file__ == place:
        return found  # another function of the same file was loaded before
    folder = str(Path(place).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # files beside it can be imported
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, name, None)
        spec.loader.exec_module(module)
        undo.pop_all()
    return module


def _import_module(place: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {place!r}: {error}") from error
        raise
