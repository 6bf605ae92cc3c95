"""Rows -> samples, all of them before a model is loaded; then an endless stream of rows that a number can resume."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from posttrain.config import DataConfig
from posttrain.data.chat import ChatRenderer
from posttrain.data.examples import Chat, Example, Labelled, Message, Pair, Stepwise, Text
from posttrain.data.formats import SourceFormat
from posttrain.data.sources import Row, find_files, read_rows
from posttrain.data.tokens import Part, Segment, TokenEncoder
from posttrain.errors import DataError, UsageError
from posttrain.types import RowKind, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 512  # encoded in one call of the tokenizer
SPLIT = 0x5B117  # keeps the split's random numbers apart from those of the epochs


@dataclass(slots=True)
class Dataset:
    """Encoded rows: a row is the samples that an algorithm wants side by side, one or the two of a pair."""

    rows: list[list[Sample]]
    fingerprint: str
    verdicts: list[str]
    counts: dict[str, int]
    """read: rows of the files; kept: rows here; truncated, dropped; quoted: had a control token's text, as text."""


@dataclass(slots=True)
class Encoded:
    """What became of one example."""

    samples: list[Sample]
    truncated: bool = False
    dropped: bool = False
    quoted: bool = False  # text that looks like a control token was kept as text


class Encoder:
    """Turns examples into samples: tokens, and a mask of those that count."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        kind: RowKind,
        vocab_size: int,
        placeholder: str = "ки",
    ) -> None:
        if config.max_tokens < 2:
            raise UsageError(f"data.max_tokens is {config.max_tokens}: a sequence needs at least 2 tokens")
        if kind == "stepwise" and not placeholder.strip():
            raise UsageError("the placeholder that marks the end of a step is empty")
        self.tokenizer = tokenizer
        self.config = config
        self.kind = kind
        self.vocab_size = vocab_size
        self.placeholder = placeholder
        self.tokens = TokenEncoder(tokenizer)
        self.chat = ChatRenderer(tokenizer, self.tokens, config.input_template)
        self.bos_id = tokenizer.bos_token_id

    def encode(self, example: Example) -> list[Sample]:
        """Its samples: one; chosen and rejected of a pair; the parts of a long text; none if dropped for length."""
        return self.encode_all([example])[0].samples

    def encode_all(self, examples: Sequence[Example]) -> list[Encoded]:
        """The same for many, which is faster."""
        sequences = [self._sequences(example) for example in examples]
        flat = [segments for of_example in sequences for segments in of_example]
        ids = iter(self.tokens.encode(flat))
        return [
            self._encoded(example, of_example, [next(ids) for _ in of_example])
            for example, of_example in zip(examples, sequences, strict=True)
        ]

    def _sequences(self, example: Example) -> list[list[Segment]]:
        match example:
            case Text(text=text):
                return [[Segment((Part(text, False),), trained=True, end=True)]]
            case Chat(messages=messages):
                return [self.chat.segments(messages, 0, example.plain, example.origin)]
            case Pair(prompt=prompt):
                answers = (example.chosen, example.rejected)
                return [self._answered(prompt, answer, example.plain, example.origin) for answer in answers]
            case Labelled():
                return [self._answered(example.prompt, example.answer, example.plain, example.origin)]
            case Stepwise():
                return [self._steps(example)]
        raise AssertionError(f"unknown kind of example: {example}")

    def _answered(self, prompt: list[Message], answer: list[Message], plain: bool, origin: str) -> list[Segment]:
        return self.chat.segments(prompt + answer, len(prompt), plain, origin)

    def _steps(self, example: Stepwise) -> list[Segment]:
        """The prompt, then steps, each with its placeholder: the placeholders are the trained segments."""
        segments = self.chat.prompt(example.prompt, example.plain, example.origin) if example.prompt else []
        steps = list(example.steps)
        if segments and not segments[-1].text[-1:].isspace() and not steps[0][:1].isspace() and self.chat.is_plain:
            steps[0] = "\n" + steps[0]  # mere strings, set apart by nothing
        for step in steps:
            segments.append(Segment((Part(step, False),)))
            segments.append(Segment((Part(self.placeholder, True),), trained=True))
        return segments

    def _encoded(self, example: Example, sequences: list[list[Segment]], ids: list[list[list[int]]]) -> Encoded:
        pairs = zip(sequences, ids, strict=True)
        samples = [self._sample(example, segments, segment_ids) for segments, segment_ids in pairs]
        quoted = any(self.tokens.quotes_control(segment) for segments in sequences for segment in segments)
        longest, limit = max(map(len, samples)), self.config.max_tokens
        if longest <= limit:
            return Encoded(samples, quoted=quoted)
        if self.config.on_long == "drop":
            return Encoded([], dropped=True, quoted=quoted)
        if self.config.on_long == "error":
            raise DataError(
                f"{example.origin}: {longest} tokens, more than data.max_tokens = {limit}: raise data.max_tokens, "
                "or set data.on_long to truncate or drop"
            )
        if isinstance(example, Text):
            return Encoded(list(self._split(samples[0])), quoted=quoted)
        return Encoded([self._truncate(sample) for sample in samples], truncated=True, quoted=quoted)

    def _sample(self, example: Example, segments: list[Segment], ids: list[list[int]]) -> Sample:
        origin = example.origin
        tokens = np.array([token for of_segment in ids for token in of_segment], dtype=np.int64)
        mask = np.zeros(len(tokens), dtype=np.bool_)
        targets = None
        ends = np.cumsum([len(of_segment) for of_segment in ids])
        for segment, of_segment, end in zip(segments, ids, ends, strict=True):
            if segment.trained:
                self._check_filled(segment, of_segment, origin)
                mask[end - len(of_segment) : end] = True
        if isinstance(example, Stepwise):
            last_of_placeholders = ends[[segment.trained for segment in segments]] - 1
            mask[:] = False
            mask[last_of_placeholders] = True
            targets = np.zeros(len(tokens), dtype=np.float32)
            targets[last_of_placeholders] = example.labels
        elif isinstance(example, Text):
            if self.bos_id is not None and tokens[0] != self.bos_id:
                tokens, mask = np.insert(tokens, 0, self.bos_id), np.insert(mask, 0, False)
            mask[0] = False
        if mask[0]:
            raise DataError(f"{origin}: the prompt has no tokens, so nothing comes before the response")
        self._check_vocabulary(tokens, origin)
        return Sample(
            tokens=tokens.astype(np.int32),
            mask=mask,
            targets=targets,
            label=example.label if isinstance(example, Labelled) else 0.0,
            margin=example.margin if isinstance(example, Pair) else 0.0,
            origin=origin,
        )

    def _check_filled(self, segment: Segment, ids: list[int], origin: str) -> None:
        """Words that a tokenizer knows nothing of may leave no token but the end-of-turn."""
        said = any(not part.from_template and part.text.strip() for part in segment.parts)
        if not ids or (said and all(token in self.tokens.special_ids for token in ids)):
            raise DataError(f"{origin}: the tokenizer has no tokens for the response {segment.text[:40]!r}")

    def _check_vocabulary(self, tokens: npt.NDArray[np.int64], origin: str) -> None:
        if tokens.min() >= 0 and tokens.max() < self.vocab_size:
            return
        wrong = int(tokens[(tokens < 0) | (tokens >= self.vocab_size)][0])
        token = self.tokenizer.convert_ids_to_tokens(wrong) if wrong >= 0 else None
        raise DataError(
            f"{origin}: token id {wrong} ({token!r}) is outside the model's vocabulary of {self.vocab_size}: "
            "is this the model's own tokenizer?"
        )

    def _truncate(self, sample: Sample) -> Sample:
        limit = self.config.max_tokens
        if not sample.mask[:limit].any():
            what = "first step" if self.kind == "stepwise" else "response"
            start = int(sample.mask.argmax())
            raise DataError(
                f"{sample.origin}: nothing of the {what} is left within data.max_tokens = {limit}: it "
                f"{'ends' if self.kind == 'stepwise' else 'begins'} at token {start + 1}. "
                "Raise data.max_tokens, or set data.on_long to drop"
            )
        targets = None if sample.targets is None else sample.targets[:limit]
        return replace(sample, tokens=sample.tokens[:limit], mask=sample.mask[:limit], targets=targets)

    def _split(self, sample: Sample) -> Iterator[Sample]:
        """Parts of a text. Each begins with one token that does not count: BOS, or else the last of the part before."""
        room = self.config.max_tokens - 1
        for start in range(1, len(sample), room):
            first = sample.tokens[:1] if self.bos_id is not None else sample.tokens[start - 1 : start]
            tokens = np.concatenate([first, sample.tokens[start : start + room]])
            yield Sample(tokens=tokens, mask=np.arange(len(tokens)) > 0, origin=sample.origin)


def load_dataset(
    files: Sequence[str],
    encoder: Encoder,
    max_rows: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Dataset:
    """Read, recognise, encode and check all rows, or the first `max_rows`; `progress` hears how many were read."""
    if not files:
        raise UsageError("no data files are given: set data.train")
    for file in files:
        find_files(file)  # a wrong name is said at once, not after the other files are read
    rows: list[list[Sample]] = []
    verdicts: list[str] = []
    counts = dict.fromkeys(("read", "kept", "truncated", "dropped", "quoted"), 0)
    for file in files:
        source = SourceFormat(encoder.kind, encoder.placeholder)
        left = None if max_rows is None else max_rows - counts["read"]
        for chunk in _chunks(islice(read_rows(file), left)):
            examples = [example for row in chunk for example in source.examples(row)]
            for encoded in encoder.encode_all(examples):
                if encoder.kind == "text":
                    rows += [[sample] for sample in encoded.samples]
                elif encoded.samples:
                    rows.append(encoded.samples)
                counts["truncated"] += encoded.truncated
                counts["dropped"] += encoded.dropped
                counts["quoted"] += encoded.quoted
            counts["read"] += len(chunk)
            if progress is not None:
                progress(counts["read"])
        if source.verdict:
            verdicts.append(f"{file}: {source.verdict}")
    if not rows:
        raise DataError(
            f"{', '.join(files)}: no rows are left: {counts['read']} read, {counts['dropped']} dropped, longer "
            f"than data.max_tokens = {encoder.config.max_tokens}"
        )
    return _dataset(rows, verdicts, counts)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rows = iter(rows)
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        yield chunk


def _dataset(rows: list[list[Sample]], verdicts: list[str], counts: dict[str, int]) -> Dataset:
    for index, row in enumerate(rows):
        for sample in row:
            sample.group = index
    return Dataset(rows, fingerprint(rows), verdicts, {**counts, "kept": len(rows)})


def fingerprint(rows: Sequence[Sequence[Sample]]) -> str:
    """Changes with any token, mask, target, label or margin, and with their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(struct.pack("<q", len(row)))
        for sample in row:
            targets = b"" if sample.targets is None else sample.targets.tobytes()
            digest.update(struct.pack("<qqdd", len(sample), len(targets), sample.label, sample.margin))
            digest.update(sample.tokens.tobytes() + sample.mask.tobytes() + targets)
    return digest.hexdigest()


def split_rows(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Set a part of the rows aside, the same every time. Rows that come from one row of a file stay together."""
    if not 0 < fraction < 1:
        raise UsageError(f"data.eval_fraction is {fraction}: it must be between 0 and 1")
    origins = [row[0].origin for row in dataset.rows]
    units = list(dict.fromkeys(origins))
    if len(units) == 1:  # one long text: its parts may be parted
        origins = units = [str(index) for index in range(len(dataset.rows))]
    if len(units) < 2:
        raise UsageError("data.eval_fraction: one row cannot be divided into training and evaluation; give data.eval")
    order = np.random.default_rng([seed, SPLIT]).permutation(len(units))
    size = min(max(1, round(fraction * len(units))), len(units) - 1)
    aside = {units[index] for index in order[:size]}
    train = [row for row, origin in zip(dataset.rows, origins, strict=True) if origin not in aside]
    evaluation = [row for row, origin in zip(dataset.rows, origins, strict=True) if origin in aside]
    return (
        _dataset(train, dataset.verdicts, dataset.counts),
        _dataset(evaluation, dataset.verdicts, dataset.counts),
    )


class RowStream:
    """The rows without end, each once an epoch, in an order that the seed and the epoch decide.

    `position`, the number of rows taken so far, is all its state.
    """

    def __init__(
        self,
        rows: Sequence[list[Sample]],
        rows_per_step: int,
        seed: int,
        shuffle: bool = True,
        strata: Sequence[float] | None = None,
    ) -> None:
        """`strata`: a number a row; rows that differ in it are spread evenly over the epoch."""
        assert rows, "a stream needs rows"
        self.rows = rows
        self.strata = np.array(strata if strata is not None else [0.0] * len(rows))
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._order = (-1, np.arange(len(rows)))  # epoch, and its order

    def take(self, n_rows: int | None = None) -> list[Sample]:
        """Samples of the next rows, `rows_per_step` by default; each row is a group of its own.

        They are the data set's own samples, so that what is written into them stays; a row that comes up a second
        time in one call is a shallow copy.
        """
        samples: list[Sample] = []
        taken: set[int] = set()
        for _ in range(self.rows_per_step if n_rows is None else n_rows):
            index = self._index(self.position)
            row = [replace(sample) for sample in self.rows[index]] if index in taken else self.rows[index]
            taken.add(index)
            for sample in row:
                sample.group = self.position
            samples += row
            self.position += 1
        return samples

    def _index(self, position: int) -> int:
        epoch, at = divmod(position, len(self.rows))
        if self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        return int(self._order[1][at])

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        order = np.arange(len(self.rows))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        place = np.zeros(len(order))  # of each row in its stratum, from 0 to 1: merging by it spreads the strata
        for stratum in np.unique(self.strata):
            members = np.flatnonzero(self.strata[order] == stratum)
            place[members] = (np.arange(len(members)) + 0.5) / len(members)
        return order[np.argsort(place, kind="stable")]
