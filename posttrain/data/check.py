"""Check data before training: format, counts, lengths, duplicates, rendered examples, problems."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError
from posttrain.core.types import ExampleKind
from posttrain.data.dataset import chunks, encode, source_format, understand
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import Example, PromptExample
from posttrain.data.reading.formats import VERBS
from posttrain.data.reading.records import BadRecord, ReadProgress, Record
from posttrain.data.reading.sources import source_parts

PROBLEMS_LISTED = 20
ROWS_SHOWN = 3
ENCODED_FIRST, ENCODED_EVERY = 10_000, 10  # rows encoded of a large source: the first, and of the others every tenth
ROWS_TO_RECOGNISE = 100
NO_LIMIT = 2**31 - 1
LONGEST_SHOWN = 400  # characters of a piece of a row


class RenderedSpan(NamedTuple):
    """A part of a rendered sample that is trained on, or not."""

    text: str
    trained: bool


@dataclass(slots=True)
class SourceReport:
    """The findings about one source."""

    name: str
    kind: ExampleKind | None = None
    descriptions: list[tuple[str, list[str]]] = field(
        default_factory=list
    )  # what it can be read as, and by which verbs
    rows: int = 0
    duplicates: int = 0  # rows that hold the same as one before them
    encoded: int = 0  # rows that were turned into tokens; the lengths speak of these
    too_long: int = 0  # of them, rows with a sequence beyond the limit
    lengths: array[int] = field(default_factory=lambda: array("q"))  # of each sequence, before any cut
    shown: list[tuple[str, list[list[RenderedSpan]]]] = field(
        default_factory=list
    )  # origin, and the pieces of its samples
    problems: list[str] = field(default_factory=list)  # the first of them
    bad: int = 0  # problems in all

    def add_problem(self, bad: BadRecord) -> None:
        self.bad += 1
        if len(self.problems) < PROBLEMS_LISTED:
            self.problems.append(str(bad.error))


def check_source(
    name: str,
    make_encoder: Callable[[ExampleKind], Encoder],
    kind: ExampleKind | None = None,
    limit: int | None = None,
    full: bool = False,
    meter: ReadProgress | None = None,
    progress: Callable[[int], None] | None = None,
) -> SourceReport:
    """Read all rows of a source. Without a `kind`, the first that its rows can serve as is taken.

    Every row's columns are checked. Of a large source not all rows are encoded, unless `full` says so. `limit`, the
    encoder's longest sequence, is left out where its tokens are not those of the model to be trained.
    """
    report = SourceReport(name)
    parts = source_parts(name)
    rows = (row for part in parts for row in part.scan(meter))
    try:
        start = _first_rows(rows)
        descriptions = _verdicts(start, make_encoder)
        report.kind = kind or next(iter(descriptions), None)
        report.descriptions = _grouped(descriptions)
        if report.kind is None:
            report.rows = len(start)
            _no_format(start, report)
        else:
            _Checker(report, make_encoder(report.kind), limit, full).check(chain(start, rows), progress)
    except DataError as error:  # the file is damaged, and nothing behind this place can be read
        report.bad += 1
        report.problems = [*report.problems[: PROBLEMS_LISTED - 1], str(error)]
    return report


def _first_rows(rows: Iterable[Record | BadRecord]) -> list[Record | BadRecord]:
    """Return the records up to the first good one."""
    start: list[Record | BadRecord] = []
    for row in rows:
        start.append(row)
        if isinstance(row, Record) or len(start) == ROWS_TO_RECOGNISE:
            break
    return start


def _verdicts(
    start: Sequence[Record | BadRecord], make_encoder: Callable[[ExampleKind], Encoder]
) -> dict[ExampleKind, str]:
    """Return the kinds of examples that the first good record can give, by its columns alone."""
    descriptions: dict[ExampleKind, str] = {}
    for row in (row for row in start if isinstance(row, Record)):
        for kind in VERBS:
            source = source_format(make_encoder(kind))
            understand([row], source, lambda bad: None)
            # That a conversation could also serve as a prompt goes without saying, as long as no verb asks for it.
            if source.format is not None and (VERBS[kind] or source.format.kind == kind):
                descriptions[kind] = source.description
    return descriptions


def _grouped(descriptions: dict[ExampleKind, str]) -> list[tuple[str, list[str]]]:
    verbs_of: dict[str, list[str]] = {}
    for kind, description in descriptions.items():
        verbs_of.setdefault(description, []).extend(VERBS[kind] or ["reinforcement learning"])
    return list(verbs_of.items())


def _no_format(start: list[Record | BadRecord], report: SourceReport) -> None:
    """Report why the first good record has no format."""
    for row in start:
        if isinstance(row, BadRecord):
            report.add_problem(row)
        else:
            columns = ", ".join(row.values) or "none"
            report.add_problem(BadRecord(row.origin, f"no known format has the columns {columns}", row.values))


class _Checker:
    """Checks the records of one source."""

    def __init__(self, report: SourceReport, encoder: Encoder, limit: int | None, full: bool) -> None:
        self.report, self.full = report, full
        self.encoder = encoder
        self.limit = limit
        self.whole = Encoder(
            encoder.tokenizer,
            replace(encoder.config, max_length=NO_LIMIT),
            encoder.kind,
            encoder.vocab_size,
            encoder.placeholder,
        )
        self.seen: set[bytes] = set()

    def check(self, rows: Iterable[Record | BadRecord], progress: Callable[[int], None] | None) -> None:
        report, source = self.report, source_format(self.encoder)
        for chunk in chunks(rows):
            picked = []
            for at, (row, examples) in enumerate(understand(chunk, source, report.add_problem), start=report.rows):
                digest = _digest(examples)
                report.duplicates += digest in self.seen
                self.seen.add(digest)
                if self.full or at < ENCODED_FIRST or at % ENCODED_EVERY == 0:
                    picked.append((row, examples))
            self._encode(picked)
            report.rows += len(chunk)
            if progress is not None:
                progress(report.rows)

    def _encode(self, picked: list[tuple[Record, list[Example]]]) -> None:
        if self.encoder.kind == "prompt":
            for row, examples in picked:
                self._look_at_prompt(row, examples)
            return
        limit, examples_of = self.limit, {row.origin: examples for row, examples in picked}
        for row, encoded in encode(picked, self.whole, self.report.add_problem):
            samples = [sample for of_example in encoded for sample in of_example.samples]
            self._measure([len(sample) for sample in samples])
            if limit is not None and max(map(len, samples)) > limit:  # does what is left of it serve?
                list(encode([(row, examples_of[row.origin])], self.encoder, self.report.add_problem))
            if len(self.report.shown) < ROWS_SHOWN:
                pieces = [_pieces(self.encoder, sample.tokens, sample.mask) for sample in samples]
                self.report.shown.append((row.origin, pieces))

    def _look_at_prompt(self, row: Record, examples: list[Example]) -> None:
        questions = [example for example in examples if isinstance(example, PromptExample)]
        try:
            prompts = [prompt for prompt in self.whole.prompts(questions) if prompt is not None]
            self._measure([len(prompt.tokens) for prompt in prompts])
            if self.limit is not None:
                self.encoder.prompts(questions)
        except DataError as error:
            self.report.add_problem(BadRecord(row.origin, str(error).removeprefix(f"{row.origin}: "), row.values))
            return
        if len(self.report.shown) < ROWS_SHOWN:
            nothing = [np.zeros(len(prompt.tokens), dtype=np.bool_) for prompt in prompts]
            pairs = zip(prompts, nothing, strict=True)
            self.report.shown.append((row.origin, [_pieces(self.encoder, p.tokens, mask) for p, mask in pairs]))

    def _measure(self, lengths: list[int]) -> None:
        self.report.encoded += 1
        self.report.lengths.extend(lengths)
        self.report.too_long += self.limit is not None and max(lengths) > self.limit


def _digest(examples: Sequence[Example]) -> bytes:
    """Return a digest that is equal for equal examples, regardless of position and other columns."""
    names = [entry.name for entry in fields(examples[0]) if entry.name not in ("origin", "columns")]
    content = repr([[getattr(example, name) for name in names] for example in examples])
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _pieces(encoder: Encoder, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]) -> list[RenderedSpan]:
    """Split the text of a sample where training on tokens begins or ends."""

    def text_before(edge: int) -> str:
        text = encoder.tokenizer.decode(tokens[:edge], skip_special_tokens=False)
        return text.rstrip("\ufffd") if edge < len(tokens) else text  # half a character goes to what follows

    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    texts = [text_before(edge) for edge in edges]
    steps = zip(edges[:-1], pairwise(texts), strict=True)
    return [RenderedSpan(after[len(before) :], bool(mask[start])) for start, (before, after) in steps]


def histogram(lengths: Sequence[int], limit: int | None) -> list[tuple[int, int, int]]:
    """Return (from, to, count) by powers of two, with an edge at the limit; empty bins at the start are left out."""
    if not lengths:
        return []
    values = np.asarray(lengths)
    edges = sorted({2**power for power in range(5, 63) if 2 ** (power - 1) < values.max()} | {limit or 32})
    edges = [edge for edge in edges if edge < values.max()] + [max(int(values.max()), 1)]
    bins: list[tuple[int, int, int]] = []
    low = 0
    for edge in edges:
        bins.append((low + 1, edge, int(((values > low) & (values <= edge)).sum())))
        low = edge
    while bins and not bins[0][2]:
        bins.pop(0)
    return bins


def shortened(text: str) -> str:
    """Shorten a long text in its middle and escape control characters for the terminal."""
    if len(text) > LONGEST_SHOWN:
        half = LONGEST_SHOWN // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
