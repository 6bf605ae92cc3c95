"""Errors that are shown to the user as one message, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class PosttrainError(Exception):
    """A failure that the user can act on; the message states what happened, where, and what to do."""

    exit_code = 1


class UsageError(PosttrainError):
    """The command or its configuration is wrong; nothing was started."""

    exit_code = 2


class DataError(PosttrainError):
    """An example cannot be used; the message begins with `file:line:`."""


class CheckpointError(PosttrainError):
    """A checkpoint is missing, damaged or belongs to another run."""


class DivergedError(PosttrainError):
    """Loss or gradients were not finite several times in a row."""


class RewardError(PosttrainError):
    """Reward functions failed for too many completions."""

    def __init__(self, message: str, rollouts: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.rollouts = rollouts  # of the batch, so that a run can record them


class WorkerError(PosttrainError):
    """A worker process was lost, timed out or failed; the message names it and its log."""

    def __init__(self, message: str, *, lost: bool) -> None:
        super().__init__(message)
        self.lost = lost
        """Whether the process is gone or unresponsive, so that the run can continue with a new one."""
        self.folder: Path | None = None  # the run directory, if it is known


class Stopped(PosttrainError):  # noqa: N818  a request, not a fault
    """A signal asked the run to stop; its state has been saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn a panic of the tokenizers library into a UsageError about `what`.

    It happens for a regular expression of tokenizer.json that needs too many steps. A panic is no Exception: a thread
    that does not expect it would end.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UsageError(f"{what}: the tokenizer failed: {' '.join(str(error).split())[:300]}") from None
