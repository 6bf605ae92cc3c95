"""Finds the library that a command or a file was written for, and writes what its options are called here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from posttrain.config.foreign.axolotl import AXOLOTL
from posttrain.config.foreign.llama_factory import LLAMA_FACTORY
from posttrain.config.foreign.meanings import Found, Library, Meaning, TranslationError, items, plain, truth
from posttrain.config.foreign.mindformers import MINDFORMERS
from posttrain.config.foreign.mindrlhf import MINDRLHF
from posttrain.config.foreign.mindspeed import MINDSPEED_LLM, MINDSPEED_RL
from posttrain.config.foreign.openrlhf import OPENRLHF, OPENRLHF_2026
from posttrain.config.foreign.request import Request
from posttrain.config.foreign.trl import TRL
from posttrain.config.foreign.verl import VERL
from posttrain.config.help import negative
from posttrain.config.sections import option_value
from posttrain.config.yaml_nodes import compose_yaml

LIBRARIES = (
    TRL,
    OPENRLHF,
    OPENRLHF_2026,
    VERL,
    LLAMA_FACTORY,
    AXOLOTL,
    MINDSPEED_RL,
    MINDRLHF,
    MINDSPEED_LLM,
    MINDFORMERS,
)
ENOUGH = 3  # names of one library before it is named
YAML_FILES = (".yaml", ".yml")
OVERRIDE = re.compile(r"[+~]{0,2}(?P<name>[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)  # hydra's key=value
SINGLE_DASH = re.compile(r"-[A-Za-z][\w.-]+")
TRAINERS = {"rejection-sampling": "sft", "conditional-sft": "sft", "iterative-dpo": "dpo"}
"""Pipeline -> the verb whose options it has, besides its own."""
OWN_ENTRIES = ("verb", "defaults")  # of a file, besides options
WIDTH = 100
LONGEST = 40  # of a value that is shown behind its option


class Use(NamedTuple):
    """An option as it was given, of whatever library."""

    where: str  # `file:line: `, or empty
    dashes: str
    name: str  # with underscores
    value: Any  # as in meanings.py; None: null

    @property
    def shown(self) -> str:
        value = " ".join(map(str, self.value)) if isinstance(self.value, list) else str(self.value)
        typed = not self.where and self.value not in (True, None) and len(value) <= LONGEST
        between = " " if self.dashes else "="
        return f"{self.where}{self.dashes}{self.name}{between + value if typed else ''}"


# The answer


def answer(request: Request, words: Sequence[str]) -> str:
    """Return what to write instead of a command, if it has options of another library; empty if it has none."""
    file = words[0] if words and words[0].endswith(YAML_FILES) and Path(words[0]).is_file() else ""
    in_file = list(uses_of_file(Path(file), request.known)) if file else []
    typed = list(uses_of_words(words[1:] if file else words))
    return answer_uses(request, in_file, typed, file)


def answer_mapping(request: Request, flat: dict[str, Any]) -> str:
    """Do what `answer` does for options from Python, as name -> value."""
    return answer_uses(request, [], [Use("", "", name.replace("-", "_"), as_text(v)) for name, v in flat.items()], "")


def answer_uses(request: Request, in_file: list[Use], typed: list[Use], file: str) -> str:
    uses = in_file + typed
    unknown = [use for use in uses if not is_ours(use, request)]
    matching = [use for use in unknown if any(exact(library, use.name) for library in LIBRARIES)]
    if not matching and not any(short_meanings(request, use) for use in unknown):
        return ""
    found = candidates(request.verb, unknown)
    if len(matching) < ENOUGH or not found:
        return "\n".join(line_of_option(request, use) for use in unknown)
    wanted, because = verb_for(found[0], trainer_of(request.verb), uses)
    title = heading(found, request.verb, file if in_file and not is_ours_alone(in_file, request) else "")
    if wanted:
        return f"{title} {wrong_verb(request, wanted, because, file)}"
    return "\n".join(answer_lines(request, found, title, in_file, typed, file))


def answer_lines(
    request: Request, libraries: list[Library], title: str, in_file: list[Use], typed: list[Use], file: str
) -> Iterator[str]:
    """Yield the lines of an answer to many options."""
    own_file = bool(file) and is_ours_alone(in_file, request)
    uses = typed if own_file else in_file + typed
    meanings = [(use, meaning_of(request, libraries, use)) for use in uses]
    yield f"{title} Here they are called:"
    yield from with_counterpart(request, meanings)
    yield from without_counterpart(request, meanings, libraries)
    options, by_hand = translate(request, meanings)
    if not own_file:
        source, what = (f"{file} -o NEW.yaml", file) if file else ("COMMAND", "the command with its program in front")
        yield (
            f"`posttrain import {source}` translates {what} with a reason for each key that is left out, "
            f"`posttrain run {file or 'COMMAND'}` also starts it."
        )
    if options and file and not own_file:
        yield from as_file(request, options)
    elif options:
        yield from as_command(request, options, file if own_file else "")
    if not own_file:
        by_hand += [option for option in missing(request, options) if option not in by_hand]
    if by_hand:
        yield f"Set these yourself: {', '.join(by_hand)}."


def heading(libraries: list[Library], verb: str, file: str) -> str:
    names = " or ".join(
        f"{library.name}'s {library.programs[verb]}" if verb in library.programs and not file else library.name
        for library in libraries[:3]
    )
    return f"{file} looks like a configuration of {names}." if file else f"These look like options of {names}."


def wrong_verb(request: Request, wanted: str, because: Use, file: str) -> str:
    where = f"{because.where}{because.dashes}{because.name} is {because.value}"
    if because.value is True:
        where = f"{because.dashes}{because.name} is set"
    return (
        f"{where}: that is `posttrain {wanted}`, not `posttrain {request.verb}`. "
        f"`posttrain {wanted}{f' {file}' if file else ' ...'}` prints what all of them are called here"
        f"{import_hint(file)}."
    )


def import_hint(file: str) -> str:
    """Return the commands that translate a file, or start it."""
    if not file:
        return ""
    return f"; `posttrain import {file} -o NEW.yaml` writes them as a file, `posttrain run {file}` starts it"


# Single lines


def with_counterpart(request: Request, meanings: Sequence[tuple[Use, Meaning | None]]) -> Iterator[str]:
    """Yield a line for each meaning that has options here, with all names for it, unless the name is the same."""
    lines: dict[int, tuple[Meaning, list[Use]]] = {}
    for use, meaning in meanings:
        options = [option for option in meaning.options if option in request.known] if meaning else []
        if meaning and options and options != [use.name]:
            lines.setdefault(id(meaning), (meaning, []))[1].append(use)
    for meaning, uses in lines.values():
        dashes = "" if uses[0].where else "--"
        options = [dashes + option for option in meaning.options if option in request.known]
        note = f" ({meaning.note})" if meaning.note else ""
        names = grouped(uses) if uses[0].where else ", ".join(use.shown for use in uses)
        yield f"{names}: here {' and '.join(options)}{note}."


def without_counterpart(
    request: Request, meanings: Sequence[tuple[Use, Meaning | None]], libraries: list[Library]
) -> Iterator[str]:
    """Yield one line per reason."""
    reasons: dict[str, list[Use]] = {}
    for use, meaning in meanings:
        if meaning is None:
            if not is_ours(use, request):
                reasons.setdefault(unknown_reason(request, use, libraries), []).append(use)
        elif use.name not in meaning.options and not any(option in request.known for option in meaning.options):
            reason = meaning.note if not meaning.options else f"no counterpart in posttrain {request.verb}"
            reasons.setdefault(reason, []).append(use)
    for reason, uses in reasons.items():
        yield f"{grouped(uses)}: {reason}."


def unknown_reason(request: Request, use: Use, libraries: list[Library]) -> str:
    for library in libraries:
        if verbs := library.verbs_with(use.name):
            return f"no counterpart in posttrain {request.verb}; an option for posttrain {', '.join(verbs)}"
    near = request.nearest(use.name)
    return "no such option" + (f". Did you mean {use.dashes}{near}?" if near else "")


def grouped(uses: Sequence[Use]) -> str:
    """Group places: `file:3: a, file:4: b` -> `file:3, 4: a, b`."""
    names = ", ".join(f"{use.dashes}{use.name}" for use in uses)
    file, _, first = uses[0].where.removesuffix(": ").rpartition(":")
    if not file or any(not use.where.startswith(f"{file}:") for use in uses):
        return names
    lines = dict.fromkeys(use.where.removesuffix(": ").rpartition(":")[2] for use in uses)
    return f"{file}:{', '.join(lines) if len(lines) > 1 else first}: {names}"


def line_of_option(request: Request, use: Use) -> str:
    """Return the line for an option if the library is unknown: the meaning that all libraries share, or each one's."""
    named = f"{use.where}{use.dashes}{use.name}"
    found = {library.name: meaning for library in LIBRARIES if (meaning := exact_for(library, request, use.name))}
    found = found or short_meanings(request, use)
    by_options: dict[tuple[str, ...], str] = {}
    for name, meaning in found.items():
        by_options.setdefault(tuple(o for o in meaning.options if o in request.known), name)
    if not by_options and use.dashes == "-":
        return f"{named}: options begin with --, as --seed 10. posttrain {request.verb} --help lists them."
    if not by_options:
        near = request.nearest(use.name)
        hint = (
            f"Did you mean {use.dashes}{near}?" if near else f"posttrain {request.verb} --help-all lists all options."
        )
        return f"{named}: no such option. {hint}"
    parts = []
    for options, name in by_options.items():
        note, here = found[name].note, " and ".join(use.dashes + option for option in options)
        text = f"here it is {here}{f' ({note})' if note else ''}" if options else note
        parts.append(f"{text} ({name})" if len(by_options) > 1 else text)
    return f"{named}: no such option; {', or '.join(parts)}."


# Which library, which verb


def trainer_of(verb: str) -> str:
    """Return the verb whose table applies."""
    return TRAINERS.get(verb, verb)


def exact(library: Library, name: str) -> bool:
    return name in library.names


def exact_for(library: Library, request: Request, name: str) -> Meaning | None:
    """Return the meaning if it says something about this verb."""
    own, trainers = (library.by_verb.get(verb, {}).get(name) for verb in (request.verb, trainer_of(request.verb)))
    meaning = own or trainers
    usable = meaning and (not meaning.options or any(option in request.known for option in meaning.options))
    return meaning if usable else None


def short_meanings(request: Request, use: Use) -> dict[str, Meaning]:
    """Library -> the meaning of the end of one of its long names."""
    found = {library.name: library.shortened(trainer_of(request.verb), use.name) for library in LIBRARIES}
    return {
        name: meaning
        for name, meaning in found.items()
        if meaning and any(option in request.known for option in meaning.options)
    }


def candidates(verb: str, unknown: Sequence[Use]) -> list[Library]:
    """Return the libraries that know most of the names; several if they are equal, those with the verb first."""

    def score(library: Library) -> tuple[int, bool]:
        known = sum(2 if exact(library, use.name) else bool(library.verbs_with(use.name)) for use in unknown)
        return known, trainer_of(verb) in library.by_verb

    scores = {library.name: score(library) for library in LIBRARIES}
    best = max(scores.values())
    return [library for library in LIBRARIES if scores[library.name] == best and best[0] >= 2 * ENOUGH]


def verb_for(library: Library, verb: str, uses: Sequence[Use]) -> tuple[str, Use]:
    """Return the verb that the values ask for and the option that says so; no verb if this one is right."""
    allowed: list[str] = []
    because = uses[0]
    for use in uses:
        meanings = (library.meaning(other, use.name) for other in (verb, *library.by_verb))
        meaning = next((meaning for meaning in meanings if meaning), None)
        verbs = meaning.verbs.get(str(use.value).lower(), ()) if meaning else ()
        if verbs:
            because = use if verb not in verbs and (not allowed or verb in allowed) else because
            allowed = [name for name in allowed if name in verbs] or list(verbs)
    return ("", because) if not allowed or verb in allowed else (allowed[0], because)


def meaning_of(request: Request, libraries: list[Library], use: Use) -> Meaning | None:
    """Return the meaning in the first library that knows the name; a pipeline's options come before its trainer's."""
    found = (library.meaning(v, use.name) for library in libraries for v in (request.verb, trainer_of(request.verb)))
    return next((meaning for meaning in found if meaning), None)


def is_ours(use: Use, request: Request) -> bool:
    return use.name in OWN_ENTRIES or bool(request.ours(use.name, use.value))


def is_ours_alone(uses: Iterable[Use], request: Request) -> bool:
    return all(is_ours(use, request) for use in uses)


# What was given


def uses_of_words(words: Sequence[str]) -> Iterator[Use]:
    """Yield options with one dash or two and their values, and hydra's key=value; other words are left out."""
    name, dashes, values = "", "", list[str]()

    def finished() -> Iterator[Use]:
        if name:
            value = True if not values else values[0] if len(values) == 1 else values
            yield Use("", dashes, name.replace("-", "_"), value)

    for word in words:
        override = OVERRIDE.fullmatch(word)
        if word.startswith("--") or SINGLE_DASH.fullmatch(word):
            yield from finished()
            dashes = "--" if word.startswith("--") else "-"
            name, is_, value = word[len(dashes) :].partition("=")
            values = [value] if is_ else []
        elif override and (not name or values):
            yield from finished()
            name, values = "", []
            yield Use("", "", override["name"].replace("-", "_"), override["value"])
        elif name:
            values.append(word)
    yield from finished()


def uses_of_file(file: Path, known: Sequence[str]) -> Iterator[Use]:
    """Yield the entries of a YAML file under their full names, as `actor.optim.lr`; nothing if it cannot be read."""
    try:
        root = compose_yaml(file)
    except (yaml.YAMLError, UnicodeDecodeError, OSError):
        return
    if isinstance(root, yaml.MappingNode):
        yield from entries(root, str(file), "", known)


def entries(node: yaml.MappingNode, file: str, prefix: str, known: Sequence[str]) -> Iterator[Use]:
    for key, value in node.value:
        name = f"{prefix}{key.value}".replace("-", "_")
        if isinstance(value, yaml.MappingNode) and value.value and name not in known:
            yield from entries(value, file, f"{name}.", known)
        else:
            yield Use(f"{file}:{key.start_mark.line + 1}: ", "", name, node_value(value))


def node_value(node: yaml.Node) -> Any:
    """Return a node as written; None for null."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: node_value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [node_value(value) for value in node.value]
    return None if node.tag.endswith(":null") else node.value


def as_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [as_text(entry) for entry in value]
    return value if isinstance(value, dict) or value is None else str(value)


# The translation


def translate(request: Request, meanings: Sequence[tuple[Use, Meaning | None]]) -> tuple[Found, list[str]]:
    """Return the options here with their values, and those that have to be set by hand."""
    given = {use.name: use.value for use, _ in meanings}
    found: Found = {}
    by_hand: dict[str, None] = {}
    for use, meaning in meanings:
        if is_null(use.value) or use.name in OWN_ENTRIES:
            continue
        values = request.ours(use.name, use.value) if meaning is None else translated(meaning, use.value, given)
        if values is None:
            assert meaning is not None
            by_hand |= dict.fromkeys(option for option in meaning.options if option in request.known)
            continue
        for option, value in values.items():
            fitting = fitted(request.defaults, option, value) if option in request.known else None
            if fitting is not None:
                add(found, option, fitting)
            elif option in request.known:
                by_hand[option] = None
    return found, [option for option in by_hand if option not in found]


def translated(meaning: Meaning, value: Any, given: Found) -> Found | None:
    try:
        return meaning.translate(value, given) if meaning.translate else None
    except TranslationError:
        return None


def missing(request: Request, options: Found) -> list[str]:
    """Return what a run needs and the translation does not have."""
    needed = [option for option in ("model.path", "data.train", "reward.functions") if option in request.known]
    if any(option.startswith("cluster.") and option.endswith(("_size", "_devices")) for option in options):
        needed.append("cluster.devices")
    return [option for option in needed if option not in options]


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value in ("", "null", "None", "~"))


def add(found: Found, option: str, value: Any) -> None:
    """Add a value; a mapping and a list collect the values of several options."""
    before = found.get(option)
    if isinstance(before, dict):
        value = before | value
    elif isinstance(before, list) and option in ("log.report_to", "cluster.offload"):
        value = [*before, *(entry for entry in value if entry not in before)]
    found[option] = value


def fitted(defaults: Any, option: str, value: Any) -> Any:
    """Return the value in the type of the option; None if it does not fit."""
    *section, name = option.split(".")
    hint = get_type_hints(type(option_value(defaults, section[0]) if section else defaults))[name]
    several = get_origin(hint) is tuple
    (first, *_) = get_args(hint) if several else (hint,)
    if hint is bool:
        return truth(value) if str(value).lower() in ("true", "false", "1", "0", "yes", "no", "on", "off") else None
    if get_origin(hint) is dict:
        return value if isinstance(value, dict) else None
    if several:
        fitting = [scalar(first, entry) for entry in (value if isinstance(value, list) else items(value))]
        return None if None in fitting else fitting
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    return None if isinstance(value, dict | bool) or value is None else scalar(hint, value)


def scalar(hint: Any, value: Any) -> Any:
    """Return the value as written if it is one of the option's, or None."""
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == str(value)), None)
    if hint is str:
        return str(value)
    number = plain(str(value))
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if hint is int:
        return str(int(number)) if number == int(number) else None
    return str(value)


def as_file(request: Request, found: Found) -> Iterator[str]:
    """Yield the translation as a YAML file."""
    nested: dict[str, Any] = {"verb": request.verb}
    for option, value in found.items():
        section, _, name = option.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = plain(value)
    yield "As a file for posttrain:"
    yield ""
    yield yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, width=WIDTH)


def as_command(request: Request, found: Found, file: str) -> Iterator[str]:
    """Yield the translation as a command."""
    parts = [f"posttrain {request.verb}{f' {shlex.quote(file)}' if file else ''}"]
    for option, value in found.items():
        parts.append(" ".join(map(quoted, option_words(option, value))))
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > WIDTH:
            lines[-1] += " \\"
            lines.append("    ")
        lines[-1] += f" {part}" if lines[-1].strip() else part
    yield "As a command:"
    yield ""
    yield from lines
    yield ""


def quoted(word: str) -> str:
    """Return the word for a shell, which still replaces a leading ~."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") and word[2:] else shlex.quote(word)


def option_words(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--{negative(option)}"]
    if isinstance(value, dict):
        return [f"--{option}", json.dumps(value, ensure_ascii=False)]
    return [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
