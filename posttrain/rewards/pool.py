"""Scores completions in several child processes.

A process that hangs or crashes is killed and replaced, and only the completion that caused it fails.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rewards.specs import RewardSpec
from posttrain.rewards.verdict import Completion, Verdict
from posttrain.sandbox.process import ProcessDiedError, ProcessLimits, ProcessRetiredError, ProcessTimeoutError
from posttrain.sandbox.supervisor import STOP_SECONDS, ProcessSupervisor, RunStoppedError, StopFlag

JUDGE_MEMORY_GIB = 8.0
CHUNK = 32  # completions per request: what a batch function receives in one call, for any number of workers
FIELDS = tuple(field.name for field in dataclasses.fields(Completion))
GIVEN_UP = Verdict(value=None, kind="error", reason="not scored: too many completions before it timed out")


class TimeoutBudget:
    """Counts how many completions of a batch may still time out before the rest is given up.

    All calls that score a part of the batch share it.
    """

    def __init__(self, timeouts: int, stop_seconds: float = STOP_SECONDS) -> None:
        """`stop_seconds`: how long a call may take once a stop of the run is requested."""
        self.lock = threading.Lock()
        self.timeouts, self.stop_seconds = timeouts, stop_seconds

    def spend(self) -> None:
        with self.lock:
            self.timeouts -= 1

    @property
    def is_spent(self) -> bool:
        return self.timeouts < 0


@dataclasses.dataclass(slots=True)
class ScoringJob:
    """Completions `first` to `end` for one reward to score; each verdict has the index of its completion."""

    spec: RewardSpec
    completions: Sequence[Completion]
    verdicts: list[Verdict | None] = dataclasses.field(default_factory=list)
    first: int = 0
    end: int = 0
    one_by_one: bool = False
    batch_timed_out: bool = False
    groups: Sequence[int] = ()  # for a judge: completions with the same number belong to one prompt

    def __post_init__(self) -> None:
        self.verdicts = self.verdicts or [None] * len(self.completions)
        self.end = self.end or len(self.completions)

    def split(self, first: int, parts: int, *, one_by_one: bool) -> list[ScoringJob]:
        """Divide the completions from `first` on into at most `parts` jobs that write into the same verdicts."""
        edges = [first + (self.end - first) * part // parts for part in range(parts + 1)]
        return [
            ScoringJob(self.spec, self.completions, self.verdicts, start, end, one_by_one)
            for start, end in pairwise(edges)
            if start < end
        ]


class JobQueue:
    """Jobs for several workers; a worker may return what is left of a job, for all of them to share."""

    def __init__(self, jobs: Sequence[ScoringJob]) -> None:
        self.waiting = deque(jobs)
        self.unfinished = len(jobs)  # waiting or being run
        self.closed = False
        self.changed = threading.Condition()

    def take(self) -> ScoringJob | None:
        """Wait for a job; None when all are finished."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or not self.unfinished or self.closed)
            return self.waiting.popleft() if self.waiting and not self.closed else None

    def finish(self, left: Sequence[ScoringJob] = ()) -> None:
        """End a job that was taken, and add the parts that are left of it."""
        with self.changed:
            self.waiting.extend(left)
            self.unfinished += len(left) - 1
            self.changed.notify_all()

    def close(self) -> None:
        """Let all workers return, although jobs are left."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class RewardWorker:
    """Scores jobs with one child process at a time."""

    def __init__(self, limits: ProcessLimits, allow_unprotected_code: bool, slow: set[str], stop: StopFlag) -> None:
        """`slow`: rewards for which a whole batch takes longer than the deadline; shared by all workers."""
        self.allow_unprotected_code, self.slow, self.stop_flag = allow_unprotected_code, slow, stop
        self.token = self.identity = ""  # of a judge that is a local model
        self.supervisor = ProcessSupervisor("posttrain.rewards.child", limits, stop)

    def load(self, spec: RewardSpec, columns: Sequence[str] = ()) -> bool:
        """Load a reward into the process, and return whether it takes batches."""
        request = {
            "spec": dataclasses.asdict(spec),
            "columns": list(columns),
            "allow_unprotected_code": self.allow_unprotected_code,
            "token": self.token,
            "identity": self.identity,
        }
        reply = self.supervisor.load(f"reward {spec.text}", request, again=bool(columns))
        return bool(reply["batch"])

    def stop(self) -> None:
        self.supervisor.stop()

    def run_judge(self, job: ScoringJob, recorded: Mapping[str, str], budget: TimeoutBudget) -> None:
        """Score a whole job with a judge, which limits the time of each of its questions by itself.

        If the process ends, the job is repeated once: verdicts that were given are in the judge's cache.
        """
        reason = ""
        for _ in range(2):
            if budget.is_spent:
                job.verdicts[:] = [GIVEN_UP] * job.end
                return
            try:
                self.load(job.spec)
                for index, verdict in enumerate(self._judged(job, recorded, budget)):
                    job.verdicts[index] = verdict
                break
            except UsageError as error:
                reason = str(error)
                break
            except (ProcessTimeoutError, ProcessDiedError) as error:
                self.stop()
                reason = f"the judge's process failed: {error}"
            if self.stop_flag.is_set():
                return
        failed = Verdict(value=None, kind="error", reason=reason)
        job.verdicts[:] = [verdict or failed for verdict in job.verdicts]
        for scored in job.verdicts:
            if scored is not None and scored.kind == "timeout":
                budget.spend()

    def _judged(self, job: ScoringJob, recorded: Mapping[str, str], budget: TimeoutBudget) -> Iterator[Verdict]:
        request = {
            "spec": job.spec.text,
            "completions": [{name: getattr(each, name) for name in FIELDS} for each in job.completions],
            "groups": list(job.groups) or list(range(len(job.completions))),
            "recorded": dict(recorded),
            "timeouts": budget.timeouts,
        }
        replies: list[dict[str, Any]] = []
        for reply in self.supervisor.ask(request):
            if "judge_reply" in reply:
                replies.append(reply["judge_reply"])
            elif "index" in reply:
                fields = {name: reply[name] for name in ("value", "kind", "reason", "seconds", "counts")}
                yield Verdict(**fields, replies=replies)
                replies = []

    def run(self, job: ScoringJob, budget: TimeoutBudget) -> int:
        """Score the completions of a job; after a timeout return the number of the first that is left, else its end.

        After a crash the completion that was being scored gets a second try, alone in a new process: the process may
        have been killed from outside, or threads or memory that an earlier completion left behind may be the cause. A
        batch that fails is repeated one by one.
        """
        next_index, alone = job.first, False
        job.one_by_one = job.one_by_one or job.spec.text in self.slow
        while next_index < job.end and not self.stop_flag.is_set():
            left = job.end - next_index
            if budget.is_spent:
                job.verdicts[next_index : job.end] = [GIVEN_UP] * left
                break
            try:
                batch = self.load(job.spec)
            except (UsageError, ProcessDiedError, ProcessTimeoutError) as error:
                if not self.stop_flag.is_set():
                    job.verdicts[next_index : job.end] = [Verdict(value=None, kind="error", reason=str(error))] * left
                break
            try:
                end = next_index + 1 if alone else job.end
                for verdict in self._verdicts(job, next_index, end):
                    job.verdicts[next_index] = verdict
                    next_index += 1
                alone = False
                continue
            except ProcessRetiredError:
                self.stop()
                job.one_by_one = True  # so that the new process calls the function for one completion first
                continue
            except (ProcessTimeoutError, ProcessDiedError) as error:
                timed_out, reason = isinstance(error, ProcessTimeoutError), str(error)
            self.stop()
            if self.stop_flag.is_set():
                break
            if batch and not job.one_by_one and left > 1:
                job.one_by_one, job.batch_timed_out = True, timed_out
            elif not timed_out and not alone:
                alone = True
            else:
                seconds = self.supervisor.limits.seconds if timed_out else 0.0
                job.verdicts[next_index] = Verdict(
                    value=None, kind="timeout" if timed_out else "error", reason=reason, seconds=seconds
                )
                next_index, alone = next_index + 1, False
                if timed_out:
                    budget.spend()
            if timed_out:
                return next_index
        return job.end

    def _verdicts(self, job: ScoringJob, start: int, end: int) -> Iterator[Verdict]:
        completions = [{name: getattr(each, name) for name in FIELDS} for each in job.completions[start:end]]
        request = {"spec": job.spec.text, "completions": completions, "one_by_one": job.one_by_one}
        received = 0
        for reply in self.supervisor.ask(request):
            if "one_by_one" in reply:
                continue
            if reply.get("index") != received:
                raise ProcessDiedError("the replies are out of order")
            received += 1
            yield Verdict(**{name: reply[name] for name in ("value", "kind", "reason", "seconds")})
        if received != len(completions):
            raise ProcessDiedError("a reply is missing")


class RewardPool:
    """Several workers; their processes start when they are first needed. Each judge has one of its own.

    So a judge's limits of requests hold for all of them.
    """

    def __init__(self, workers: int, limits: ProcessLimits, allow_unprotected_code: bool = False) -> None:
        self.slow: set[str] = set()
        self.stop_flag = StopFlag()
        self.limits, self.allow_unprotected_code = limits, allow_unprotected_code
        self.workers = [self._worker(limits) for _ in range(workers)]
        self.judges: dict[str, RewardWorker] = {}
        self.lock = threading.Lock()

    def _worker(self, limits: ProcessLimits) -> RewardWorker:
        return RewardWorker(limits, self.allow_unprotected_code, self.slow, self.stop_flag)

    def judge(self, spec: RewardSpec) -> RewardWorker:
        """Return the worker of a judge; its threads reserve address space, so it may use more than functions."""
        if spec.text not in self.judges:
            limits = dataclasses.replace(self.limits, memory_gib=max(self.limits.memory_gib, JUDGE_MEMORY_GIB))
            self.judges[spec.text] = self._worker(limits)
        return self.judges[spec.text]

    def check(self, specs: Sequence[RewardSpec], columns: Sequence[str] = ()) -> None:
        """Raise a UsageError for the first reward that cannot be loaded."""
        with self.lock:
            for spec in specs:
                worker = self.judge(spec) if spec.kind == "judge" else self.workers[0]
                try:
                    worker.load(spec, columns)
                except (ProcessDiedError, ProcessTimeoutError) as error:
                    raise UsageError(f"the process for reward functions did not start: {error}") from error

    def run(self, jobs: Sequence[ScoringJob], budget: TimeoutBudget, recorded: Mapping[str, str] | None = None) -> None:
        """Run all jobs; when the budget is spent, the rest is given up.

        After a timeout all workers share what is left of the job. RunStoppedError if the run was asked to stop.
        `recorded`: replies that judges gave before, by key.
        """
        judged = [job for job in jobs if job.spec.kind == "judge"]
        others = [job for job in jobs if job.spec.kind != "judge"]
        queue = JobQueue(others)
        self.stop_flag.interrupted.clear()

        def drain(worker: RewardWorker) -> None:
            try:
                while (job := queue.take()) is not None:
                    left = worker.run(job, budget)
                    queue.finish(job.split(left, len(self.workers), one_by_one=job.one_by_one))
            except BaseException:
                queue.close()
                raise

        busy = self.workers if any(len(job.completions) > 1 for job in others) else self.workers[: len(others)]
        with (
            self.lock,
            ThreadPoolExecutor(len(busy) + len(judged) or 1, thread_name_prefix="rewards") as threads,
            self.stop_flag.work(budget.stop_seconds),
        ):
            try:
                futures = [threads.submit(drain, worker) for worker in busy]
                futures += [threads.submit(self.judge(j.spec).run_judge, j, recorded or {}, budget) for j in judged]
                for future in futures:
                    future.result()
            except BaseException:
                queue.close()
                raise
        if any(verdict is None for job in jobs for verdict in job.verdicts):
            raise RunStoppedError("the run was asked to stop while rewards were being computed")
        for job in others:
            hangs = any(verdict is not None and verdict.kind == "timeout" for verdict in job.verdicts)
            if job.batch_timed_out and not hangs:
                self.slow.add(job.spec.text)  # no completion hangs, so the batch is only slow: do not try one again

    def stop(self) -> None:
        for worker in (*self.workers, *self.judges.values()):
            worker.stop()
