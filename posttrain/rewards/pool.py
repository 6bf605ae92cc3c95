"""Several children that judge completions: what misbehaves is killed and replaced, and only the guilty one fails."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields

from posttrain.core.errors import UsageError
from posttrain.rewards.process import LOAD_SECONDS, Child, DeadError, LateError, Limits, RetiredError
from posttrain.rewards.specs import Spec
from posttrain.rewards.verdict import Completion, Verdict

__all__ = ["LOAD_SECONDS", "Child", "DeadError", "Job", "LateError", "Limits", "Pool", "RetiredError", "Worker"]

CHUNK = 32  # completions a message; a batch function sees so many at once, whatever the number of workers
ASKED = tuple(each.name for each in fields(Completion))
GIVEN_UP = Verdict(value=None, kind="error", reason="not asked: too many before it gave no result in time")


class Patience:
    """How many completions of a batch may still hang until the others are given up: waiting would take for ever."""

    def __init__(self, hangs: int) -> None:
        self.lock = threading.Lock()
        self.hangs = hangs

    def spend(self) -> None:
        with self.lock:
            self.hangs -= 1

    @property
    def lost(self) -> bool:
        return self.hangs < 0


@dataclass(slots=True)
class Job:
    """Completions that one function is to judge; verdicts appear at the same places."""

    spec: Spec
    completions: Sequence[Completion]
    verdicts: list[Verdict | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verdicts = [None] * len(self.completions)


class Worker:
    """Works off jobs with one child at a time."""

    def __init__(self, limits: Limits, slow: set[str], closing: threading.Event) -> None:
        self.limits = limits
        self.closing = closing
        self.slow = slow  # functions for which a whole batch takes longer than the deadline; shared by all workers
        self.child: Child | None = None

    def ready(self, spec: Spec, columns: Sequence[str] = ()) -> tuple[Child, bool]:
        """A child that has loaded this, and whether it takes batches."""
        if self.child is None:
            self.child = Child(self.limits, self.closing)
        try:
            return self.child, self.child.load(spec, columns)
        except UsageError:
            self.stop()
            raise

    def stop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()

    def work(self, job: Job, patience: Patience) -> None:
        """Judge all; a completion that hangs or crashes its process fails alone."""
        start, singly, again, late_batch = 0, job.spec.text in self.slow, False, False
        while start < len(job.completions) and not self.closing.is_set():
            if patience.lost:
                job.verdicts[start:] = [GIVEN_UP] * (len(job.completions) - start)
                return
            try:
                child, batch = self.ready(job.spec)
            except (UsageError, DeadError, LateError) as error:
                left = len(job.completions) - start
                job.verdicts[start:] = [Verdict(value=None, kind="error", reason=str(error))] * left
                return
            try:
                stop = start + 1 if again else len(job.completions)
                for verdict in self._replies(child, job, start, stop, singly):
                    job.verdicts[start] = verdict
                    start += 1
                again = False
                continue
            except RetiredError:
                self.stop()
                continue
            except LateError:
                late, reason = True, f"no result within {self.limits.seconds:g} s{child.tail()}"
            except DeadError as error:
                late, reason = False, str(error)
            self.stop()
            if batch and not singly and len(job.completions) - start > 1:
                singly, late_batch = True, late
            elif child.judged and not late and not again:
                again = True  # what an earlier one left behind may be the cause: ask by itself, in a fresh process
            else:
                seconds = self.limits.seconds if late else 0.0
                verdict = Verdict(value=None, kind="timeout" if late else "error", reason=reason, seconds=seconds)
                job.verdicts[start] = verdict
                start, again = start + 1, False
                if late:
                    patience.spend()
        if late_batch and all(verdict is not None and verdict.kind != "timeout" for verdict in job.verdicts):
            self.slow.add(job.spec.text)  # nobody hangs: it is only slow, so do not try a batch again

    def _replies(self, child: Child, job: Job, start: int, stop: int, singly: bool) -> Iterator[Verdict]:
        asked = [{name: getattr(completion, name) for name in ASKED} for completion in job.completions[start:stop]]
        message = {"do": "judge", "spec": job.spec.text, "completions": asked, "singly": singly}
        answered = 0
        for reply in child.ask(message, self.limits.seconds):
            if "singly" in reply:
                continue
            if "retire" in reply:
                raise RetiredError
            if reply.get("at") != answered:
                raise DeadError("replies in disorder")
            answered += 1
            child.judged += 1
            yield Verdict(**{name: reply[name] for name in ("value", "kind", "reason", "seconds")})
        if answered != len(asked):
            raise DeadError("a reply is missing")


class Pool:
    """Several workers; children start when they are first needed."""

    def __init__(self, workers: int, limits: Limits) -> None:
        slow: set[str] = set()
        self.closing = threading.Event()
        self.workers = [Worker(limits, slow, self.closing) for _ in range(workers)]
        self.lock = threading.Lock()

    def check(self, specs: Sequence[Spec], columns: Sequence[str] = ()) -> None:
        """UsageError for the first that cannot be loaded."""
        with self.lock:
            for spec in specs:
                try:
                    self.workers[0].ready(spec, columns)
                except (DeadError, LateError) as error:
                    raise UsageError(f"the process for reward functions did not start: {error}") from error

    def run(self, jobs: Sequence[Job], hangs: int) -> None:
        """Work off all jobs; when more completions than `hangs` gave no result in time, the rest is given up."""
        patience = Patience(hangs)
        queue = deque(jobs)
        self.closing.clear()

        def drain(worker: Worker) -> None:
            while True:
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                worker.work(job, patience)

        busy = self.workers[: len(jobs)]
        with self.lock, ThreadPoolExecutor(max(1, len(busy)), thread_name_prefix="rewards") as threads:
            try:
                for future in [threads.submit(drain, worker) for worker in busy]:
                    future.result()
            except BaseException:
                queue.clear()
                self.closing.set()  # interrupted: the workers do not wait for their functions
                raise

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
