"""An index of rollouts.jsonl: where each line is and the numbers that completions are filtered by.

The index of a file is a file of fixed records in a cache directory. It grows with the record; a thread reads what was
added. When a resumed run cut lines off and wrote others, the checksums of the lines show where the two differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from posttrain.board.files import MAX_LINE_BYTES, complete_lines
from posttrain.board.runs import ROLLOUTS, BoardRun, is_number, parse
from posttrain.core.jsonl import as_line

RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u8"),
        ("step", "<i8"),
        ("group", "<i8"),
        ("reward", "<f8"),
        ("prompt", "<u8"),  # hash of the prompt's messages
        ("length", "<u4"),  # tokens of the completion
        ("checksum", "<u4"),
        ("turns", "<u2"),
        ("flags", "<u2"),
    ]
)
FAILED, TRUNCATED, UNREADABLE = 1, 2, 4
MAGIC = b"posttrain board index 1\n"
BATCH = 5_000  # lines that are added together
WAIT_SECONDS = 0.5  # for a small file, whose index is complete by then
LARGEST = 2**62
Records = NDArray[Any]

# The beginning of a line, as rollout/records.py writes it; a line that differs is parsed as a whole.
TEXT = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
HEAD = re.compile(
    rb'\{"step": (?P<step>\d{1,15}), "group": (?P<group>-?\d{1,15}), "origin": ' + TEXT + rb', "version": [^,"]+, '
    rb'(?:"newest": [^,"]+, )?"finish": "(?P<finish>\w*)", "reward": (?P<reward>[^,"]+), "baseline": [^,"]+, '
    rb'"rewards": \{[^{}]*\}, "failure": (?P<failure>' + TEXT + rb'), "seconds": [^,"]+, "turns": (?P<turns>\d{1,4}), '
    rb'"prompt": '
)
PROMPT_END, MASK = b'], "text": "', b'], "mask": "'


def record_of(offset: int, size: int, line: bytes | None) -> tuple[Any, ...]:
    """Return the record of a line."""
    if line is None:
        return (offset, size, -1, -1, np.nan, 0, 0, 0, 0, UNREADABLE)
    checksum = zlib.crc32(line)
    return quick_record(offset, size, line, checksum) or parsed_record(offset, size, line, checksum)


def quick_record(offset: int, size: int, line: bytes, checksum: int) -> tuple[Any, ...] | None:
    """Read the numbers without parsing the line; None unless it looks exactly as it is written."""
    head = HEAD.match(line)
    # Inside a JSON text a quotation mark follows a backslash, so these cannot occur there; a key might repeat them.
    if head is None or line.count(PROMPT_END) != 1 or line.count(MASK) != 1:
        return None
    prompt_end, mask = line.index(PROMPT_END) + 1, line.index(MASK) + len(MASK)
    mask_end = line.find(b'"', mask)
    try:
        reward = float(head["reward"])
    except ValueError:
        return None
    flags = (FAILED if len(head["failure"]) > 2 else 0) | (TRUNCATED if head["finish"] == b"length" else 0)
    return (
        *(offset, size, int(head["step"]), int(head["group"]), reward, prompt_hash(line[head.end() : prompt_end])),
        *(line.count(b"1", mask, mask_end), checksum, int(head["turns"]), flags),
    )


def parsed_record(offset: int, size: int, line: bytes, checksum: int) -> tuple[Any, ...]:
    """Read the numbers from a line of any form."""
    row = parse(line)
    if row is None or not is_whole(row.get("step")):
        return (offset, size, -1, -1, np.nan, 0, 0, checksum, 0, UNREADABLE)
    reward: Any = row.get("reward")
    turns: Any = row.get("turns")
    mask = row.get("mask")
    messages = as_line({"": row.get("prompt")})[5:-2].encode("utf-8", "backslashreplace")
    flags = (FAILED if row.get("failure") else 0) | (TRUNCATED if row.get("finish") == "length" else 0)
    return (
        *(offset, size, row["step"], row["group"] if is_whole(row.get("group")) else -1),
        *(float(reward) if is_number(reward) else np.nan, prompt_hash(messages)),
        *(min(mask.count("1"), 2**32 - 1) if isinstance(mask, str) else 0, checksum),
        *(min(max(turns, 0), 2**16 - 1) if is_whole(turns) else 1, flags),
    )


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def prompt_hash(messages: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(messages, digest_size=8).digest(), "little")


class RolloutIndex:
    """The records of one rollouts.jsonl. `refresh` brings it up to date; `records` are those known so far."""

    def __init__(self, run: BoardRun, cache: Path | None) -> None:
        """`cache`: the directory of indexes; None keeps this one in memory."""
        self.run = run
        self.records: Records = np.zeros(0, RECORD)
        self.room = self.records  # an array that `records` is the first part of
        self.loaded = False
        self.indexed = 0  # bytes
        self.total = 0  # bytes
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()
        self.error = ""
        self.store = IndexFile(cache / f"{run.id}.index") if cache is not None else None

    def refresh(self, wait_seconds: float = WAIT_SECONDS) -> Records:
        """Start reading what was added, wait a moment, and return the records."""
        with self.lock:
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self.update, name="rollout index", daemon=True)
                self.thread.start()
        self.thread.join(wait_seconds)
        return self.records

    def progress(self) -> dict[str, Any]:
        return {"bytes": self.indexed, "of": self.total, "rows": len(self.records), "error": self.error}

    def update(self) -> None:
        """Read all complete lines that are not known yet."""
        try:
            with self.run.folder.open(ROLLOUTS) as file:
                self.total = os.fstat(file.fileno()).st_size
                if self.store is not None and not self.loaded:
                    self.records = self.room = self.store.read()
                self.loaded = True
                kept = unchanged(self.records, file)
                if kept < len(self.records):  # a copy, because readers may still use the old ones
                    self.records = self.room = self.records[:kept].copy()
                    if self.store is not None:
                        self.store.cut(kept)
                self.indexed = end_of(self.records)
                batch: list[tuple[Any, ...]] = []
                for offset, size, line in complete_lines(file, self.indexed):
                    batch.append(record_of(offset, size, line))
                    if len(batch) == BATCH:
                        self.add(batch)
                        batch = []
                if batch:
                    self.add(batch)
                self.error = ""
        except OSError as error:
            self.error = error.strerror or str(error)

    def add(self, batch: list[tuple[Any, ...]]) -> None:
        """Add records after those that are known; readers keep the part of the array that they were given."""
        known = len(self.records)
        if known + len(batch) > len(self.room):
            self.room = np.zeros(2 * known + len(batch), RECORD)
            self.room[:known] = self.records
        self.room[known : known + len(batch)] = batch
        if self.store is not None:
            self.store.append(self.room[known : known + len(batch)])
        self.records = self.room[: known + len(batch)]
        self.indexed = end_of(self.records)

    def lines(self, numbers: NDArray[Any]) -> Iterator[tuple[int, bytes | None]]:
        """Yield number and content of lines; None for one that cannot be read, or has changed since."""
        records = self.records
        try:
            file = self.run.folder.open(ROLLOUTS)
        except OSError:  # it was deleted
            yield from ((int(number), None) for number in numbers)
            return
        with file:
            for number in numbers:
                record = records[number]
                yield int(number), None if record["flags"] & UNREADABLE else read_line(file, record)


def read_line(file: BinaryIO, record: Any) -> bytes | None:
    if record["size"] > MAX_LINE_BYTES:
        return None
    file.seek(int(record["offset"]))
    line = file.read(int(record["size"]) - 1)
    return line if zlib.crc32(line) == record["checksum"] else None


def end_of(records: Records) -> int:
    return int(records[-1]["offset"] + records[-1]["size"]) if len(records) else 0


def unchanged(records: Records, file: BinaryIO) -> int:
    """Return how many records, from the first, still describe the file: lines are only ever cut off its end."""
    size = os.fstat(file.fileno()).st_size

    def valid(number: int) -> bool:
        record = records[number]
        if int(record["offset"]) + int(record["size"]) > size:
            return False
        return bool(record["size"] > MAX_LINE_BYTES) or read_line(file, record) is not None

    low, high = 0, len(records)
    if high and valid(high - 1):
        return high
    while low < high:
        middle = (low + high) // 2
        if valid(middle):
            low = middle + 1
        else:
            high = middle
    return low


class IndexFile:
    """Records on disk. A second board that uses the same file at the same time reads it and does not write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None

    def read(self) -> Records:
        """Return the stored records; none if the file is not such an index."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.file = self.path.open("a+b")
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.file.close()
                self.file = None
            data = self.path.read_bytes()
            if data[: len(MAGIC)] == MAGIC:
                whole = (len(data) - len(MAGIC)) // RECORD.itemsize
                return np.frombuffer(data, RECORD, whole, len(MAGIC)).copy()
            if self.file is not None:
                self.file.truncate(0)
                self.file.write(MAGIC)
                self.file.flush()
        return np.zeros(0, RECORD)

    def cut(self, count: int) -> None:
        if self.file is not None:
            self.file.flush()
            size = len(MAGIC) + count * RECORD.itemsize
            if os.fstat(self.file.fileno()).st_size > size:
                self.file.truncate(size)

    def append(self, records: Records) -> None:
        if self.file is not None:
            try:
                self.file.write(records.tobytes())
                self.file.flush()
            except OSError:  # a full disk: the index stays in memory
                self.file = None


def default_cache() -> Path:
    """Return where indexes are kept: beside other caches of the user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "posttrain" / "board"


def escaped(text: str) -> bytes:
    """Return a text as it is written inside a line."""
    return as_line({"": text})[6:-3].encode("utf-8", "backslashreplace")
