"""`python -m posttrain.cli.reference` prints docs/commands.md: every verb and option, read from the code itself."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

from posttrain.algorithms import ALGORITHMS, Algorithm
from posttrain.cli import tools
from posttrain.config.help import Option, capital, default_of, field_docs, options_of, type_name, usage
from posttrain.config.sections import Config, OnlineConfig, option_value
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.types import ExampleKind
from posttrain.pipelines.settings import RECIPES, PipelineConfig

EXAMPLES: dict[ExampleKind, str] = {
    "text": "plain text",
    "chat": "conversations",
    "pair": "preference pairs: a chosen and a rejected completion",
    "labelled": "completions labelled good or bad",
    "stepwise": "completions labelled step by step",
    "prompt": "prompts, with the columns that their reward functions read",
}

INTRODUCTION = """\
# Commands

This page is made from the code by `make docs`; a test fails when it is out of date. `posttrain <verb> --help-all`
prints the same. What the options do together is in [training.md](training.md), the data in [data.md](data.md), the
maths in [losses.md](losses.md).

```
posttrain <verb> [CONFIG.yaml] [--section.option value ...]
```

The file comes first. Its entries are `section:` with `option: value` below, and `verb:` to say what it is for; options
that are typed win over the file. An unknown key is an error that names the nearest one. Switches are written
`--section.option` and `--section.no_option`; in the file `true` and `false`."""


def commands_page() -> str:
    """Return the whole page as Markdown."""
    lines = [
        INTRODUCTION,
        "",
        *markdown_table(("verb", "what it does"), verbs()),
        "",
        "## Options of every trainer",
        "",
        *common_options(),
        "## Options of online trainers",
        "",
        *online_options(),
        *(line for verb, algorithm in ALGORITHMS.items() for line in trainer(verb, algorithm)),
        "## Options of pipelines",
        "",
        *pipeline_options(),
        *(line for verb in PIPELINES for line in pipeline(verb)),
        *(line for verb in TOOLS for line in tool(verb)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def verbs() -> Iterator[tuple[str, str]]:
    for verb, about in ({name: algorithm.help for name, algorithm in ALGORITHMS.items()} | PIPELINES | TOOLS).items():
        yield f"[`{verb}`](#{verb})", escaped(about)


def common_options() -> Iterator[str]:
    """Yield a table of the options without a section, then one per section."""
    hints = get_type_hints(Config).items()
    sections = {name: kind for name, kind in hints if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    yield from option_table(Config, without={*sections, "algo"})
    yield ""
    for name, kind in sections.items():
        yield from (f"### {name}", "", *option_table(kind, f"{name}."), "")


def online_options() -> Iterator[str]:
    """Yield tables of the options that only online trainers have."""
    known = get_type_hints(Config)
    hints = get_type_hints(OnlineConfig).items()
    sections = {name: kind for name, kind in hints if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    yield from option_table(OnlineConfig, without=set(known) | set(sections))
    yield ""
    for name, kind in sections.items():
        if known.get(name) != kind:
            inherited = {entry.name for entry in dataclasses.fields(known[name])} if name in known else set()
            yield from (f"### {name}", "", *option_table(kind, f"{name}.", without=inherited), "")


def trainer(verb: str, algorithm: type[Algorithm]) -> Iterator[str]:
    """Yield the section on one trainer: its examples, defaults and options."""
    yield from (f"## {verb}", "", f"{capital(escaped(algorithm.help))}.")
    yield f"Examples: {EXAMPLES[algorithm.example_kind]}. Preset: `posttrain {verb} configs/{verb}.yaml`."
    usual = OnlineConfig() if algorithm.online else Config()
    changed = [
        f"`{key}` is {default_of(value)} (else {default_of(option_value(usual, key))})"
        for key, value in algorithm.defaults.items()
        if value != option_value(usual, key)
    ]
    if changed:
        yield f"Other default: {', '.join(changed)}."
    yield ""
    options = list(option_table(algorithm.Config, "algo."))
    yield from (*(options or ["No options of its own."]), "")


def pipeline_options() -> Iterator[str]:
    """Yield tables of the options that only pipelines have."""
    known = get_type_hints(Config)
    hints = get_type_hints(PipelineConfig).items()
    sections = {name: kind for name, kind in hints if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    yield from option_table(PipelineConfig, without={*sections, "algo"})
    yield ""
    shared = [name for name, kind in sections.items() if known.get(name) == kind]
    yield f"The sections {', '.join(f'`{name}`' for name in shared)} and `algo` are those of the trainer."
    yield ""
    for name, kind in sections.items():
        if name not in shared:
            yield from (f"### {name} of pipelines", "", *option_table(kind, f"{name}."), "")


def pipeline(verb: str) -> Iterator[str]:
    """Yield the section on one pipeline: its selection, trainer and defaults."""
    recipe = RECIPES[verb]
    yield from (f"## {verb}", "", f"{capital(escaped(PIPELINES[verb]))}.")
    yield f"Selects `{recipe.method}`, trains by [`{recipe.trainer}`](#{recipe.trainer})."
    yield f"Preset: `posttrain {verb} configs/{verb}.yaml`. More: [pipelines.md](pipelines.md)."
    defaults = [f"`{key}` is {default_of(value)}" for key, value in recipe.defaults.items()]
    yield from (f"Other default: {', '.join(defaults)}.", "")


def tool(verb: str) -> Iterator[str]:
    """Yield usage and options of a tool, or of each of its commands."""
    yield from (f"## {verb}", "")
    yield from (f"{capital(escaped(TOOLS[verb]))}.", "")
    for command in tools.args_of(verb):
        if command.verb != verb:
            yield from (f"### {command.verb}", "", f"{capital(escaped(command.about))}.", "")
        yield from ("```", usage(command.verb, command()), command.example, "```", "")
        options = [tool_row(option) for option in options_of(command())]
        yield from (*(markdown_table(("option", "type", "default", "meaning"), options) if options else []), "")


def tool_row(option: Option) -> tuple[str, str, str, str]:
    name = option.name.upper() if option.positional else f"--{option.name}"
    default = f"`{option.default}`" if option.default not in ("", "on", "off") else option.default
    return f"`{name}`", option.words, default, escaped(option.sentence)


def option_table(config: type, prefix: str = "", without: set[str] | None = None) -> list[str]:
    """Return the fields of a section as a table; empty if it has none."""
    hints, about = get_type_hints(config), field_docs(config)
    rows = []
    for field in dataclasses.fields(config):
        if field.name in (without or ()):
            continue
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        option = f"`--{prefix}{field.name}`"
        rows.append((option, type_name(hints[field.name]), default_of(value), escaped(about[field.name])))
    return markdown_table(("option", "type", "default", "meaning"), rows) if rows else []


def escaped(text: str) -> str:
    """Escape what Markdown would interpret, except code in backquotes."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[0::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[0::2]]
    return "".join(parts).replace("|", "\\|")


def markdown_table(head: tuple[str, ...], rows: Any) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    sys.stdout.write(commands_page())
