"""`posttrain run FILE_OR_COMMAND`: imports a configuration of another library and starts it."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.cli.importing import ImportArgs, read_options, translate_words
from posttrain.cli.main import dispatch
from posttrain.config.verbs import TOOLS


@dataclass(kw_only=True)
class RunArgs(ImportArgs):
    """Options of `posttrain run`, which are those of `posttrain import`."""

    verb: ClassVar[str] = "run"
    about: ClassVar[str] = TOOLS["run"]
    example: ClassVar[str] = "posttrain run llama3_lora_sft.yaml --devices 1"

    output_file: str = ""
    """The YAML file to write before the start, also as -o; empty: none is kept but that of the run directory."""


ARGS = (RunArgs,)


def run(args: list[str]) -> int:
    """Import, print what is left out, and run the verb."""
    from posttrain.config.foreign.importing import lines_of

    options, words, settings = read_options(RunArgs(), args)
    translation = translate_words(options, words, settings)
    if isinstance(translation, list):
        return dispatch([*translation, *settings])
    print(f"posttrain: {translation.summary()}", file=sys.stderr)
    for line in lines_of(translation):
        print(f"  left out: {line}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        out = Path(options.output_file or Path(folder) / "imported.yaml")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(translation.yaml(), encoding="utf-8")
        code = dispatch([translation.verb, str(out)])
    return code or (dispatch(translation.then) if translation.then else 0)
