"""Turns a configuration of another library into one of ours: `posttrain import` and `posttrain run`.

Each key is translated, or stands in a comment with the reason why it may be left out. A key that may not be left out,
because the training would change without a message, is a problem: nothing is written then.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from posttrain.config.foreign.answer import (
    ENOUGH,
    LIBRARIES,
    Use,
    add,
    candidates,
    fitted,
    is_null,
    trainer_of,
    unknown_reason,
)
from posttrain.config.foreign.meanings import (
    CHOSEN,
    DEVICES,
    DIRECTORY,
    GROUPED,
    Found,
    Library,
    Meaning,
    TranslationError,
    is_off,
    number,
    plain,
    text_of_value,
)
from posttrain.config.foreign.openrlhf import OPENRLHF, OPENRLHF_2024, POST_PROCESSORS
from posttrain.config.foreign.request import Request
from posttrain.config.sections import option_value
from posttrain.core.errors import UsageError

WIDTH = 110
LONGEST = 60  # of a value in a comment


@dataclass(kw_only=True)
class Foreign:
    """What was given, before it is translated."""

    name: str
    """The file or program, for messages."""
    uses: list[Use]
    libraries: tuple[Library, ...] = ()
    """Those that the program belongs to; empty: recognised by the keys."""
    verbs: tuple[str, ...] = ()
    """Verbs that the program may be; empty: all of the library."""
    devices: int = 0
    """Number of devices that it was started for; 0: unknown."""
    directory: str = "."
    """Directory of the file."""
    notes: list[str] = field(default_factory=list)
    """Words without a counterpart, such as those of a launcher, with the reason."""


@dataclass(kw_only=True)
class Choices:
    """What the user decides besides the configuration."""

    library: str = ""
    verb: str = ""
    devices: int = 0
    ignore: Sequence[str] = ()
    """Keys to leave out although the training depends on them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of ours, which win over the translation."""


class Key(NamedTuple):
    """What became of one key."""

    use: Use
    options: Found
    reason: str
    problem: bool = False
    default: bool = False


@dataclass(kw_only=True)
class Imported:
    """A translated configuration."""

    name: str
    library: str
    verb: str
    options: Found
    keys: list[Key]
    notes: list[str]
    settings: Mapping[str, Any]
    then: list[str] = field(default_factory=list)
    """Words of a command of posttrain that follows, where one command there is two here."""

    @property
    def problems(self) -> list[Key]:
        return [key for key in self.keys if key.problem]

    def mapping(self) -> dict[str, Any]:
        """Return the options as a nested mapping, without the verb."""
        nested: dict[str, Any] = {}
        for option, value in self.options.items():
            section, _, name = option.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[name] = plain(value)
        return nested

    def yaml(self) -> str:
        """Return the configuration as YAML, with the key that each option comes from and the keys that have none."""
        sources: dict[str, list[str]] = {}
        for key in self.keys:
            for option in key.options:
                name = f"{key.use.name} (default of {self.library})" if key.default else key.use.name
                sources.setdefault(option, []).append(name)
        sources |= {option: ["given with the command"] for option in self.settings}
        lines = [f"# Imported from {self.name}, a configuration of {self.library}.", f"verb: {self.verb}"]
        for name, value in self.mapping().items():
            if not isinstance(value, dict) or name in self.options:
                lines.append(with_comment(yaml_entry(name, value), sources.get(name, [])))
                continue
            lines.append(f"{name}:")
            lines += [
                with_comment(f"  {yaml_entry(inner, entry)}", sources.get(f"{name}.{inner}", []))
                for inner, entry in value.items()
            ]
        left_out = [*self.notes, *(f"{key_and_value(key.use)}: {key.reason}" for key in self.left_out)]
        if left_out:
            lines += ["", "# Left out:"]
            lines += [line for text in left_out for line in textwrap.wrap(text, WIDTH, initial_indent="# ",
                                                                          subsequent_indent="#   ")]  # fmt: skip
        return "\n".join(lines) + "\n"

    @property
    def left_out(self) -> list[Key]:
        return [key for key in self.keys if not key.options and not key.default]

    def summary(self) -> str:
        """Return what became of the keys, in one line."""
        given = [key for key in self.keys if not key.default]
        done = sum(bool(key.options) for key in given)
        defaults = sum(bool(key.options) for key in self.keys if key.default)
        more = f", {defaults} defaults of {self.library} added" if defaults else ""
        return (
            f"{self.name}: {self.library}, posttrain {self.verb}; {len(given)} keys: {done} translated, "
            f"{len(given) - done} left out with the reason{more}"
        )


def yaml_entry(name: str, value: Any) -> str:
    """Return an entry of a YAML file on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return f"{name}: {text.removesuffix('...' + chr(10)).rstrip()}"


def with_comment(line: str, names: Sequence[str]) -> str:
    return f"{line}  # {', '.join(dict.fromkeys(names))}" if names else line


def key_and_value(use: Use) -> str:
    """Return a key with its value on one line."""
    value = " ".join(text_of_value(use.value).split())
    value = value if len(value) <= LONGEST else f"{value[: LONGEST - 4]} ..."
    return f"{use.dashes}{use.name}{'' if use.value is True else f' {value}' if use.dashes else f': {value}'}"


# The translation


def import_foreign(foreign: Foreign, request_of: Callable[[str], Request], choices: Choices) -> Imported:
    """Translate; raise UsageError if the library or the verb is unknown."""
    uses = list({use.name: use for use in foreign.uses}.values())  # of equal keys the last one counts
    library = choose_library(foreign, uses, choices)
    verb = choose_verb(library, foreign, uses, choices)
    request = request_of(verb)
    own = trainer_of(verb)
    given = {use.name: use for use in uses}
    theirs = library.defaults_of(own) | library.defaults_of(verb)
    defaults = {name: Use("", "", name, value) for name, value in theirs.items() if name not in given}
    values = {name: use.value for name, use in (defaults | given).items() if not is_null(use.value)}
    chosen = int(choices.settings.get("cluster.devices") or choices.devices)
    devices = choices.devices or foreign.devices or chosen
    if devices:
        values[DEVICES] = str(devices)
    if chosen:
        values[CHOSEN] = str(chosen)
    values[DIRECTORY] = foreign.directory
    keys = [
        translate_key(request, library, use, values, choices, default=name in defaults)
        for name, use in (defaults | given).items()
    ]
    keys = [apply_choices(key, choices, chosen) for key in keys]
    if without_kl(request, keys, choices):
        keys = [without_option(key, "algo.reference", "algo.kl_coef is 0: there is no reference") for key in keys]
    options: Found = {}
    for key in keys:
        for option, value in key.options.items():
            add(options, option, value)
    if devices > 1 and "cluster.devices" in request.known:
        options.setdefault("cluster.devices", str(chosen or devices))
    for option, value in choices.settings.items():
        options[option] = value
    notes, then = list(foreign.notes), follow_up(library, verb, values, options)
    if then:
        notes.append(f"then: posttrain {shlex.join(then)}")
    order = list(request.known)
    return Imported(
        name=foreign.name,
        library=library.name,
        verb=verb,
        options=dict(sorted(options.items(), key=lambda item: order.index(item[0]))),
        keys=keys,
        notes=notes,
        settings=choices.settings,
        then=then,
    )


def follow_up(library: Library, verb: str, values: Mapping[str, Any], options: Found) -> list[str]:
    """Return the command that selects after scoring, as OpenRLHF's post-processors do; scores get their own file."""
    method = POST_PROCESSORS.get(str(values.get("post_processor"))) if verb == "score" else None
    if library not in (OPENRLHF, OPENRLHF_2024) or method is None or "output_file" not in options:
        return []
    out = str(options["output_file"])
    options["output_file"] = f"{out}.scored.jsonl"
    template = str(values.get("reward_template", "")).replace("{input}", "{prompt}").replace("{reward}", "{reward:.2f}")
    wording = ["--condition_template", template] if template and method == "condition" else []
    return ["select", method, options["output_file"], "--output_file", out, *wording]


def translate_key(
    request: Request, library: Library, use: Use, values: Mapping[str, Any], choices: Choices, *, default: bool
) -> Key:
    """Translate one key."""
    if is_null(use.value):
        return Key(use, {}, "has no value")
    meaning = library.meaning(request.verb, use.name) or library.meaning(trainer_of(request.verb), use.name)
    if meaning is None:
        return left_out_or_problem(use, unknown_reason(request, use, [library]), choices, None, default)
    note = meaning.note or "it has no effect here"
    if meaning.verbs and not meaning.options:
        known = str(use.value).lower() in meaning.verbs
        if known:
            return Key(use, {}, note)
        return left_out_or_problem(use, f"{note}; this one is unknown", choices, meaning, default)
    usable = [option for option in meaning.options if option in request.known]
    if not usable:
        note = note if not meaning.options else f"no counterpart in posttrain {request.verb}"
        return left_out_or_problem(use, note, choices, meaning, default)
    try:
        found = meaning.translate(use.value, values) if meaning.translate else None
    except TranslationError as error:
        return without_value(use, usable, str(error), choices, meaning, default)
    if found is None:
        return without_value(use, usable, f"{' and '.join(usable)} must be set ({note})", choices, meaning, default)
    fitting = {option: fitted(request.defaults, option, v) for option, v in found.items() if option in request.known}
    wrong = [option for option, value in fitting.items() if value is None]
    if wrong or len(fitting) < len(found):
        reason = f"does not fit {' and '.join(wrong or usable)} ({note})"
        return without_value(use, usable, reason, choices, meaning, default)
    return Key(use, fitting, "" if fitting else "switched off" if is_off(use.value) else note, default=default)


def without_value(
    use: Use, options: Sequence[str], reason: str, choices: Choices, meaning: Meaning, default: bool
) -> Key:
    """Return what becomes of a key whose value cannot be translated: the user sets the options here, or has to."""
    if set_ones := [option for option in options if option in choices.settings]:
        return Key(use, {}, f"{' and '.join(set_ones)} was given with the command", default=default)
    if meaning.harmless:
        return Key(use, {}, f"{meaning.note}; {' and '.join(options)} may be set", default=default)
    options_text = " or ".join(f"--{option}" for option in options)
    ask = "" if "Give " in reason else f". Give {options_text}"
    return left_out_or_problem(use, f"{reason}{ask}", choices, meaning, default)


def left_out_or_problem(use: Use, reason: str, choices: Choices, meaning: Meaning | None, default: bool) -> Key:
    """Return what becomes of a key without translation: it is left out, or a problem."""
    if use.name in choices.ignore:
        return Key(use, {}, f"left out by --ignore ({reason})")
    harmless = meaning is not None and meaning.may_be_left_out(use.value)
    if default and not harmless:
        return Key(use, {}, f"the default there; {reason}")
    return Key(use, {}, reason, problem=not harmless, default=default)


DIVIDES_A_MODEL = ("_size", "sequence_parallel", "ulysses_degree", "pipeline_schedule", "pipeline_layers_per_stage")
"""Ends of the names of options that divide a model among devices."""


def apply_choices(key: Key, choices: Choices, chosen: int) -> Key:
    """Leave out options that conflict with the devices or the engine that the user chose."""
    kept = dict(key.options)
    if chosen:
        ends = ("_devices", "_colocate_with", *(DIVIDES_A_MODEL if chosen == 1 else ()))
        kept = {o: v for o, v in kept.items() if not (o.startswith("cluster.") and o.endswith(ends))}
        kept.pop("cluster.devices", None)
    if choices.settings.get("rollout.engine") == "local":
        dropped = ("rollout.engine", "rollout.vllm_options", "cluster.rollout_tensor_parallel_size")
        kept = {o: v for o, v in kept.items() if o not in dropped}
    if kept == key.options:
        return key
    return key._replace(options=kept, reason="replaced by the devices or the engine given with the command")


def without_kl(request: Request, keys: Sequence[Key], choices: Choices) -> bool:
    """Whether the trainer has no term with the reference."""
    if "algo.kl_coef" not in request.known:
        return False
    found = {option: value for key in keys for option, value in key.options.items()} | dict(choices.settings)
    return number(found.get("algo.kl_coef", option_value(request.defaults, "algo.kl_coef"))) == 0


def without_option(key: Key, option: str, reason: str) -> Key:
    if option not in key.options:
        return key
    return key._replace(options={o: v for o, v in key.options.items() if o != option}, reason=reason)


def refusal_text(imported: Imported) -> str:
    """Return the message about keys that cannot be left out."""
    lines = [f"{imported.name} cannot be imported as it is: without these keys the training would differ."]
    lines += [f"  {key.use.where}{key_and_value(key.use)}: {key.reason}" for key in imported.problems]
    names = " ".join(dict.fromkeys(key.use.name for key in imported.problems))
    lines.append(f"Nothing was written. To leave them out all the same: --ignore {names}")
    return "\n".join(lines)


# Which library, which verb


def choose_library(foreign: Foreign, uses: Sequence[Use], choices: Choices) -> Library:
    """Return the library that was chosen, that the program belongs to, or that the keys fit."""
    if choices.library:
        named = [lib for lib in LIBRARIES if lib.name.lower().startswith(choices.library.lower())]
        if not named:
            names = ", ".join(library.name for library in LIBRARIES)
            raise UsageError(f"--library {choices.library}: unknown; the libraries are {names}.")
        return named[0]
    if len(foreign.libraries) == 1:
        return foreign.libraries[0]
    if foreign.libraries:
        return max(foreign.libraries, key=lambda library: sum(use.name in library.names for use in uses))
    found = candidates("", uses)
    if not found and (verb := next((use.value for use in uses if use.name == "verb"), "")):
        raise UsageError(f"{foreign.name}: is a configuration of posttrain already: posttrain {verb} {foreign.name}")
    if not found:
        raise UsageError(
            f"{foreign.name}: no library is recognised: fewer than {ENOUGH} of its keys are known. Name it: "
            f"--library {' or '.join(library.name for library in LIBRARIES[:3])} ..."
        )
    if len(found) > 1:
        names = " or ".join(library.name for library in found)
        raise UsageError(f"{foreign.name}: its keys fit {names} alike. Name the library: --library '{found[0].name}'")
    return found[0]


def choose_verb(library: Library, foreign: Foreign, uses: Sequence[Use], choices: Choices) -> str:
    """Return the verb that was chosen, that values ask for, or that the names fit best."""
    if choices.verb:
        return choices.verb
    allowed = list(foreign.verbs)
    for use in uses:
        meanings = (library.meaning(verb, use.name) for verb in (*allowed, *library.by_verb))
        verbs = next((m.verbs.get(str(use.value).lower(), ()) for m in meanings if m), ())
        if verbs:
            allowed = [verb for verb in allowed if verb in verbs] or list(verbs)
    if allowed:
        return allowed[0]
    scores = {verb: score for verb in library.by_verb if (score := sum(fits(library, verb, use) for use in uses))}
    best = [verb for verb, score in scores.items() if score == max(scores.values())]
    if library.default_verb and (library.default_verb in best or not best):
        return library.default_verb
    if best and set(best) <= set(GROUPED):
        return best[0]
    if len(best) == 1:
        return best[0]
    raise UsageError(
        f"{foreign.name}: {library.name}, but its keys do not say which trainer it is for. Name it: --trainer "
        f"{' or '.join(best or list(library.by_verb))}"
    )


def fits(library: Library, verb: str, use: Use) -> bool:
    meaning = library.meaning(verb, use.name)
    return meaning is not None and (bool(meaning.options) or bool(meaning.verbs) or meaning.harmless)


def lines_of(imported: Imported) -> Iterator[str]:
    """Yield the keys that are left out, one line each, for the terminal."""
    yield from imported.notes
    yield from (f"{key_and_value(key.use)}: {key.reason}" for key in imported.left_out)
