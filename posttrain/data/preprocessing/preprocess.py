"""`posttrain data preprocess`: tokenise once into indexed files.

Rows are read here in order, encoded in chunks by worker processes and written in order, so that the result is the same
for any number of workers. Finished parts stay on the disk until the whole is there: a run that was killed goes on after
the last of them, if neither its configuration nor its inputs changed.
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
from typing import TYPE_CHECKING, Any

import numpy as np

import posttrain
from posttrain.core.errors import DataError, PosttrainError, UsageError
from posttrain.core.files import file_sha256
from posttrain.data.encoding.templates import apply_template
from posttrain.data.preprocessing.handlers import (
    IGNORED,
    GeneralPretrainHandler,
    Handler,
    Outcome,
    PreprocessConfig,
    handler_class,
    make_handler,
)
from posttrain.data.preprocessing.indexed import IndexedReader, Numbers
from posttrain.data.preprocessing.part_store import Shop, Target, shop_of
from posttrain.data.reading.sources import BadRecord, ReadProgress, Record, SourcePart, source_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 256
CHUNK_BYTES = 2**20
AHEAD = 32  # chunks that this process may encode before it waits for others
PART_BYTES = 2**26  # of rows, in a part that a killed run need not do again
FORMAT = 1  # of what is written; a change makes older parts useless
FREE = {"workers", "n_subs", "cache_dir", "log_interval", "seed"}  # options that do not change the result


def preprocess(
    config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write the files; what it returns is also in the manifest beside them."""
    check(config)
    started = time.perf_counter()
    apply_template(tokenizer, config.prompt_type)
    handler = make_handler(config, tokenizer)
    parts = [part for name in config.input for part in source_parts(name)]
    target = Target(config.output_prefix, handler)
    target.folder.mkdir(parents=True, exist_ok=True)
    job = describe_job(config, tokenizer, parts)
    with shop_of(target, config.cache_dir) as shop:
        if (done := target.finished(job)) is not None:
            shop.clear()
            say(f"{target.named('*')}: already there, from the same rows and the same options")
            return done
        shop.take_over(job)
        if shop.counts:
            say(f"going on after row {shop.counts['read']:,}: {len(shop.finished)} finished parts are taken over")
        encode_rows(config, handler, parts, shop, say)
        counts = shop.counts
        if not counts["kept"]:
            raise DataError(
                f"{', '.join(config.input)}: nothing to write: {counts['read']} rows read, {counts['dropped']} dropped "
                f"(seq_length {config.seq_length} or longer), {counts['bad']} set aside"
            )
        if config.pack or config.neat_pack:
            counts["rows"] = write_packed(config, handler, shop, target)
        else:
            counts["rows"] = write_merged(handler, shop, target)
        manifest = target.publish(job, counts, shop.bad)
        shop.clear()
    say(summary(config, target, counts, time.perf_counter() - started))
    return manifest


def check(config: PreprocessConfig) -> None:
    """Settings that cannot work, named with what resolves them."""

    def refuse(problem: bool, message: str) -> None:
        if problem:
            raise UsageError(message)

    handler = handler_class(config.handler_name)
    refuse(not config.input, "input is not set. Name the files to read: --input rows.jsonl")
    refuse(not config.output_prefix, "output_prefix is not set. Say where to write: --output_prefix data/rows")
    packs = config.pack or config.neat_pack
    refuse(packs and not handler.can_pack, f"pack is for instruction handlers, not for {config.handler_name}.")
    refuse(
        config.split_sentences and handler is not GeneralPretrainHandler,
        f"split_sentences is for GeneralPretrainHandler, not for {config.handler_name}.",
    )
    refuse(packs and not config.seq_length, "pack needs to know how long a row is to be: --seq_length 4096, say.")
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


# What a run is: if all of this is the same, so is the result


def describe_job(
    config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase, parts: list[SourcePart]
) -> dict[str, Any]:
    options = {name: value for name, value in asdict(config).items() if name not in FREE}
    return {
        "format": FORMAT,
        "posttrain": posttrain.__version__,
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "inputs": [{"name": part.name, "sha256": content_hash(Path(part.name))} for part in parts],
        "tokenizer": tokenizer_hash(tokenizer),
    }


def content_hash(file: Path) -> str:
    """The sha256 of a file; empty for what is not a file, such as a dataset of the hub."""
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
    """Rows that are encoded together."""

    rows: list[Record] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    size: int = 0  # bytes


def chunks_of(parts: Iterable[SourcePart], skip: int) -> Iterator[Chunk]:
    """All rows but the first `skip`; chunks end at the same rows whoever asks."""
    chunk = Chunk()
    for row in islice((row for part in parts for row in part.scan(ReadProgress())), skip, None):
        if isinstance(row, BadRecord):
            chunk.bad.append(row)
        else:
            chunk.rows.append(row)
            chunk.size += row.size
        if len(chunk.rows) + len(chunk.bad) >= CHUNK_ROWS or chunk.size >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk()
    if chunk.rows or chunk.bad:
        yield chunk


def encode_rows(
    config: PreprocessConfig, handler: Handler, parts: list[SourcePart], shop: Shop, say: Callable[[str], None]
) -> None:
    """All rows into finished parts."""
    total = sum(part.size for part in parts)
    enough = max(1, total // config.n_subs) if config.n_subs and total else PART_BYTES
    progress = Progress(config.log_interval, say)
    for chunk, outcome in encode_in_order(config, handler, chunks_of(parts, shop.counts.get("read", 0))):
        outcome.bad += [{"reason": f"{bad.origin}: {bad.reason}", "raw": bad.raw} for bad in chunk.bad]
        outcome.counts["read"] += len(chunk.bad)
        outcome.counts["bad"] += len(chunk.bad)
        shop.add(outcome, chunk.size)
        progress.add(outcome.counts)
        if shop.size >= enough:
            shop.finish_part()
    shop.finish_part()


def encode_in_order(
    config: PreprocessConfig, handler: Handler, chunks: Iterator[Chunk]
) -> Iterator[tuple[Chunk, Outcome]]:
    """Chunks and what became of them; a few are under way at a time, so that memory stays flat."""
    if config.on_bad_row == "stop":
        chunks = map(refuse_bad, chunks)
    if config.workers == 1:
        for chunk in chunks:
            yield chunk, handler.encode(chunk.rows)
        return
    helpers = config.workers - 1  # this process is a worker too: it need not be started, and would wait otherwise
    pool = ProcessPoolExecutor(
        helpers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(config, handler.tokenizer),
    )
    under_way: deque[tuple[Chunk, Future[Outcome]]] = deque()
    try:
        for chunk in chunks:
            if sum(not future.done() for _, future in under_way) < 2 * helpers:
                under_way.append((chunk, pool.submit(encode_in_worker, chunk.rows)))
            else:
                under_way.append((chunk, encode_here(handler, chunk)))
            while under_way and (under_way[0][1].done() or len(under_way) > 2 * helpers + AHEAD):
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()
    except BrokenProcessPool as error:
        raise PosttrainError(
            "a worker process died; was there too little memory? Start again, it goes on after the last finished part; "
            "fewer workers need less memory"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_here(handler: Handler, chunk: Chunk) -> Future[Outcome]:
    """A fault is kept until its turn comes, so that the first in the file is the one that is told."""
    future: Future[Outcome] = Future()
    try:
        future.set_result(handler.encode(chunk.rows))
    except DataError as error:
        future.set_exception(error)
    return future


def refuse_bad(chunk: Chunk) -> Chunk:
    if chunk.bad:
        raise chunk.bad[0].error
    return chunk


_handler: Handler | None = None  # of a worker process


def start_worker(config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    global _handler
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    _handler = make_handler(config, tokenizer)


def encode_in_worker(rows: list[Record]) -> Outcome:
    assert _handler is not None
    return _handler.encode(rows)


class Progress:
    """A line every so many rows."""

    def __init__(self, every: int, say: Callable[[str], None]) -> None:
        self.every, self.say = every, say
        self.started = time.perf_counter()
        self.rows = self.tokens = 0

    def add(self, counts: dict[str, int]) -> None:
        before = self.rows // self.every
        self.rows += counts["read"]
        self.tokens += counts["tokens"]
        if self.rows // self.every > before:
            seconds = time.perf_counter() - self.started
            speed = f"{self.rows / seconds:,.0f} rows/s, {self.tokens / seconds:,.0f} tokens/s"
            self.say(f"{self.rows:,} rows, {self.tokens:,} tokens; {speed}")


# The whole


def write_merged(handler: Handler, shop: Shop, target: Target) -> int:
    rows = 0
    for key in handler.keys:
        writer = target.writer(key)
        for number in range(len(shop.finished)):
            writer.add_index(shop.prefix(number, key))
        rows = len(writer.edges) - 1
        writer.write_index()
    return rows


def write_packed(config: PreprocessConfig, handler: Handler, shop: Shop, target: Target) -> int:
    """Rows of seq_length tokens, each filled with the longest rows that still fit; what is left over is padding."""
    columns = {key: SequenceColumn(shop.readers(key)) for key in handler.keys}
    writers = {key: target.writer(key) for key in handler.keys}
    pad_id = handler.tokenizer.pad_token_id
    padding = {"input_ids": 0 if pad_id is None else pad_id, "labels": IGNORED, "attention_mask": 0}
    packs = 0
    for members in fill_packs(columns["input_ids"].lengths, config.seq_length):
        packs += 1
        for key, rows in columns.items():
            packed = np.full(config.seq_length, padding[key], dtype=handler.dtype(key))
            at = 0
            for place, member in enumerate(members, start=1):
                row = rows[member]
                packed[at : at + len(row)] = place if key == "attention_mask" and config.neat_pack else row
                at += len(row)
            writers[key].add(packed)
    for writer in writers.values():
        writer.write_index()
    return packs


class SequenceColumn:
    """The rows of several files, numbered through."""

    def __init__(self, readers: list[IndexedReader]) -> None:
        self.readers = readers
        self.edges = np.cumsum([0, *map(len, readers)])
        self.lengths: Numbers = np.concatenate([reader.lengths for reader in readers])

    def __getitem__(self, index: int) -> Numbers:
        number = int(np.searchsorted(self.edges, index, side="right")) - 1
        return self.readers[number][index - self.edges[number]]


def fill_packs(lengths: Numbers, room: int) -> Iterator[list[int]]:
    """Packs of rows, none longer than `room`: the longest row left, then the longest that still fits, and so on."""
    order = np.argsort(lengths, kind="stable")
    values, first, number = np.unique(lengths[order], return_index=True, return_counts=True)
    assert not len(values) or values[-1] <= room, "a row is longer than a pack"
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


def summary(config: PreprocessConfig, target: Target, counts: dict[str, int], seconds: float) -> str:
    left_out = [f"{counts['dropped']:,} dropped: seq_length {config.seq_length} or longer"] if counts["dropped"] else []
    left_out += [f"{counts['bad']:,} set aside: {target.name}_quarantine.jsonl"] if counts["bad"] else []
    rows = f"{counts['read']:,} rows read, {counts['kept']:,} kept" + "".join(f", {text}" for text in left_out)
    packed = f" in {counts['rows']:,} packed rows of {config.seq_length}" if counts["rows"] != counts["kept"] else ""
    keys = ", ".join(sorted(target.handler.keys))
    speed = f"{counts['tokens'] / seconds:,.0f} tokens/s"
    return f"done: {rows}; {counts['tokens']:,} tokens{packed}; {speed}\n{target.named('*')}.bin/.idx: {keys}"
