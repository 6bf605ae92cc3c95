"""Recognise the format of data by its columns and turn records into typed examples; nothing is guessed.

A source has the format of its first record, which can be printed. A record that does not fit raises a DataError with
its position, the column and the reason. The formats are the rows of `format_table.FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.types import ExampleKind
from posttrain.data.ground_truth import ground_truth_of
from posttrain.data.reading import parsers
from posttrain.data.reading.cells import (
    QUARANTINE,
    cell_error,
    refuse_media,
    refuse_template_options,
    refuse_tools,
    refuse_unused_context,
    refuse_weight,
    with_system,
)
from posttrain.data.reading.columns import KeyMap
from posttrain.data.reading.examples import (
    ChatExample,
    Example,
    LabelledExample,
    PairExample,
    PromptExample,
    SegmentsExample,
    StepwiseExample,
    TextExample,
)
from posttrain.data.reading.format_table import FORMATS, Format, has_sentences
from posttrain.data.reading.records import Record
from posttrain.data.reading.suggestions import suggestion

__all__ = ["FORMATS", "VERBS", "Format", "SourceFormat", "recognise", "unknown_format"]

VERBS: dict[ExampleKind, tuple[str, ...]] = {
    "text": ("pretrain",),
    "chat": ("sft", "distill"),
    "pair": ("reward", "dpo", "simpo", "orpo", "cpo"),
    "labelled": ("kto",),
    "stepwise": ("prm",),
    "prompt": (),  # reinforcement learning
}
"""The commands that train on each kind of example."""
USUAL_SHOWN = 5  # formats in a message
COLUMNS_SHOWN = 40


class SourceFormat:
    """The format of one source: recognised by its first record, required of all others."""

    def __init__(self, kind: ExampleKind, placeholder: str, map_keys: str | Mapping[str, Any] = "") -> None:
        self.kind = kind
        self.placeholder = placeholder
        self.keys = KeyMap.parse(map_keys)
        self.format: Format | None = None
        self._verdict = ""
        self._unused: dict[str, None] = {}  # columns with text, of all records so far, of which nothing is used
        self._known_columns: set[tuple[str, ...]] = set()

    @property
    def description(self) -> str:
        """The verdict: the format, its columns, how they are used, and the columns with text that are not."""
        unused = "only for reward functions" if self.kind == "prompt" else "not used"
        return self._verdict + (f"; {unused}: {', '.join(self._unused)}" if self._unused else "")

    def examples(self, record: Record) -> list[Example]:
        """Return the record's examples: one as a rule, two labelled ones for a pair, several in some formats."""
        record = self.keys.apply(record)
        refuse_media(record)
        refuse_template_options(record)
        form = self._format_of(record)
        if self.kind != "prompt":
            refuse_weight(record)
        if form.takes_system and "tools" not in form.used:
            refuse_tools(record)
        parsed = form.parse(record, self.placeholder)
        if form.question and not self.keys.changes_columns:
            refuse_unused_context(record, form.used, form.question)
        examples = [self._finish(form, record, one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        self._unused |= dict.fromkeys(name for name in form.unused(record.values) if name not in self.keys.read_inside)
        made = [made for example in examples for made in self._of_kind(record, example)]
        if len(examples) > 1 and self.kind == "labelled":  # the best completion is part of several pairs
            made = [example for index, example in enumerate(made) if example not in made[:index]]
        return made

    def _format_of(self, record: Record) -> Format:
        """Return the format, which the first record determines; DataError if this one has another."""
        columns = tuple(record.values)
        if self.format is None:
            found = recognise(record, self.kind)
            self._check_mapped(found, record)
            self.format, self._verdict = found, self._describe(found, record)
        elif columns not in self._known_columns or not self.format.condition(record.values):
            for column in self.format.columns:
                if column not in record.values:
                    raise cell_error(record, column, f"missing column; the first example was {self._verdict}")
            found = recognise(record, self.kind)
            same = found.parse is self.format.parse and self.kind != "prompt"  # GSM8K differs in the ground truth only
            if found is not self.format and not same:
                reason = f"this example is {found.describe(record.values)}; the first one was {self._verdict}"
                raise DataError(f"{record.origin}: {reason}")
        self._known_columns.add(columns)
        return self.format

    def _check_mapped(self, form: Format, record: Record) -> None:
        """Check that the format uses every column that data.map_keys names; reward functions may use any."""
        mapped = [our for our, their in self.keys.columns.items() if their and our in record.values]
        lost = [our for our in mapped if our not in form.used and self.kind != "prompt"]
        if lost:
            other = next((column for column in form.columns if column not in mapped), "")
            remedy = f'remove {other} with "{other}": ""' if other else "remove it there"
            reason = f"data.map_keys sets it, but the format is {form.describe(record.values)}, which does not use it"
            raise cell_error(record, lost[0], f"{reason}; {remedy}")

    def _finish(self, form: Format, record: Record, example: Example) -> Example:
        """Put the system prompt of a column before the messages, and check what holds for all formats."""
        if isinstance(example, PairExample):
            _check_pair(form, record, example)
        if not form.takes_system or isinstance(example, TextExample | SegmentsExample):
            return example
        if isinstance(example, ChatExample):
            messages = with_system(record, form.columns[0], example.messages)
            return example if messages is example.messages else replace(example, messages=messages, plain=False)
        assert isinstance(example, PairExample | LabelledExample | StepwiseExample | PromptExample)
        prompt = with_system(record, form.columns[0], example.prompt)
        if len(prompt) == 1 and not example.prompt:
            raise cell_error(record, "system", "the format has no prompt that a system prompt could come before")
        return example if prompt is example.prompt else replace(example, prompt=prompt, plain=False)

    def _describe(self, form: Format, record: Record) -> str:
        """Return the format, its columns and how they are used."""
        description = form.describe(record.values)
        if self.kind == "prompt" and form.kind == "chat":
            kept = " and kept as ground_truth" if self._has_no_truth(form, record) else ""
            return f"{description}; the last completion is removed{kept}"
        return f"{description}; {form.note}" if form.note else description

    def _of_kind(self, record: Record, example: Example) -> list[Example]:
        """Return the examples of this source's kind that a parsed one gives."""
        if self.kind == "labelled" and isinstance(example, PairExample):
            shared: dict[str, Any] = {
                "origin": record.origin,
                "prompt": example.prompt,
                "plain": example.plain,
                "raw": example.raw,
            }
            return [
                LabelledExample(completion=example.chosen, label=1.0, **shared),
                LabelledExample(completion=example.rejected, label=0.0, **shared),
            ]
        if not isinstance(example, ChatExample):
            return [example]
        assert self.format is not None
        truth = self._ground_truth(self.format, record) if self.kind == "prompt" else None
        last = example.messages[-1]
        if truth is None and not last["content"].strip() and "tool_calls" not in last:
            raise cell_error(record, " and ".join(self.format.columns[1:]), "empty completion")
        return [example if self.kind != "prompt" else parsers.prompt_from_chat(record, example, truth)]

    def _has_no_truth(self, form: Format, record: Record) -> bool:
        return form.truth is None and self._ground_truth(form, record) is None

    def _ground_truth(self, form: Format, record: Record) -> Any:
        """Return the ground truth of a conversation that is not its completion, or None."""
        if form.truth is not None:
            return form.truth(record)
        return ground_truth_of({name: value for name, value in record.values.items() if name not in form.columns})


def _check_pair(form: Format, record: Record, pair: PairExample) -> None:
    """Raise a DataError if both completions are equal, or if both repeat the prompt, which would be trained on."""
    if pair.chosen == pair.rejected:
        both = "the chosen and the rejected completion are equal: none is preferred"
        raise DataError(f"{record.origin}: {both}; {QUARANTINE}")
    column = form.columns[0]
    written = record.values.get(column)
    prompt = written.strip() if isinstance(written, str) and not pair.raw else ""
    texts = [completion[0]["content"].lstrip() for completion in (pair.chosen, pair.rejected)]
    if has_sentences(prompt) and all(text.startswith(prompt) for text in texts):
        reason = f'begins both completions, which would be trained on; remove it with data.map_keys {{"{column}": ""}}'
        raise cell_error(record, column, f"{reason}, so that the text that both begin with is the prompt")


def recognise(record: Record, kind: ExampleKind) -> Format:
    """Return the format for `kind` that the record's columns fit; DataError if there is none or more than one."""
    fitting = _most_specific([form for form in FORMATS if form.matches(record.values)])
    serving = [form for form in fitting if form.provides(kind)]
    if kind == "prompt":  # a column with a prompt takes precedence over a conversation
        serving = [form for form in serving if form.kind == "prompt"] or serving
    if len(serving) == 1:
        return serving[0]
    if serving:
        both = " or ".join(form.describe(record.values) for form in serving)
        own = next(column for column in serving[0].columns if column not in serving[1].columns)
        remove = f'with --data.map_keys \'{{"{own}": ""}}\''
        raise DataError(f"{record.origin}: ambiguous columns: {both}; remove one of the columns, for example {remove}")
    if not fitting:
        raise unknown_format(record, [kind])
    verbs = tuple(dict.fromkeys(verb for form in fitting for verb in _verbs_taking(form)))
    is_a = " or ".join(dict.fromkeys(form.describe(record.values) for form in fitting))
    usual = dict.fromkeys(form.describe() for form in FORMATS if form.provides(kind))
    wanted = (
        f"Usual formats for {verb_names(VERBS[kind])}: {'; '.join(list(usual)[:USUAL_SHOWN])}; docs/data.md lists all."
    )
    raise DataError(f"{record.origin}: the format is {is_a}, which is data for {verb_names(verbs)}. {wanted}")


def unknown_format(record: Record, kinds: Sequence[ExampleKind]) -> DataError:
    """Return the error for a record that fits no format: its columns, near formats, and a map_keys that would do."""
    columns = list(map(str, record.values))
    found = ", ".join(columns[:COLUMNS_SHOWN]) + ", ..." * (len(columns) > COLUMNS_SHOWN) or "none"

    def is_known(mapping: dict[str, str], kind: ExampleKind) -> bool:
        mapped = KeyMap.parse(mapping).apply(record)
        return any(form.matches(mapped.values) and form.provides(kind) for form in FORMATS)

    advice = suggestion(record, kinds, FORMATS, is_known)
    return DataError(f"{record.origin}: no known format has the columns {found}.{_wrapped(record)}{advice}")


def _wrapped(record: Record) -> str:
    """Return a sentence about records that are inside of this one: a line that is a list, or a list in a column."""
    if all(str(name).isdigit() for name in record.values):
        return " The line is a list: if its items are the records, the name of the file must end in .json."
    for name, value in record.values.items():
        item = value[0] if isinstance(value, list) and value else None
        if isinstance(item, dict) and any(form.matches(item) for form in FORMATS):
            return f" If the records are the items of {name}, write them one per line: jq -c '.{name}[]' FILE."
    return ""


def _most_specific(forms: list[Format]) -> list[Format]:
    """Return the formats without those that need a part of the columns of another one of the same kind."""
    return [
        form
        for form in forms
        if not any(other.kind == form.kind and set(form.columns) < set(other.columns) for other in forms)
    ]


def verb_names(verbs: Sequence[str]) -> str:
    """Return the names of verbs for a message."""
    return ", ".join(verbs) or "reinforcement learning"


def _verbs_taking(form: Format) -> list[str]:
    return [verb for kind, verbs in VERBS.items() if form.provides(kind) for verb in verbs]
