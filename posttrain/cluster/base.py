"""Workers: plain objects, one a device, called together. The loops hold this handle and never know the transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class PendingCall(Protocol):
    """A call that was sent."""

    def result(self) -> list[Any]:
        """The answers by rank, at the latest when the pool's deadline is over; else WorkerError, or what was raised."""


class Workers(Protocol):
    """Calls a method on every worker and returns the answers in order of rank."""

    size: int

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same arguments for all."""

    def scatter(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """A first argument of its own for each."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """`call` that does not wait."""

    def close(self) -> None:
        """Let go of the objects; the pool's processes stay."""


class Pool(Protocol):
    """Worker processes that hold objects by role; those of one pool are torch.distributed's default group."""

    size: int

    def start(self, role: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Workers:
        """Build an object in each worker. host.RoleRef(role) in the arguments stands for one that is there already.

        It may return before they are there; then the first call waits for them, and raises what went wrong.
        """

    def close(self) -> None:
        """End the processes."""


def split_evenly(items: Sequence[T], parts: int, group_size: int = 1) -> list[list[T]]:
    """Consecutive whole groups, as evenly as they go."""
    groups = len(items) // group_size
    edges = [group_size * (groups * part // parts) for part in range(parts + 1)]
    return [list(items[a:b]) for a, b in pairwise(edges)]
