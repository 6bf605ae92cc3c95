"""`python -m posttrain.cli.reference` prints docs/commands.md: every verb and option, read from the code itself."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

from posttrain.algorithms import ALGORITHMS, Algorithm
from posttrain.cli import tools
from posttrain.config.help import default_of, meanings, type_name
from posttrain.config.sections import Config, OnlineConfig, value_of
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.types import ExampleKind
from posttrain.pipelines.settings import RECIPES, PipelineConfig

WIDTH = 100  # of the tools' help, whatever the terminal

ROWS: dict[ExampleKind, str] = {
    "text": "plain text",
    "chat": "conversations",
    "pair": "pairs of a better and a worse answer",
    "labelled": "answers labelled good or bad",
    "stepwise": "answers labelled step by step",
    "prompt": "prompts, with what their reward functions want to know",
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


def page() -> str:
    """The whole page as Markdown."""
    lines = [
        INTRODUCTION,
        "",
        *table(("verb", "what it does"), verbs()),
        "",
        "## Options of every trainer",
        "",
        *common_options(),
        "## Options of trainers that learn from their own answers",
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
    """A table for the options without a section, then one a section."""
    hints = get_type_hints(Config).items()
    sections = {name: kind for name, kind in hints if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    yield from option_table(Config, without={*sections, "algo"})
    yield ""
    for name, kind in sections.items():
        yield from (f"### {name}", "", *option_table(kind, f"{name}."), "")


def online_options() -> Iterator[str]:
    """The same for what these take besides; in a section that all have, only what is new."""
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
    """What is particular about one trainer."""
    yield from (f"## {verb}", "", f"{capital(escaped(algorithm.help))}.")
    yield f"Rows: {ROWS[algorithm.example_kind]}. Preset: `posttrain {verb} configs/{verb}.yaml`."
    usual = OnlineConfig() if algorithm.online else Config()
    changed = [
        f"`{key}` is {default_of(value)} (else {default_of(value_of(usual, key))})"
        for key, value in algorithm.defaults.items()
        if value != value_of(usual, key)
    ]
    if changed:
        yield f"Other default: {', '.join(changed)}."
    yield ""
    options = list(option_table(algorithm.Config, "algo."))
    yield from (*(options or ["No options of its own."]), "")


def pipeline_options() -> Iterator[str]:
    """What pipelines have besides the sections of trainers."""
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
    """What is particular about one pipeline."""
    recipe = RECIPES[verb]
    yield from (f"## {verb}", "", f"{capital(escaped(PIPELINES[verb]))}.")
    yield f"Selects `{recipe.method}`, trains by [`{recipe.trainer}`](#{recipe.trainer})."
    yield f"Preset: `posttrain {verb} configs/{verb}.yaml`. More: [pipelines.md](pipelines.md)."
    defaults = [f"`{key}` is {default_of(value)}" for key, value in recipe.defaults.items()]
    yield from (f"Other default: {', '.join(defaults)}.", "")


def tool(verb: str) -> Iterator[str]:
    yield from (f"## {verb}", "", "```", help_of(verb), "```", "")


def help_of(verb: str) -> str:
    """What `posttrain <verb> --help` prints, at a fixed width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            tools.run(verb, ["--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return text.getvalue().strip()


def option_table(config: type, prefix: str = "", without: set[str] | None = None) -> list[str]:
    """The fields of a section as rows of a table; nothing if it has none."""
    hints, about = get_type_hints(config), meanings(config)
    rows = []
    for field in dataclasses.fields(config):
        if field.name in (without or ()):
            continue
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        option = f"`--{prefix}{field.name}`"
        rows.append((option, type_name(hints[field.name]), default_of(value), escaped(about[field.name])))
    return table(("option", "type", "default", "meaning"), rows) if rows else []


def escaped(text: str) -> str:
    """Text as Markdown shows it as it is, code in backquotes apart."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[0::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[0::2]]
    return "".join(parts).replace("|", "\\|")


def table(head: tuple[str, ...], rows: Any) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    sys.stdout.write(page())
