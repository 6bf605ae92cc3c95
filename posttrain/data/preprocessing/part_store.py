"""Files of preprocessing: parts, from which a killed run resumes, and the output, published complete or not at all."""

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
from posttrain.core.files import atomic_write_text, file_sha256, read_json, sync_folder
from posttrain.data.preprocessing.handlers import EncodedChunk, Handler
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
def open_part_store(target: OutputFiles, cache_dir: str) -> Iterator[PartStore]:
    """Open and lock the directory of unfinished parts for this process."""
    if cache_dir:  # outputs of several folders with equal names share it
        digest = hashlib.sha256(str(target.folder.resolve()).encode()).hexdigest()[:12]
        folder = Path(cache_dir) / f"{target.name}-{digest}.parts"
    else:
        folder = target.folder / f".{target.name}.parts"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder}: another process is writing {target.prefix('*')}") from None
        store = PartStore(folder, target.handler)
        try:
            yield store
        finally:
            store.close()


class PartStore:
    """Stores parts: indexed files of consecutive examples, each with a JSON record once it is finished."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        self.folder = folder
        self.handler = handler
        self.finished: list[dict[str, Any]] = []
        self.size = 0  # bytes of records in the part that is being written
        self._writers: dict[str, IndexedWriter] = {}
        self._counts: dict[str, int] = {}
        self._bad: list[dict[str, Any]] = []

    @property
    def counts(self) -> dict[str, int]:
        """The sums over all finished parts."""
        total: dict[str, int] = {}
        for record in self.finished:
            for name, count in record["counts"].items():
                total[name] = total.get(name, 0) + count
        return total

    @property
    def bad(self) -> Iterator[dict[str, Any]]:
        """The records of all finished parts that could not be used."""
        for number in range(len(self.finished)):
            with (self.folder / f"{number:06}.bad.jsonl").open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    def prefix(self, number: int, key: str) -> str:
        return str(self.folder / f"{number:06}.{key}")

    def resume(self, job: dict[str, Any]) -> None:
        """Keep the finished parts of an earlier run of the same job; remove all other files."""
        job_file = self.folder / "job.json"
        previous = read_record(job_file)
        if previous == job:
            while self._is_complete(record := read_record(self.folder / f"{len(self.finished):06}.json")):
                assert record is not None
                self.finished.append(record)
        keep = {"lock", "job.json"} if previous == job else {"lock"}
        for number in range(len(self.finished)):
            keep |= {f"{number:06}.json", f"{number:06}.bad.jsonl"}
            keep |= {f"{number:06}.{key}.{end}" for key in self.handler.keys for end in ("bin", "idx")}
        for file in self.folder.iterdir():
            if file.name not in keep:
                file.unlink()
        if previous != job:
            write_record(job_file, job)

    def _is_complete(self, record: dict[str, Any] | None) -> bool:
        if record is None:
            return False
        return is_unchanged(self.folder, record["files"])

    def add(self, encoded: EncodedChunk, size: int) -> None:
        number = len(self.finished)
        if not self._writers:
            self._writers = {
                key: IndexedWriter(self.prefix(number, key), self.handler.dtype(key)) for key in self.handler.keys
            }
        for key, column in encoded.columns.items():
            self._writers[key].add_all(column.numbers, column.lengths, column.documents)
        for name, count in encoded.counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        self._bad += encoded.bad
        self.size += size

    def finish_part(self) -> None:
        """Write everything to disk, the record last."""
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

    def close(self) -> None:
        """Discard the unfinished part; keep the finished ones."""
        for writer in self._writers.values():
            writer.discard()
        if not self.finished and self.folder.exists():
            self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.folder)


class OutputFiles:
    """The output files, under the names that trainers expect."""

    def __init__(self, output_prefix: str, handler: Handler) -> None:
        self.handler = handler
        self.folder = Path(output_prefix).parent
        self.name = Path(output_prefix).name + handler.suffix
        if not Path(output_prefix).name:
            raise UsageError(f"output_prefix {output_prefix!r} is a folder; add the beginning of the file names")
        self.manifest = self.folder / f"{self.name}_manifest.json"

    def prefix(self, key: str) -> str:
        return str(self.folder / f"{self.name}_{key}_{self.handler.level}")

    def writer(self, key: str) -> IndexedWriter:
        return IndexedWriter(self.prefix(key), self.handler.dtype(key))

    def finished(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Return the manifest, if it describes this job and the files are unchanged."""
        manifest = read_record(self.manifest)
        if manifest is None or manifest["job"] != job:
            return None
        return manifest if is_unchanged(self.folder, manifest["files"]) else None

    def publish(self, job: dict[str, Any], counts: dict[str, int], bad: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Rename all files to their final names, the indexes last."""
        self.manifest.unlink(missing_ok=True)
        prefixes = [self.prefix(key) for key in self.handler.keys]
        for prefix in reversed(prefixes):
            unpublish(prefix)
        sync_folder(self.folder)  # after a power cut no old file may reappear next to a new one
        for path in [*map(bin_path, prefixes), *map(idx_path, prefixes)]:
            Path(f"{path}{UNFINISHED}").replace(path)
        sync_folder(self.folder)
        files = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
        if counts["bad"]:
            quarantine = self.folder / f"{self.name}_quarantine.jsonl"
            lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in bad)
            quarantine.write_text(lines, encoding="utf-8")
            files.append(quarantine)
        manifest = {
            "job": job,
            "kind": self.handler.kind,
            "counts": counts,
            "files": {file.name: file_sha256(file) for file in files},
            **self.handler.manifest_entries(),
        }
        write_record(self.manifest, manifest)
        return manifest


def is_unchanged(folder: Path, files: dict[str, str]) -> bool:
    """Whether every file is in the directory with its recorded sha256."""
    return all((folder / name).is_file() and file_sha256(folder / name) == digest for name, digest in files.items())


def read_record(file: Path) -> dict[str, Any] | None:
    """Read a JSON record; None if there is no such file or it is damaged."""
    try:
        return read_json(file) if file.is_file() else None
    except CheckpointError:
        return None


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Replace a record atomically."""
    atomic_write_text(file, json.dumps(record, ensure_ascii=False, indent=1))
