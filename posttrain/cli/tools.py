"""The verbs that do not train: each has a module of its own here."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from posttrain.config.tools import ToolArgs

MODULES = {"import": "importing"}  # a module cannot have the name of a keyword


def run(verb: str, args: list[str]) -> int:
    found: int = module_of(verb).run(args)
    return found


def module_of(verb: str) -> ModuleType:
    """Return the module of a verb, imported only now: help of other verbs does not have to wait for its imports."""
    return import_module(f"posttrain.cli.{MODULES.get(verb, verb)}")


def args_of(verb: str) -> tuple[type[ToolArgs], ...]:
    """Return the options of a verb, or of each of its commands."""
    found: tuple[type[ToolArgs], ...] = module_of(verb).ARGS
    return found
