"""One queue of requests for all rollout workers: a worker takes the next ones when it has room.

Which worker takes a request depends on timing; its completion does not, up to rounding: every random number comes from
a request's own seed, and samples are put back in the order of the requests. Where results have to be the same bit for
bit, requests are divided into one part per worker, which is generated together whoever takes it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from posttrain.core.errors import WorkerError
from posttrain.core.types import Sample
from posttrain.engines.base import GenerationRequest

REFILL_SHARE = 1 / 16  # of the sequences of a worker: a larger part waits until several of them are finished


@dataclass(slots=True, eq=False)
class Part:
    """Requests that one worker takes at a time, by their indices."""

    requests: dict[int, GenerationRequest]
    lost: int = 0  # how many workers were lost with some of them


class RequestQueue:
    """Requests that wait, are being generated, and are finished. Every method may be called from any thread."""

    def __init__(self, parts: Sequence[Part], attempts: int) -> None:
        """`attempts`: after a part was lost with this many workers, generation fails."""
        self.waiting, self.attempts = deque(parts), attempts
        self.unfinished = sum(len(part.requests) for part in parts)
        self.finished: deque[tuple[int, Sample]] = deque()  # not read yet
        self.returned = 0  # requests of lost workers, which went back to the queue
        self.failure: BaseException | None = None
        self.changed = threading.Condition()

    @property
    def next_size(self) -> int:
        """How many requests the next part has; 0 if none waits."""
        with self.changed:
            return len(self.waiting[0].requests) if self.waiting else 0

    def take(self, room: int | None = None) -> Part | None:
        """Return the next part, of at most `room` requests; None if there is none.

        A worker without requests takes a part of any size, with `room` None, and waits for it while others have some:
        those of a worker that is lost come back. None means then that no request will need a worker any more.
        """
        with self.changed:
            if room is None:
                self.changed.wait_for(lambda: self.waiting or not self.unfinished or self.failure is not None)
            if not self.waiting or self.failure is not None:
                return None
            fits = room is None or len(self.waiting[0].requests) <= room
            return self.waiting.popleft() if fits else None

    def finish(self, samples: Mapping[int, Sample]) -> None:
        with self.changed:
            self.unfinished -= len(samples)
            self.finished.extend(samples.items())
            self.changed.notify_all()

    def put_back(self, part: Part, error: WorkerError) -> None:
        """Return what a lost worker has not finished to the front of the queue."""
        with self.changed:
            part.lost += 1
            self.returned += len(part.requests)
            self.waiting.appendleft(part)
            if part.lost == self.attempts:
                message = f"workers were lost {part.lost} times in a row during one call of generate: {error}"
                self.failure = WorkerError(message, lost=True)
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End generation with an error, which the reader of the results raises."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def close(self) -> None:
        """Let the workers take nothing more."""
        with self.changed:
            self.waiting.clear()
            self.unfinished = 0
            self.changed.notify_all()

    def take_finished(self, seconds: float) -> dict[int, Sample]:
        """Return the samples that were finished since the last call, by index; waits for some, at most this long.

        Raises the error of `fail`.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.finished or self.failure is not None, seconds)
            if self.failure is not None:
                raise self.failure
            found = dict(self.finished)
            self.finished.clear()
            return found


def divide(requests: Sequence[GenerationRequest], workers: int, slots: int = 0) -> list[Part]:
    """Divide requests into one part per worker, of nearly equal size.

    With `slots`, the sequences that a worker generates at a time, parts have at most that many requests, and what is
    left follows in small parts, for workers that have room again. Completions of a prompt, which share its prefill,
    stay together where they can.
    """
    first = min(len(requests), slots * workers) if slots else len(requests)
    groups = [len(list(members)) for _, members in groupby(requests[:first], key=lambda request: request.group)]
    units = deque(groups if len(groups) >= workers else [1] * first)
    sizes: list[int] = []
    while units:
        left = first - sum(sizes)
        size = units.popleft()
        while units and size + units[0] / 2 <= left / max(1, workers - len(sizes)):
            size += units.popleft()
        sizes.append(size)
    if slots and max(sizes, default=0) > slots:
        edges = [first * number // workers for number in range(workers + 1)]
        sizes = [end - begin for begin, end in pairwise(edges)]
    most = max(1, int(slots * REFILL_SHARE))
    for _, members in groupby(requests[first:], key=lambda request: request.group):
        left = len(list(members))
        sizes += [most] * (left // most) + ([left % most] if left % most else [])
    parts, begin = [], 0
    for size in sizes:
        parts.append(Part({index: requests[index] for index in range(begin, begin + size)}))
        begin += size
    return parts
