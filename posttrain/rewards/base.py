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
from posttrain.rewards.builtin import verifiers
from posttrain.rewards.pool import CHUNK, RewardPool, ScoringJob
from posttrain.rewards.specs import RewardLike, RewardSpec, parse_specs, reward_texts
from posttrain.rewards.verdict import Completion, Verdict, combine
from posttrain.sandbox.process import ProcessLimits

__all__ = ["Completion", "Rewards", "Verdict", "combine"]

REWARDS = "rewards"  # parameter of a combining function: the values of all other rewards, by name
SHOWN_FAILURES = 3  # different ones in a message


class Rewards:
    """Scores completions in child processes; a context manager, which ends them."""

    def __init__(
        self,
        specs: Sequence[RewardLike],
        weights: Sequence[float] = (),
        *,
        timeout_seconds: float = 10.0,
        workers: int = 2,
        memory_gib: float = 2.0,
        max_failure_rate: float = 0.1,
        env: Sequence[str] = (),
        allow_unprotected_code: bool = False,
    ) -> None:
        """`specs`: texts as `--reward` takes them, or Python functions.

        `env`: environment variables that reward functions see, besides PATH and the like.

        `allow_unprotected_code`: the verifier `code` also works where programs of the model cannot be isolated.
        """
        if weights and len(weights) != len(specs):
            raise UsageError(f"{len(specs)} rewards but {len(weights)} weights: give one weight per reward, or none")
        if not all(math.isfinite(weight) for weight in weights):
            raise UsageError(f"reward weights must be finite numbers, not {list(weights)}")
        for name, value in (("timeout_seconds", timeout_seconds), ("workers", workers), ("memory_gib", memory_gib)):
            if value <= 0:
                raise UsageError(f"rewards.{name} is {value}: it must be more than 0")
        if not 0 <= max_failure_rate <= 1:
            raise UsageError(f"max_failure_rate is {max_failure_rate}: it must be between 0 and 1")
        self.specs = parse_specs(reward_texts(specs))
        self.weights = [float(weight) for weight in weights] or [1.0] * len(specs)
        if self.combiner is not None:
            if weights:
                raise UsageError(
                    f"reward {self.combiner.text} replaces the weighted sum: remove the weights, or remove it"
                )
            self.weights = [0.0] * (len(specs) - 1) + [1.0]
        self.max_failure_rate = max_failure_rate
        token = ["POSTTRAIN_TOKEN"] if any(spec.kind == "remote" for spec in self.specs) else []
        limits = ProcessLimits(seconds=timeout_seconds, memory_gib=memory_gib, env=(*env, *token))
        self._pool = RewardPool(workers, limits, allow_unprotected_code)

    @property
    def names(self) -> list[str]:
        """The name of each reward in metrics; all are different."""
        return [spec.name for spec in self.specs]

    @property
    def combiner(self) -> RewardSpec | None:
        """The function that computes the reward from the values of all others, if there is one."""
        return self.specs[-1] if self.specs and self.specs[-1].combines else None

    @property
    def parallel_completions(self) -> int:
        """The number of completions that keeps all child processes busy."""
        return CHUNK * len(self._pool.workers)

    @property
    def models(self) -> list[tuple[int, str]]:
        """Index and path of each reward model; the trainer computes their scores."""
        return [(index, spec.place) for index, spec in enumerate(self.specs) if spec.kind == "model"]

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all child processes and their descendants."""
        self._pool.stop()

    def check(self, columns: Sequence[str] = ()) -> None:
        """Load all rewards; a UsageError if one cannot be loaded or needs a column that is not in `columns`."""
        known = verifiers()
        for spec in self.specs:
            if spec.kind == "verifier":
                known[spec.place].check()
        self._pool.check([spec for spec in self.specs if spec.kind != "model" and not spec.combines], columns)
        if self.combiner is not None:
            self._pool.check([self.combiner], [*columns, REWARDS] if columns else ())

    def score(self, completions: Sequence[Completion], batch_size: int = 0) -> list[list[Verdict | None]]:
        """Score completions: [completion][reward]; None for a reward model, after which `run_combiner` must be called.

        `batch_size`: the number of completions in the whole batch, if these are a part of it.
        """
        verdicts: list[list[Verdict | None]] = [[None] * len(self.specs) for _ in completions]
        indices = [index for index, spec in enumerate(self.specs) if spec.kind != "model" and not spec.combines]
        self._run(indices, completions, verdicts, batch_size)
        if not self.models:
            self.run_combiner(completions, verdicts, batch_size)
        return verdicts

    def run_combiner(
        self, completions: Sequence[Completion], verdicts: list[list[Verdict | None]], batch_size: int = 0
    ) -> None:
        """Call the combining function, if there is one, now that all other verdicts are there."""
        if self.combiner is None:
            return
        complete, rows = [], []
        for completion, row in zip(completions, verdicts, strict=True):
            values = {name: verdict.value for name, verdict in zip(self.names, row, strict=True) if verdict is not None}
            if None in values.values():
                row[-1] = Verdict(value=None, kind="error", reason="not scored: another reward failed")
            else:
                complete.append(replace(completion, columns=completion.columns | {REWARDS: values}))
                rows.append(row)
        self._run([len(self.specs) - 1], complete, rows, batch_size)

    def _run(
        self,
        indices: Sequence[int],
        completions: Sequence[Completion],
        verdicts: list[list[Verdict | None]],
        batch_size: int,
    ) -> None:
        """Score completions with the rewards of these indices; fills in their columns of `verdicts`."""
        jobs = {
            (index, start): ScoringJob(self.specs[index], completions[start : start + CHUNK])
            for index in indices
            for start in range(0, len(completions), CHUNK)
        }
        self._pool.run(list(jobs.values()), max_timeouts=int(self.max_failure_rate * (batch_size or len(completions))))
        for (index, start), job in jobs.items():
            for offset, verdict in enumerate(job.verdicts):
                assert verdict is not None
                verdicts[start + offset][index] = verdict

    def check_failures(self, verdicts: Sequence[Sequence[Verdict | None]]) -> None:
        """Raise a RewardError with the first messages if more than `max_failure_rate` of these completions failed."""
        failures: dict[tuple[str, str], list[str]] = defaultdict(list)
        failed = 0
        for row in verdicts:
            bad = [(i, verdict) for i, verdict in enumerate(row) if verdict is not None and verdict.value is None]
            failed += bool(bad)
            for i, verdict in bad:
                failures[self.specs[i].name, verdict.reason.strip().rpartition("\n")[2]].append(verdict.reason)
        if failed <= self.max_failure_rate * len(verdicts):
            return
        most_frequent = sorted(failures.items(), key=lambda item: -len(item[1]))
        lines = [
            f"reward functions failed for {failed} of {len(verdicts)} completions; "
            f"reward.max_failure_rate allows {self.max_failure_rate:g} of them"
        ]
        for (name, _), texts in most_frequent[:SHOWN_FAILURES]:
            lines.append(f"{name}, {len(texts)} time{'s' * (len(texts) > 1)}:\n{texts[0]}")
        if len(most_frequent) > SHOWN_FAILURES:
            lines.append(f"and {len(most_frequent) - SHOWN_FAILURES} other failures")
        raise RewardError("\n\n".join(lines))
