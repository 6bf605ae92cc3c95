"""One queue of requests for all rollout workers: a worker takes the next part when it has finished the one before.

Which worker takes a part depends on timing; the result does not. A part is always the same requests, generated together
and alone, every random number comes from a request's own seed, and samples are put back in the order of the requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from posttrain.core.errors import WorkerError
from posttrain.core.types import Sample
from posttrain.engines.base import GenerationRequest


@dataclass(slots=True, eq=False)
class Part:
    """Neighbouring requests that one worker generates together."""

    first: int  # index of its first request
    requests: list[GenerationRequest]
    lost: int = 0  # how many workers were lost with it


class RequestQueue:
    """Parts that wait, are being generated, and are finished. Every method may be called from any thread."""

    def __init__(self, parts: Sequence[Part], attempts: int) -> None:
        """`attempts`: after a part was lost with this many workers, generation fails."""
        self.waiting, self.attempts = deque(parts), attempts
        self.unfinished = len(self.waiting)
        self.finished: deque[tuple[Part, list[Sample]]] = deque()  # not read yet
        self.returned = 0  # requests of lost workers, which went back to the queue
        self.failure: BaseException | None = None
        self.changed = threading.Condition()

    def take(self) -> Part | None:
        """Return the next part; None if no part will need a worker any more.

        Waits while others are being generated: those of a worker that is lost come back.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or not self.unfinished or self.failure is not None)
            return self.waiting.popleft() if self.waiting and self.failure is None else None

    def finish(self, part: Part, samples: list[Sample]) -> None:
        with self.changed:
            self.unfinished -= 1
            self.finished.append((part, samples))
            self.changed.notify_all()

    def put_back(self, part: Part, error: WorkerError) -> None:
        """Return the part of a lost worker to the front of the queue."""
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

    def next_finished(self, seconds: float) -> tuple[Part, list[Sample]] | None:
        """Return a finished part; None if there is none within this time. Raises the error of `fail`."""
        with self.changed:
            self.changed.wait_for(lambda: self.finished or self.failure is not None, seconds)
            if self.failure is not None:
                raise self.failure
            return self.finished.popleft() if self.finished else None


def divide(requests: Sequence[GenerationRequest], workers: int, *, evenly: bool = False) -> list[Part]:
    """Divide requests into parts, the first ones large and the last ones small, so that workers finish at one time.

    A part has half of each worker's share of what is left (guided self-scheduling; Polychronopoulos and Kuck, 1987).
    `evenly`: one part per worker instead, of nearly equal size. Completions of a prompt, which share its prefill, stay
    together unless there are fewer prompts than workers.
    """
    groups = [len(list(members)) for _, members in groupby(requests, key=lambda request: request.group)]
    units = deque(groups if len(groups) >= workers else [1] * len(requests))
    parts: list[Part] = []
    first, count = 0, len(requests)
    while units:
        shares = max(1, workers - len(parts)) if evenly or workers == 1 else 2 * workers
        size = units.popleft()
        while units and size + units[0] / 2 <= (count - first) / shares:
            size += units.popleft()
        parts.append(Part(first, list(requests[first : first + size])))
        first += size
    return parts
