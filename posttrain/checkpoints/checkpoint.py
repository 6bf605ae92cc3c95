"""Writes, finds, verifies and deletes checkpoint directories; a kill, a full disk or a flipped bit is always detected.

    <run>/checkpoints/step-00000040/model/...     a plain Hugging Face folder
                                    state.json    and other files of the writer
                                    manifest.json written last: size and sha256 of every other file

A save fills `.tmp-step-00000040-<pid>`, syncs it to the disk and renames it, so a directory with the final name is
complete. When a step is saved again, the earlier directory is named `step-00000040.old` until the new one is in place,
and counts as a checkpoint until then. No file points at the latest checkpoint: it is found by verifying.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from posttrain.core.disk import bytes_in, format_bytes, is_disk_full
from posttrain.core.errors import CheckpointError, WorkerError
from posttrain.core.files import file_sha256, read_json, sync_folder, write_json
from posttrain.core.temporary import TemporaryFolder, remove_leftovers

FORMAT = 1
MANIFEST = "manifest.json"
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(\.old)?")

SHARD_NAME = re.compile(r"-(\d{5})-of-\d{5}\.safetensors$")
VERIFY_THREADS = 16  # hashing does not hold Python's lock; more than cores, since files may be on slow storage

FileEntries = dict[str, dict[str, Any]]
"""Size and sha256 of files, by path relative to their folder."""

VerifyFiles = Callable[[Path, FileEntries], None]
"""Reads files of a folder and raises CheckpointError for the first that differs from its entry."""

log = logging.getLogger("posttrain")


# Saving


def write_checkpoint(checkpoints: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Save a step: `write` fills a directory, which then appears complete or not at all."""
    return start_checkpoint(checkpoints, step, write)()


def start_checkpoint(
    checkpoints: Path, step: int, write: Callable[[Path], None], described: Callable[[], FileEntries] = dict
) -> Callable[[], Path]:
    """Let `write` fill a directory; the returned function syncs and seals it and gives it its name.

    That function may run in another thread: it needs only the files, which do not change any more. `described` returns
    the entries of files that other processes sync and hash; the rest is done here.
    """
    final = checkpoint_path(checkpoints, step)
    with ExitStack() as stack:
        with _save_errors(checkpoints, step):
            _make_folder(checkpoints)
            temporary = stack.enter_context(TemporaryFolder(checkpoints, final.name))
        with _save_errors(checkpoints, step, temporary):
            temporary.chmod(checkpoints.stat().st_mode & 0o777)
            write(temporary)
        written = stack.pop_all()

    def finish() -> Path:
        with written, _save_errors(checkpoints, step, temporary):
            _seal(temporary, step, described())
            _put_in_place(temporary, final)
        return final

    return finish


@contextmanager
def _save_errors(checkpoints: Path, step: int, temporary: Path | None = None) -> Iterator[None]:
    """Turn errors of a save into a CheckpointError that says what to do."""
    try:
        yield
    except WorkerError:  # its message is complete, and the caller may replace the worker and retry
        raise
    except Exception as error:
        written = bytes_in(temporary) if temporary is not None else 0
        raise CheckpointError(_save_error(error, checkpoints, step, written)) from error


def _seal(folder: Path, step: int, described: FileEntries) -> None:
    """Sync every file to the disk that is not `described`, then write and sync the manifest that lists all of them."""
    readers = folder.stat().st_mode & 0o666
    paths = sorted(_files(folder))
    for path in paths:
        assert path != folder / MANIFEST, "the writer must not write the manifest"
        path.chmod(readers)  # safetensors creates files that only their owner may read, regardless of the umask
    for name, entry in described.items():
        found = (folder / name).stat().st_size
        if found != entry["size"]:
            raise CheckpointError(
                f"{folder / name}: has {found} bytes, but the worker that wrote it found {entry['size']}"
            )
    files = described | describe_files(folder, [path for path in paths if _name(folder, path) not in described])
    files = dict(sorted(files.items()))
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": files})
    with (folder / MANIFEST).open("rb") as file:
        os.fsync(file.fileno())
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_folder(path)


def _put_in_place(temporary: Path, final: Path) -> None:
    old = final.with_name(final.name + ".old")
    if old.exists():
        _finish_replacement(old)
    try:
        if final.exists():
            final.rename(old)
        temporary.rename(final)
    except BaseException:
        if old.exists() and not final.exists():
            old.rename(final)
        raise
    sync_folder(final.parent)
    if old.exists():
        _try_to_delete(old)


def _finish_replacement(old: Path) -> None:
    """Finish or undo an interrupted replacement: one of `step-N` and `step-N.old` stays, named `step-N`."""
    final = old.with_name(old.name.removesuffix(".old"))
    if final.exists() and (is_valid(final) or not is_valid(old)):
        _delete(old)
        return
    if final.exists():
        _delete(final)
    old.rename(final)
    sync_folder(final.parent)


def _save_error(error: Exception, checkpoints: Path, step: int, written: int) -> str:
    reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    advice = "Remove the cause and continue with --resume."
    if is_disk_full(error):
        advice = "Free some space, or lower save.max_checkpoints or save.max_gigabytes, and continue with --resume."
    return (
        f"{checkpoints}: the checkpoint of step {step} was not saved: {reason.rstrip('.')}. "
        f"{_space(checkpoints, written)} Earlier checkpoints are untouched. {advice}"
    )


def _space(checkpoints: Path, written: int) -> str:
    """Describe how much space the save needed and how much is free, as far as is known after a disk error."""
    known = [f"written before the error: {format_bytes(written)}"]
    try:
        last = next((path for path in list_checkpoints(checkpoints) if looks_complete(path)), None)
        if last is not None:
            known.append(f"needed: about {format_bytes(_checkpoint_size(last))}, the size of {last.name}")
        known.append(f"free: {format_bytes(shutil.disk_usage(checkpoints).free)}")
    except (OSError, CheckpointError):
        pass
    return f"({'; '.join(known)})"


# Finding


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the directories named like checkpoints, valid or not, newest first."""
    try:
        found = [path for path in checkpoints.iterdir() if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{checkpoints}: cannot be read: {error.strerror}") from error
    return sorted(found, key=_age, reverse=True)


def _age(checkpoint: Path) -> tuple[int, bool]:
    return step_of(checkpoint), checkpoint.suffix != ".old"


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint, which need not exist."""
    assert step >= 0
    return checkpoints / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint directory."""
    match = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint}: not a checkpoint: its name must be like step-00000040")
    return int(match[1])


def verify(checkpoint: Path, verify_tensors: VerifyFiles | None = None) -> None:
    """Read every file and raise CheckpointError for the first that differs from what was saved.

    `verify_tensors` reads the files of tensors, which are nearly all of it, elsewhere.
    """
    try:
        files = _check_sizes(checkpoint)
    except OSError as error:
        raise CheckpointError(f"{error.filename or checkpoint}: cannot be read: {error.strerror}") from error
    tensors = {name: entry for name, entry in files.items() if name.endswith(".safetensors")}
    verify_files(checkpoint, {name: entry for name, entry in files.items() if name not in tensors})
    (verify_tensors or verify_files)(checkpoint, tensors)


class FileHashing:
    """A thread that syncs and hashes the files of a checkpoint that this process has written, while it trains."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        """`folder`: of the checkpoint."""
        self.outcome: FileEntries | BaseException | None = None
        self.folder, self.files = folder, files
        threading.Thread(target=self.work, name="hash", daemon=True).start()

    def work(self) -> None:
        try:
            self.outcome = describe_files(self.folder, self.files)
        except BaseException as error:
            self.outcome = error  # raised by `result`
            if not isinstance(error, Exception):
                raise

    def result(self) -> FileEntries | None:
        """Return the entries of the files, for the manifest; None while the thread works."""
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """Return the files of tensors that a rank has written, if several have; their names have numbers from 1."""
    found = sorted(path for pattern in ("*.safetensors", "model/*.safetensors") for path in folder.glob(pattern))
    return [path for path in found if (match := SHARD_NAME.search(path.name)) and int(match[1]) == rank + 1]


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def describe_files(folder: Path, files: Iterable[Path]) -> FileEntries:
    """Sync files to the disk; returns their sizes and sha256 by path relative to the folder, for `verify_files`."""
    return {
        _name(folder, path): {"size": path.stat().st_size, "sha256": file_sha256(path, sync=True)} for path in files
    }


def verify_files(folder: Path, files: FileEntries) -> None:
    """Read files, several at a time; raise CheckpointError for the first that is missing or differs from its entry."""

    def found(name: str) -> FileEntries:
        path = folder / name
        try:
            return {name: {"size": path.stat().st_size, "sha256": file_sha256(path)}}
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

    with ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="verify") as threads:
        for name, entry in zip(files, threads.map(found, files), strict=True):
            if entry[name] != {"size": files[name]["size"], "sha256": files[name]["sha256"]}:
                raise CheckpointError(f"{folder / name}: damaged: its content differs from what was saved")


def is_valid(checkpoint: Path) -> bool:
    """Whether `verify` accepts the checkpoint."""
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def saved_files(checkpoint: Path) -> FileEntries:
    """Return the files of a checkpoint as they were saved, after comparing their sizes; nothing else is read."""
    return _check_sizes(checkpoint)


def looks_complete(checkpoint: Path) -> bool:
    """Whether all files exist with the right sizes; their content is not read."""
    try:
        _check_sizes(checkpoint)
    except (CheckpointError, OSError):
        return False
    return True


def newest_valid(checkpoints: Path, step: int | None = None, verify_tensors: VerifyFiles | None = None) -> Path | None:
    """Return the newest checkpoint (of `step`, if given) that passes `verify`; log a warning for each that does not."""
    for path in list_checkpoints(checkpoints):
        if step is not None and step_of(path) != step:
            continue
        try:
            verify(path, verify_tensors)
        except CheckpointError as error:
            log.warning("skipped a damaged checkpoint: %s", error)
            continue
        return path
    return None


def checkpoint_to_resume(checkpoints: Path, verify_tensors: VerifyFiles | None = None) -> Path | None:
    """Return the newest valid checkpoint; None if none was saved yet, CheckpointError if all of them are damaged."""
    found = newest_valid(checkpoints, verify_tensors=verify_tensors)
    if found is None and (saved := list_checkpoints(checkpoints)):
        raise CheckpointError(
            f"{checkpoints}: none of the {len(saved)} checkpoints can be used; the warnings above name the damage. "
            "Restore one of them from a copy, or start a new run with another --output_dir. To start this one again "
            "from step 0, delete the directory."
        )
    return found


def is_run_directory(folder: Path) -> bool:
    """Whether a folder is a run directory: it has a config.yaml or a checkpoint."""
    return (folder / "config.yaml").is_file() or bool(list_checkpoints(folder / "checkpoints"))


def resolve_model_folder(run: Path) -> Path:
    """Return the Hugging Face folder in the newest valid checkpoint of a run."""
    checkpoint = newest_valid(run / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(f"{run}: the run has no valid checkpoint; let it save one, or give another path")
    if not (checkpoint / "model").is_dir():
        raise CheckpointError(f"{checkpoint}: has no folder model/, so it was not saved by posttrain")
    return checkpoint / "model"


def _check_sizes(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return the files of the manifest; raise CheckpointError unless these exist with their sizes, and no others."""
    files = _read_manifest(checkpoint)
    for name, entry in files.items():
        path = checkpoint / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: missing, but listed in {MANIFEST}")
        if path.stat().st_size != entry["size"]:
            raise CheckpointError(f"{path}: damaged: {path.stat().st_size} bytes, but {entry['size']} were saved")
    for path in _files(checkpoint):
        if path != checkpoint / MANIFEST and path.relative_to(checkpoint).as_posix() not in files:
            raise CheckpointError(f"{path}: not listed in {MANIFEST}; move it out of the checkpoint")
    return files


def _read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete")
    manifest = read_json(path)
    if not isinstance(manifest.get("format"), int):
        raise CheckpointError(f"{path}: damaged: it has no format number")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {manifest['format']}; this version of posttrain reads format {FORMAT}")
    if manifest.get("step") != step_of(checkpoint):
        raise CheckpointError(f"{path}: is for step {manifest.get('step')}, but the directory is {checkpoint.name}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise CheckpointError(f"{path}: damaged: its list of files is malformed")
    return files


def _is_entry(name: str, entry: Any) -> bool:
    inside = not name.startswith("/") and ".." not in name.split("/") and "\0" not in name
    return (
        inside
        and isinstance(entry, dict)
        and isinstance(entry.get("size"), int)
        and isinstance(entry.get("sha256"), str)
    )


# Deleting


def delete_old_checkpoints(
    checkpoints: Path, max_checkpoints: int, max_gigabytes: float, best_step: int | None, newest: Path | None = None
) -> list[Path]:
    """Delete the oldest beyond `max_checkpoints` and `max_gigabytes` (0: no limit), and return them.

    The best and the newest valid checkpoint are never deleted.
    `newest` is a checkpoint that has just been written, which need not be verified again. Checkpoints newer than the
    newest valid one are damaged; they are kept for inspection and replaced when the run reaches their step again.
    """
    found = list_checkpoints(checkpoints)
    newest = newest or next((path for path in found if is_valid(path)), None)
    if newest is None:
        return []
    older = [path for path in found if _age(path) < _age(newest)]
    best = [path for path in older if step_of(path) == best_step]
    count, size = 1 + len(best), sum(_checkpoint_size(path) for path in (newest, *best))
    full, deleted = False, []
    for path in older:
        if path in best:
            continue
        complete = looks_complete(path)
        if complete:  # an incomplete one cannot be resumed from and does not count
            count, size = count + 1, size + _checkpoint_size(path)
            full = full or count > max_checkpoints or 0 < max_gigabytes * 1e9 < size
        if (full or not complete) and _try_to_delete(path):
            deleted.append(path)
    return deleted


def remove_temporaries(checkpoints: Path) -> None:
    """Remove what killed processes left behind; called by the owner of the run before its first save."""
    if not checkpoints.is_dir():
        return
    remove_leftovers(checkpoints, locked=True)
    for path in list(checkpoints.iterdir()):
        try:
            if CHECKPOINT_NAME.fullmatch(path.name) and path.suffix == ".old":
                _finish_replacement(path)
        except OSError as error:  # costs disk space, nothing else
            log.warning("could not remove %s: %s", path, error)


def _delete(folder: Path) -> None:
    """Rename before deleting, so that a kill cannot leave a partial checkpoint under its name."""
    doomed = folder.with_name(f".tmp-delete-{folder.name}-{os.getpid()}")
    if doomed.exists():  # left by a killed process that had the same number
        shutil.rmtree(doomed)
    folder.rename(doomed)
    sync_folder(folder.parent)
    shutil.rmtree(doomed)


def _try_to_delete(folder: Path) -> bool:
    try:
        _delete(folder)
    except OSError as error:  # a failed clean-up must not end the run
        log.warning("could not delete the old checkpoint %s: %s", folder, error)
        return False
    return True


# Files


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path}: a checkpoint may only hold plain files and folders")
        if path.is_file():
            yield path


def _checkpoint_size(checkpoint: Path) -> int:
    """Return the size of a checkpoint in bytes according to its manifest; 0 if that cannot be read."""
    try:
        return sum(entry["size"] for entry in _read_manifest(checkpoint).values())
    except (CheckpointError, OSError):
        return 0
