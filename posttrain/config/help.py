"""Prints the options of a verb: with --help those that most users set, with --help-all every one.

Names, types, defaults and sentences are read from the dataclasses of the configuration; docs/commands.md is made of the
same. The options of a class with `group`, such as a mixin for rarely used ones, are listed by --help-all alone, under
that title.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import ModuleType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

RUN = "run"
"""Title of the options without a section."""
SECTIONS = ("model", "data", "train", "algo", "rollout", "generate", "reward", RUN, "eval", "save", "log", "cluster")
"""The order in which sections are printed; others follow."""
ARGUMENTS, OPTIONS = "arguments", "options"
"""Titles of a tool's positional options, and of its options without another title."""
COMMON = {
    RUN: {"output_dir", "resume", "seed", "iterations", "prompts_per_iteration"},
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
"""Options of each section that --help shows."""
COMMON_OF_TOOLS = {"output_file", "output_dir", "samples_per_prompt", "max_tokens", "temperature", "seed", "resume"}
COMMON_OF_TOOLS |= {"reward", "reward_weights", "against", "chat_template", "max_examples", "devices", "engine"}
"""Options that --help shows of a tool with many."""
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
    title: str = ""  # of the group in which help lists it
    words: str = ""  # its type, in words
    rare: bool = False  # --help-all alone lists it
    choices: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.name if self.section == RUN else f"{self.section}.{self.name}"


def help_text(verb: str, about: str, defaults: Any, *, everything: bool) -> str:
    """Return the text of `posttrain VERB --help`, or, with `everything`, of --help-all."""
    options = list(options_of(defaults))
    shown = options if everything else [option for option in options if not option.rare]
    shown = shown if everything or len(shown) <= SHORT else [option for option in shown if is_common(option)]
    width = min(100, shutil.get_terminal_size().columns)
    first, _, rest = about.partition("\n")
    lines = [usage(verb, defaults), "", *textwrap.wrap(capital(first), width), rest]
    titles = list(dict.fromkeys(option.title for option in shown))
    if not is_tool(defaults):
        titles.sort(key=lambda title: SECTIONS.index(title) if title in SECTIONS else len(SECTIONS))
    for title in titles:
        lines += ["", title]
        lines += [line for option in shown if option.title == title for line in option_lines(option, width)]
    if len(shown) < len(options):
        lines += ["", f"These are the options that most users set; --help-all lists all {len(options)}."]
    return "\n".join(lines)


def usage(verb: str, defaults: Any) -> str:
    if written := getattr(defaults, "usage", ""):
        return f"usage: {written}"
    words = [
        f"{option.name.upper()}{' ...' * option.kind.endswith('...')} "
        for option in options_of(defaults)
        if option.positional
    ]
    rest = f" [CONFIG.yaml] {''.join(words)}[--option value ...]" if dataclasses.fields(defaults) else ""
    return f"usage: posttrain {verb}{rest}"


def option_lines(option: Option, width: int) -> Iterator[str]:
    """Yield the option with its type, and below it its sentence and default."""
    name = option.name.upper() if option.positional else f"--{option.key}"
    default = f" (default: {option.default})" if option.default else ""
    if option.kind == SWITCH:
        default = f" (default: on; --{negative(option.key)} turns it off)" if option.default == "on" else ""
    kind = "" if option.kind == SWITCH or (option.positional and option.kind == NAMES[str].upper()) else option.kind
    yield f"  {name} {kind.removeprefix(NAMES[str].upper() + ' ') if option.positional else kind}".rstrip()
    margin = " " * INDENT
    yield from textwrap.wrap(option.sentence + default, width, initial_indent=margin, subsequent_indent=margin)


def negative(key: str) -> str:
    """Return the spelling that turns a switch off: data.shuffle -> data.no_shuffle."""
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}no_{name}"


def is_common(option: Option) -> bool:
    common = COMMON.get(option.section, ()) if option.title == option.section else COMMON_OF_TOOLS
    return option.positional or option.name in common


def options_of(defaults: Any, section: str = RUN) -> Iterator[Option]:
    """Yield all options with the values of `defaults` as defaults; positional options of a tool come first."""
    hints, sentences = get_type_hints(type(defaults)), field_docs(type(defaults))
    found: list[Option] = []
    for field in dataclasses.fields(defaults):
        value = getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            found += options_of(value, field.name)
            continue
        kind = placeholder(hints[field.name])
        default = "" if field.metadata.get("required") else default_of(value).strip("`")
        positional = bool(field.metadata.get("positional"))
        group = group_of(type(defaults), field.name)
        title = (
            ARGUMENTS
            if positional
            else group or (title_of(type(defaults), field.name) if is_tool(defaults) else section)
        )
        words, sentence = type_name(hints[field.name]), sentences.get(field.name, "")
        choices = choices_of(hints[field.name])
        found.append(
            Option(section, field.name, kind, default, sentence, positional, title, words, bool(group), choices)
        )
    order = {ARGUMENTS: 0, OPTIONS: 1}
    yield from sorted(found, key=lambda option: order.get(option.title, 2)) if is_tool(defaults) else found


def group_of(config: type, name: str) -> str:
    """Return `group` of the class that defines a field, or an empty text."""
    owner = next((kind for kind in config.__mro__ if name in inspect.get_annotations(kind)), config)
    return str(owner.__dict__.get("group", ""))


def is_tool(defaults: Any) -> bool:
    """Whether these are the options of a tool (a ToolArgs of tools.py): without sections, in groups with titles."""
    return hasattr(defaults, "example")


def title_of(config: type, name: str) -> str:
    """Return `title` of the class that first defines an option; a subclass may give it another default."""
    owner = next(kind for kind in reversed(config.__mro__) if name in inspect.get_annotations(kind))
    return str(owner.__dict__.get("title", OPTIONS))


def field_docs(config: type) -> dict[str, str]:
    """Return field -> the string below it in the source; that of a subclass replaces that of its base."""
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if dataclasses.is_dataclass(kind):
            found |= module_field_docs(sys.modules.get(kind.__module__)).get(kind.__qualname__, {})
    return found


@cache
def module_field_docs(module: ModuleType | None) -> dict[str, dict[str, str]]:
    """Return the fields of each class of a module with the strings below them, by the class's qualified name.

    A module without a source file, such as a notebook, has none.
    """
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}

    def visit(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = dict(documented_fields(node))
                visit(node, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                visit(node, f"{prefix}{node.name}.<locals>.")

    visit(tree, "")
    return found


def documented_fields(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class that have a string below them, with this string on one line."""
    for field, text in pairwise(definition.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        if isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant):
            yield field.target.id, " ".join(str(text.value.value).split())


SWITCH = "switch"
NAMES = {int: "integer", float: "number", str: "text", bool: SWITCH}


def placeholder(hint: Any) -> str:
    """Return the placeholder of an option's value: TEXT, NUMBER ..., or its choices in braces."""
    (first, *_) = get_args(hint) or (hint,)
    several = " ..." if get_origin(hint) is tuple else ""
    if choices := choices_of(hint):
        return f"{{{','.join(choices)}}}{several}"
    if get_origin(hint) is dict:
        return "JSON"
    return SWITCH if hint is bool else NAMES[first].upper() + several


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values of an option that has only some, as they are typed; one that is empty is left out."""
    (first, *_) = get_args(hint) or (hint,)
    choices = get_args(hint) if get_origin(hint) is Literal else get_args(first) if get_origin(first) is Literal else ()
    return tuple(str(choice) for choice in choices if choice != "")


def type_name(hint: Any) -> str:
    """Describe a type in words."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint) if choice != "")
    if get_origin(hint) is tuple:
        first = get_args(hint)[0]
        return f"any of {type_name(first)}" if get_origin(first) is Literal else f"{NAMES[first]}s"
    if get_origin(hint) is dict:
        return "mapping"
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return f"{NAMES[kinds[0]]} or `None`" if kinds else NAMES[hint]


def default_of(value: Any) -> str:
    """Return a default as it would be typed."""
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
