"""The handles through which a loop calls its workers. They are the same for every transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class PendingCall(Protocol):
    """A call that was sent to the workers."""

    def result(self) -> list[Any]:
        """Wait for the results of all ranks, in order of rank.

        Raises WorkerError if a worker fails, is lost or exceeds the pool's timeout; an error that is meant for users
        is raised as it is.
        """


class Workers(Protocol):
    """The objects of one role, one per worker. A call runs on all of them and returns results in order of rank."""

    size: int

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method with the same arguments on every worker."""

    def scatter(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method whose first argument differs per worker: `shards[rank]`."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Send what `call` sends, without waiting for the results."""

    def close(self) -> None:
        """Delete the objects; the processes of the pool keep running."""


class Pool(Protocol):
    """Worker processes that hold objects by role. The workers of a pool form torch.distributed's default group.

    LocalPool is this process; worker_pool.WorkerPool manages other processes.
    """

    size: int

    def start(self, role: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Workers:
        """Build an object in each worker. RoleRef(role) among the arguments stands for an object built before.

        May return before the objects exist; then the first call waits for them and raises what went wrong.
        """

    def close(self) -> None:
        """End the processes."""


def split_evenly(items: Sequence[T], parts: int, group_size: int = 1) -> list[list[T]]:
    """Split into consecutive parts of nearly equal size, without splitting a group."""
    groups = len(items) // group_size
    edges = [group_size * (groups * part // parts) for part in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(edges)]
