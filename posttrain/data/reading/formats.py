"""Recognise the format of data by its columns and turn records into typed examples; nothing is guessed.

A source has the format of its first record, which can be printed. A record that does not fit raises a DataError with
its position, the column and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.types import ExampleKind
from posttrain.data.reading import parsers
from posttrain.data.reading.cells import cell_error
from posttrain.data.reading.columns import KeyMap
from posttrain.data.reading.examples import ChatExample, Example, LabelledExample, PairExample
from posttrain.data.reading.records import Record

VERBS: dict[ExampleKind, tuple[str, ...]] = {
    "text": ("pretrain",),
    "chat": ("sft", "distill"),
    "pair": ("reward", "dpo", "simpo", "orpo", "cpo"),
    "labelled": ("kto",),
    "stepwise": ("prm",),
    "prompt": (),  # reinforcement learning
}
"""The commands that train on each kind of example."""


@dataclass(frozen=True, slots=True)
class Format:
    """A set of columns and how to parse them."""

    name: str
    kind: ExampleKind
    columns: tuple[str, ...]
    parse: Callable[[Record, str], Example]  # the string is the placeholder that marks the end of a step
    optional: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # columns with which the others have another meaning
    condition: Callable[[dict[str, Any]], bool] = lambda values: True

    def matches(self, values: dict[str, Any]) -> bool:
        """Whether a record with these values has this format."""
        missing = any(column not in values for column in self.columns)
        foreign = any(column in values for column in self.excluded)
        return not missing and not foreign and self.condition(values)

    def provides(self, kind: ExampleKind) -> bool:
        """Whether it gives examples of this kind: pairs also give labelled examples, conversations give prompts."""
        return self.kind == kind or (kind, self.kind) in (("labelled", "pair"), ("prompt", "chat"))

    def describe(self, values: dict[str, Any] | None = None) -> str:
        """Return the name and columns; of the optional ones those that `values` has."""
        columns: Sequence[str] = self.columns
        if values is not None:
            used = {*self.columns, *(column for column in self.optional if values.get(column) is not None)}
            columns = [column for column in values if column in used]
        return f"{self.name}: {', '.join(columns)}"


class SourceFormat:
    """The format of one source: recognised by its first record, required of all others."""

    def __init__(self, kind: ExampleKind, placeholder: str, map_keys: str | Mapping[str, Any] = "") -> None:
        self.kind = kind
        self.placeholder = placeholder
        self.keys = KeyMap.parse(map_keys)
        self.format: Format | None = None
        self.description = ""
        self._known_columns: set[tuple[str, ...]] = set()

    def examples(self, record: Record) -> list[Example]:
        """Return the record's example, or two labelled examples for a pair."""
        record = self.keys.apply(record)
        columns = tuple(record.values)
        if self.format is None:
            self.format = recognise(record, self.kind)
            self.description = self.format.describe(record.values)
            if self.kind == "prompt" and self.format.kind == "chat":
                kept = "" if "ground_truth" in record.values else " and kept as ground_truth"
                self.description += f"; the last completion is removed{kept}"
        elif columns not in self._known_columns:
            for column in self.format.columns:
                if column not in record.values:
                    raise cell_error(record, column, f"missing column; the first example was {self.description}")
            found = recognise(record, self.kind)
            if found is not self.format:
                reason = f"this example is {found.describe(record.values)}; the first one was {self.description}"
                raise DataError(f"{record.origin}: {reason}")
        self._known_columns.add(columns)
        example = self.format.parse(record, self.placeholder)
        if self.kind == "labelled" and isinstance(example, PairExample):
            shared: dict[str, Any] = {"origin": record.origin, "prompt": example.prompt, "plain": example.plain}
            return [
                LabelledExample(completion=example.chosen, label=1.0, **shared),
                LabelledExample(completion=example.rejected, label=0.0, **shared),
            ]
        if self.kind == "prompt" and isinstance(example, ChatExample):
            return [parsers.prompt_from_chat(record, example)]
        return [example]


def recognise(record: Record, kind: ExampleKind) -> Format:
    """Return the format for `kind` that the record's columns fit; DataError if there is none or more than one."""
    fitting = [form for form in FORMATS if form.matches(record.values)]
    serving = [form for form in fitting if form.provides(kind)]
    if kind == "prompt":  # a column with a prompt takes precedence over a conversation
        serving = [form for form in serving if form.kind == "prompt"] or serving
    if len(serving) == 1:
        return serving[0]
    wanted = f"Formats for {_named(VERBS[kind])}:\n" + "\n".join(
        f"  {form.describe()}" for form in FORMATS if form.provides(kind)
    )
    if serving:
        both = " or ".join(form.describe(record.values) for form in serving)
        raise DataError(f"{record.origin}: ambiguous columns: {both}; remove or rename one of the columns")
    if fitting:
        verbs = tuple(dict.fromkeys(verb for form in fitting for verb in _verbs_taking(form)))
        is_a = " or ".join(form.describe(record.values) for form in fitting)
        raise DataError(f"{record.origin}: the format is {is_a}, which is data for {_named(verbs)}. {wanted}")
    found = ", ".join(record.values) or "none"
    rename = 'rename columns with data.map_keys, for example --data.map_keys \'{"prompt": "COLUMN"}\'.'
    raise DataError(f"{record.origin}: no known format has the columns {found}; {rename} {wanted}")


def _named(verbs: Sequence[str]) -> str:
    return ", ".join(verbs) or "reinforcement learning"


def _verbs_taking(form: Format) -> list[str]:
    return [verb for kind, verbs in VERBS.items() if form.provides(kind) for verb in verbs]


# The table of formats

MARGIN_COLUMNS = ("margin", "chosen_score", "rejected_score")
ALPACA_COLUMNS = ("input", "history", "system")
COMPLETION_COLUMNS = ("completion", "completions", "response", "chosen", "rejected", "label")
PROMPT_COLUMNS = ("prompt", "instruction", "conversations", "messages", "question", "problem", "input")

FORMATS = (
    Format("text", "text", ("text",), parsers.parse_text),
    Format("chat", "chat", ("messages",), parsers.parse_chat, ("tools",), excluded=("label",)),
    Format(
        "prompt and completion", "chat", ("prompt", "completion"), parsers.parse_prompt_completion, excluded=("label",)
    ),
    Format(
        "Alpaca",
        "chat",
        ("instruction", "output"),
        parsers.parse_alpaca,
        ALPACA_COLUMNS,
        excluded=("label",),
        condition=lambda values: not isinstance(values["output"], list),
    ),
    Format(
        "prompt and response",
        "chat",
        ("prompt", "response"),
        parsers.parse_prompt_response,
        ("query", "history", "system"),
        excluded=("label", "completion"),
    ),
    Format(
        "ShareGPT",
        "chat",
        ("conversations",),
        parsers.parse_sharegpt,
        ("system", "tools"),
        excluded=("chosen", "rejected", "label"),
    ),
    Format(
        "GSM8K",
        "chat",
        ("question", "answer"),
        parsers.parse_question_answer,
        excluded=("label",),
        condition=parsers.is_gsm8k,
    ),
    Format(
        "question and answer",
        "chat",
        ("question", "answer"),
        parsers.parse_question_answer,
        excluded=("label",),
        condition=lambda values: not parsers.is_gsm8k(values) and not parsers.has_options(values),
    ),
    Format(
        "multiple choice",
        "chat",
        ("question", "A", "B", "answer"),
        parsers.parse_multiple_choice,
        tuple(parsers.LETTERS[2:]),
        excluded=("label", "choices"),
        condition=lambda values: not parsers.is_gsm8k(values),
    ),
    Format(
        "multiple choice",
        "chat",
        ("question", "choices", "answer"),
        parsers.parse_multiple_choice,
        excluded=("label",),
        condition=lambda values: not parsers.is_gsm8k(values) and isinstance(values["choices"], list),
    ),
    Format(
        "prompt",
        "prompt",
        ("prompt",),
        parsers.parse_prompt,
        ("tools",),
        excluded=COMPLETION_COLUMNS,
        condition=lambda values: not parsers.has_ground_truth(values),
    ),
    Format(
        "messages to answer",
        "prompt",
        ("messages",),
        parsers.parse_prompt_messages,
        ("tools",),
        excluded=("label",),
        condition=parsers.ends_with_prompt,
    ),
    Format(
        "verl",
        "prompt",
        ("prompt", "reward_model"),
        parsers.parse_verl,
        ("extra_info",),
        excluded=COMPLETION_COLUMNS,
        condition=parsers.has_ground_truth,
    ),
    Format("preference", "pair", ("prompt", "chosen", "rejected"), parsers.parse_pair, MARGIN_COLUMNS),
    Format("hh-rlhf", "pair", ("chosen", "rejected"), parsers.parse_hh_pair, MARGIN_COLUMNS, excluded=PROMPT_COLUMNS),
    Format(
        "ShareGPT pairwise",
        "pair",
        ("conversations", "chosen", "rejected"),
        parsers.parse_sharegpt_pair,
        ("system", *MARGIN_COLUMNS),
    ),
    Format(
        "Alpaca pairwise",
        "pair",
        ("instruction", "chosen", "rejected"),
        parsers.parse_alpaca_pair,
        (*ALPACA_COLUMNS, *MARGIN_COLUMNS),
    ),
    Format(
        "Alpaca pairwise, output a list of two",
        "pair",
        ("instruction", "output"),
        parsers.parse_alpaca_output_pair,
        (*ALPACA_COLUMNS, *MARGIN_COLUMNS),
        excluded=("chosen", "rejected"),
        condition=lambda values: isinstance(values["output"], list),
    ),
    Format("labelled chat", "labelled", ("messages", "label"), parsers.parse_labelled_chat),
    Format("labelled completion", "labelled", ("prompt", "completion", "label"), parsers.parse_labelled_completion),
    Format("steps", "stepwise", ("prompt", "completions", "labels"), parsers.parse_stepwise),
    Format("ProcessBench", "stepwise", ("problem", "steps", "label"), parsers.parse_processbench),
    Format(
        "marked steps", "stepwise", ("input", "value"), parsers.marked_steps_parser("value"), excluded=("instruction",)
    ),
    Format(
        "marked steps",
        "stepwise",
        ("input", "label"),
        parsers.marked_steps_parser("label"),
        excluded=("instruction", "value"),
        condition=lambda values: isinstance(values["label"], list),
    ),
)
