"""Prints the options of a verb: with --help those that most users set, with --help-all every one.

Names, types, defaults and sentences are read from the dataclasses of the configuration; docs/commands.md is made of the
same.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

RUN = "run"
"""Title of the options without a section."""
SECTIONS = ("model", "data", "train", "algo", "rollout", "generate", "reward", RUN, "eval", "save", "log", "cluster")
"""The order in which sections are printed; others follow."""
COMMON = {
    RUN: {"output_dir", "resume", "seed", "iterations", "reward"},
    "model": {"path", "lora_rank", "load_in_4bit"},
    "data": {"train", "eval", "eval_fraction", "max_length", "chat_template"},
    "train": {"max_steps", "epochs", "batch_size", "learning_rate", "lr_scheduler", "micro_batch_tokens"},
    "algo": {"beta", "loss_type", "kl_coef", "reference", "teacher", "divergence", "critic_learning_rate"},
    "rollout": {"samples_per_prompt", "max_tokens", "temperature", "engine"},
    "generate": {"samples_per_prompt", "max_tokens", "temperature", "engine"},
    "reward": {"functions", "weights"},
    "eval": {"every_steps"},
    "save": {"every_steps"},
    "log": {"report_to"},
    "cluster": {"devices"},
}
"""What --help shows of each section."""
SHORT = 24  # a verb with at most this many options shows all of them
INDENT = 6  # of the sentence below an option


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option as help shows it."""

    section: str
    name: str
    kind: str
    default: str
    sentence: str
    positional: bool = False

    @property
    def key(self) -> str:
        return self.name if self.section == RUN else f"{self.section}.{self.name}"


def help_text(verb: str, about: str, start: Any, *, everything: bool) -> str:
    """What `posttrain VERB --help` (or, with `everything`, --help-all) prints."""
    options = list(options_of(start))
    shown = options if everything or len(options) <= SHORT else [o for o in options if is_common(o)]
    words = "".join(f" {option.name.upper()}" for option in options if option.positional)
    width = min(100, shutil.get_terminal_size().columns)
    first, _, rest = about.partition("\n")
    lines = [f"usage: posttrain {verb} [CONFIG.yaml]{words} [--option value ...]", ""]
    lines += [*textwrap.wrap(capital(first), width), rest]
    present = {option.section for option in shown}
    for section in [name for name in SECTIONS if name in present] + sorted(present - set(SECTIONS)):
        lines += ["", section]
        lines += [line for option in shown if option.section == section for line in option_lines(option, width)]
    if len(shown) < len(options):
        lines += ["", f"These are the options that most users set; --help-all lists all {len(options)}."]
    return "\n".join(lines)


def option_lines(option: Option, width: int) -> Iterator[str]:
    """The option with its type, and below it what it means and its default."""
    name = option.name.upper() if option.positional else f"--{option.key}"
    default = f" (default: {option.default})" if option.default else ""
    if option.kind == SWITCH:
        default = f" (default: on; --{negative(option.key)} turns it off)" if option.default == "on" else ""
    yield f"  {name} {'' if option.kind == SWITCH else option.kind}".rstrip()
    margin = " " * INDENT
    yield from textwrap.wrap(option.sentence + default, width, initial_indent=margin, subsequent_indent=margin)


def negative(key: str) -> str:
    """The spelling that turns a switch off: data.shuffle -> data.no_shuffle."""
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}no_{name}"


def is_common(option: Option) -> bool:
    return option.positional or option.name in COMMON.get(option.section, ())


def options_of(start: Any, section: str = RUN) -> Iterator[Option]:
    """All options of a configuration with the values of `start` as defaults."""
    hints, sentences = get_type_hints(type(start)), meanings(type(start))
    for field in dataclasses.fields(start):
        value = getattr(start, field.name)
        if dataclasses.is_dataclass(value):
            yield from options_of(value, field.name)
            continue
        kind, default = placeholder(hints[field.name]), default_of(value).strip("`")
        positional = bool(field.metadata.get("positional"))
        yield Option(section, field.name, kind, default, sentences.get(field.name, ""), positional)


def meanings(config: type) -> dict[str, str]:
    """Field -> the string below it in the source; that of a subclass replaces that of its base."""
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if not dataclasses.is_dataclass(kind) or not has_source(kind):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
                continue
            if isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant):
                found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def has_source(kind: type) -> bool:
    """Whether the class stands in a file; with_algorithm makes one that does not, without options of its own."""
    try:
        inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return True


SWITCH = "switch"
NAMES = {int: "integer", float: "number", str: "text", bool: SWITCH}


def placeholder(hint: Any) -> str:
    """What stands for the value behind an option: TEXT, NUMBER ..., or its choices in braces."""
    (first, *_) = get_args(hint) or (hint,)
    choices = get_args(hint) if get_origin(hint) is Literal else get_args(first) if get_origin(first) is Literal else ()
    several = " ..." if get_origin(hint) is tuple else ""
    if choices:
        return f"{{{','.join(map(str, choices))}}}{several}"
    if get_origin(hint) is dict:
        return "JSON"
    return SWITCH if hint is bool else NAMES[first].upper() + several


def type_name(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is tuple:
        first, *others = get_args(hint)
        if get_origin(first) is Literal:
            return f"any of {type_name(first)}"
        if others == [...]:
            return f"{NAMES[first]}s"
        if len(others) == 2:
            return f"three {NAMES[first]}s"
        return f"two {NAMES[first]}s" if others == [first] else f"{NAMES[first]} and {NAMES[others[0]]}"
    if get_origin(hint) is dict:
        return "mapping"
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return f"{NAMES[kinds[0]]} or `None`" if kinds else NAMES[hint]


def default_of(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return f"`{value}`" if value else ""
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else ""
    if isinstance(value, float):
        return f"`{value:g}`".replace("e-0", "e-")
    return f"`{value}`" if value not in ("", None) else ""


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
