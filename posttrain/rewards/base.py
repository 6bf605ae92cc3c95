"""Rewards of completions: any mix of verifiers, functions, services and reward models, each with a weight.

with Rewards(["gsm8k", "my.py:score"], weights=[1.0, 0.2]) as rewards:
    rewards.check()
    verdicts = rewards.score(completions)      # [completion][reward]
    rewards.check_failures(verdicts)
    values = [combine(row, rewards.weights) for row in verdicts]
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from posttrain.core.errors import RewardError, UsageError
from posttrain.rewards.builtin import verifiers
from posttrain.rewards.judge_server import JudgeServer
from posttrain.rewards.pool import CHUNK, RewardPool, ScoringJob, TimeoutBudget
from posttrain.rewards.specs import RewardLike, RewardSpec, parse_specs, reward_texts
from posttrain.rewards.verdict import Completion, Verdict, combine, group_by_prompt
from posttrain.sandbox.process import ProcessLimits
from posttrain.sandbox.supervisor import STOP_SECONDS

__all__ = ["Completion", "Rewards", "Verdict", "combine", "group_by_prompt"]

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

        `env`: environment variables that reward functions see, besides PATH and the like; each must be set.

        `allow_unprotected_code`: the verifier `code` also works where programs of the model cannot be isolated.
        """
        if weights and len(weights) != len(specs):
            raise UsageError(f"{len(specs)} rewards but {len(weights)} weights: give one weight per reward, or none")
        if not all(math.isfinite(weight) for weight in weights):
            raise UsageError(f"reward weights must be finite numbers, not {list(weights)}")
        for name, value in (("timeout_seconds", timeout_seconds), ("workers", workers), ("memory_gib", memory_gib)):
            if value <= 0:
                raise UsageError(f"reward.{name} is {value}: it must be more than 0")
        if not 0 <= max_failure_rate <= 1:
            raise UsageError(f"reward.max_failure_rate is {max_failure_rate}: it must be between 0 and 1")
        if unset := [name for name in env if name not in os.environ]:
            raise UsageError(f"reward.env: {unset[0]} is not set in this environment: export it, or remove it")
        self.specs = parse_specs(reward_texts(specs))
        self.weights = [float(weight) for weight in weights] or [1.0] * len(specs)
        if self.combiner is not None:
            if weights:
                raise UsageError(
                    f"reward {self.combiner.text} replaces the weighted sum: remove the weights, or remove it"
                )
            self.weights = [0.0] * (len(specs) - 1) + [1.0]
        self.max_failure_rate = max_failure_rate
        for spec in self.specs:
            key = spec.rubric.api_key_env if spec.rubric else ""
            if key and key not in env:
                raise UsageError(f"reward {spec.text}: the judge needs its key: pass it with reward.env {key}")
        token = ["POSTTRAIN_TOKEN"] if any(spec.kind == "remote" for spec in self.specs) else []
        limits = ProcessLimits(seconds=timeout_seconds, memory_gib=memory_gib, env=(*env, *token))
        self.limits = limits
        self.recorded: dict[str, str] = {}  # replies of judges in an earlier run, by key: they are not asked again
        self._servers: dict[str, JudgeServer] = {}  # of judges that are local models, by text of the reward
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

    @property
    def judges(self) -> list[str]:
        """Names of the rewards that are judges."""
        return [spec.name for spec in self.specs if spec.kind == "judge"]

    @property
    def comparing(self) -> list[int]:
        """Indices of the judges that compare completions of one prompt with each other."""
        return [index for index, spec in enumerate(self.specs) if spec.rubric is not None and spec.rubric.compares]

    @property
    def has_open_verdicts(self) -> bool:
        """Whether `score` leaves verdicts open: those of reward models and of judges that compare completions."""
        return bool(self.models or self.comparing)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all child processes and their descendants."""
        self._pool.stop()
        for server in self._servers.values():
            server.stop()
        self._servers.clear()

    def measure_order(self) -> None:
        """Let judges that compare completions ask in both orders, so that their verdicts show how much it matters."""
        self.specs = [
            replace(spec, rubric=replace(spec.rubric, swap=True)) if spec.rubric is not None else spec
            for spec in self.specs
        ]

    def _serve_judges(self) -> None:
        """Start a server for each judge that is a local model."""
        for index, spec in enumerate(self.specs):
            if spec.rubric is None or spec.rubric.base_url:
                continue
            server = JudgeServer(spec.rubric.model, spec.rubric.max_tokens)
            self._servers[spec.text] = server
            self.specs[index] = replace(spec, rubric=replace(spec.rubric, base_url=server.address))
            worker = self._pool.judge(spec)
            worker.token, worker.identity = server.token, server.identity

    def check(self, columns: Sequence[str] = ()) -> None:
        """Load all rewards; a UsageError if one cannot be loaded or needs a column that is not in `columns`."""
        known = verifiers()
        self._serve_judges()
        for spec in self.specs:
            if spec.rubric is not None and columns and spec.rubric.reference not in ("", *columns):
                raise UsageError(
                    f"reward {spec.text}: reference: {spec.rubric.reference} is not a column of the data; "
                    f"the columns are {', '.join(columns)}"
                )
            if spec.kind == "verifier":
                known[spec.place].check(columns)
        self._pool.check([spec for spec in self.specs if spec.kind != "model" and not spec.combines], columns)
        if self.combiner is not None:
            self._pool.check([self.combiner], [*columns, REWARDS] if columns else ())

    def check_examples(self, examples: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        """Raise a DataError if a verifier has nothing to compare with in an example, given by columns and origin."""
        known = verifiers()
        used = [known[spec.place] for spec in self.specs if spec.kind == "verifier"]
        for columns, origin in examples:
            for verifier in used:
                verifier.check_example(columns, origin)

    def timeout_budget(self, completions: int, *, stop_seconds: float = STOP_SECONDS) -> TimeoutBudget:
        """Return the budget of timeouts that all calls of `score` for one batch of `completions` completions share.

        `stop_seconds`: once a stop is requested (`stop_when`), a call ends after this time with a RunStoppedError.
        """
        return TimeoutBudget(int(self.max_failure_rate * completions), stop_seconds)

    def stop_when(self, requested: Callable[[], bool]) -> None:
        """Set the function that tells whether the run was asked to stop; scoring then does not wait any longer."""
        self._pool.stop_flag.stop_requested = requested

    def score(
        self, completions: Sequence[Completion], budget: TimeoutBudget | None = None
    ) -> list[list[Verdict | None]]:
        """Score completions: [completion][reward]; None for a reward model and for a judge that compares completions.

        If there are any of these (`has_open_verdicts`), `compare` and `run_combiner` must be called once all
        completions of a prompt are there.

        `budget`: of the whole batch, if these are a part of it.
        """
        verdicts: list[list[Verdict | None]] = [[None] * len(self.specs) for _ in completions]
        later = {*self.comparing, *(index for index, _ in self.models)}
        indices = [index for index, spec in enumerate(self.specs) if index not in later and not spec.combines]
        budget = budget or self.timeout_budget(len(completions))
        self._run(indices, completions, verdicts, budget)
        if not self.has_open_verdicts:
            self.run_combiner(completions, verdicts, budget)
        return verdicts

    def compare(
        self,
        completions: Sequence[Completion],
        groups: Sequence[int],
        verdicts: list[list[Verdict | None]],
        budget: TimeoutBudget | None = None,
    ) -> None:
        """Fill in the verdicts of judges that compare completions: those with the same number in `groups`."""
        if self.comparing:
            budget = budget or self.timeout_budget(len(completions))
            self._run(self.comparing, completions, verdicts, budget, groups)

    def run_combiner(
        self,
        completions: Sequence[Completion],
        verdicts: list[list[Verdict | None]],
        budget: TimeoutBudget | None = None,
    ) -> None:
        """Call the combining function, if there is one, now that all other verdicts are there."""
        if self.combiner is None:
            return
        complete, rows = [], []
        for completion, row in zip(completions, verdicts, strict=True):
            others = {name: verdict for name, verdict in zip(self.names, row, strict=True) if verdict is not None}
            values = {name: verdict.value for name, verdict in others.items()}  # None: it does not apply
            if any(verdict.failed for verdict in others.values()):
                row[-1] = Verdict(value=None, kind="error", reason="not scored: another reward failed")
            else:
                complete.append(replace(completion, columns=completion.columns | {REWARDS: values}))
                rows.append(row)
        self._run([len(self.specs) - 1], complete, rows, budget or self.timeout_budget(len(completions)))

    def _run(
        self,
        indices: Sequence[int],
        completions: Sequence[Completion],
        verdicts: list[list[Verdict | None]],
        budget: TimeoutBudget,
        groups: Sequence[int] = (),
    ) -> None:
        """Score completions with the rewards of these indices; fills in their columns of `verdicts`."""
        self._serve_judges()
        jobs: dict[tuple[int, int], ScoringJob] = {}
        for index in indices if completions else ():
            spec = self.specs[index]
            size = len(completions) if spec.kind == "judge" else CHUNK
            for start in range(0, len(completions), size):
                jobs[index, start] = ScoringJob(spec, completions[start : start + size], groups=groups)
        self._pool.run(list(jobs.values()), budget, self.recorded)
        for (index, start), job in jobs.items():
            for offset, verdict in enumerate(job.verdicts):
                assert verdict is not None
                verdicts[start + offset][index] = verdict

    def check_failures(self, verdicts: Sequence[Sequence[Verdict | None]]) -> None:
        """Raise a RewardError with the first messages if more than `max_failure_rate` of these completions failed."""
        failures: dict[tuple[str, str], list[str]] = defaultdict(list)
        failed = 0
        for row in verdicts:
            bad = [(i, verdict) for i, verdict in enumerate(row) if verdict is not None and verdict.failed]
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
        if any(verdict is not None and verdict.kind == "timeout" for row in verdicts for verdict in row):
            lines.append(self.timeout_hint())
        raise RewardError("\n\n".join(lines + self.hidden_variable_hints(most_frequent[0][1])))

    def timeout_hint(self) -> str:
        """Return which options help against timeouts."""
        hint = f"If a reward function needs longer, raise reward.timeout_seconds (now {self.limits.seconds:g})."
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores:
            hint += (
                f" This machine is busy (load {load:.1f} on {cores} cores): fewer processes at a time may help too, "
                f"with a lower reward.workers (now {len(self._pool.workers)})."
            )
        return hint

    def hidden_variable_hints(self, reasons: Sequence[str]) -> list[str]:
        """Return a hint if a function failed because it looked for an environment variable that only this process has.

        `reasons`: the tracebacks of the most frequent failure.
        """
        found = re.search(r"^KeyError: '(\w+)'$", reasons[0].strip().rpartition("\n")[2])
        if found is None or found[1] not in os.environ or found[1] in self.limits.env:
            return []
        return [f"Reward functions see no environment variables of this process: pass it with reward.env {found[1]}"]
