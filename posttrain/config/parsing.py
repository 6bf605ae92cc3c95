"""Reads options from the command line, a YAML file or a Python dict, with errors that name the fix.

There is one reader for all verbs: `start` is a dataclass with the defaults, with or without sections. Whatever a value
comes from, it becomes an `Entry`; previous spellings (renames.py) and bare section names are resolved there, and one
parser (tyro) converts all of them, so that types, choices and error messages are the same everywhere.
A field with metadata {"positional": True} takes words without an option, in the order of the fields.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from posttrain.config import foreign
from posttrain.config.checks import check
from posttrain.config.help import help_text, negative
from posttrain.config.renames import NAMES, SWITCHES, renamed
from posttrain.config.sections import Config, value_of, with_algorithm
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
    """`[CONFIG.yaml] --section.option value ...` -> a checked configuration. `data`: whether data is required."""
    return check(read_args(verb, about(verb, algorithm), with_algorithm(algorithm), args), data=data)


def from_mapping(verb: str, algorithm: Any, mapping: dict[str, Any]) -> Config:
    """The same from Python: {"model": {"path": "pico"}, "train": {"max_steps": 5}}."""
    return check(read_mapping(verb, about(verb, algorithm), with_algorithm(algorithm), mapping))


def about(verb: str, algorithm: Any) -> str:
    """The text above the list of options."""
    reward = " --reward gsm8k" if algorithm.online else ""
    return f"{algorithm.help}.\n\nposttrain {verb} --model MODEL --data EXAMPLES.jsonl{reward}"


# Any verb


def read_args(verb: str, about: str, start: T, args: Sequence[str]) -> T:
    """`[CONFIG.yaml] [WORD ...] [--option value ...]` -> `start` with these values; typed options win over the file."""
    first = args[0] if args and not args[0].startswith("-") else ""
    has_file = bool(first) and (Path(first).suffix in (".yaml", ".yml") or not positionals(start))
    entries = entries_of_file(Path(first), start, verb) if has_file else []
    kind = "--section.option" if any(map(dataclasses.is_dataclass, sections(start).values())) else "--option"
    about += f"\n\nA file may come first: posttrain {verb} CONFIG.yaml {kind} value ..."
    words = args[1:] if has_file else args
    if wanted := {"-h", "--help", "--help-all", "--help_all"} & set(words):
        print(help_text(verb, about, start, everything=not {"-h", "--help"} & wanted))
        raise SystemExit(0)
    typed = list(entries_of_words(words, start, verb))
    found = read_entries(verb, about, start, [*entries, *typed])
    if (changed := list(notes(typed, start))) and not getattr(found, "quiet", False):
        print(f"posttrain: {'; '.join(changed)}", file=sys.stderr)
    return found


def read_mapping(verb: str, about: str, start: T, mapping: dict[str, Any]) -> T:
    """The same from a Python dict, nested or with dots; None leaves an option at its default."""
    flat = flatten(mapping, option_keys(start))
    return read_entries(verb, about, start, [Entry("", "", k, v) for k, v in flat.items() if v is not None])


def read_entries(verb: str, about: str, start: T, entries: Sequence[Entry]) -> T:
    """`start` with the values of the entries; of several for one option the last counts."""
    resolved = [found for entry in entries for found in resolve(entry, start)]
    check_keys(verb, resolved, start)
    last = list({entry.key: entry for entry in resolved}.values())
    if not last:
        return start

    def wrong(count: int) -> bool:
        if any(entry.value is None for entry in last[:count]):
            return True
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the parser's own message does not know the place
                run_parser(verb, about, start, as_options(last[:count], start))
        except SystemExit:
            return True
        return False

    if wrong(len(last)):
        first = bisect.bisect_left(range(1, len(last)), True, key=wrong)
        raise UsageError(wrong_value(last[first], start, verb))
    return run_parser(verb, about, start, as_options(last, start))


def run_parser(verb: str, about: str, start: T, options: list[str]) -> T:
    import tyro  # here, so that `posttrain --help` stays quick

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def json_mapping(info: Any) -> Any:
        """Mappings are JSON text."""
        if info.type_origin is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: mapping_of(words[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    return tyro.cli(
        type(start),
        args=options,
        default=start,
        prog=f"posttrain {verb}",
        description=about,
        use_underscores=True,
        registry=registry,
    )


def mapping_of(text: str) -> dict[str, Any]:
    """A mapping from JSON text; ValueError if it is none."""
    found = json.loads(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def json_option(name: str, text: str) -> dict[str, Any]:
    """The value of an option that takes a mapping as JSON text."""
    try:
        return mapping_of(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'{name} is {text!r}; it must be a mapping as JSON, such as {{"name": "value"}}: {error}'
        ) from None


# Names


def sections(config: Any) -> dict[str, Any]:
    """Name -> the options of a section, a dataclass; or the value of an option without one."""
    return {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}


def option_keys(config: Any) -> list[str]:
    """All options of a configuration, as `section.option` or `option`."""
    return [
        key
        for name, value in sections(config).items()
        for key in ([f"{name}.{inner}" for inner in sections(value)] if dataclasses.is_dataclass(value) else [name])
    ]


def positionals(config: Any) -> list[str]:
    return [entry.name for entry in dataclasses.fields(config) if entry.metadata.get("positional")]


def resolve(entry: Entry, start: Any) -> list[Entry]:
    """The entry under the names that options have now: bare section names and previous spellings are replaced."""
    key, value = entry.key, entry.value
    main = getattr(sections(start).get(key), "main", "")
    if main:
        key = f"{key}.{main}"
    try:
        found = renamed(key, value, option_keys(start))
    except UsageError as error:
        raise UsageError(f"{entry.where}{error}") from None
    return [entry._replace(key=k, value=v) for k, v in ({key: value} if found is None else found).items()]


def positive(key: str) -> str:
    """`section.no_option` -> `section.option`; empty if it has no such form."""
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}{name.removeprefix('no_')}" if name.startswith("no_") else ""


def check_keys(verb: str, entries: Sequence[Entry], start: Any) -> None:
    """Raise UsageError for options that do not exist, with what was probably meant."""
    known = option_keys(start)
    unknown = [entry for entry in entries if entry.key not in known]
    if not unknown:
        return
    text = foreign.explain(verb, [foreign.Unknown(*entry[:3]) for entry in unknown], known)
    raise UsageError(text or "\n".join(no_such_option(entry, known, verb) for entry in unknown))


def no_such_option(entry: Entry, known: Sequence[str], verb: str) -> str:
    near = nearest(entry.key, known)
    hint = f"Did you mean {entry.dashes}{near}?" if near else f"posttrain {verb} --help lists all options."
    return f"{entry.shown}: no such option. {hint}"


def nearest(key: str, known: Sequence[str]) -> str:
    """The option whose last part is the same, or that is spelled almost alike; previous spellings count too."""
    same = [option for option in known if option.rpartition(".")[2] == key.rpartition(".")[2]]
    if same:
        return difflib.get_close_matches(key, same, n=1, cutoff=0.0)[0]
    previous = {old: new for old, new in NAMES.items() if isinstance(new, str) and new in known}
    spelled = {option: option for option in known} | previous
    by_last = {name.rpartition(".")[2]: option for name, option in reversed(spelled.items())}
    for candidates, word in ((spelled, key), (by_last, key.rpartition(".")[2])):
        if found := difflib.get_close_matches(word, candidates, n=1, cutoff=NEAR):
            return candidates[found[0]]
    return ""


def notes(typed: Sequence[Entry], start: Any) -> Iterator[str]:
    """What previous spellings that were typed are called now."""
    known = option_keys(start)
    for entry in typed:
        found = resolve(entry, start)
        if entry.key not in known and any(new.key in known for new in found) and entry.key not in sections(start):
            yield f"{entry.dashes}{entry.key} is now {' '.join(f'--{new.key}' for new in found)}"


# What is typed


def entries_of_words(words: Sequence[str], start: Any, verb: str) -> Iterator[Entry]:
    """Typed words as entries; switches become bools, and words without an option the positional options."""
    loose: list[str] = []
    for name, *values in by_option(words):
        if not name.startswith("--"):
            loose += [name, *values]
            continue
        for word in values:
            if re.fullmatch(r"-[a-zA-Z][\w.]+", word):
                raise UsageError(not_an_option(word, verb))
        entry, surplus = typed_entry(name, values, start, verb)
        loose += surplus
        yield entry
    yield from positional_entries(loose, start, verb)


def by_option(typed: Sequence[str]) -> Iterator[list[str]]:
    """Each option with its values; `--option=value` is two words then."""
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


def typed_entry(name: str, values: list[str], start: Any, verb: str) -> tuple[Entry, list[str]]:
    """The entry, and the words behind it that belong to positional options."""
    known = option_keys(start)
    entry = Entry("", "--", name[2:].replace("-", "_"), values)
    switch = positive(entry.key)
    if switch and entry.key not in known and (switch in {*NAMES, *SWITCHES} or is_switch(switch, start)):
        if values and not positionals(start):
            raise UsageError(takes_no_value(entry, switch))
        return entry._replace(key=switch, value=False), values
    first = next(iter(resolve(entry, start)), entry)
    if not is_switch(first.key, start):
        one = first.key in known and not isinstance(value_of(start, first.key), tuple)
        surplus = values[1:] if one and positionals(start) else []
        return entry._replace(value=values[: len(values) - len(surplus)]), surplus
    if first.value is not values:  # a previous form that had a value
        return entry, []
    if values and not positionals(start):
        raise UsageError(takes_no_value(entry, first.key))
    return entry._replace(value=True), values


def is_switch(key: str, start: Any) -> bool:
    return key in option_keys(start) and isinstance(value_of(start, key), bool)


def positional_entries(words: list[str], start: Any, verb: str) -> Iterator[Entry]:
    """Each positional option takes one word; one that is a list takes all that the later ones leave."""
    names = positionals(start)
    for place, name in enumerate(names):
        if not words:
            return
        count = max(1, len(words) - (len(names) - place - 1)) if isinstance(value_of(start, name), tuple) else 1
        yield Entry("", "", name, words[:count])
        words = words[count:]
    if words:
        raise UsageError(not_an_option(words[0], verb))


def not_an_option(word: str, verb: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"{word}: a configuration file comes first: posttrain {verb} {word} --option value ..."
    return f"{word}: options begin with --, as --seed 10. posttrain {verb} --help lists them."


def takes_no_value(entry: Entry, switch: str) -> str:
    words = " ".join(entry.value)
    if words.endswith((".yaml", ".yml")):
        return not_an_option(entry.value[-1], "<verb>")
    return f"{entry.shown} is a switch and takes no value: write --{switch} or --{negative(switch)}, without {words!r}."


# Values


def as_options(entries: Sequence[Entry], start: Any) -> list[str]:
    """Entries as the parser takes them."""
    options: list[str] = []
    for _, _, key, value in entries:
        if isinstance(value, bool):
            options.append(f"--{key}" if value else f"--{negative(key)}")
        elif isinstance(value, dict):
            options.append(f"--{key}={json.dumps(value, ensure_ascii=False)}")
        elif isinstance(value, list | tuple) and (len(value) != 1 or isinstance(value_of(start, key), tuple)):
            options += [f"--{key}", *map(str, value)]
        else:
            options.append(f"--{key}={value[0] if isinstance(value, list | tuple) else value}")
    return options


def wrong_value(entry: Entry, start: Any, verb: str) -> str:
    """What is wrong with the value of an option."""
    value = entry.value
    if entry.dashes and isinstance(value, list):
        files = [word for word in value if word.endswith((".yaml", ".yml"))]
        if files:
            return f"{files[0]}: a configuration file comes first: posttrain {verb} {files[0]} {entry.shown} ..."
        if not value:
            return f"{entry.shown} has no value; it must be {type_of(start, entry.key)}."
        value = " ".join(map(str, value))
    return f"{entry.shown} is {value!r}; it must be {type_of(start, entry.key)}."


WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "tuple[float, ...]": "a list of numbers",
    "tuple[int, ...]": "a list of whole numbers",
    "tuple[str, ...]": "a list of texts",
    "int | None": "a whole number",
    "float | None": "a number",
}


def type_of(config: Any, key: str) -> str:
    """What an option takes, in words."""
    *section, name = key.split(".")
    holder = value_of(config, section[0]) if section else config
    written = next(str(entry.type) for entry in dataclasses.fields(holder) if entry.name == name)
    if written.startswith("dict"):
        return 'a mapping; on the command line as JSON, such as {"name": "value"}'
    choices = written.partition("Literal[")[2].partition("]")[0]
    return WORDS.get(written) or f"{'any' if written.startswith('tuple') else 'one'} of {choices}"


def flatten(mapping: dict[str, Any], known: Sequence[str] = ()) -> dict[str, Any]:
    """{"model": {"path": "pico"}} -> {"model.path": "pico"}; keys with a dot and options that are mappings stay."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict) and "." not in key and key not in known:
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat


# YAML files


def read_yaml(file: Path) -> yaml.MappingNode | None:
    """The file's entries with their places in it; None if it is empty."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such configuration file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        tab = "; a tab: indent with spaces" if "'\\t'" in str(error) else ""
        raise UsageError(f"{file}: cannot be read as YAML{tab}: {error}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{file}: must hold `section:` entries, not a {root.id}")
    return root


def verb_of_file(file: Path) -> str:
    """The value of the entry `verb`, or "" ."""
    root = read_yaml(file)
    return next((str(value.value) for key, value in root.value if key.value == "verb"), "") if root else ""


def entries_of_file(file: Path, start: Any, verb: str, inside: tuple[Path, ...] = ()) -> list[Entry]:
    """Entries of a YAML file with their places in it, after those of the files that it names under `defaults`.

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
                for entry in entries_before(other, start, verb, inside)
            ] + entries
            continue
        pairs = [(str(key_node.value), key_node, value_node)]
        if isinstance(value_node, yaml.MappingNode) and key_node.value not in option_keys(start):  # a section
            pairs = [(f"{key_node.value}.{k.value}", k, v) for k, v in value_node.value]
        for key, node, value in pairs:
            where = f"{file}:{node.start_mark.line + 1}: "
            try:
                entries.append(Entry(where, "", key.replace("-", "_"), constructor.construct_object(value, deep=True)))
            except (yaml.YAMLError, ValueError) as error:
                raise UsageError(f"{where}{key}: cannot be read: {str(error).splitlines()[0]}") from None
    check_keys(verb, [found for entry in entries for found in resolve(entry, start)], start)
    return entries


def files_before(file: Path, node: yaml.Node) -> list[Path]:
    """What a file names under `defaults`: one file or several, relative to its own directory."""
    names = [entry.value for entry in node.value] if isinstance(node, yaml.SequenceNode) else [node.value]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{file}:{node.start_mark.line + 1}: defaults must be files, as [base.yaml, model.yaml]")
    return [file.parent / name for name in names]


def entries_before(file: Path, start: Any, verb: str, inside: tuple[Path, ...]) -> list[Entry]:
    if file.resolve() in inside:
        raise UsageError(f"{inside[-1]}: defaults: {file} is the file itself, or one that names it")
    return entries_of_file(file, start, verb, inside)
