"""Check data before training: format, counts, lengths, duplicates, rendered examples, problems."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError
from posttrain.core.types import ExampleKind
from posttrain.data.dataset import chunks, encode, parse_records, source_format
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import Example, PromptExample
from posttrain.data.reading.formats import VERBS, SourceFormat, unknown_format
from posttrain.data.reading.records import BadRecord, ReadProgress, Record
from posttrain.data.reading.sources import source_parts

PROBLEMS_LISTED = 20
EXAMPLES_SHOWN = 3
ENCODED_FIRST, ENCODED_EVERY = 10_000, 10  # of a large source the first records are encoded, then every tenth
RECORDS_TO_RECOGNISE = 100
NO_LIMIT = 2**31 - 1
LONGEST_SHOWN = 400  # characters of a rendered span

OnParsed = Callable[[Sequence[tuple[Record, list[Example]]]], None]


class RenderedSpan(NamedTuple):
    """A part of a rendered sample, and whether it is trained on."""

    text: str
    trained: bool


@dataclass(slots=True)
class SourceReport:
    """What was found in one source."""

    name: str
    kind: ExampleKind | None = None
    descriptions: list[tuple[str, list[str]]] = field(default_factory=list)
    """The formats it can be read as, and the verbs that accept them."""
    examples: int = 0
    duplicates: int = 0  # examples with the same content as an earlier one
    encoded: int = 0  # examples that were tokenised; `lengths` and `too_long` refer to these
    too_long: int = 0  # examples with a sequence longer than the limit
    lengths: array[int] = field(default_factory=lambda: array("q"))  # of each sequence, before truncation
    completions: array[int] = field(default_factory=lambda: array("q"))  # tokens of each sequence that count
    shown: list[tuple[str, list[list[RenderedSpan]]]] = field(default_factory=list)
    """Origins, and the spans of their samples."""
    problems: list[str] = field(default_factory=list)  # the first of them
    bad: int = 0  # number of problems

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
    on_parsed: OnParsed | None = None,
) -> SourceReport:
    """Read and check all examples of a source. Without a `kind`, the first kind that its records can give is used.

    The columns of every record are checked. Of a large source only a part is encoded, unless `full` is set. `limit` is
    the encoder's longest sequence; it is None if the tokenizer is not that of the model to be trained. `on_parsed` is
    called with the records that could be read, and their examples.
    """
    report = SourceReport(name)
    parts = source_parts(name)
    records = (record for part in parts for record in part.scan(meter))
    try:
        start = first_records(records)
        descriptions = possible_kinds(start, lambda kind: source_format(make_encoder(kind)))
        report.kind = kind or next(iter(descriptions), None)
        report.descriptions = _grouped(descriptions)
        unreadable = _unreadable(start, make_encoder, kind) if report.kind not in descriptions else None
        if report.kind is None or unreadable is not None:
            report.examples = len(start)
            for bad in [*(bad for bad in start if isinstance(bad, BadRecord)), *([unreadable] if unreadable else [])]:
                report.add_problem(bad)
        else:
            checker = _Checker(report, make_encoder(report.kind), limit, full, on_parsed)
            try:
                checker.check(chain(start, records), progress)
            finally:  # columns that the first record has not are known now
                report.descriptions = _grouped(descriptions | {report.kind: checker.source.description})
    except DataError as error:  # the file is damaged, and nothing after this position can be read
        report.bad += 1
        report.problems = [*report.problems[: PROBLEMS_LISTED - 1], str(error)]
    return report


def first_records(records: Iterable[Record | BadRecord]) -> list[Record | BadRecord]:
    """Return the records up to the first good one."""
    start: list[Record | BadRecord] = []
    for record in records:
        start.append(record)
        if isinstance(record, Record) or len(start) == RECORDS_TO_RECOGNISE:
            break
    return start


def possible_kinds(
    start: Sequence[Record | BadRecord], make_source: Callable[[ExampleKind], SourceFormat]
) -> dict[ExampleKind, str]:
    """Return the kinds of examples that the first good record gives, or that its columns allow if it gives none."""
    descriptions: dict[ExampleKind, str] = {}
    faulty: dict[ExampleKind, str] = {}
    for record in (record for record in start if isinstance(record, Record)):
        for kind in VERBS:
            source = make_source(kind)
            errors: list[BadRecord] = []
            parse_records([record], source, errors.append)
            # Every conversation can also give a prompt; this is listed only if a verb reads that kind.
            if source.format is not None and (VERBS[kind] or source.format.kind == kind):
                (faulty if errors else descriptions)[kind] = source.description
    return descriptions or faulty


def _grouped(descriptions: dict[ExampleKind, str]) -> list[tuple[str, list[str]]]:
    verbs_of: dict[str, list[str]] = {}
    for kind, description in descriptions.items():
        verbs_of.setdefault(description, []).extend(VERBS[kind] or ["reinforcement learning"])
    return list(verbs_of.items())


def _unreadable(
    start: Sequence[Record | BadRecord], make_encoder: Callable[[ExampleKind], Encoder], kind: ExampleKind | None
) -> BadRecord | None:
    """Return why the first good record has no format, as the trainer would report it; None if it has one."""
    record = next((record for record in start if isinstance(record, Record)), None)
    if record is None:
        return None
    found: list[BadRecord] = []
    for tried in [kind] if kind else VERBS:
        source = source_format(make_encoder(tried))
        parse_records([record], source, found.append)
        if source.format is not None:
            return None
    unknown = [bad for bad in found if bad.reason.startswith("no known format")]
    if kind is None and len(unknown) == len(found):
        reason = str(unknown_format(source.keys.apply(record), list(VERBS))).removeprefix(f"{record.origin}: ")
        return BadRecord(record.origin, reason, record.values)
    return next((bad for bad in found if bad.reason.startswith("ambiguous")), found[0])


class _Checker:
    """Checks the records of one source."""

    def __init__(
        self, report: SourceReport, encoder: Encoder, limit: int | None, full: bool, on_parsed: OnParsed | None
    ) -> None:
        self.report, self.full, self.on_parsed = report, full, on_parsed
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
        self.source = source_format(encoder)

    def check(self, records: Iterable[Record | BadRecord], progress: Callable[[int], None] | None) -> None:
        report = self.report
        for chunk in chunks(records):
            picked = []
            parsed = parse_records(chunk, self.source, report.add_problem)
            if self.on_parsed is not None:
                self.on_parsed(parsed)
            for at, (record, examples) in enumerate(parsed, start=report.examples):
                digest = _examples_digest(examples)
                report.duplicates += digest in self.seen
                self.seen.add(digest)
                if self.full or at < ENCODED_FIRST or at % ENCODED_EVERY == 0:
                    picked.append((record, examples))
            self._encode(picked)
            report.examples += len(chunk)
            if progress is not None:
                progress(report.examples)

    def _encode(self, picked: list[tuple[Record, list[Example]]]) -> None:
        if self.encoder.kind == "prompt":
            for record, examples in picked:
                self._check_prompt(record, examples)
            return
        limit, examples_of = self.limit, {record.origin: examples for record, examples in picked}
        for record, encoded in encode(picked, self.whole, self.report.add_problem):
            samples = [sample for of_example in encoded for sample in of_example.samples]
            self._measure([len(sample) for sample in samples], [int(sample.mask.sum()) for sample in samples])
            if limit is not None and max(map(len, samples)) > limit:  # is the truncated example valid?
                list(encode([(record, examples_of[record.origin])], self.encoder, self.report.add_problem))
            if len(self.report.shown) < EXAMPLES_SHOWN:
                spans = [rendered_spans(self.encoder.tokenizer, sample.tokens, sample.mask) for sample in samples]
                self.report.shown.append((record.origin, spans))

    def _check_prompt(self, record: Record, examples: list[Example]) -> None:
        prompt_examples = [example for example in examples if isinstance(example, PromptExample)]
        try:
            prompts = [prompt for prompt in self.whole.prompts(prompt_examples) if prompt is not None]
            self._measure([len(prompt.tokens) for prompt in prompts], [0] * len(prompts))
            if self.limit is not None:
                self.encoder.prompts(prompt_examples)
        except DataError as error:
            reason = str(error).removeprefix(f"{record.origin}: ")
            self.report.add_problem(BadRecord(record.origin, reason, record.values))
            return
        if len(self.report.shown) < EXAMPLES_SHOWN:
            masks = [np.zeros(len(prompt.tokens), dtype=np.bool_) for prompt in prompts]  # no token is trained on
            pairs = zip(prompts, masks, strict=True)
            spans = [rendered_spans(self.encoder.tokenizer, prompt.tokens, mask) for prompt, mask in pairs]
            self.report.shown.append((record.origin, spans))

    def _measure(self, lengths: list[int], completions: list[int]) -> None:
        self.report.encoded += 1
        self.report.lengths.extend(lengths)
        self.report.completions.extend(completions)
        self.report.too_long += self.limit is not None and max(lengths) > self.limit


def _examples_digest(examples: Sequence[Example]) -> bytes:
    """Return a digest that is equal for equal examples, regardless of position and other columns."""
    names = [entry.name for entry in fields(examples[0]) if entry.name not in ("origin", "columns")]
    content = repr([[getattr(example, name) for name in names] for example in examples])
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def rendered_spans(tokenizer: Any, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]) -> list[RenderedSpan]:
    """Split the text of a sample where training on tokens begins or ends."""

    def text_before(edge: int) -> str:
        text = tokenizer.decode(tokens[:edge], skip_special_tokens=False)
        return text.rstrip("\ufffd") if edge < len(tokens) else text  # an incomplete character belongs to the next span

    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    texts = [text_before(edge) for edge in edges]
    steps = zip(edges[:-1], pairwise(texts), strict=True)
    return [RenderedSpan(after[len(before) :], bool(mask[start])) for start, (before, after) in steps]


def length_bins(lengths: Sequence[int], limit: int | None) -> list[tuple[int, int, int]]:
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


def shortened_text(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Shorten a long text in its middle and escape control characters."""
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
