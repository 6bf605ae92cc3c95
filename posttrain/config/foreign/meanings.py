"""How a table says what an option of another library is called here.

A table maps names to an option of ours (a string: the same value under another name) or to a `Meaning`, made by the
functions below. Several names with one meaning stand in one string, separated by spaces; `*` matches any text.
Values are what was written: a text, a list of texts, a mapping, or True for an option without a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate as as_regex
from functools import cached_property
from typing import Any

DEVICES = "(devices)"
"""Name in `Given` of the number of devices that the configuration was written for."""
DIRECTORY = "(directory)"
"""Name in `Given` of the directory of the configuration."""
CHOSEN = "(chosen devices)"
"""Name in `Given` of the number of devices that the user chose instead of the configuration's."""

Found = dict[str, Any]
"""Option here -> value."""
Given = Mapping[str, Any]
"""All names of the same command or file -> value."""
Translate = Callable[[Any, Given], Found | None]
"""Value and all that was given -> options here; None: it has to be decided by hand."""

OFFLINE = ("sft", "pretrain", "reward", "prm", "dpo", "kto", "simpo", "orpo", "cpo", "distill")
ONLINE = ("grpo", "gspo", "gmpo", "cispo", "sapo", "rloo", "reinforce", "remax", "ppo", "opd")
EVERY = (*OFFLINE, *ONLINE)
GROUPED = ("grpo", "gspo", "gmpo", "cispo", "sapo")
REFERENCED = ("dpo", "kto")
MARGIN = ("dpo", "simpo", "cpo")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an option of another library is here: options, a note on what is different, or why there is none."""

    options: tuple[str, ...] = ()
    note: str = ""
    translate: Translate | None = None
    verbs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Value -> the verbs here that it asks for, the most likely one first."""
    harmless: bool = False
    """Whether it may be left out without changing what is trained."""
    same: tuple[str, ...] = ()
    """Values that ask for what is done here anyway; with another value it must not be left out."""

    def may_be_left_out(self, value: Any) -> bool:
        """Whether a run without this value trains the same."""
        return self.harmless or is_off(value) or text_of_value(value).lower() in self.same


Table = Mapping[str, str | Meaning]


@dataclass(frozen=True)
class Library:
    """A library with its tables; for a verb, a later table wins over an earlier one."""

    name: str
    tables: tuple[tuple[tuple[str, ...], Table], ...]
    programs: Mapping[str, str] = field(default_factory=dict)
    """Verb here -> what that is called there."""
    defaults: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = ()
    """Verbs -> name -> the value there if it is not given, where that is not the value here."""
    default_verb: str = ""
    """The verb of a configuration that does not say which trainer it is for."""

    def defaults_of(self, verb: str) -> dict[str, Any]:
        """Return the values that count there unless others are given."""
        return {name: value for verbs, values in self.defaults if verb in verbs for name, value in values.items()}

    @cached_property
    def by_verb(self) -> dict[str, dict[str, Meaning]]:
        """Verb -> name -> meaning."""
        found: dict[str, dict[str, Meaning]] = {verb: {} for verbs, _ in self.tables for verb in verbs}
        for verbs, table in self.tables:
            rows = {name: as_meaning(entry) for names, entry in table.items() for name in names.split()}
            for verb in verbs:
                found[verb] |= rows
        return found

    @cached_property
    def names(self) -> frozenset[str]:
        """All names of all verbs, without patterns."""
        return frozenset(name for rows in self.by_verb.values() for name in rows if "*" not in name)

    @cached_property
    def patterns(self) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
        """Verb -> the names with a *, the longest first, as they are matched."""
        names = {verb: [name for name in rows if "*" in name] for verb, rows in self.by_verb.items()}
        return {
            verb: [(n, re.compile(as_regex(n))) for n in sorted(ns, key=len, reverse=True)]
            for verb, ns in names.items()
        }

    def meaning(self, verb: str, name: str) -> Meaning | None:
        """Find what a name means with a verb: its row, that of the longest pattern, or that of the mapping it is in."""
        rows = self.by_verb.get(verb, {})
        if name in rows:
            return rows[name]
        matching = (pattern for pattern, matches in self.patterns.get(verb, []) if matches.fullmatch(name))
        mapping, _, _ = name.rpartition(".")
        return rows.get(next(matching, mapping))

    def shortened(self, verb: str, name: str) -> Meaning | None:
        """Find the meaning of the end of a long name, such as `rollout.n`, if only one name ends so."""
        ends = [rows for key, rows in self.by_verb.get(verb, {}).items() if key.endswith(f".{name}")]
        return ends[0] if ends and len({rows.options for rows in ends}) == 1 else None

    def verbs_with(self, name: str) -> list[str]:
        return [verb for verb in self.by_verb if self.meaning(verb, name)]


def as_meaning(entry: str | Meaning) -> Meaning:
    return here(entry) if isinstance(entry, str) else entry


# What a table says


def here(option: str, note: str = "") -> Meaning:
    """Translate to another name with the same value."""
    return Meaning((option,), note, lambda value, given: {option: value})


def by_hand(*options: str, note: str = "", harmless: bool = False) -> Meaning:
    """Name options whose value does not follow from the value there."""
    return Meaning(options, note, harmless=harmless)


def made(*options: str, by: Translate, note: str = "", harmless: bool = False) -> Meaning:
    """Name options whose values `by` computes."""
    return Meaning(options, note, by, harmless=harmless)


def part_of(option: str, note: str) -> Meaning:
    """Mark a value that the translation of another name uses."""
    return Meaning((option,), note, lambda value, given: {})


def chosen(option: str, values: Mapping[str, Any], note: str = "") -> Meaning:
    """Another word for the value; one that is not listed has to be decided by hand."""

    def translate(value: Any, given: Given) -> Found | None:
        return {option: values[word]} if (word := str(value).lower()) in values else None

    return Meaning((option,), note, translate)


def if_true(values: Found, note: str = "") -> Meaning:
    """Translate a switch there to these values here."""
    return Meaning(tuple(values), note, lambda value, given: dict(values) if truth(value) else {})


def sequence_parallel(*sizes: str) -> Meaning:
    """Translate Megatron's switch, which has an effect where one of the given tensor-parallel sizes is above 1."""

    def translate(value: Any, given: Given) -> Found:
        divided = any((number(given.get(name)) or 1) > 1 for name in sizes)
        return {"cluster.sequence_parallel": "true"} if truth(value) and divided else {}

    return Meaning(("cluster.sequence_parallel",), "where tensor parallelism divides the model", translate)


def listed(option: str, note: str = "") -> Meaning:
    """Translate to a list; names separated by commas are split."""
    return Meaning((option,), note, lambda value, given: {option: items(value)})


def absent(reason: str, *same: str) -> Meaning:
    """Mark a name without counterpart that the training needs, unless it is switched off or one of `same`."""
    return Meaning(note=f"no counterpart: {reason}", same=same)


def unrelated(reason: str) -> Meaning:
    """Mark a name without counterpart and without influence on what is trained."""
    return Meaning(note=f"no counterpart: {reason}", harmless=True)


def needless(reason: str) -> Meaning:
    return Meaning(note=f"not needed: {reason}", harmless=True)


EXPERTS_BY_TENSORS = unrelated("experts are divided among tensor-parallel devices like the other matrices")


# Values


class TranslationError(Exception):
    """Raised by a translation that knows why there is none for a value."""


OFF = ("", "false", "none", "null", "~", "no", "off", "0", "0.0", "[]", "{}")


def truth(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def is_off(value: Any) -> bool:
    """Whether a value switches its option off, or is empty."""
    return value is None or value in ([], {}) or str(value).lower() in OFF


def text_of_value(value: Any) -> str:
    """Return a value as one text; the entries of a list are separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def items(value: Any) -> list[str]:
    """Split `a,b` or ["a", "b"], a text or a list, into its items."""
    words = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return [bare for word in words if (bare := str(word).strip(" '\""))]


def ratio(option: str, *names: str, note: str) -> Meaning:
    """Translate to the value divided by that of the first of `names` that was given; by hand if none was."""

    def translate(value: Any, given: Given) -> Found | None:
        above, below = number(value), number(next((given[name] for name in names if name in given), None))
        return {option: f"{above / below:g}"} if above is not None and below else None

    return Meaning((option,), note, translate)


def product(option: str, *names: str, note: str) -> Meaning:
    """Translate to the product of several numbers there; to be set by hand if one of them was not given."""

    def translate(value: Any, given: Given) -> Found | None:
        total = 1.0
        for name in names:
            factor = number(given.get(name))
            if factor is None:
                return None
            total *= factor
        return {option: str(round(total))}

    return Meaning((option,), note, translate)


def batch_of(option: str, note: str, *names: str) -> Meaning:
    """Translate to a size per device (the first name) times other numbers, which are 1 if not given, times devices."""

    def translate(value: Any, given: Given) -> Found | None:
        if DEVICES not in given:
            raise TranslationError(
                "a size per device, and the number of devices is not known. Give it with --devices N, or all examples "
                f"of a step with --{option}"
            )
        first, *others = names
        factors = [number(given.get(first)), *(number(given.get(name, "1")) for name in (*others, DEVICES))]
        return None if None in factors else {option: str(round(math.prod(factor or 0 for factor in factors)))}

    return Meaning((option,), note, translate)


def clip_both(unless: str = "") -> Meaning:
    """Translate one clip range to both sides; `unless`: the name of a separate upper one."""

    def translate(value: Any, given: Given) -> Found:
        both = {"algo.clip_low": value, "algo.clip_high": value}
        return {"algo.clip_low": value} if unless and given.get(unless) is not None else both

    return Meaning(("algo.clip_low", "algo.clip_high"), "both sides", translate)


def positive_only(option: str, note: str = "") -> Meaning:
    """Translate a number that is 0 or below where it is switched off; here that is 0."""

    def translate(value: Any, given: Given) -> Found | None:
        amount = number(value)
        return None if amount is None else {option: value if amount > 0 else "0"}

    return Meaning((option,), note, translate)


def if_positive(option: str, note: str = "") -> Meaning:
    """Translate a number, unless it is 0 or below, which means that it is not set."""

    def translate(value: Any, given: Given) -> Found | None:
        amount = number(value)
        return None if amount is None else {option: value} if amount > 0 else {}

    return Meaning((option,), note, translate)


def reward_model(*, note: str = "a reward model is a reward of the form model:PATH") -> Meaning:
    return Meaning(
        ("reward.functions",), note, lambda value, given: {"reward.functions": [f"model:{p}" for p in items(value)]}
    )


def vllm(name: str, *, unless: str = "", note: str = "") -> Meaning:
    """Pass on an option of vLLM by its own name. `unless`: a switch there that must be on for vLLM to be used."""

    def translate(value: Any, given: Given) -> Found:
        if unless and not truth(given.get(unless)):
            return {}
        return {"rollout.engine": "vllm", "rollout.vllm_options": {name: plain(value)}}

    return Meaning(("rollout.vllm_options",), note or f"as {name}, with rollout.engine vllm", translate)


def reward_range(value: Any, given: Given) -> Found | None:
    """Translate a range: [-10, 10] is 10, other ones are two bounds."""
    bounds = [number(bound) for bound in items(value)]
    low, high = bounds if len(bounds) == 2 else (None, None)
    if low is None or high is None:
        return None
    if low == -high:
        return {"reward.clip": f"{high:g}"}
    return {"reward.clip_min": f"{low:g}", "reward.clip_max": f"{high:g}"}


STEP_TOKENS = Meaning(
    ("algo.positive_token", "algo.negative_token"),
    "two options; more than two kinds of steps do not exist",
    lambda value, given: (
        dict(zip(("algo.positive_token", "algo.negative_token"), items(value), strict=True))
        if len(items(value)) == 2
        else None
    ),
)


def offload(*parts: str) -> Meaning:
    return if_true({"cluster.offload": list(parts)}, note=" ".join(parts))


OFFLOADED_ACTIVATIONS: Found = {"cluster.offload": ["activations"], "model.gradient_checkpointing": "true"}
OFFLOADED_INPUTS = "activations, together with model.gradient_checkpointing: the inputs of layers are moved"


def plain(value: Any) -> Any:
    """Convert a text to the number or bool that it stands for."""
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def with_pattern(prefixes: str, table: Table) -> dict[str, str | Meaning]:
    """Return the table with each of the prefixes before each of its names."""
    found: dict[str, str | Meaning] = {}
    for names, entry in table.items():
        found[" ".join(f"{prefix}.{name}" for prefix in prefixes.split() for name in names.split())] = entry
    return found
