"""Several child processes that score completions: a process that hangs or crashes is killed and replaced, and only the
completion that caused it fails."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from posttrain.core.errors import UsageError
from posttrain.rewards.specs import RewardSpec
from posttrain.rewards.verdict import Completion, Verdict
from posttrain.sandbox.process import ProcessDiedError, ProcessLimits, ProcessRetiredError, ProcessTimeoutError
from posttrain.sandbox.supervisor import ProcessSupervisor

CHUNK = 32  # completions per request: what a batch function gets at once, whatever the number of workers
FIELDS = tuple(field.name for field in dataclasses.fields(Completion))
GIVEN_UP = Verdict(value=None, kind="error", reason="not scored: too many completions before it timed out")


class TimeoutBudget:
    """Counts how many completions of a batch may still time out before the rest is given up."""

    def __init__(self, timeouts: int) -> None:
        self.lock = threading.Lock()
        self.timeouts = timeouts

    def spend(self) -> None:
        with self.lock:
            self.timeouts -= 1

    @property
    def is_spent(self) -> bool:
        return self.timeouts < 0


@dataclasses.dataclass(slots=True)
class ScoringJob:
    """Completions for one reward to score; each verdict has the index of its completion."""

    spec: RewardSpec
    completions: Sequence[Completion]
    verdicts: list[Verdict | None] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.verdicts = [None] * len(self.completions)


class RewardWorker:
    """Scores jobs with one child process at a time."""

    def __init__(
        self, limits: ProcessLimits, allow_unprotected_code: bool, slow: set[str], cancelled: threading.Event
    ) -> None:
        """`slow`: rewards for which a whole batch takes longer than the deadline; shared by all workers."""
        self.allow_unprotected_code, self.slow, self.cancelled = allow_unprotected_code, slow, cancelled
        self.supervisor = ProcessSupervisor("posttrain.rewards.child", limits, cancelled)
        self.scored = 0  # completions that the current process scored; they may have left threads or memory behind

    def load(self, spec: RewardSpec, columns: Sequence[str] = ()) -> bool:
        """Load a reward into the process, and return whether it takes batches."""
        request = {
            "spec": dataclasses.asdict(spec),
            "columns": list(columns),
            "allow_unprotected_code": self.allow_unprotected_code,
        }
        reply = self.supervisor.load(f"reward {spec.text}", request, again=bool(columns))
        return bool(reply["batch"])

    def stop(self) -> None:
        self.supervisor.stop()
        self.scored = 0

    def run(self, job: ScoringJob, budget: TimeoutBudget) -> None:
        """Score all completions of a job.

        After a crash the completion that was being scored gets a second try, alone in a new process, because threads or
        memory that an earlier one left behind may be the cause. A batch that fails is repeated one by one.
        """
        next_index, one_by_one, alone, batch_timed_out = 0, job.spec.text in self.slow, False, False
        while next_index < len(job.completions) and not self.cancelled.is_set():
            left = len(job.completions) - next_index
            if budget.is_spent:
                job.verdicts[next_index:] = [GIVEN_UP] * left
                return
            try:
                batch = self.load(job.spec)
            except (UsageError, ProcessDiedError, ProcessTimeoutError) as error:
                job.verdicts[next_index:] = [Verdict(value=None, kind="error", reason=str(error))] * left
                return
            try:
                end = next_index + 1 if alone else len(job.completions)
                for verdict in self._verdicts(job, next_index, end, one_by_one):
                    job.verdicts[next_index] = verdict
                    next_index += 1
                alone = False
                continue
            except ProcessRetiredError:
                self.stop()
                continue
            except (ProcessTimeoutError, ProcessDiedError) as error:
                timed_out, reason = isinstance(error, ProcessTimeoutError), str(error)
            scored_before = self.scored
            self.stop()
            if batch and not one_by_one and len(job.completions) - next_index > 1:
                one_by_one, batch_timed_out = True, timed_out
            elif scored_before and not timed_out and not alone:
                alone = True
            else:
                seconds = self.supervisor.limits.seconds if timed_out else 0.0
                job.verdicts[next_index] = Verdict(
                    value=None, kind="timeout" if timed_out else "error", reason=reason, seconds=seconds
                )
                next_index, alone = next_index + 1, False
                if timed_out:
                    budget.spend()
        if batch_timed_out and all(verdict is not None and verdict.kind != "timeout" for verdict in job.verdicts):
            self.slow.add(job.spec.text)  # no completion hangs, so the batch is only slow: do not try one again

    def _verdicts(self, job: ScoringJob, start: int, end: int, one_by_one: bool) -> Iterator[Verdict]:
        completions = [{name: getattr(each, name) for name in FIELDS} for each in job.completions[start:end]]
        request = {"spec": job.spec.text, "completions": completions, "one_by_one": one_by_one}
        received = 0
        for reply in self.supervisor.ask(request):
            if "one_by_one" in reply:
                continue
            if reply.get("index") != received:
                raise ProcessDiedError("the replies are out of order")
            received += 1
            self.scored += 1
            yield Verdict(**{name: reply[name] for name in ("value", "kind", "reason", "seconds")})
        if received != len(completions):
            raise ProcessDiedError("a reply is missing")


class RewardPool:
    """Several workers; their processes start when they are first needed."""

    def __init__(self, workers: int, limits: ProcessLimits, allow_unprotected_code: bool = False) -> None:
        slow: set[str] = set()
        self.cancelled = threading.Event()
        self.workers = [RewardWorker(limits, allow_unprotected_code, slow, self.cancelled) for _ in range(workers)]
        self.lock = threading.Lock()

    def check(self, specs: Sequence[RewardSpec], columns: Sequence[str] = ()) -> None:
        """Raise a UsageError for the first reward that cannot be loaded."""
        with self.lock:
            for spec in specs:
                try:
                    self.workers[0].load(spec, columns)
                except (ProcessDiedError, ProcessTimeoutError) as error:
                    raise UsageError(f"the process for reward functions did not start: {error}") from error

    def run(self, jobs: Sequence[ScoringJob], max_timeouts: int) -> None:
        """Run all jobs; after more than `max_timeouts` completions timed out, the rest is given up."""
        budget = TimeoutBudget(max_timeouts)
        queue = deque(jobs)
        self.cancelled.clear()

        def drain(worker: RewardWorker) -> None:
            while True:
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                worker.run(job, budget)

        busy = self.workers[: len(jobs)]
        with self.lock, ThreadPoolExecutor(max(1, len(busy)), thread_name_prefix="rewards") as threads:
            try:
                for future in [threads.submit(drain, worker) for worker in busy]:
                    future.result()
            except BaseException:
                queue.clear()
                self.cancelled.set()  # interrupted: do not wait for the reward functions
                raise

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
