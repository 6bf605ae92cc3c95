"""Verifies the tensors of a checkpoint in the processes that load them, so that the controller reads no weights."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.checkpoints.checkpoint import FileEntries, VerifyFiles, checkpoint_to_resume, verify_files
from posttrain.cluster.base import Workers
from posttrain.cluster.placement import Placement
from posttrain.core.errors import CheckpointError, WorkerError


class FileVerifier:
    """Runs in a worker process."""

    def verify(self, files: FileEntries, checkpoint: Path) -> str:
        """Read some files of a checkpoint; returns which of them is damaged, or an empty text."""
        try:
            verify_files(checkpoint, files)
        except CheckpointError as error:
            return str(error)
        return ""


def find_checkpoint(checkpoints: Path, placement: Placement) -> tuple[Path | None, float]:
    """Return the newest valid checkpoint, None before the first, and the seconds in which files were read.

    With several processes the policy's workers read the tensors, each its share; the controller reads what is small.
    """
    if placement.in_process:
        began = time.perf_counter()
        return checkpoint_to_resume(checkpoints), time.perf_counter() - began
    try:
        workers = placement.pool("actor").start("verifier", FileVerifier)
        began = time.perf_counter()
        try:
            found = checkpoint_to_resume(checkpoints, verified_by(workers))
        finally:
            workers.close()
    except WorkerError as error:
        error.folder = checkpoints.parent  # the run may be started again
        raise
    return found, time.perf_counter() - began


def verified_by(workers: Workers) -> VerifyFiles:
    """Return a function that lets each worker read a share of the files; it raises for the first that is damaged."""

    def verify(checkpoint: Path, files: FileEntries) -> None:
        problems = workers.scatter("verify", divide_by_size(files, workers.size), checkpoint)
        if problem := next(filter(None, problems), ""):
            raise CheckpointError(problem)

    return verify


def divide_by_size(files: FileEntries, parts: int) -> list[FileEntries]:
    """Divide files into parts of nearly equal size: each goes to the smallest part, the largest file first."""
    shares: list[FileEntries] = [{} for _ in range(parts)]
    sizes = [0] * parts
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        smallest = sizes.index(min(sizes))
        shares[smallest][name] = files[name]
        sizes[smallest] += files[name]["size"]
    return shares
