"""What preprocessing keeps on the disk: parts, so that a killed run can go on; and the result, whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import atomic_write_text, file_sha256, read_json, sync_folder, temporary_prefix
from posttrain.data.preprocessing.handlers import Handler, Outcome
from posttrain.data.preprocessing.indexed import (
    UNFINISHED,
    IndexedReader,
    IndexedWriter,
    bin_path,
    close_safely,
    idx_path,
    unpublish,
)


@contextmanager
def shop_of(target: Target, cache_dir: str) -> Iterator[Shop]:
    """The folder of unfinished work, for this process alone."""
    name = f".{target.name}.parts"
    if cache_dir:  # there, equal names from several folders meet
        digest = hashlib.sha256(str(target.folder.resolve()).encode()).hexdigest()[:12]
        folder = Path(cache_dir) / f"{target.name}-{digest}.parts"
    else:
        folder = target.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder}: another process is writing {target.named('*')} right now") from None
        shop = Shop(folder, target.handler)
        try:
            yield shop
        finally:
            shop.leave()


class Shop:
    """Parts: indexed files of consecutive rows, and for each finished one a record of what it holds."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        self.folder = folder
        self.handler = handler
        self.finished: list[dict[str, Any]] = []
        self.size = 0  # bytes of rows in the part that is being written
        self._writers: dict[str, IndexedWriter] = {}
        self._counts: dict[str, int] = {}
        self._bad: list[dict[str, Any]] = []

    @property
    def counts(self) -> dict[str, int]:
        """Of all finished parts."""
        total: dict[str, int] = {}
        for record in self.finished:
            for name, count in record["counts"].items():
                total[name] = total.get(name, 0) + count
        return total

    @property
    def bad(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self.finished)):
            with (self.folder / f"{number:06}.bad.jsonl").open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    def prefix(self, number: int, key: str) -> str:
        return str(self.folder / f"{number:06}.{key}")

    def take_over(self, job: dict[str, Any]) -> None:
        """Keep the finished parts of an earlier run of the same job; remove all else."""
        job_file = self.folder / "job.json"
        known = read_record(job_file)
        if known == job:
            while self._is_whole(record := read_record(self.folder / f"{len(self.finished):06}.json")):
                assert record is not None
                self.finished.append(record)
        keep = {"lock", "job.json"} if known == job else {"lock"}
        for number in range(len(self.finished)):
            keep |= {f"{number:06}.json", f"{number:06}.bad.jsonl"}
            keep |= {f"{number:06}.{key}.{end}" for key in self.handler.keys for end in ("bin", "idx")}
        for file in self.folder.iterdir():
            if file.name not in keep:
                file.unlink()
        if known != job:
            write_record(job_file, job)

    def _is_whole(self, record: dict[str, Any] | None) -> bool:
        if record is None:
            return False
        return is_unchanged(self.folder, record["files"])

    def add(self, outcome: Outcome, size: int) -> None:
        number = len(self.finished)
        if not self._writers:
            self._writers = {
                key: IndexedWriter(self.prefix(number, key), self.handler.dtype(key)) for key in self.handler.keys
            }
        for key, column in outcome.columns.items():
            self._writers[key].add_all(column.numbers, column.lengths, column.documents)
        for name, count in outcome.counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        self._bad += outcome.bad
        self.size += size

    def finish_part(self) -> None:
        """Everything on the disk, the record last."""
        if not self._writers:
            return
        number = len(self.finished)
        for writer in self._writers.values():
            writer.finish()
        with (self.folder / f"{number:06}.bad.jsonl").open("wb") as file:
            for bad in self._bad:
                file.write((json.dumps(bad, ensure_ascii=False, default=str) + "\n").encode(errors="backslashreplace"))
            close_safely(file)
        prefixes = [self.prefix(number, key) for key in self.handler.keys]
        files = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
        files.append(self.folder / f"{number:06}.bad.jsonl")
        record = {"counts": self._counts, "files": {file.name: file_sha256(file) for file in files}}
        write_record(self.folder / f"{number:06}.json", record)
        self.finished.append(record)
        self._writers, self._counts, self._bad, self.size = {}, {}, [], 0

    def readers(self, key: str) -> list[IndexedReader]:
        return [IndexedReader(self.prefix(number, key)) for number in range(len(self.finished))]

    def leave(self) -> None:
        """After an error: what was half written goes, what was finished stays."""
        for writer in self._writers.values():
            writer.discard()
        if not self.finished and self.folder.exists():
            self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.folder)


class Target:
    """The files that are written, under names that others look for."""

    def __init__(self, output_prefix: str, handler: Handler) -> None:
        self.handler = handler
        self.folder = Path(output_prefix).parent
        self.name = Path(output_prefix).name + handler.mark
        if not Path(output_prefix).name:
            raise UsageError(f"output_prefix {output_prefix!r} names a folder; add how file names are to begin")
        self.manifest = self.folder / f"{self.name}_manifest.json"

    def named(self, key: str) -> str:
        return str(self.folder / f"{self.name}_{key}_{self.handler.level}")

    def writer(self, key: str) -> IndexedWriter:
        return IndexedWriter(self.named(key), self.handler.dtype(key))

    def finished(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """The manifest, if it is of this job and the files are those it speaks of."""
        manifest = read_record(self.manifest)
        if manifest is None or manifest["job"] != job:
            return None
        return manifest if is_unchanged(self.folder, manifest["files"]) else None

    def publish(self, job: dict[str, Any], counts: dict[str, int], bad: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Give all files their names, the one without which the others mean nothing last."""
        self.manifest.unlink(missing_ok=True)
        for left in self.folder.glob(f"{temporary_prefix(self.manifest)}*"):  # by a process that was killed
            left.unlink()
        prefixes = [self.named(key) for key in self.handler.keys]
        for prefix in reversed(prefixes):
            unpublish(prefix)
        sync_folder(self.folder)  # no old file may come back beside a new one
        for path in [*map(bin_path, prefixes), *map(idx_path, prefixes)]:
            Path(f"{path}{UNFINISHED}").replace(path)
        sync_folder(self.folder)
        files = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
        if counts["bad"]:
            quarantine = self.folder / f"{self.name}_quarantine.jsonl"
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad)
            quarantine.write_text(lines, encoding="utf-8")
            files.append(quarantine)
        manifest = {
            "job": job,
            "kind": self.handler.kind,
            "counts": counts,
            "files": {file.name: file_sha256(file) for file in files},
            **self.handler.facts(),
        }
        write_record(self.manifest, manifest)
        return manifest


def is_unchanged(folder: Path, files: dict[str, str]) -> bool:
    """Whether every file is in the folder with the sha256 that was recorded for it."""
    return all((folder / name).is_file() and file_sha256(folder / name) == digest for name, digest in files.items())


def read_record(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file or it is damaged."""
    try:
        return read_json(file) if file.is_file() else None
    except CheckpointError:
        return None


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Replace a record atomically."""
    atomic_write_text(file, json.dumps(record, ensure_ascii=False, indent=1))
