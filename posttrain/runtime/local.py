"""The direct call: one worker, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class LocalWorkers:
    """A worker object behind the handle that the other transports share."""

    size = 1

    def __init__(self, start: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.worker = start(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args, **kwargs)]

    def scatter(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        (shard,) = shards
        return self.call(method, shard, *args, **kwargs)
