"""Load and encode all examples before the model is loaded; then stream them endlessly, resumable by a position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import Sample
from posttrain.data.encoding.encoder import Encoded, Encoder
from posttrain.data.indexed_dataset import is_indexed, load_indexed, load_indexed_prompts
from posttrain.data.prompts import PromptStore, PromptStoreBuilder
from posttrain.data.reading.examples import Example
from posttrain.data.reading.formats import SourceFormat
from posttrain.data.reading.mixture import Mixture
from posttrain.data.reading.records import BadRecord, Record
from posttrain.data.reading.sources import SourcePart, source_parts
from posttrain.data.store import ExampleStore, ExampleStoreBuilder

__all__ = ["Dataset", "Encoder", "ExampleStream", "load_dataset", "split_examples"]

RECORDS_PER_CHUNK = 512  # encoded in one call of the tokenizer,
BYTES_PER_CHUNK = 2**22  # or fewer if they are large
SPLIT = 0x5B117  # keeps the split's random numbers apart from those of the epochs

OnBadRecord = Callable[[BadRecord], None]


@dataclass(slots=True)
class Dataset:
    """Encoded examples. An example is a prompt, or the samples that are trained together: one, or the two of a pair."""

    examples: ExampleStore | PromptStore
    fingerprint: str
    descriptions: list[str]
    counts: dict[str, int]
    """read: records of the files; kept: examples here; truncated; dropped; quoted: contained the text of a control
    token, which is encoded as text; quarantined: could not be used and were left out."""
    mixture: Mixture | None = None
    """How the sources are mixed, if weights are given."""

    @property
    def sample_groups(self) -> ExampleStore:
        """The examples of an offline trainer: each is a list of samples."""
        assert isinstance(self.examples, ExampleStore), "these examples are prompts"
        return self.examples

    @property
    def prompts(self) -> PromptStore:
        """The examples of an online trainer: each is a list with one prompt."""
        assert isinstance(self.examples, PromptStore), "these examples are not prompts"
        return self.examples

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of all examples."""
        for example in self.sample_groups:
            yield from example


def load_dataset(
    files: Sequence[str],
    encoder: Encoder,
    max_examples: int | None = None,
    progress: Callable[[int], None] | None = None,
    quarantine: Path | None = None,
    cache: Path | None = None,
    weights: Sequence[float] = (),
) -> Dataset:
    """Read, recognise, encode and check all examples, or the first `max_examples` (of each source if they are mixed).

    With `weights`, one per source, the sources are mixed; otherwise they are read one after the other.

    `progress` is called with the number of records read. With data.on_bad_example: quarantine, bad records are
    appended to the file `quarantine`; without a file they are only counted. Large data is stored in a file in the
    directory `cache`.
    """
    if not files:
        raise UsageError("no data files are given: set data.train")
    names = list(files)
    if len(names) == 1 and is_indexed(names[0]):
        return load_tokenized(names[0], encoder, max_examples)
    if indexed := [name for name in names if is_indexed(name)]:
        raise UsageError(f"{indexed[0]}: tokenized files cannot be combined with other files; use them alone")
    sources = [source_parts(name) for name in names]  # a wrong name is reported before any file is read
    builder = PromptStoreBuilder() if encoder.kind == "prompt" else ExampleStoreBuilder(cache)
    sizes: list[int] = []  # examples of each source
    descriptions: list[str] = []
    counts = dict.fromkeys(("read", "kept", "truncated", "dropped", "quoted", "quarantined"), 0)
    with Quarantine(quarantine, encoder.config.on_bad_example == "stop") as bad_records:
        for name, parts in zip(names, sources, strict=True):
            before = builder.count
            limit = max_examples if weights or max_examples is None else max_examples - counts["read"]
            source = source_format(encoder)
            read_source(parts, source, encoder, builder, counts, bad_records, limit, progress)
            sizes.append(builder.count - before)
            if source.description:
                descriptions.append(f"{name}: {source.description}")
            if weights and not sizes[-1]:
                raise DataError(f"{name}: no examples of this source are left, so it cannot be mixed with the others")
    if not builder.count:
        raise DataError(
            f"{', '.join(names)}: no examples are left: {counts['read']} read, {counts['dropped']} dropped, longer "
            f"than data.max_length = {encoder.config.max_length}"
        )
    how = encoder.config.repeat, encoder.config.max_mixture_examples
    mixture = Mixture(tuple(sizes), tuple(weights), *how) if weights else None
    return make_dataset(builder.finish(), descriptions, counts, mixture)


def read_source(
    parts: Sequence[SourcePart],
    source: SourceFormat,
    encoder: Encoder,
    builder: ExampleStoreBuilder | PromptStoreBuilder,
    counts: dict[str, int],
    bad_records: Quarantine,
    limit: int | None,
    progress: Callable[[int], None] | None,
) -> None:
    """Read the files of one source, at most `limit` records, and store its encoded examples."""
    before = counts["read"]
    for part in parts:
        left = None if limit is None else limit - (counts["read"] - before)
        for chunk in chunks(islice(part.scan(None), left)):
            for _, encoded_examples in encode(parse_records(chunk, source, bad_records.add), encoder, bad_records.add):
                for encoded in encoded_examples:
                    store(encoded, encoder, builder, counts)
            counts["read"] += len(chunk)
            if progress is not None:
                progress(counts["read"])
        bad_records.check(part, counts)


def load_tokenized(name: str, encoder: Encoder, max_examples: int | None) -> Dataset:
    """Load examples that `posttrain data preprocess` has tokenized."""
    if encoder.kind == "prompt":
        prompts, counts, description = load_indexed_prompts(name, encoder, max_examples)
        return make_dataset(prompts, [description], {**counts, "quarantined": 0}, None)
    if encoder.needs_margin:
        raise UsageError(f"{name}: tokenized files have no margins; train on the files that they were made from")
    examples = load_indexed(
        name,
        encoder.kind,
        encoder.vocab_size,
        max_length=encoder.config.max_length,
        on_overlong=encoder.config.on_overlong,
        max_examples=max_examples,
        bos_id=encoder.bos_id,
    )
    return make_dataset(examples, [examples.description], {**examples.counts, "quarantined": 0}, None)


def source_format(encoder: Encoder) -> SourceFormat:
    """Return the format recogniser of one source for this encoder."""
    return SourceFormat(encoder.kind, encoder.placeholder, encoder.config.map_keys)


def chunks(records: Iterable[Record | BadRecord]) -> Iterator[list[Record | BadRecord]]:
    """Yield records in chunks. An error while reading is raised after the records before it were yielded."""
    chunk: list[Record | BadRecord] = []
    size = 0
    damaged: DataError | None = None
    records = iter(records)
    while damaged is None:
        try:
            record = next(records, None)
        except DataError as error:
            record, damaged = None, error
        if record is not None:
            chunk.append(record)
            size += record.size if isinstance(record, Record) else 0
        if chunk and (record is None or len(chunk) == RECORDS_PER_CHUNK or size > BYTES_PER_CHUNK):
            yield chunk
            chunk, size = [], 0
        if record is None and damaged is None:
            return
    raise damaged


def parse_records(
    chunk: Iterable[Record | BadRecord], source: SourceFormat, on_bad: OnBadRecord
) -> list[tuple[Record, list[Example]]]:
    """Return records with their examples; pass records that cannot be used to `on_bad`."""
    parsed: list[tuple[Record, list[Example]]] = []
    for record in chunk:
        if isinstance(record, BadRecord):
            on_bad(record)
            continue
        try:
            parsed.append((record, source.examples(record)))
        except DataError as error:
            on_bad(bad_record(record, error))
    return parsed


def encode(
    parsed: Sequence[tuple[Record, list[Example]]], encoder: Encoder, on_bad: OnBadRecord
) -> Iterator[tuple[Record, list[Encoded]]]:
    """Yield records with their encoded examples; pass records that cannot be encoded to `on_bad`."""
    try:
        encoded = iter(encoder.encode_all([example for _, examples in parsed for example in examples]))
    except DataError:  # encode one by one, to find which records cannot be encoded
        for record, examples in parsed:
            try:
                alone = encoder.encode_all(examples)
            except DataError as error:
                on_bad(bad_record(record, error))
            else:
                yield record, alone
    else:
        for record, examples in parsed:
            yield record, [next(encoded) for _ in examples]


def bad_record(record: Record, error: DataError) -> BadRecord:
    """Return a record that cannot be used, with the reason."""
    return BadRecord(record.origin, str(error).removeprefix(f"{record.origin}: "), record.values)


def store(
    encoded: Encoded, encoder: Encoder, builder: ExampleStoreBuilder | PromptStoreBuilder, counts: dict[str, int]
) -> None:
    """Store an encoded example, and count how it was changed; parts of a long text are examples of their own."""
    if encoder.kind == "text":
        for sample in encoded.samples:
            builder.add([sample])
    elif encoded.samples:
        builder.add(encoded.samples)
    counts["truncated"] += encoded.truncated
    counts["dropped"] += encoded.dropped
    counts["quoted"] += encoded.quoted


class Quarantine:
    """Handles records that cannot be used: raises the error of the first, or counts all and writes them to a file."""

    def __init__(self, path: Path | None, stop: bool) -> None:
        self.path, self.stop = path, stop
        self.of_part = self.read_before = 0
        self.first: BadRecord | None = None
        self.file: Any = None

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, bad: BadRecord) -> None:
        """Raise the error of a record that cannot be used, or count the record and write it to the file."""
        if self.stop:
            raise bad.error
        self.first = self.first or bad
        self.of_part += 1
        if self.path is None:
            return
        if self.file is None:
            self.file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        line = {"origin": bad.origin, "reason": bad.reason, "row": bad.raw}
        self.file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def check(self, part: SourcePart, counts: dict[str, int]) -> None:
        """Count the bad records of a finished file; DataError if it has no others."""
        counts["quarantined"] += self.of_part
        read = counts["read"] - self.read_before
        if self.first is not None and self.of_part == read:
            raise DataError(f"{part.name}: none of its {read:,} examples can be used. The first: {self.first.error}")
        self.of_part, self.read_before, self.first = 0, counts["read"], None


def make_dataset(
    examples: ExampleStore | PromptStore, descriptions: list[str], counts: dict[str, int], mixture: Mixture | None
) -> Dataset:
    """Return stored examples as a data set, with a fingerprint of the examples and of how sources are mixed."""
    fingerprint = examples.fingerprint()
    if mixture is not None:
        limit = f" {mixture.limit}" if mixture.limit else ""
        fingerprint = hashlib.sha256(f"{fingerprint} {mixture}{limit}".encode()).hexdigest()
    return Dataset(examples, fingerprint, descriptions, {**counts, "kept": len(examples)}, mixture)


def split_examples(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split off a fraction of the examples for evaluation, always the same; parts of one record stay together."""
    if not 0 < fraction < 1:
        raise UsageError(f"data.eval_fraction is {fraction}: it must be above 0 and below 1")
    examples = dataset.examples
    origins: list[str] = [examples.origin(index) for index in range(len(examples))]
    units = list(dict.fromkeys(origins))
    if len(units) == 1:  # one long text: its parts may be separated
        origins = units = [str(index) for index in range(len(examples))]
    if len(units) < 2:
        raise UsageError("data.eval_fraction: one example cannot be divided; name evaluation files with data.eval")
    order = np.random.default_rng([seed, SPLIT]).permutation(len(units))
    size = min(max(1, round(fraction * len(units))), len(units) - 1)
    held_out = {units[index] for index in order[:size]}
    is_held_out = np.array([origin in held_out for origin in origins])
    mixture = dataset.mixture
    if mixture is not None:
        edges = np.cumsum((0, *mixture.sizes))
        left = tuple(int((~is_held_out[a:b]).sum()) for a, b in pairwise(edges))
        if not all(left):
            raise UsageError(
                f"data.eval_fraction {fraction} leaves no examples of a source to train on; "
                "name evaluation files with data.eval"
            )
        mixture = replace(mixture, sizes=left)
    return (
        make_dataset(examples.subset(np.flatnonzero(~is_held_out)), dataset.descriptions, dataset.counts, mixture),
        make_dataset(examples.subset(np.flatnonzero(is_held_out)), dataset.descriptions, dataset.counts, None),
    )


class ExampleStream:
    """Yields examples endlessly, epoch by epoch, in an order that depends on the seed and the epoch.

    An epoch has every example once; where sources are mixed by weight, it has the share of each. `position`, the number
    of examples taken so far, is its only state. The controller takes whole batches and sends parts of them to the
    workers, so the order is the same for any number of workers.
    """

    def __init__(
        self,
        examples: Sequence[list[Any]],
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        strata: Sequence[float] | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """`strata`: a number per example; examples that differ in it are spread evenly over the epoch."""
        assert len(examples), "a stream needs examples"
        assert mixture is None or sum(mixture.sizes) == len(examples), "the mixture has other sizes than the examples"
        self.examples = examples
        self.strata = np.array(strata if strata is not None else np.zeros(len(examples)))
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.mixture = mixture
        self.examples_per_epoch = len(examples) if mixture is None else mixture.examples
        self.position = 0
        self._order = (-1, np.arange(0))  # epoch, and its order

    def take(self, count: int | None = None) -> list[Sample]:
        """Return the samples of the next examples, `batch_size` by default; each example is a group of its own.

        If the store holds its samples, they are the same objects every time, so what is written into them stays; an
        example that occurs a second time in one call is a shallow copy.
        """
        samples: list[Sample] = []
        taken: set[int] = set()
        for _ in range(self.batch_size if count is None else count):
            position, index = self.next_index()
            example = self.examples[index]
            if index in taken:
                example = [replace(sample) for sample in example]
            taken.add(index)
            for sample in example:
                sample.group = position
            samples += example
        return samples

    def next_index(self) -> tuple[int, int]:
        """Return the next position in the stream and the index of its example."""
        self.position += 1
        return self.position - 1, self._index(self.position - 1)

    def _index(self, position: int) -> int:
        epoch, at = divmod(position, self.examples_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        return int(self._order[1][at])

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self.mixture is not None:
            order = self.mixture.order(epoch, self.seed, self.shuffle)
        elif self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
        else:
            order = np.arange(len(self.examples))
        # Position of each example in its stratum, from 0 to 1: sorting by it spreads the strata.
        place = np.zeros(len(order))
        for stratum in np.unique(self.strata):
            members = np.flatnonzero(self.strata[order] == stratum)
            place[members] = (np.arange(len(members)) + 0.5) / len(members)
        return order[np.argsort(place, kind="stable")]
