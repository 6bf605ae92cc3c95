"""A rollout worker's place, which keeps its position when the worker in it is lost and replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.cluster.base import PendingCall, Pool, Workers
from posttrain.core.errors import WorkerError


class WorkerSlot:
    """A rollout worker's place; who sits there may change."""

    def __init__(self, make: Callable[[], Pool], start: Callable[[Pool], Workers]) -> None:
        self.make, self.begin = make, start
        self.pool: Pool | None = None
        self.workers: Workers | None = None

    def fill(self) -> None:
        if self.workers is None:
            self.pool = self.make()
            self.workers = self.begin(self.pool)

    def empty(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = self.workers = None

    def submit(self, method: str, *args: Any) -> PendingCall:
        assert self.workers is not None, "nobody sits here"
        try:
            return self.workers.submit(method, *args)
        except WorkerError as error:  # lost since, as another thread has found out
            return FailedCall(error)


class FailedCall:
    """A call that could not be sent."""

    def __init__(self, error: WorkerError) -> None:
        self.error = error

    def result(self) -> list[Any]:
        raise self.error
