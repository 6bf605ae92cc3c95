"""`posttrain data preprocess`: tokenize examples once into indexed files.

Records are read in order, encoded in chunks by worker processes and written in order, so that the result is the same
for any number of workers. Finished parts stay on disk until the output is complete: a killed run resumes after the last
of them, if neither its configuration nor its inputs changed.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from posttrain.core.disk import disk_errors
from posttrain.core.errors import DataError, PosttrainError, UsageError
from posttrain.core.files import file_sha256
from posttrain.core.lazy import PreTrainedTokenizerBase
from posttrain.core.progress import ProgressDisplay, time_left
from posttrain.data.encoding.templates import apply_template
from posttrain.data.preprocessing.handlers import (
    IGNORED,
    EncodedChunk,
    GeneralPretrainHandler,
    Handler,
    PreprocessConfig,
    handler_class,
    make_handler,
)
from posttrain.data.preprocessing.indexed import IndexedReader, Numbers
from posttrain.data.preprocessing.part_store import OutputFiles, PartStore, open_part_store
from posttrain.data.reading.records import BadRecord, ReadProgress, Record
from posttrain.data.reading.sources import SourcePart, source_parts

CHUNK_RECORDS = 256
CHUNK_BYTES = 2**20
AHEAD = 32  # chunks that this process may encode before it waits for the workers
PART_BYTES = 2**26  # bytes of records per part
FORMAT = 1  # version of the parts; a change invalidates older parts
NOT_IN_JOB = {"workers", "n_subs", "cache_dir", "log_interval"}  # options that do not change the result


def preprocess(
    config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase, print_line: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Write the output files and return the manifest, which is also written next to them.

    `print_line` receives messages and progress, instead of standard output.
    """
    with ProgressDisplay(print_line=print_line) as display:
        return write_files(config, tokenizer, display)


def write_files(
    config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase, display: ProgressDisplay
) -> dict[str, Any]:
    check_settings(config)
    started = time.perf_counter()
    apply_template(tokenizer, config.chat_template)
    handler = make_handler(config, tokenizer)
    parts = [part for name in config.input for part in source_parts(name)]
    target = OutputFiles(config.output_prefix, handler)
    target.folder.mkdir(parents=True, exist_ok=True)
    job = describe_job(config, tokenizer, parts)
    again = (
        "Free some space, or set cache_dir, and run the same command again: it resumes after the last finished part."
    )
    with (
        open_part_store(target, config.cache_dir) as store,
        disk_errors(Path(target.prefix("*")), written_in=store.folder, advice=again),
    ):
        if (done := target.finished(job)) is not None:
            store.clear()
            display.message(f"{target.prefix('*')}: already complete, from the same inputs and options")
            return done
        store.resume(job)
        if store.counts:
            done_before = f"{len(store.finished)} finished parts"
            display.message(f"resuming after example {store.counts['read']:,}: {done_before} are reused")
        encode_parts(config, handler, parts, store, display)
        counts = store.counts
        if not counts["kept"]:
            raise DataError(
                f"{', '.join(config.input)}: nothing to write: {counts['read']} examples read, "
                f"{counts['dropped']} dropped (seq_length {config.seq_length} or longer), {counts['bad']} quarantined"
            )
        if config.pack or config.neat_pack:
            counts["rows"] = write_packed(config, handler, store, target)
        else:
            counts["rows"] = write_merged(handler, store, target)
        manifest = target.publish(job, counts, store.bad)
        store.clear()
    display.message(summary(config, target, counts, time.perf_counter() - started))
    return manifest


def check_settings(config: PreprocessConfig) -> None:
    """Raise UsageError for settings that cannot work."""

    def refuse(problem: bool, message: str) -> None:
        if problem:
            raise UsageError(message)

    handler = handler_class(config.handler_name)
    refuse(not config.input, "input is not set. Name the files to read: --input train.jsonl")
    refuse(
        not config.output_prefix,
        "output_prefix is not set. Set the prefix of the output files: --output_prefix data/train",
    )
    packs = config.pack or config.neat_pack
    refuse(packs and not handler.can_pack, f"pack works with instruction handlers, not with {config.handler_name}.")
    refuse(
        config.split_sentences and handler is not GeneralPretrainHandler,
        f"split_sentences works with GeneralPretrainHandler, not with {config.handler_name}.",
    )
    refuse(
        packs and not config.seq_length, "pack needs the length of the packed sequences, for example --seq_length 4096."
    )
    for name, value, low in (
        ("workers", config.workers, 1),
        ("n_subs", config.n_subs, 0),
        ("log_interval", config.log_interval, 1),
    ):
        refuse(value < low, f"{name} is {value}; it must be at least {low}.")
    refuse(
        config.seq_length < 0 or 0 < config.seq_length < 3,
        f"seq_length is {config.seq_length}; it must be at least 3, or 0 for no limit.",
    )


# The identity of a job: equal descriptions give equal results


def describe_job(
    config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase, parts: list[SourcePart]
) -> dict[str, Any]:
    options = {name: value for name, value in asdict(config).items() if name not in NOT_IN_JOB}
    return {
        "format": FORMAT,
        "posttrain": posttrain.__version__,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "inputs": [{"name": part.name, "sha256": content_hash(Path(part.name))} for part in parts],
        "tokenizer": tokenizer_hash(tokenizer),
    }


def content_hash(file: Path) -> str:
    """Return the sha256 of a file; empty for what is not a file, such as a dataset of the hub."""
    return file_sha256(file) if file.is_file() else ""


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    model = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    parts = (type(tokenizer).__name__, model, repr(tokenizer.chat_template), repr(tokenizer.special_tokens_map))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# Encoding


@dataclass(slots=True)
class Chunk:
    """Records that are encoded together."""

    records: list[Record] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    size: int = 0  # bytes


def read_chunks(parts: Iterable[SourcePart], skip: int) -> Iterator[Chunk]:
    """Read all records but the first `skip` in chunks."""
    chunk = Chunk()
    for record in islice((record for part in parts for record in part.scan(ReadProgress())), skip, None):
        if isinstance(record, BadRecord):
            chunk.bad.append(record)
        else:
            chunk.records.append(record)
            chunk.size += record.size
        if len(chunk.records) + len(chunk.bad) >= CHUNK_RECORDS or chunk.size >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk()
    if chunk.records or chunk.bad:
        yield chunk


def encode_parts(
    config: PreprocessConfig, handler: Handler, parts: list[SourcePart], store: PartStore, display: ProgressDisplay
) -> None:
    """Encode all records into finished parts."""
    total = sum(part.size for part in parts)
    enough = max(1, total // config.n_subs) if config.n_subs and total else PART_BYTES
    progress = PreprocessProgress(config.log_interval, total, display)
    for chunk, encoded in encode_in_order(config, handler, read_chunks(parts, store.counts.get("read", 0))):
        encoded.bad += [{"reason": f"{bad.origin}: {bad.reason}", "raw": bad.raw} for bad in chunk.bad]
        encoded.counts["read"] += len(chunk.bad)
        encoded.counts["bad"] += len(chunk.bad)
        store.add(encoded, chunk.size)
        progress.add(encoded.counts, chunk.size)
        if store.size >= enough:
            store.finish_part()
    store.finish_part()


def encode_in_order(
    config: PreprocessConfig, handler: Handler, chunks: Iterator[Chunk]
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Yield chunks with their encodings, in order; the number of chunks in flight is bounded, and so is memory."""
    if config.on_bad_example == "stop":
        chunks = map(refuse_bad, chunks)
    if config.workers == 1:
        for chunk in chunks:
            yield chunk, handler.encode(chunk.records)
        return
    workers = config.workers - 1  # this process also encodes, as it would wait otherwise
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=initialise_worker,
        initargs=(config, handler.tokenizer),
    )
    in_flight: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
    try:
        for chunk in chunks:
            if sum(not future.done() for _, future in in_flight) < 2 * workers:
                in_flight.append((chunk, pool.submit(encode_in_worker, chunk.records)))
            else:
                in_flight.append((chunk, encode_here(handler, chunk)))
            while in_flight and (in_flight[0][1].done() or len(in_flight) > 2 * workers + AHEAD):
                first, future = in_flight.popleft()
                yield first, future.result()
        for first, future in in_flight:
            yield first, future.result()
    except BrokenProcessPool as error:
        raise PosttrainError(
            "a worker process died, possibly out of memory. Run the same command again: it resumes after the last "
            "finished part. Fewer workers need less memory."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_here(handler: Handler, chunk: Chunk) -> Future[EncodedChunk]:
    """Encode in this process; keep an error in the future, so that the first one in the file is reported."""
    future: Future[EncodedChunk] = Future()
    try:
        future.set_result(handler.encode(chunk.records))
    except DataError as error:
        future.set_exception(error)
    return future


def refuse_bad(chunk: Chunk) -> Chunk:
    if chunk.bad:
        raise chunk.bad[0].error
    return chunk


_handler: Handler | None = None  # of a worker process


def initialise_worker(config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    global _handler
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    _handler = make_handler(config, tokenizer)


def encode_in_worker(records: list[Record]) -> EncodedChunk:
    assert _handler is not None
    return _handler.encode(records)


class PreprocessProgress:
    """Counts examples and tokens, and shows them; without a terminal it prints a line every `every` examples."""

    def __init__(self, every: int, total_bytes: int, display: ProgressDisplay) -> None:
        self.every, self.total_bytes, self.display = every, total_bytes, display
        self.started = time.monotonic()
        self.examples = self.tokens = self.bytes = 0

    def add(self, counts: dict[str, int], size: int) -> None:
        before = self.examples // self.every
        self.examples += counts["read"]
        self.tokens += counts["tokens"]
        self.bytes += size
        crossed = self.examples // self.every > before
        if crossed or self.display.on_terminal:
            seconds = time.monotonic() - self.started
            self.display.update(
                f"{self.examples:,} examples  {self.tokens:,} tokens",
                f"{self.examples / seconds:,.0f} examples/s  {self.tokens / seconds:,.0f} tokens/s",
                done=self.bytes,
                total=self.total_bytes or None,
                eta=time_left(self.started, self.bytes, self.total_bytes),
                show=crossed,
            )


# Output


def write_merged(handler: Handler, store: PartStore, target: OutputFiles) -> int:
    count = 0
    for key in handler.keys:
        writer = target.writer(key)
        for number in range(len(store.finished)):
            writer.add_index(store.prefix(number, key))
        count = len(writer.edges) - 1
        writer.write_index()
    return count


def write_packed(config: PreprocessConfig, handler: Handler, store: PartStore, target: OutputFiles) -> int:
    """Pack examples into sequences of seq_length tokens, padded at the end; return the number of sequences."""
    columns = {key: ConcatenatedReader(store.readers(key)) for key in handler.keys}
    writers = {key: target.writer(key) for key in handler.keys}
    pad_id = handler.tokenizer.pad_token_id
    padding = {"input_ids": 0 if pad_id is None else pad_id, "labels": IGNORED, "attention_mask": 0}
    count = 0
    for members in pack_sequences(columns["input_ids"].lengths, config.seq_length):
        count += 1
        for key, sequences in columns.items():
            packed = np.full(config.seq_length, padding[key], dtype=handler.dtype(key))
            at = 0
            for index, member in enumerate(members, start=1):
                sequence = sequences[member]
                packed[at : at + len(sequence)] = index if key == "attention_mask" and config.neat_pack else sequence
                at += len(sequence)
            writers[key].add(packed)
    for writer in writers.values():
        writer.write_index()
    return count


class ConcatenatedReader:
    """The sequences of several indexed files under consecutive numbers."""

    def __init__(self, readers: list[IndexedReader]) -> None:
        self.readers = readers
        self.edges = np.cumsum([0, *map(len, readers)])
        self.lengths: Numbers = np.concatenate([reader.lengths for reader in readers])

    def __getitem__(self, index: int) -> Numbers:
        number = int(np.searchsorted(self.edges, index, side="right")) - 1
        return self.readers[number][index - self.edges[number]]


def pack_sequences(lengths: Numbers, room: int) -> Iterator[list[int]]:
    """Yield the members of each packed sequence of at most `room` tokens: repeatedly the longest that still fits."""
    order = np.argsort(lengths, kind="stable")
    values, first, number = np.unique(lengths[order], return_index=True, return_counts=True)
    assert not len(values) or values[-1] <= room, "a sequence is longer than a packed one may be"
    waiting = {int(v): deque(order[f : f + n].tolist()) for v, f, n in zip(values, first, number, strict=True)}
    present = sorted(waiting)
    while present:
        members: list[int] = []
        left = room
        while at := bisect.bisect_right(present, left):
            length = present[at - 1]
            members.append(waiting[length].popleft())
            left -= length
            if not waiting[length]:
                del present[at - 1]
        yield members


def summary(config: PreprocessConfig, target: OutputFiles, counts: dict[str, int], seconds: float) -> str:
    left_out = [f"{counts['dropped']:,} dropped: seq_length {config.seq_length} or longer"] if counts["dropped"] else []
    left_out += [f"{counts['bad']:,} quarantined: {target.name}_quarantine.jsonl"] if counts["bad"] else []
    examples = f"{counts['read']:,} examples read, {counts['kept']:,} kept" + "".join(f", {text}" for text in left_out)
    packed = (
        f" in {counts['rows']:,} packed sequences of {config.seq_length}" if counts["rows"] != counts["kept"] else ""
    )
    keys = ", ".join(sorted(target.handler.keys))
    speed = f"{counts['tokens'] / seconds:,.0f} tokens/s"
    return f"done: {examples}; {counts['tokens']:,} tokens{packed}; {speed}\n{target.prefix('*')}.bin/.idx: {keys}"
