"""Read tokenized training examples from memory-mapped indexed files; samples are created on access.

If there is no file or directory of the given name, it is a prefix of indexed files:

    data/train                 data/train_<key>_document.idx or data/train_packed_<key>_document.idx, for all keys
    data/train_text_document   data/train_text_document.idx: one file of texts, as pretraining tools name them

All tokens and labels are checked when the files are opened, block by block, so errors appear before a model is loaded.
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
BLOCK = 2**22  # tokens checked at a time
NO_LIMIT = 2**31 - 1
PAIR = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
SINGLE = ("input_ids", "labels", "attention_mask")
OnOverlong = Literal["truncate", "drop", "error"]


def is_indexed(name: str) -> bool:
    """Whether a name refers to indexed files."""
    return not Path(name).exists() and (idx_path(name).is_file() or bool(_columns(name, MARK) or _columns(name, "")))


def load_indexed(
    name: str,
    kind: ExampleKind,
    vocab_size: int,
    *,
    max_length: int = NO_LIMIT,
    on_overlong: OnOverlong = "truncate",
    max_examples: int | None = None,
    bos_id: int | None = None,
) -> IndexedExamples:
    """Open and check all examples, or the first `max_examples`; overlong ones are treated as when text is encoded.

    `bos_id` is the first token of the later parts into which a long text is split.
    """
    files = open_files(name)
    if files.kind != kind and (kind, files.kind) != ("labelled", "pair"):
        if files.kind == "prompt":
            raise UsageError(f"{name}: these are prompts without completions, for reinforcement learning")
        verbs = ", ".join(VERBS[files.kind])
        raise UsageError(
            f"{name}: indexed examples of kind {files.kind}: for {verbs}, not for {', '.join(VERBS[kind])}"
        )
    streams = [TokenStream(files, prefix) for prefix in (("chosen_", "rejected_") if files.kind == "pair" else ("",))]
    read = min(len(streams[0].ids), NO_LIMIT if max_examples is None else max_examples)
    for stream in streams:
        stream.scan(read, vocab_size)
    table, counts = make_table(streams, kind, max_length, on_overlong)
    counts |= {"read": read, "quarantined": 0}
    if not len(table.numbers):
        raise DataError(
            f"{name}: no examples are left: {read} read, {counts['dropped']} longer than {max_length} tokens"
        )
    settings = f"{kind} {max_length} {on_overlong} {read} {bos_id}"
    return IndexedExamples(files, kind, streams, table, counts, fingerprint(files, settings), bos_id)


def load_indexed_prompts(
    name: str, encoder: Encoder, max_examples: int | None
) -> tuple[PromptStore, dict[str, int], str]:
    """Return the stored prompts, their counts and a description; all other keys are decoded into text columns."""
    files = open_files(name)
    if files.kind != "prompt":
        verbs = ", ".join(VERBS[files.kind])
        raise UsageError(f"{name}: indexed examples of kind {files.kind}: for {verbs}, not for reinforcement learning")
    ids, tokenizer = files.readers["input_ids"], encoder.tokenizer
    others = {key: reader for key, reader in files.readers.items() if key not in ("input_ids", "attention_mask")}
    for reader in others.values():
        if len(reader) != len(ids):
            raise DataError(f"{reader.prefix} has {len(reader)} examples, but {ids.prefix} has {len(ids)}")
    read = min(len(ids), NO_LIMIT if max_examples is None else max_examples)
    prompts = []
    for index in range(read):
        tokens = ids[index].astype(np.int64)
        columns = {key: tokenizer.decode(reader[index], skip_special_tokens=True) for key, reader in others.items()}
        messages = [{"role": "user", "content": tokenizer.decode(tokens, skip_special_tokens=True)}]
        example = PromptExample(origin=f"{name}:{index}", prompt=messages, columns=columns)
        prompts.append(encoder.prompt(example, tokens))
    kept = [prompt for prompt in prompts if prompt is not None]
    if not kept:
        raise DataError(
            f"{name}: no examples are left: {read} read, all longer than {encoder.config.max_length} tokens"
        )
    counts = {"read": read, "truncated": 0, "dropped": read - len(kept), "quoted": 0}
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
        raise UsageError(f"{name}: both {name}{MARK}_*_document and {name}_*_document exist; move one set elsewhere")
    found = marked or plain
    if len(found) == 1 and not marked:
        return IndexedFiles(name, {"input_ids": IndexedReader(*found.values())}, "text")
    manifest = read_manifest(Path(f"{name}{MARK if marked else ''}_manifest.json"))
    keys: tuple[str, ...] = PAIR
    if found.keys() >= set(PAIR):
        kind = "pair"
    elif found.keys() >= {"input_ids", "labels"}:
        kind = manifest.get("kind") or guess_kind(found)
        keys = tuple(found) if kind == "prompt" else tuple(key for key in SINGLE if key in found)
    elif found.keys() == {"input_ids", "attention_mask"}:  # PPOAlpacaStyleInstructionHandler
        kind, keys = "prompt", tuple(found)
    else:
        hint = (
            "preprocessing was interrupted; run posttrain data preprocess again"
            if marked
            else f"give the name of one of them, for instance {next(iter(found.values()))}"
        )
        raise UsageError(f"{name}: found only {', '.join(found.values())}: {hint}")
    readers = {key: IndexedReader(found[key]) for key in keys}
    return IndexedFiles(name, readers, kind, tuple(manifest.get("reward_ids", ())))


def guess_kind(found: dict[str, str]) -> str:
    """Guess the kind without a manifest: the labels of a prompt are its completion, without -100."""
    if "attention_mask" not in found:
        return "prompt"
    ids, labels = IndexedReader(found["input_ids"]), IndexedReader(found["labels"])
    is_completion = len(labels) and (labels[0] != IGNORED).all() and not np.array_equal(labels[0], ids[0])
    return "prompt" if is_completion else "chat"


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


# Checking the tokens and labels


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
                raise DataError(f"{reader.prefix}.bin: there are gaps between its sequences; create the file again")
            if not np.array_equal(reader.lengths, self.ids.lengths):
                raise DataError(f"{reader.prefix}: its sequences have other lengths than those in {self.ids.prefix}")
        self.starts: Numbers = np.zeros(0, dtype=np.int64)  # of each document, in tokens from the start of the file
        self.lengths: Numbers = np.zeros(0, dtype=np.int64)
        self.examples: Numbers = np.zeros(0, dtype=np.int64)  # the example that contains a document

    def scan(self, count: int, vocab_size: int) -> None:
        """Check the first `count` examples and find their documents."""
        found = [self._scan_block(first, last, vocab_size) for first, last in blocks(self.ids.lengths[:count])]
        if found:
            self.starts, self.lengths, self.examples = (np.concatenate(parts) for parts in zip(*found, strict=True))

    def _scan_block(self, first: int, last: int, vocab_size: int) -> tuple[Numbers, Numbers, Numbers]:
        """Check the examples from `first` to `last`; return start, length and example of each of their documents."""
        start, end = int(self.ids.starts[first]), int(self.ids.starts[last - 1] + self.ids.lengths[last - 1])
        ids = self.ids.numbers[start:end]
        if (wrong := (ids < 0) | (ids >= vocab_size)).any():
            reason = f"token id {ids[wrong.argmax()]} is outside the model's vocabulary of {vocab_size}"
            self._refuse(start, wrong, f"{reason}: was it written with this model's tokenizer?")
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
        examples = first + np.searchsorted(edges, starts, side="right") - 1
        return start + starts[real], lengths[real], examples[real]

    def _check_labels(self, ids: Numbers, labels: Numbers, start: int, starts: Numbers) -> None:
        counts = labels != IGNORED
        first_counts = np.zeros(len(ids), dtype=np.bool_)
        first_counts[starts] = counts[starts]
        self._refuse(start, first_counts, "a label on the first token of a document, which cannot be predicted")
        if self.files.kind == "stepwise":
            if len(self.files.reward_ids) != 2:
                raise DataError(
                    f"{self.files.name}: the labels of correct and incorrect steps are unknown: the manifest is missing"
                )
            wrong = counts & ~np.isin(labels, self.files.reward_ids)
            self._refuse(start, wrong, f"a label that is not one of the reward tokens {self.files.reward_ids}")
        else:
            wrong = counts & (labels != ids)
            self._refuse(start, wrong, "a label differs from its token: is it another kind of data, or shifted?")

    def _refuse(self, start: int, wrong: npt.NDArray[np.bool_], reason: str) -> None:
        if wrong.any():
            at = start + int(wrong.argmax())
            example = int(np.searchsorted(self.ids.starts, at, side="right")) - 1
            raise DataError(f"{self.files.name}:{example}: token {at - int(self.ids.starts[example])}: {reason}")

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
    """Yield ranges of sequences that have about BLOCK tokens in total."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + BLOCK, side="right")))
        yield first, last
        first = last


# Examples


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The positions of the samples in the files."""

    streams: Numbers  # the stream that contains a sample
    starts: Numbers
    lengths: Numbers
    counted: Numbers
    continued: npt.NDArray[np.bool_]  # a later part of a long text
    firsts: Numbers  # first sample of each example, and the end
    numbers: Numbers  # of each example in its file


def make_table(
    streams: list[TokenStream], kind: ExampleKind, max_length: int, on_overlong: OnOverlong
) -> tuple[SampleTable, dict[str, int]]:
    """Return the samples to keep, by example, and the counts of dropped and truncated ones."""
    name, ways = streams[0].files.name, len(streams)
    starts, lengths, numbers = (
        np.stack([getattr(stream, field) for stream in streams], axis=1).ravel()
        for field in ("starts", "lengths", "examples")
    )
    which = np.tile(np.arange(ways, dtype=np.int8), len(numbers) // ways)
    together = ways if kind == "pair" else 1  # samples that are dropped together
    long: npt.NDArray[np.bool_] = np.repeat(np.any(lengths.reshape(-1, together) > max_length, axis=1), together)
    if long.any() and on_overlong == "error":
        first = int(long.argmax())
        raise DataError(
            f"{name}:{numbers[first]}: more than data.max_length = {max_length} tokens: raise data.max_length, or set "
            "data.on_overlong to truncate or drop"
        )
    drop = long & (on_overlong == "drop")
    if kind == "text":
        drop |= lengths < 2  # a single token cannot be predicted
    which, starts, lengths, numbers = (array[~drop] for array in (which, starts, lengths, numbers))
    continued = np.zeros(len(starts), dtype=np.bool_)
    if kind == "text":
        starts, lengths, numbers, continued = split_texts(starts, lengths, numbers, max_length)
        which = np.zeros(len(starts), dtype=np.int8)
    lengths = np.minimum(lengths, max_length)
    counted = np.zeros(len(starts), dtype=np.int64)
    for number, stream in enumerate(streams):
        counted[which == number] = stream.counted(starts[which == number], lengths[which == number])
    if not counted.all():
        within = f" within data.max_length = {max_length}" if long.any() and on_overlong == "truncate" else ""
        reason = f"no token to train on{within}. Raise data.max_length, or set data.on_overlong to drop"
        raise DataError(f"{name}:{numbers[counted.argmin()]}: {reason}")
    if kind in ("text", "labelled"):  # every sample is an example of its own
        firsts = np.arange(len(starts) + 1)
    else:
        numbers, first_samples = np.unique(numbers, return_index=True)
        firsts = np.append(first_samples, len(starts))
    truncated = int(long.sum()) // together if on_overlong == "truncate" and kind != "text" else 0
    counts = {"kept": len(numbers), "truncated": truncated, "dropped": int(drop.sum()) // together, "quoted": 0}
    return SampleTable(which, starts, lengths, counted, continued, firsts, numbers), counts


def split_texts(
    starts: Numbers, lengths: Numbers, numbers: Numbers, max_length: int
) -> tuple[Numbers, Numbers, Numbers, npt.NDArray[np.bool_]]:
    """Split texts; each part begins with the last token of the part before, which is not trained on."""
    room = max_length - 1
    parts = -(-(lengths - 1) // room)
    which = np.repeat(np.arange(len(starts)), parts)
    part = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    return starts[which] + part * room, lengths[which] - part * room, numbers[which], part > 0


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
        documents = ", packed documents separated" if streams[0].packed else ""
        self.description = f"{files.name}: indexed {files.kind}: {', '.join(files.readers)}{documents}"

    def subset(self, indices: npt.ArrayLike) -> IndexedExamples:
        """Return some of the examples in the given order; nothing is copied."""
        chosen = self.chosen[np.asarray(indices, dtype=np.int64)]
        return IndexedExamples(
            self.files, self.kind, self.streams, self.table, self.counts, self.digest, self.bos_id, chosen
        )

    def _make_samples(self, index: int) -> list[Sample]:
        table, origin = self.table, self.origin(index)
        samples: list[Sample] = []
        for number in self._samples_of(index):
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
            samples.append(Sample(tokens=tokens, mask=mask, targets=targets, label=label, group=index, origin=origin))
        return samples

    def _samples_of(self, index: int) -> range:
        at = self.chosen[index]
        return range(self.table.firsts[at], self.table.firsts[at + 1])

    def origin(self, index: int) -> str:
        """Return `name:number`: the number of the example in the files."""
        return f"{self.files.name}:{self.table.numbers[self.chosen[index]]}"

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
