"""Rewards of completions: any mix of verifiers, functions, services and reward models, each with a weight.

with Rewards(["gsm8k", "my.py:score"], weights=[1.0, 0.2]) as rewards:
    rewards.check()
    verdicts = rewards.score(completions)      # [completion][reward]
    rewards.check_failures(verdicts)
    values = [combine(row, rewards.weights) for row in verdicts]
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from posttrain.core.errors import RewardError, UsageError
from posttrain.rewards.pool import CHUNK, Job, Pool
from posttrain.rewards.process import Limits
from posttrain.rewards.specs import Spec, parse_specs
from posttrain.rewards.verdict import Completion, Verdict, combine
from posttrain.rewards.verifier import verifiers

__all__ = ["Completion", "Rewards", "Verdict", "combine"]

REWARDS = "rewards"  # what all others said, by name: a parameter of the function that combines
SHOWN_FAULTS = 3  # different ones in a message


class Rewards:
    """Scores completions in child processes; start it as a context manager, which ends them."""

    def __init__(
        self,
        specs: Sequence[str],
        weights: Sequence[float] = (),
        *,
        timeout_seconds: float = 10.0,
        workers: int = 2,
        memory_gib: float = 2.0,
        max_failure_rate: float = 0.1,
        env: Sequence[str] = (),
    ) -> None:
        if weights and len(weights) != len(specs):
            raise UsageError(f"{len(specs)} rewards but {len(weights)} weights: give one weight for each, or none")
        if not all(math.isfinite(weight) for weight in weights):
            raise UsageError(f"weights of rewards must be finite numbers, not {list(weights)}")
        for name, value in (("timeout_seconds", timeout_seconds), ("workers", workers), ("memory_gib", memory_gib)):
            if value <= 0:
                raise UsageError(f"rewards.{name} is {value}: it must be more than 0")
        if not 0 <= max_failure_rate <= 1:
            raise UsageError(f"max_failure_rate is {max_failure_rate}: it must lie between 0 and 1")
        self.specs = parse_specs(specs)
        self.weights = [float(weight) for weight in weights] or [1.0] * len(specs)
        if self.combiner is not None:
            if weights:
                raise UsageError(f"reward {self.combiner.text} decides alone: leave the weights out, or it")
            self.weights = [0.0] * (len(specs) - 1) + [1.0]
        self.max_failure_rate = max_failure_rate
        token = ["POSTTRAIN_TOKEN"] if any(spec.kind == "remote" for spec in self.specs) else []
        self._pool = Pool(workers, Limits(seconds=timeout_seconds, memory_gib=memory_gib, env=(*env, *token)))

    @property
    def names(self) -> list[str]:
        """One for each reward, all different; for metrics."""
        return [spec.name for spec in self.specs]

    @property
    def combiner(self) -> Spec | None:
        """The function that makes one number of what all others said, if there is one."""
        return self.specs[-1] if self.specs and self.specs[-1].combines else None

    @property
    def at_once(self) -> int:
        """Completions that keep all child processes busy."""
        return CHUNK * len(self._pool.workers)

    @property
    def models(self) -> list[tuple[int, str]]:
        """Place and path of each reward model; the trainer scores these."""
        return [(at, spec.place) for at, spec in enumerate(self.specs) if spec.kind == "model"]

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all child processes and what they left behind."""
        self._pool.stop()

    def check(self, columns: Sequence[str] = ()) -> None:
        """UsageError if a reward cannot be loaded or asks for a column that is not among these (if any are given)."""
        known = verifiers()
        for spec in self.specs:
            if spec.kind == "verifier":
                known[spec.place].check()
        self._pool.check([spec for spec in self.specs if spec.kind != "model" and not spec.combines], columns)
        if self.combiner is not None:
            self._pool.check([self.combiner], [*columns, REWARDS] if columns else ())

    def score(self, completions: Sequence[Completion], among: int = 0) -> list[list[Verdict | None]]:
        """[completion][reward]; None where a reward model is to fill in; `conclude` must be called then.

        `among`: the number of all completions, where these are a part of them.
        """
        verdicts: list[list[Verdict | None]] = [[None] * len(self.specs) for _ in completions]
        places = [at for at, spec in enumerate(self.specs) if spec.kind != "model" and not spec.combines]
        self._ask(places, completions, verdicts, among)
        if not self.models:
            self.conclude(completions, verdicts, among)
        return verdicts

    def conclude(self, completions: Sequence[Completion], verdicts: list[list[Verdict | None]], among: int = 0) -> None:
        """Ask what combines the rewards, if anything does, now that all others have spoken."""
        if self.combiner is None:
            return
        asked, rows = [], []
        for completion, row in zip(completions, verdicts, strict=True):
            said = {name: verdict.value for name, verdict in zip(self.names, row, strict=True) if verdict is not None}
            if None in said.values():
                row[-1] = Verdict(value=None, kind="error", reason="not asked: another reward failed")
            else:
                asked.append(replace(completion, columns=completion.columns | {REWARDS: said}))
                rows.append(row)
        self._ask([len(self.specs) - 1], asked, rows, among)

    def _ask(
        self, places: Sequence[int], completions: Sequence[Completion], verdicts: list[list[Verdict | None]], among: int
    ) -> None:
        """Let these functions judge; what they say goes to their places in each completion's row."""
        jobs = {
            (at, start): Job(self.specs[at], completions[start : start + CHUNK])
            for at in places
            for start in range(0, len(completions), CHUNK)
        }
        self._pool.run(list(jobs.values()), hangs=int(self.max_failure_rate * (among or len(completions))))
        for (at, start), job in jobs.items():
            for offset, verdict in enumerate(job.verdicts):
                assert verdict is not None
                verdicts[start + offset][at] = verdict

    def check_failures(self, verdicts: Sequence[Sequence[Verdict | None]]) -> None:
        """RewardError with the first texts if more than `max_failure_rate` of these completions failed."""
        faults: dict[tuple[str, str], list[str]] = defaultdict(list)
        failed = 0
        for row in verdicts:
            bad = [(at, verdict) for at, verdict in enumerate(row) if verdict is not None and verdict.value is None]
            failed += bool(bad)
            for at, verdict in bad:
                faults[self.specs[at].name, verdict.reason.strip().rpartition("\n")[2]].append(verdict.reason)
        if failed <= self.max_failure_rate * len(verdicts):
            return
        most = sorted(faults.items(), key=lambda item: -len(item[1]))
        lines = [
            f"reward functions failed for {failed} of {len(verdicts)} completions, more than "
            f"rewards.limits allows: {self.max_failure_rate:g} of them"
        ]
        for (name, _), texts in most[:SHOWN_FAULTS]:
            lines.append(f"{name}, {len(texts)} time{'s' * (len(texts) > 1)}:\n{texts[0]}")
        if len(most) > SHOWN_FAULTS:
            lines.append(f"and {len(most) - SHOWN_FAULTS} other faults")
        raise RewardError("\n\n".join(lines))
