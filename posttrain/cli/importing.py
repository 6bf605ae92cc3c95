"""`posttrain import FILE_OR_COMMAND -o OUT.yaml`: writes a configuration of another library as one of ours."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.tools import args_of
from posttrain.config import parsing
from posttrain.config.foreign.request import Request
from posttrain.config.tools import ToolArgs, check_at_least, check_required, positional, read_own_options
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.errors import UsageError

SETTINGS = (
    "Options of the verb may follow a file, or a command in quotes: they win over what is imported. A command without "
    "quotes comes last, after the options of posttrain."
)


@dataclass(kw_only=True)
class ImportArgs(ToolArgs):
    """Options of `posttrain import`."""

    verb: ClassVar[str] = "import"
    about: ClassVar[str] = TOOLS["import"]
    example: ClassVar[str] = "posttrain import llama3_lora_sft.yaml --devices 1 -o sft.yaml"

    source: tuple[str, ...] = positional(())
    """Configuration file (YAML, JSON), shell script, or the whole command of LLaMA-Factory, axolotl, TRL, verl,
    OpenRLHF, MindSpeed-RL, MindSpeed-LLM or MindRLHF, with its launcher. It is read, never executed."""
    output_file: str = ""
    """The YAML file to write, also as -o; empty: print it."""
    overwrite: bool = False
    """Replace the output file if it exists."""
    devices: int = 0
    """Number of devices that the configuration was written for, where it does not say it: sizes per device are
    multiplied by it, and it becomes cluster.devices."""
    trainer: str = ""
    """Verb of posttrain, where the configuration does not say which trainer it is for: sft, dpo, grpo ..."""
    library: str = ""
    """Library, where the keys do not say which one it is: TRL, verl, OpenRLHF ..."""
    ignore: tuple[str, ...] = ()
    """Keys to leave out although the training depends on them; several with commas."""


ARGS = (ImportArgs,)


def run(args: list[str]) -> int:
    """Write the configuration; 2 and nothing written if a key can neither be translated nor left out."""
    options, words, settings = read_options(ImportArgs(), args)
    translation = translate_words(options, words, settings)
    if isinstance(translation, list):
        raise UsageError(f"posttrain takes these flags as they are: posttrain {shlex.join(translation)}")
    text, summary = translation.yaml(), translation.summary()
    if not options.output_file:
        print(text, end="")
        print(f"posttrain: {summary}", file=sys.stderr)
        return 0
    out = Path(options.output_file)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{summary}. Start it with: posttrain {translation.verb} {shlex.quote(str(out))}")
    return 0


def read_options(defaults: Any, args: list[str]) -> tuple[Any, list[str], list[str]]:
    """Return the options, the words of what is imported, and options of the verb."""
    args = ["--output_file" if word == "-o" else word for word in args]
    position = first_word_position(defaults, args)
    if position < len(args) and not is_file_or_command(args[position]):
        command = args[position:]
        if len(command) > 2 and command[-2] == "--output_file":
            args, command = [*args[:position], *command[-2:]], command[:-2]
        else:
            args = args[:position]
        options, words, settings = read_own_options(defaults, args, SETTINGS)
        words += command
    else:
        options, words, settings = read_own_options(defaults, args, SETTINGS)
    check_at_least(options, devices=0)
    if options.output_file and Path(options.output_file).exists() and not options.overwrite:
        raise UsageError(f"{options.output_file} exists. Choose another --output_file, or --overwrite.")
    options.source = tuple(words)
    options.ignore = tuple(name for entry in options.ignore for name in entry.split(",") if name)
    check_required(options)
    return options, words, settings


def first_word_position(defaults: Any, args: list[str]) -> int:
    """Return the index of the first word that is neither an option of this tool nor its value."""
    position = 0
    while position < len(args) and args[position].startswith("--"):
        name, is_, _ = args[position][2:].replace("-", "_").partition("=")
        if name in ("help", "help_all"):
            return len(args)
        position += 1 if is_ or parsing.is_switch(name, defaults) else 2
    return position


def is_file_or_command(word: str) -> bool:
    """Whether a word is a file, or a whole command in quotes."""
    return any(letter.isspace() for letter in word) or Path(word).suffix in (
        *(".yaml", ".yml", ".json"),
        *(".sh", ".bash", ".slurm", ".sbatch"),
    )


def translate_words(options: Any, words: list[str], settings: list[str]) -> Any:
    """Translate and check; a list: the words of a command of posttrain that takes the flags as they are."""
    from posttrain.config.foreign.commands import read_foreign
    from posttrain.config.foreign.importing import Choices, import_foreign, refusal_text

    foreign = read_foreign(words)
    if isinstance(foreign, list):
        return foreign
    choices = Choices(
        library=options.library, verb=options.trainer, devices=options.devices, ignore=options.ignore, settings={}
    )
    if settings:  # they are options of the verb, which has to be known first
        verb = import_foreign(foreign, request_of, choices).verb
        choices.settings = verb_settings(verb, settings)
    imported = import_foreign(foreign, request_of, choices)
    if imported.problems:
        raise UsageError(refusal_text(imported))
    check_accepted(imported.verb, imported.mapping(), imported.name)
    return imported


def request_of(verb: str) -> Request:
    return parsing.request(verb, verb_defaults(verb))


def verb_defaults(verb: str) -> Any:
    """Return the defaults of a verb."""
    from posttrain.config.sections import with_algorithm

    if verb in ALGORITHMS:
        return with_algorithm(ALGORITHMS[verb])
    if verb in PIPELINES:
        from posttrain.pipelines.settings import pipeline_defaults

        return pipeline_defaults(verb)
    if verb not in TOOLS or len(args_of(verb)) != 1:
        raise UsageError(f"--trainer {verb}: there is no such verb; posttrain --help lists them.")
    return args_of(verb)[0]()


def verb_settings(verb: str, words: list[str]) -> dict[str, Any]:
    """Return options of the verb as name -> value, fit for YAML."""
    defaults = verb_defaults(verb)
    entries = [
        found for entry in parsing.entries_of_words(words, defaults, verb) for found in parsing.resolve(entry, defaults)
    ]
    parsing.check_keys(verb, entries, defaults)
    values: dict[str, Any] = {}
    for entry in entries:
        value = entry.value
        if isinstance(value, list) and not parsing.is_list(entry.key, defaults):
            value = value[0] if value else None
        if parsing.annotation(defaults, entry.key).startswith("dict") and isinstance(value, str):
            value = parsing.json_option(entry.key, value)
        values[entry.key] = value
    return values


def check_accepted(verb: str, mapping: Mapping[str, Any], name: str) -> None:
    """Raise UsageError if the verb would refuse the configuration."""
    try:
        if verb in ALGORITHMS:
            config = parsing.from_mapping(verb, ALGORITHMS[verb], dict(mapping))
            ALGORITHMS[verb](config.algo)
            template = config.data.chat_template
        else:
            found = parsing.read_mapping(verb, "", verb_defaults(verb), dict(mapping))
            if isinstance(found, ToolArgs):
                check_required(found)
            template = getattr(found, "chat_template", "")
        if template:
            from posttrain.data.encoding.templates import load_template

            load_template(template)
    except UsageError as error:
        raise UsageError(
            f"{name} is translated, but posttrain {verb} needs more: {str(error).rstrip('.')}. Add options of the verb "
            "behind the file, or behind the command in quotes. Nothing was written."
        ) from None
