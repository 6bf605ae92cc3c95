"""A pool of one worker: the controller's own process. Calls are plain method calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.cluster.worker_host import WorkerHost


class LocalPool:
    """This process as the only worker."""

    size = 1

    def __init__(self) -> None:
        self.host = WorkerHost()

    def start(self, role: str, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> LocalWorkers:
        self.host.start(role, factory, args, kwargs)
        return LocalWorkers(self.host, role)

    def close(self) -> None:
        self.host.close()


class LocalWorkers:
    """The object of one role in this process, behind the interface that all transports share."""

    size = 1

    def __init__(self, host: WorkerHost, role: str) -> None:
        self.host, self.role = host, role

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [self.host.run(self.role, method, args, kwargs)]

    def scatter(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        (shard,) = shards
        return self.call(method, shard, *args, **kwargs)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> CompletedCall:
        return CompletedCall(self.call(method, *args, **kwargs))

    def close(self) -> None:
        self.host.remove(self.role)


class CompletedCall:
    """A call whose results are known."""

    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def result(self) -> list[Any]:
        return self.results
