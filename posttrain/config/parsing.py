"""Reads options from the command line, a YAML file or a Python dict, with errors that name the fix.

There is one reader for all verbs: `defaults` is a dataclass with or without sections. Wherever a value comes from, it
becomes an `Entry`; previous spellings (renames.py) and bare section names are resolved there, and one parser (tyro)
converts all of them, so that types, choices and error messages are the same everywhere.
A field with metadata {"positional": True} takes words without an option, in the order of the fields; `--name value`
and `name:` in a file set it, too.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml

from posttrain.config.checks import check
from posttrain.config.foreign.request import Request
from posttrain.config.help import help_text, negative
from posttrain.config.renames import (
    NAMES,
    PREVIOUS_LISTS,
    PREVIOUS_SWITCHES,
    SWITCHES,
    TOOL_NAMES,
    as_list,
    new_names,
    renamed,
)
from posttrain.config.sections import Config, OnlineConfig, option_value, with_algorithm
from posttrain.config.yaml_nodes import compose_yaml, yaml_problem
from posttrain.core.errors import UsageError

T = TypeVar("T")
DEFAULTS = "defaults"  # the entry of a file that names files to read before it
NEAR = 0.8  # how similar (difflib's ratio) a name must be to be suggested


class Entry(NamedTuple):
    """An option and its value before conversion; what is typed is a list of words, or the bool of a switch."""

    where: str  # `file:line: `, or empty
    dashes: str  # `--` if it was typed
    key: str
    value: Any

    @property
    def shown(self) -> str:
        return f"{self.where}{self.dashes}{self.key}"


# Training verbs


def parse(verb: str, algorithm: Any, args: Sequence[str], *, data: bool = True) -> Config:
    """Read and check `[CONFIG.yaml] --section.option value ...`. `data`: whether data is required."""
    return check(read_args(verb, about(verb, algorithm), with_algorithm(algorithm), args), data=data)


def from_mapping(verb: str, algorithm: Any, mapping: dict[str, Any], file: Path | None = None) -> Config:
    """Read and check a dict, {"model": {"path": "pico"}, "train": {"max_steps": 5}}, which overrides `file`."""
    return check(read_mapping(verb, about(verb, algorithm), with_algorithm(algorithm), mapping, file))


def about(verb: str, algorithm: Any) -> str:
    """Return the text above the list of options."""
    reward = " --reward gsm8k" if algorithm.online else ""
    short = "--model and --data are short for --model.path and --data.train."
    if algorithm.online:
        short = "--model, --data and --reward are short for --model.path, --data.train and --reward.functions."
    example = f"Example: posttrain {verb} --model MODEL --data EXAMPLES.jsonl{reward}"
    return f"{algorithm.help}.\n\n{example}\n{short}"


# Any verb


def read_args(verb: str, about: str, defaults: T, args: Sequence[str]) -> T:
    """Return `defaults` with the values of `[CONFIG.yaml] [WORD ...] [--option value ...]`; options override files."""
    try:
        return read_words(verb, about, defaults, args)
    except UsageError as error:
        from posttrain.config.foreign.answer import answer  # its tables are needed here alone

        raise UsageError(answer(request(verb, defaults), args) or str(error)) from None


def read_words(verb: str, about: str, defaults: T, args: Sequence[str]) -> T:
    """Do what `read_args` does, without hints for users of other libraries."""
    first = args[0] if args and not args[0].startswith("-") else ""
    has_file = bool(first) and (Path(first).suffix in (".yaml", ".yml") or not positionals(defaults))
    entries = entries_of_file(Path(first), defaults, verb) if has_file else []
    kind = "--section.option" if any(map(dataclasses.is_dataclass, sections(defaults).values())) else "--option"
    if option_keys(defaults):
        about += f"\n\nOptions can also come from a YAML file: posttrain {verb} CONFIG.yaml {kind} value ..."
    words = args[1:] if has_file else args
    if has_file and words and words[0].endswith((".yaml", ".yml")) and not positionals(defaults):
        other = os.path.relpath(words[0], Path(first).parent)  # names in a file are relative to its directory
        raise UsageError(
            f"{words[0]}: a second configuration file; there can be one. Name it in the first, as "
            f"`{DEFAULTS}: [{other}]` in {first}."
        )
    if wanted := {"-h", "--help", "--help-all", "--help_all"} & set(words):
        print(help_text(verb, about, defaults, everything=not {"-h", "--help"} & wanted))
        raise SystemExit(0)
    typed = list(entries_of_words(words, defaults, verb))
    found = read_entries(verb, about, defaults, [*entries, *typed])
    if (changed := list(notes(typed, defaults))) and not getattr(found, "quiet", False):
        print(f"posttrain: {'; '.join(changed)}", file=sys.stderr)
    return found


def read_mapping(verb: str, about: str, defaults: T, mapping: dict[str, Any], file: Path | None = None) -> T:
    """Return `defaults` with the values of a YAML file and a dict, nested or with dotted keys; None: the default."""
    before = [] if file is None else entries_of_file(file, defaults, verb)
    flat = {k: v for k, v in flatten(mapping, option_keys(defaults)).items() if v is not None}
    try:
        return read_entries(
            verb, about, defaults, [*before, *(Entry("", "", key, value) for key, value in flat.items())]
        )
    except UsageError as error:
        from posttrain.config.foreign.answer import answer_mapping

        raise UsageError(answer_mapping(request(verb, defaults), flat) or str(error)) from None


def read_entries(verb: str, about: str, defaults: T, entries: Sequence[Entry]) -> T:
    """Return `defaults` with the values of the entries; the last one for an option counts."""
    resolved = [found for entry in entries for found in resolve(entry, defaults)]
    check_keys(verb, resolved, defaults)
    last = list({entry.key: entry for entry in resolved if not is_absent(entry, defaults)}.values())
    if not last:
        return defaults

    def parsed(count: int) -> T | None:
        """Parse the first entries; None if one of them is wrong."""
        if any(entry.value is None or has_wrong_shape(entry, defaults) for entry in last[:count]):
            return None
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the parser's own message does not know the place
                return run_parser(verb, about, defaults, as_options(last[:count], defaults))
        except SystemExit:
            return None

    found = parsed(len(last))
    if found is None:
        first = bisect.bisect_left(range(1, len(last)), True, key=lambda count: parsed(count) is None)
        raise UsageError(wrong_value(last[first], defaults, verb))
    for entry in last:
        if holds_nan(option_value(found, entry.key)):
            raise UsageError(wrong_value(entry, defaults, verb))
    return found


def holds_nan(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, float) and math.isnan(each) for each in values)


def run_parser(verb: str, about: str, defaults: T, options: list[str]) -> T:
    """Convert and check the options by tyro; it prints its own message and raises SystemExit where one is wrong."""
    import tyro  # here, so that `posttrain --help` stays quick

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def json_text(info: Any) -> Any:
        """Pass mappings and lists of texts as JSON: tyro would take texts that begin with - for options."""
        texts = info.type_origin is tuple and get_args(info.type) == (str, ...)
        if info.type_origin is not dict and not texts:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: tuple(json.loads(words[0])) if texts else mapping_of(words[0]),
            is_instance=lambda value: isinstance(value, tuple if texts else dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    return tyro.cli(
        type(defaults),
        args=options,
        default=defaults,
        prog=f"posttrain {verb}",
        description=about,
        use_underscores=True,
        registry=registry,
        config=(tyro.conf.HelptextFromCommentsOff,),  # help.py writes the help
    )


def mapping_of(text: str) -> dict[str, Any]:
    """Parse a mapping from JSON text; raise ValueError if it is not one."""
    found = json.loads(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def json_option(name: str, text: str) -> dict[str, Any]:
    """Parse the value of an option that takes a mapping as JSON text; raise UsageError if it is not one."""
    try:
        return mapping_of(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'{name} is {text!r}; it must be a mapping as JSON, such as {{"name": "value"}}: {error}'
        ) from None


# Names


def sections(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration: sections (dataclasses), and values of options without a section."""
    return {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}


def option_keys(config: Any) -> list[str]:
    """Return all options of a configuration, as `section.option` or `option`."""
    return [
        key
        for name, value in sections(config).items()
        for key in ([f"{name}.{inner}" for inner in sections(value)] if dataclasses.is_dataclass(value) else [name])
    ]


def positionals(config: Any) -> list[str]:
    return [entry.name for entry in dataclasses.fields(config) if entry.metadata.get("positional")]


def annotation(config: Any, key: str) -> str:
    """Return the type of an option as it is written in its dataclass."""
    *section, name = key.split(".")
    holder = option_value(config, section[0]) if section else config
    return next(str(entry.type) for entry in dataclasses.fields(holder) if entry.name == name)


def resolve(entry: Entry, defaults: Any) -> list[Entry]:
    """Replace bare section names and previous spellings by current option names; one entry may become several."""
    key, value = entry.key, entry.value
    main = getattr(sections(defaults).get(key), "main", "")
    if main:
        key = f"{key}.{main}"
    try:
        found = renamed(key, value, option_keys(defaults))
    except UsageError as error:
        raise UsageError(f"{entry.where}{error}") from None
    return [entry._replace(key=k, value=v) for k, v in ({key: value} if found is None else found).items()]


def positive(key: str) -> str:
    """Turn `section.no_option` into `section.option`; return an empty text for any other key."""
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}{name.removeprefix('no_')}" if name.startswith("no_") else ""


def check_keys(verb: str, entries: Sequence[Entry], defaults: Any) -> None:
    """Raise UsageError for options that do not exist, with what was probably meant."""
    known = option_keys(defaults)
    unknown = [entry for entry in entries if entry.key not in known]
    if not unknown:
        return
    short = [name for name, value in sections(defaults).items() if getattr(value, "main", "")]
    raise UsageError("\n".join(no_such_option(entry, known, short, verb) for entry in unknown))


def no_such_option(entry: Entry, known: Sequence[str], short: Sequence[str], verb: str) -> str:
    """Describe an option that does not exist. `short`: sections whose bare name is an option, as `--model`."""
    if entry.key in online_keys() and "." in entry.key:
        return f"{entry.shown}: no such option of {verb}: only trainers that generate completions have it, as grpo."
    near = nearest(entry.key, known) or next(iter(difflib.get_close_matches(entry.key, short, n=1, cutoff=NEAR)), "")
    hint = f"Did you mean {entry.dashes}{near}?" if near else f"posttrain {verb} --help-all lists all options."
    return f"{entry.shown}: no such option. {hint}"


@cache
def online_keys() -> frozenset[str]:
    """Return the options that online trainers have besides those of all trainers."""
    return frozenset(option_keys(OnlineConfig())) - frozenset(option_keys(Config()))


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the option with the same last part, or with a similar spelling; previous spellings count too."""
    same = [option for option in known if option.rpartition(".")[2] == key.rpartition(".")[2]]
    if same:
        return difflib.get_close_matches(key, same, n=1, cutoff=0.0)[0]
    previous = {old: new for old in (*NAMES, *TOOL_NAMES) for new in new_names(old) if new in known}
    spelled = {option: option for option in known} | previous
    by_last = {name.rpartition(".")[2]: option for name, option in reversed(spelled.items())}
    for candidates, word in ((spelled, key), (by_last, key.rpartition(".")[2])):
        if found := difflib.get_close_matches(word, candidates, n=1, cutoff=NEAR):
            return candidates[found[0]]
    return ""


def request(verb: str, defaults: Any) -> Request:
    """Return what translating options of other libraries needs to know about this command."""
    known = option_keys(defaults)

    def ours(name: str, value: Any) -> dict[str, Any]:
        key, value = (positive(name), False) if is_switch(positive(name), defaults) else (name, value)
        try:
            found = resolve(Entry("", "", key, "" if value is None else value), defaults)
        except UsageError:  # an option of ours with a wrong value
            return {name: value}
        return {entry.key: entry.value for entry in found if entry.key in known}

    return Request(verb, defaults, known, ours, lambda name: nearest(name, known))


def notes(typed: Sequence[Entry], defaults: Any) -> Iterator[str]:
    """Yield a note with the current name for each previous spelling that was typed."""
    known = option_keys(defaults)
    for entry in typed:
        found = resolve(entry, defaults)
        if entry.key not in known and any(new.key in known for new in found) and entry.key not in sections(defaults):
            set_ones = found if len(found) == 1 else [new for new in found if not is_default(new, defaults)]
            names = " ".join(f"--{new.key}" for new in set_ones)
            yield f"{entry.dashes}{entry.key} " + (f"is now {names}" if names else "sets defaults only: leave it out")


def is_default(entry: Entry, defaults: Any) -> bool:
    """Whether a value, not converted yet, is spelled as the default of its option."""
    default = option_value(defaults, entry.key) if entry.key in option_keys(defaults) else None
    return list(map(str, as_list(entry.value))) == list(map(str, as_list(default)))


# What is typed


def entries_of_words(words: Sequence[str], defaults: Any, verb: str) -> Iterator[Entry]:
    """Turn command-line words into entries; switches become bools, words without an option positional options."""
    for word in words:
        if re.fullmatch(r"-[a-zA-Z][\w.]+", word):
            raise UsageError(not_an_option(word, verb))
        key, is_, value = word.removeprefix("--").partition("=")
        if is_ and word.startswith("--") and positionals(defaults) and is_switch(key, defaults):
            raise UsageError(takes_no_value(Entry("", "--", key, [value]), key, verb))
    loose: list[str] = []
    for name, *values in by_option(words):
        if not name.startswith("--"):
            loose += [name, *values]
            continue
        entry, surplus = typed_entry(name, values, defaults, verb)
        loose += surplus
        yield entry
    yield from positional_entries(loose, defaults, verb)


def by_option(typed: Sequence[str]) -> Iterator[list[str]]:
    """Yield each option with its values; `--option=value` is split. Words before the first option are a group, too."""
    group: list[str] = []
    for word in typed:
        if word.startswith("--"):
            if group:
                yield group
            name, is_, value = word.partition("=")
            group = [name, value] if is_ else [name]
        else:
            group.append(word)
    if group:
        yield group


def typed_entry(name: str, values: list[str], defaults: Any, verb: str) -> tuple[Entry, list[str]]:
    """Return the entry, and the words after its values, which belong to positional options."""
    known = option_keys(defaults)
    entry = Entry("", "--", name[2:].replace("-", "_"), values)
    surplus: list[str] = []
    if positionals(defaults):
        count = own_words(entry, defaults)
        entry, surplus = entry._replace(value=values[:count]), values[count:]
    if entry.key in PREVIOUS_SWITCHES and entry.key not in known:
        return entry._replace(value=True), surplus
    switch = positive(entry.key)
    if switch and entry.key not in known and (switch in {*NAMES, *SWITCHES} or is_switch(switch, defaults)):
        if entry.value:
            raise UsageError(takes_no_value(entry, switch, verb))
        return entry._replace(key=switch, value=False), surplus
    first = next(iter(resolve(entry, defaults)), entry)
    if not is_switch(first.key, defaults) or first.value is not entry.value:  # or a previous form that had a value
        return entry, surplus
    if entry.value:
        raise UsageError(takes_no_value(entry, first.key, verb))
    return entry._replace(value=True), surplus


def own_words(entry: Entry, defaults: Any) -> int:
    """Count the words after an option that are its values; the rest may be positional options."""
    if entry.key in PREVIOUS_SWITCHES or is_switch(positive(entry.key), defaults):
        return 0
    words = entry.value
    if entry.key in PREVIOUS_LISTS and entry.key in option_keys(defaults):
        return 1 + next((index for index, word in enumerate(words[1:]) if "=" not in word), len(words))
    first = next(iter(resolve(entry._replace(value=words[:1]), defaults)), entry)
    if is_switch(first.key, defaults):
        return 0
    if first.key not in option_keys(defaults) or not is_list(first.key, defaults):
        return 1
    if annotation(defaults, first.key) == TEXTS:
        return len(words)
    others = (index for index, word in enumerate(words) if not re.fullmatch(r"[-+\d.,eE]+|[-+]?(?:inf|nan)", word))
    return max(1, next(others, len(words)))


def is_list(key: str, defaults: Any) -> bool:
    return isinstance(option_value(defaults, key), tuple)


def is_switch(key: str, defaults: Any) -> bool:
    return key in option_keys(defaults) and isinstance(option_value(defaults, key), bool)


def positional_entries(words: list[str], defaults: Any, verb: str) -> Iterator[Entry]:
    """Assign words to positional options: one word each; a list takes all that the later ones leave."""
    names = positionals(defaults)
    for word in words:
        if re.match("-[a-zA-Z]", word):
            raise UsageError(not_an_option(word, verb))
    for index, name in enumerate(names):
        if not words:
            return
        count = max(1, len(words) - (len(names) - index - 1)) if is_list(name, defaults) else 1
        yield Entry("", "", name, words[:count] if is_list(name, defaults) else words[0])
        words = words[count:]
    if words and names and not words[0].endswith((".yaml", ".yml")):
        usage = " ".join(map(str.upper, names))
        raise UsageError(f"{words[0]}: one word too many for posttrain {verb} {usage}; options begin with --.")
    if words:
        raise UsageError(not_an_option(words[0], verb))


def not_an_option(word: str, verb: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"{word}: a configuration file comes first: posttrain {verb} {word} --option value ..."
    return f"{word}: options begin with --, as --seed 10. posttrain {verb} --help lists them."


def takes_no_value(entry: Entry, switch: str, verb: str) -> str:
    words = " ".join(entry.value)
    if words.endswith((".yaml", ".yml")):
        return not_an_option(entry.value[-1], verb)
    return f"{entry.shown} is a switch and takes no value: write --{switch} or --{negative(switch)}, without {words!r}."


# Values


def as_options(entries: Sequence[Entry], defaults: Any) -> list[str]:
    """Convert entries to arguments for tyro."""
    options: list[str] = []
    for _, _, key, value in entries:
        if isinstance(value, bool):
            options.append(f"--{key}" if value else f"--{negative(key)}")
        elif isinstance(value, dict):
            options.append(f"--{key}={json.dumps(value, ensure_ascii=False)}")
        elif annotation(defaults, key) == TEXTS:
            texts = value if isinstance(value, list | tuple) else [value]
            options.append(f"--{key}={json.dumps([str(text) for text in texts])}")
        elif isinstance(value, list | tuple) and (len(value) != 1 or is_list(key, defaults)):
            options += [f"--{key}", *map(str, value)]
        else:
            options.append(f"--{key}={value[0] if isinstance(value, list | tuple) else value}")
    return options


def wrong_value(entry: Entry, defaults: Any, verb: str) -> str:
    """Describe what is wrong with the value of an option."""
    value = entry.value
    if entry.dashes and isinstance(value, list):
        files = [word for word in value if word.endswith((".yaml", ".yml"))]
        if files:
            return f"{files[0]}: a configuration file comes first: posttrain {verb} {files[0]} {entry.shown} ..."
        if not value:
            return f"{entry.shown} has no value; it must be {type_of(defaults, entry.key)}."
        value = " ".join(map(str, value))
    return f"{entry.shown} is {value!r}; it must be {type_of(defaults, entry.key)}."


def is_absent(entry: Entry, defaults: Any) -> bool:
    """Whether a file has `null` for an option whose default is that."""
    return entry.value is None and option_value(defaults, entry.key) is None


def has_wrong_shape(entry: Entry, defaults: Any) -> bool:
    """Whether a file or a dict has a mapping or a list for an option that takes none."""
    written = annotation(defaults, entry.key)
    if isinstance(entry.value, dict):
        return not written.startswith("dict")
    if isinstance(entry.value, list | tuple) and any(isinstance(each, dict | list | tuple) for each in entry.value):
        return True
    return bool(entry.where) and isinstance(entry.value, list) and not written.startswith("tuple")


TEXTS = "tuple[str, ...]"
WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "tuple[float, ...]": "a list of numbers",
    "tuple[int, ...]": "a list of whole numbers",
    TEXTS: "a list of texts",
    "int | None": "a whole number",
    "float | None": "a number",
}


def type_of(config: Any, key: str) -> str:
    """Describe the values that an option takes."""
    written = annotation(config, key)
    if written.startswith("dict"):
        return 'a mapping; on the command line as JSON, such as {"name": "value"}'
    if written in WORDS:
        return WORDS[written]
    section, _, name = key.rpartition(".")
    hint = get_type_hints(type(option_value(config, section) if section else config))[name]
    several = get_origin(hint) is tuple
    choices = get_args(get_args(hint)[0] if several else hint)
    return f"{'any' if several else 'one'} of {', '.join(repr(choice) for choice in choices if choice != '')}"


def flatten(mapping: dict[str, Any], known: Sequence[str] = ()) -> dict[str, Any]:
    """Flatten {"model": {"path": "pico"}} to {"model.path": "pico"}; dotted keys and options that are mappings stay."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict) and "." not in key and key not in known:
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat


# YAML files


def read_yaml(file: Path) -> yaml.MappingNode | None:
    """Parse a YAML file into nodes, which know their lines; None if it is empty."""
    try:
        root = compose_yaml(file)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such configuration file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(yaml_problem(file, error)) from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{file}: must hold `section:` entries, not a {root.id}")
    return root


def verb_of_file(file: Path) -> str:
    """Return the value of the entry `verb`, or an empty text."""
    root = read_yaml(file)
    return next((str(value.value) for key, value in root.value if key.value == "verb"), "") if root else ""


def entries_of_file(file: Path, defaults: Any, verb: str, inside: tuple[Path, ...] = ()) -> list[Entry]:
    """Return the entries of a YAML file with their lines, after those of the files that it names under `defaults`.

    `inside`: the files that led to this one.
    """
    root = read_yaml(file)
    entries: list[Entry] = []
    constructor = yaml.SafeLoader("")
    for key_node, value_node in root.value if root else []:
        if key_node.value == "verb":
            if value_node.value != verb:
                raise UsageError(f"{file}: is for `posttrain {value_node.value}`, not for `posttrain {verb}`")
            continue
        if key_node.value == DEFAULTS:
            inside = (*inside, file.resolve())
            entries = [
                entry
                for other in files_before(file, value_node)
                for entry in entries_before(other, defaults, verb, inside)
            ] + entries
            continue
        refuse_merge_key(file, key_node)
        name = str(key_node.value).replace("-", "_")
        if dataclasses.is_dataclass(sections(defaults).get(name)) and value_node.tag == "tag:yaml.org,2002:null":
            continue  # a section without options, for example with all of its lines commented out
        pairs = [(name, key_node, value_node)]
        if isinstance(value_node, yaml.MappingNode) and name not in option_keys(defaults):  # a section
            pairs = [(f"{name}.{k.value}", k, v) for k, v in value_node.value]
        for key, node, value in pairs:
            refuse_merge_key(file, node)
            where = f"{file}:{node.start_mark.line + 1}: "
            try:
                entries.append(Entry(where, "", key.replace("-", "_"), constructor.construct_object(value, deep=True)))
            except (yaml.YAMLError, ValueError) as error:
                raise UsageError(f"{where}{key}: cannot be read: {str(error).splitlines()[0]}") from None
    check_keys(verb, [found for entry in entries for found in resolve(entry, defaults)], defaults)
    return entries


def refuse_merge_key(file: Path, key: yaml.Node) -> None:
    if key.tag == "tag:yaml.org,2002:merge":
        raise UsageError(
            f"{file}:{key.start_mark.line + 1}: the merge key << is not supported: write the options out, or put those "
            f"that several files share into one of their own and name it under `{DEFAULTS}: [base.yaml]`"
        )


def files_before(file: Path, node: yaml.Node) -> list[Path]:
    """Return the files named under `defaults`: one or several, relative to the directory of the file."""
    names = [entry.value for entry in node.value] if isinstance(node, yaml.SequenceNode) else [node.value]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{file}:{node.start_mark.line + 1}: defaults must be files, as [base.yaml, model.yaml]")
    return [file.parent / name for name in names]


def entries_before(file: Path, defaults: Any, verb: str, inside: tuple[Path, ...]) -> list[Entry]:
    if file.resolve() in inside:
        raise UsageError(f"{inside[-1]}: defaults: {file} is the file itself, or one that names it")
    return entries_of_file(file, defaults, verb, inside)
