"""Read several sources as one kind of example, and write examples in the usual format of their kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import ExampleKind
from posttrain.data.check import first_records, possible_kinds
from posttrain.data.ground_truth import ground_truth_of
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
from posttrain.data.reading.format_table import COMPLETION_COLUMNS, FORMATS, Format
from posttrain.data.reading.formats import SourceFormat
from posttrain.data.reading.records import ReadProgress, Record
from posttrain.data.reading.sources import read_records, scan_records, source_parts

PLACEHOLDER = "ки"  # the step token of Math-Shepherd, for stepwise examples
FORMAT_COLUMNS = {*COMPLETION_COLUMNS, "tools", "system", *(column for form in FORMATS for column in form.columns)}
FORMAT_COLUMNS -= {"answer", "solution", "ground_truth"}
"""Columns that a normalised prompt does not keep, because they are the prompt or would make it another format."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A source and the kind of its examples."""

    name: str
    kind: ExampleKind
    map_keys: Mapping[str, Any]

    def rows(self, normalize: bool, meter: ReadProgress | None = None) -> Iterator[tuple[Row, list[Example]]]:
        """Yield each row to write with its examples; DataError at the first record that cannot be used."""
        form, keys = SourceFormat(self.kind, PLACEHOLDER, self.map_keys), KeyMap.parse(self.map_keys)
        for record in read_records(self.name, meter):
            examples = form.examples(record)
            if not normalize:
                yield keys.apply(record).values, examples
                continue
            for example in examples:
                yield normalised_row(example), [example]


def open_sources(
    names: Sequence[str], kind: ExampleKind | None, map_keys: Mapping[str, Any], normalize: bool
) -> list[Source]:
    """Return the sources; without `kind`, as the first kind that all of them give.

    UsageError if they give no common kind or, unless they are normalised, have different formats.
    """
    if not names:
        raise UsageError("no data files are given")
    for name in names:
        source_parts(name)  # a wrong name is reported before any file is read
    kinds = {name: _kinds(name, map_keys) for name in names}
    common = [shared for shared in next(iter(kinds.values())) if all(shared in found for found in kinds.values())]
    if kind is not None and kind not in common:
        name = next(name for name, found in kinds.items() if kind not in found)
        raise DataError(f"{name}: gives no examples of the kind {kind!r}; `posttrain data check {name}` shows why")
    if not common:
        found = "; ".join(f"{name} is {_described(found)}" for name, found in kinds.items())
        raise DataError(f"the files have no kind of example in common: {found}")
    chosen = kind or common[0]
    if not normalize and len({_format(name, chosen, map_keys) for name in names}) > 1:
        found = "; ".join(f"{name} is {formats[chosen].partition(';')[0]}" for name, formats in kinds.items())
        raise UsageError(f"the files have different formats: {found}. Add --normalize to write all in one format")
    return [Source(name, chosen, map_keys) for name in names]


def refuse_overwriting(names: Sequence[str], outputs: Iterable[Path]) -> None:
    """Raise UsageError if a file to write is one of those to read."""
    existing = [path for path in outputs if path.exists()]
    for name in names:
        for part in source_parts(name):
            if any(Path(part.name).exists() and path.samefile(part.name) for path in existing):
                raise UsageError(f"{part.name} is both read and written; name another output")


def _kinds(name: str, map_keys: Mapping[str, Any]) -> dict[ExampleKind, str]:
    start = first_records(scan_records(name))
    return possible_kinds(start, lambda kind: SourceFormat(kind, PLACEHOLDER, map_keys))


def _format(name: str, kind: ExampleKind, map_keys: Mapping[str, Any]) -> Format:
    form = SourceFormat(kind, PLACEHOLDER, map_keys)
    form.examples(next(read_records(name)))
    assert form.format is not None, "it is recognised by the first record"
    return form.format


def _described(kinds: dict[ExampleKind, str]) -> str:
    return " or ".join(dict.fromkeys(kinds.values())) or "of no known format"


def normalised_row(example: Example) -> Row:
    """Return an example as a row that is read as the same example; DataError if there is no such row."""
    if isinstance(example, SegmentsExample):
        raise DataError(f"{example.origin}: cannot be normalised: text with control tokens cannot become messages")
    row, form = _row(example), SourceFormat(kind_of(example), PLACEHOLDER)
    try:
        (again,) = form.examples(Record(row, example.origin))
    except DataError as error:
        raise DataError(f"{example.origin}: cannot be normalised: {error}") from error
    differing = [
        entry.name
        for entry in fields(example)
        if entry.name not in ("origin", "plain", "columns")
        and getattr(again, entry.name) != getattr(example, entry.name)
    ]
    if isinstance(example, PromptExample) and isinstance(again, PromptExample):
        differs = ground_truth_of(example.columns) != ground_truth_of(again.columns)
        differing += ["the ground truth"] if differs else []
    if differing:
        raise DataError(f"{example.origin}: cannot be normalised: {', '.join(differing)} would change")
    return row


def _row(example: Example) -> Row:
    if isinstance(example, TextExample):
        return {"text": example.text}
    if isinstance(example, ChatExample):
        return {"messages": example.messages} | ({"tools": example.tools} if example.tools else {})
    if isinstance(example, PairExample):
        margin = {} if example.margin is None else {"margin": example.margin}
        return {"prompt": example.prompt, "chosen": example.chosen, "rejected": example.rejected} | margin
    if isinstance(example, LabelledExample):
        return {"prompt": example.prompt, "completion": example.completion, "label": bool(example.label)}
    if isinstance(example, StepwiseExample):
        return {"prompt": example.prompt, "completions": example.steps, "labels": example.labels}
    assert isinstance(example, PromptExample), "all kinds of examples are listed here"
    kept = {name: value for name, value in example.columns.items() if name not in FORMAT_COLUMNS}
    return {"prompt": example.prompt} | ({"tools": example.tools} if example.tools else {}) | kept


def kind_of(example: Example) -> ExampleKind:
    kinds: dict[type[Example], ExampleKind] = {
        TextExample: "text",
        ChatExample: "chat",
        SegmentsExample: "chat",
        PairExample: "pair",
        LabelledExample: "labelled",
        StepwiseExample: "stepwise",
        PromptExample: "prompt",
    }
    return kinds[type(example)]
