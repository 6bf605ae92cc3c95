"""Rows to train on straight from indexed files, memory-mapped: nothing is encoded again, rows are made when asked for.

What a name stands for, if there is no file or folder of that name:

    data/rows                 data/rows_<key>_document.idx or data/rows_packed_<key>_document.idx, for all keys
    data/rows_text_document   data/rows_text_document.idx: one file of texts, as pretraining tools name them

Everything is looked at once when it is opened, a block at a time: what is wrong shows before a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import ExampleKind, Sample
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.preprocessing.handlers import IGNORED
from posttrain.data.preprocessing.indexed import IndexedReader, Numbers, bin_path, idx_path
from posttrain.data.prompts import PromptStore
from posttrain.data.reading.examples import PromptExample
from posttrain.data.reading.formats import VERBS
from posttrain.data.store import ExampleStore

MARK = "_packed"
BLOCK = 2**22  # numbers looked at together
NO_LIMIT = 2**31 - 1
PAIR = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
SINGLE = ("input_ids", "labels", "attention_mask")
OnLong = Literal["truncate", "drop", "error"]


def is_indexed(name: str) -> bool:
    """Whether a name refers to indexed files."""
    return not Path(name).exists() and (idx_path(name).is_file() or bool(_columns(name, MARK) or _columns(name, "")))


def load_indexed(
    name: str,
    kind: ExampleKind,
    vocab_size: int,
    *,
    max_tokens: int = NO_LIMIT,
    on_long: OnLong = "truncate",
    max_rows: int | None = None,
    bos_id: int | None = None,
) -> IndexedExamples:
    """Open and check all rows, or the first `max_rows`; long ones are treated as if they came from text.

    `bos_id` begins the parts into which a long text is split.
    """
    files = open_files(name)
    if files.kind != kind and (kind, files.kind) != ("labelled", "pair"):
        if files.kind == "prompt":
            raise UsageError(f"{name}: these are prompts without completions, for reinforcement learning")
        takers = ", ".join(VERBS[files.kind])
        raise UsageError(f"{name}: indexed rows of kind {files.kind}: for {takers}, not for {', '.join(VERBS[kind])}")
    streams = [TokenStream(files, prefix) for prefix in (("chosen_", "rejected_") if files.kind == "pair" else ("",))]
    rows = min(len(streams[0].ids), NO_LIMIT if max_rows is None else max_rows)
    for stream in streams:
        stream.scan(rows, vocab_size)
    table, counts = make_table(streams, kind, max_tokens, on_long)
    counts |= {"read": rows, "quarantined": 0}
    if not len(table.numbers):
        raise DataError(
            f"{name}: no examples are left: {rows} read, {counts['dropped']} longer than {max_tokens} tokens"
        )
    settings = f"{kind} {max_tokens} {on_long} {rows} {bos_id}"
    return IndexedExamples(files, kind, streams, table, counts, fingerprint(files, settings), bos_id)


def load_indexed_prompts(name: str, encoder: Encoder, max_rows: int | None) -> tuple[PromptStore, dict[str, int], str]:
    """Prompts as they were tokenised, what became of them, and what they are; all other keys become text columns."""
    files = open_files(name)
    if files.kind != "prompt":
        takers = ", ".join(VERBS[files.kind])
        raise UsageError(f"{name}: indexed rows of kind {files.kind}: for {takers}, not for reinforcement learning")
    ids, tokenizer = files.readers["input_ids"], encoder.tokenizer
    others = {key: reader for key, reader in files.readers.items() if key not in ("input_ids", "attention_mask")}
    for reader in others.values():
        if len(reader) != len(ids):
            raise DataError(f"{reader.prefix}: has {len(reader)} rows, but {ids.prefix} has {len(ids)}")
    rows = range(min(len(ids), NO_LIMIT if max_rows is None else max_rows))
    prompts = []
    for row in rows:
        tokens = ids[row].astype(np.int64)
        columns = {key: tokenizer.decode(reader[row], skip_special_tokens=True) for key, reader in others.items()}
        said = [{"role": "user", "content": tokenizer.decode(tokens, skip_special_tokens=True)}]
        prompts.append(encoder.prompt(PromptExample(origin=f"{name}:{row}", prompt=said, columns=columns), tokens))
    kept = [prompt for prompt in prompts if prompt is not None]
    if not kept:
        raise DataError(
            f"{name}: no examples are left: {len(rows)} read, all longer than {encoder.config.max_length} tokens"
        )
    counts = {"read": len(rows), "truncated": 0, "dropped": len(rows) - len(kept), "quoted": 0}
    return PromptStore(kept), counts, f"{name}: indexed prompt: {', '.join(files.readers)}"


# Files


@dataclass(frozen=True, slots=True)
class IndexedFiles:
    """The indexed files of one dataset."""

    name: str
    readers: dict[str, IndexedReader]
    kind: Any  # ExampleKind
    reward_ids: tuple[int, ...] = ()


def _columns(name: str, mark: str) -> dict[str, str]:
    """Return the file prefix of each key."""
    place = Path(f"{name}{mark}")
    found = ([*place.parent.glob(f"{escape(place.name)}_*_{level}.idx")] for level in ("document", "sentence"))
    files = next(filter(None, found), []) if place.name else []
    keys = {file.stem[len(place.name) + 1 :].rsplit("_", 1)[0]: str(file)[: -len(".idx")] for file in files}
    return {key: prefix for key, prefix in sorted(keys.items()) if mark or not key.startswith(f"{MARK[1:]}_")}


def open_files(name: str) -> IndexedFiles:
    """Open the files; their kind comes from the manifest of preprocessing, or from their keys."""
    if idx_path(name).is_file():
        return IndexedFiles(name, {"input_ids": IndexedReader(name)}, "text")
    marked, plain = _columns(name, MARK), _columns(name, "")
    if marked and plain:
        raise UsageError(f"{name}: both {name}{MARK}_*_document and {name}_*_document are there; move one set away")
    found = marked or plain
    if len(found) == 1 and not marked:
        return IndexedFiles(name, {"input_ids": IndexedReader(*found.values())}, "text")
    manifest = read_manifest(Path(f"{name}{MARK if marked else ''}_manifest.json"))
    keys: tuple[str, ...] = PAIR
    if found.keys() >= set(PAIR):
        kind = "pair"
    elif found.keys() >= {"input_ids", "labels"}:
        kind = manifest.get("kind") or kind_of(found)
        keys = tuple(found) if kind == "prompt" else tuple(key for key in SINGLE if key in found)
    else:
        hint = "was writing them interrupted?" if marked else f"name one of them, as {next(iter(found.values()))}"
        raise UsageError(f"{name}: {', '.join(found.values())} are there: {hint}")
    readers = {key: IndexedReader(found[key]) for key in keys}
    return IndexedFiles(name, readers, kind, tuple(manifest.get("reward_ids", ())))


def kind_of(found: dict[str, str]) -> str:
    """Guess the kind without a manifest: the labels of a prompt are its completion, without -100."""
    if "attention_mask" not in found:
        return "prompt"
    ids, labels = IndexedReader(found["input_ids"]), IndexedReader(found["labels"])
    answers = len(labels) and (labels[0] != IGNORED).all() and not np.array_equal(labels[0], ids[0])
    return "prompt" if answers else "chat"


def read_manifest(file: Path) -> dict[str, Any]:
    """Read the manifest of preprocessing; empty for files of other tools."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{file}: damaged: {error}") from error
    return value if isinstance(value, dict) else {}


def fingerprint(files: IndexedFiles, settings: str) -> str:
    """Return a digest that changes with any byte of the files and with the settings."""
    digest = hashlib.sha256(f"{settings}\n".encode())
    for key, reader in files.readers.items():
        digest.update(f"{key}\n".encode())
        for path in (idx_path(reader.prefix), bin_path(reader.prefix)):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# Looking at everything


class TokenStream:
    """Token ids and their labels. `scan` finds the documents: one per example, or several if it is packed."""

    def __init__(self, files: IndexedFiles, prefix: str) -> None:
        self.files = files
        self.ids = files.readers[f"{prefix}input_ids"]
        self.labels = files.readers.get(f"{prefix}labels")
        self.seen = files.readers.get("attention_mask")
        self.packed = False
        readers = [self.ids, *(reader for reader in (self.labels, self.seen) if reader is not None)]
        for reader in readers:
            if not reader.is_dense:
                raise DataError(f"{reader.prefix}.bin: there are gaps between its sequences; write the file again")
            if not np.array_equal(reader.lengths, self.ids.lengths):
                raise DataError(f"{reader.prefix}: its sequences do not have the lengths of those in {self.ids.prefix}")
        self.starts: Numbers = np.zeros(0, dtype=np.int64)  # of each document, in the numbers of the file
        self.lengths: Numbers = np.zeros(0, dtype=np.int64)
        self.rows: Numbers = np.zeros(0, dtype=np.int64)  # the row that a document is in

    def scan(self, rows: int, vocab_size: int) -> None:
        """Check the first examples and find their documents."""
        found = [self._look(first, last, vocab_size) for first, last in blocks(self.ids.lengths[:rows])]
        if found:
            self.starts, self.lengths, self.rows = (np.concatenate(parts) for parts in zip(*found, strict=True))

    def _look(self, first: int, last: int, vocab_size: int) -> tuple[Numbers, Numbers, Numbers]:
        start, end = int(self.ids.starts[first]), int(self.ids.starts[last - 1] + self.ids.lengths[last - 1])
        ids = self.ids.numbers[start:end]
        if (wrong := (ids < 0) | (ids >= vocab_size)).any():
            told = f"token id {ids[wrong.argmax()]} is outside the model's vocabulary of {vocab_size}"
            self._refuse(start, wrong, f"{told}: was it written with this model's tokenizer?")
        edges = self.ids.starts[first:last] - start
        if not self.ids.lengths[first:last].all():
            raise DataError(f"{self.files.name}:{first + int(self.ids.lengths[first:last].argmin())}: no tokens")
        starts, real = edges, np.ones(len(edges), dtype=np.bool_)
        if self.seen is not None and (seen := self.seen.numbers[start:end]).size and (seen != 1).any():
            self.packed = True
            changes = np.flatnonzero(seen[1:] != seen[:-1]) + 1
            starts = np.union1d(edges, changes)
            real = seen[starts] != 0  # zeros are padding
        lengths = np.diff(starts, append=end - start)
        if self.labels is not None:
            self._check_labels(ids, self.labels.numbers[start:end], start, starts)
        rows = first + np.searchsorted(edges, starts, side="right") - 1
        return start + starts[real], lengths[real], rows[real]

    def _check_labels(self, ids: Numbers, labels: Numbers, start: int, starts: Numbers) -> None:
        counts = labels != IGNORED
        first_counts = np.zeros(len(ids), dtype=np.bool_)
        first_counts[starts] = counts[starts]
        self._refuse(start, first_counts, "a label on the first token of a document, which nothing comes before")
        if self.files.kind == "stepwise":
            if len(self.files.reward_ids) != 2:
                raise DataError(
                    f"{self.files.name}: without a manifest the labels of correct and incorrect steps are not known"
                )
            wrong = counts & ~np.isin(labels, self.files.reward_ids)
            self._refuse(start, wrong, f"a label that is none of the reward tokens {self.files.reward_ids}")
        else:
            wrong = counts & (labels != ids)
            self._refuse(start, wrong, "a label that is not the token itself: are these of another kind, or shifted?")

    def _refuse(self, start: int, wrong: npt.NDArray[np.bool_], reason: str) -> None:
        if wrong.any():
            at = start + int(wrong.argmax())
            row = int(np.searchsorted(self.ids.starts, at, side="right")) - 1
            raise DataError(f"{self.files.name}:{row}: token {at - int(self.ids.starts[row])}: {reason}")

    def counted(self, starts: Numbers, lengths: Numbers) -> Numbers:
        """Return the number of tokens to train on in each of these ranges."""
        if self.labels is None:
            return lengths - 1
        counts = np.zeros(len(starts), dtype=np.int64)
        for first, last in blocks(lengths):
            begin, end = int(starts[first]), int(starts[last - 1] + lengths[last - 1])
            before = np.concatenate([[0], np.cumsum(self.labels.numbers[begin:end] != IGNORED, dtype=np.int64)])
            at = starts[first:last] - begin
            counts[first:last] = before[at + lengths[first:last]] - before[at]
        return counts


def blocks(lengths: Numbers) -> Iterator[tuple[int, int]]:
    """Yield ranges of sequences that have about BLOCK numbers together."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + BLOCK, side="right")))
        yield first, last
        first = last


# Rows


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The positions of the samples in the files."""

    streams: Numbers  # which stream a sample is in
    starts: Numbers
    lengths: Numbers
    counted: Numbers
    continued: npt.NDArray[np.bool_]  # a later part of a long text
    firsts: Numbers  # first sample of each row, and the end
    numbers: Numbers  # of each row in its file


def make_table(
    streams: list[TokenStream], kind: ExampleKind, max_tokens: int, on_long: OnLong
) -> tuple[SampleTable, dict[str, int]]:
    """Return the samples to keep, by example, and the counts of dropped and truncated ones."""
    name, ways = streams[0].files.name, len(streams)
    starts, lengths, rows = (
        np.stack([getattr(stream, field) for stream in streams], axis=1).ravel()
        for field in ("starts", "lengths", "rows")
    )
    which = np.tile(np.arange(ways, dtype=np.int8), len(rows) // ways)
    together = ways if kind == "pair" else 1  # samples that are dropped together
    long: npt.NDArray[np.bool_] = np.repeat(np.any(lengths.reshape(-1, together) > max_tokens, axis=1), together)
    if long.any() and on_long == "error":
        first = int(long.argmax())
        raise DataError(
            f"{name}:{rows[first]}: more than data.max_length = {max_tokens} tokens: raise data.max_length, or set "
            "data.on_overlong to truncate or drop"
        )
    drop = long & (on_long == "drop")
    if kind == "text":
        drop |= lengths < 2  # nothing in them has a token before it
    which, starts, lengths, rows = (array[~drop] for array in (which, starts, lengths, rows))
    continued = np.zeros(len(starts), dtype=np.bool_)
    if kind == "text":
        starts, lengths, rows, continued = split_texts(starts, lengths, rows, max_tokens)
        which = np.zeros(len(starts), dtype=np.int8)
    lengths = np.minimum(lengths, max_tokens)
    counted = np.zeros(len(starts), dtype=np.int64)
    for number, stream in enumerate(streams):
        counted[which == number] = stream.counted(starts[which == number], lengths[which == number])
    if not counted.all():
        within = f" within data.max_length = {max_tokens}" if long.any() and on_long == "truncate" else ""
        told = f"no token to train on{within}. Raise data.max_length, or set data.on_overlong to drop"
        raise DataError(f"{name}:{rows[counted.argmin()]}: {told}")
    if kind in ("text", "labelled"):  # every sample is a row
        firsts = np.arange(len(starts) + 1)
    else:
        rows, first_samples = np.unique(rows, return_index=True)
        firsts = np.append(first_samples, len(starts))
    truncated = int(long.sum()) // together if on_long == "truncate" and kind != "text" else 0
    counts = {"kept": len(rows), "truncated": truncated, "dropped": int(drop.sum()) // together, "quoted": 0}
    return SampleTable(which, starts, lengths, counted, continued, firsts, rows), counts


def split_texts(
    starts: Numbers, lengths: Numbers, rows: Numbers, max_tokens: int
) -> tuple[Numbers, Numbers, Numbers, npt.NDArray[np.bool_]]:
    """Split texts; each part begins with the last token of the part before, which is not trained on."""
    room = max_tokens - 1
    parts = -(-(lengths - 1) // room)
    which = np.repeat(np.arange(len(starts)), parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    return starts[which] + part * room, lengths[which] - part * room, rows[which], part > 0


class IndexedExamples(ExampleStore):
    """Examples by number from the mapped files; `counts` and `description` summarise them."""

    def __init__(
        self,
        files: IndexedFiles,
        kind: ExampleKind,
        streams: list[TokenStream],
        table: SampleTable,
        counts: dict[str, int],
        digest: str,
        bos_id: int | None,
        chosen: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.files, self.kind, self.streams, self.table = files, kind, streams, table
        self.counts, self.digest, self.bos_id = counts, digest, bos_id
        self.chosen = np.arange(len(table.numbers)) if chosen is None else chosen
        self._held = None
        documents = ", documents of packed rows apart" if streams[0].packed else ""
        self.description = f"{files.name}: indexed {files.kind}: {', '.join(files.readers)}{documents}"

    def subset(self, rows: npt.ArrayLike) -> IndexedExamples:
        """Return some of the examples in the given order; nothing is copied."""
        chosen = self.chosen[np.asarray(rows, dtype=np.int64)]
        return IndexedExamples(
            self.files, self.kind, self.streams, self.table, self.counts, self.digest, self.bos_id, chosen
        )

    def _made(self, row: int) -> list[Sample]:
        table, origin = self.table, self.origin(row)
        samples: list[Sample] = []
        for number in self._samples_of(row):
            stream = self.streams[table.streams[number]]
            start, length = int(table.starts[number]), int(table.lengths[number])
            tokens = stream.ids.numbers[start : start + length].astype(np.int32)
            targets = None
            if stream.labels is None:
                mask = np.arange(length) > 0
                if self.bos_id is not None and table.continued[number]:
                    tokens[0] = self.bos_id
            else:
                labels = stream.labels.numbers[start : start + length]
                mask = labels != IGNORED
                if self.kind == "stepwise":
                    targets = (labels == self.files.reward_ids[0]).astype(np.float32)
            label = 1.0 - float(table.streams[number]) if self.kind == "labelled" else 0.0
            samples.append(Sample(tokens=tokens, mask=mask, targets=targets, label=label, group=row, origin=origin))
        return samples

    def _samples_of(self, row: int) -> range:
        at = self.chosen[row]
        return range(self.table.firsts[at], self.table.firsts[at + 1])

    def origin(self, row: int) -> str:
        """Return `name:row` in the files."""
        return f"{self.files.name}:{self.table.numbers[self.chosen[row]]}"

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each sample."""
        return self.table.lengths[self._samples()]

    def counted(self) -> int:
        """Return the number of tokens that are trained on."""
        return int(self.table.counted[self._samples()].sum(dtype=np.int64))

    def _samples(self) -> npt.NDArray[np.int64]:
        first, size = self.table.firsts[self.chosen], np.diff(self.table.firsts)[self.chosen]
        before = np.repeat(np.cumsum(size) - size, size)
        return np.repeat(first, size) + np.arange(int(size.sum())) - before

    def fingerprint(self) -> str:
        """Return a digest that changes with any byte of the files, with the settings, and with the chosen examples."""
        return hashlib.sha256(self.digest.encode() + self.chosen.tobytes()).hexdigest()
