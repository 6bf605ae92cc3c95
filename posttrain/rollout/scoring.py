"""Scores rollouts: reward functions, reward models, and the options that change their weighted sum."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import RewardError
from posttrain.rewards.base import Completion, Rewards, Verdict, combine
from posttrain.rewards.pool import TimeoutBudget
from posttrain.rewards.verdict import NO_REWARD
from posttrain.rollout.records import Rollout, given_rewards

CACHED_PROMPTS = 4096  # prompts whose text is kept: completions of one prompt are finished one by one
ModelVerdicts = Callable[[Sequence[Rollout]], Sequence[Verdict]]
"""A reward model: returns a score for each rollout, or a reason why it has none."""


class RolloutScorer:
    """Writes rewards into rollouts. A rollout that cannot be scored is marked as failed and never gets reward 0."""

    def __init__(
        self, rewards: Rewards, models: Mapping[int, ModelVerdicts], config: OnlineConfig, tokenizer: Any
    ) -> None:
        """`models`: reward models by their index among the rewards."""
        self.rewards, self.models, self.tokenizer = rewards, models, tokenizer
        self.weights = list(config.reward.weights or rewards.weights)
        self.clip_bounds = config.reward.clip_bounds
        self.needed = config.algo is None or config.algo.needs_reward()  # else completions without one are trained on
        self.statistics = RunningStatistics() if config.reward.normalize == "running" else None
        self.overlong = (config.reward.overlong_tokens, config.reward.overlong_penalty, config.rollout.max_tokens)
        self.decode = lru_cache(CACHED_PROMPTS)(lambda tokens: tokenizer.decode(np.frombuffer(tokens, dtype=np.int32)))

    def score(self, rollouts: Sequence[Rollout], *, budget: TimeoutBudget | None = None, training: bool = True) -> None:
        """Score all rollouts; raises RewardError if more of them fail than reward.max_failure_rate allows.

        `budget`: timeouts that the whole batch may have, shared with `score_early`.

        `training`: False neither updates nor applies the running normalization, so that results are comparable over
        a run.
        """
        scorable = [rollout for rollout in rollouts if not rollout.failure]
        remaining = [rollout for rollout in scorable if rollout.early_verdicts is None]
        budget = budget or self.rewards.timeout_budget(len(scorable))
        self.rewards.recorded = recorded_replies(scorable)
        scored = iter(self.rewards.score(self.completions(remaining), budget))
        verdicts = [next(scored) if rollout.early_verdicts is None else rollout.early_verdicts for rollout in scorable]
        for index in self.models:
            self.score_by_model(index, scorable)
            for row, rollout in zip(verdicts, scorable, strict=True):
                row[index] = rollout.model_verdicts.pop(index)
        if self.rewards.has_open_verdicts:
            completions = self.completions(scorable)
            self.rewards.compare(completions, [rollout.sample.group for rollout in scorable], verdicts, budget)
            self.rewards.run_combiner(completions, verdicts, budget)
        for rollout, row in zip(scorable, verdicts, strict=True):
            self.write(rollout, row)
        if training or self.statistics is None:
            self.normalize([rollout for rollout in scorable if not rollout.failure])
        try:
            self.rewards.check_failures(verdicts)
        except RewardError as error:
            raise RewardError(str(error), rollouts) from None

    def score_by_model(self, index: int, rollouts: Sequence[Rollout]) -> None:
        """Let a reward model judge the rollouts that it has not judged yet, and that did not fail."""
        waiting = [rollout for rollout in rollouts if index not in rollout.model_verdicts and not rollout.failure]
        for rollout, verdict in zip(waiting, self.models[index](waiting), strict=True):
            rollout.model_verdicts[index] = verdict

    @contextmanager
    def score_early(self, count: int, budget: TimeoutBudget) -> Iterator[EarlyScoring]:
        """Run reward functions in a thread on rollouts that are added one by one, `count` in all."""
        early = EarlyScoring(self, count, budget)
        try:
            yield early
        except BaseException:
            early.queue.put(None)  # end the thread; its verdicts are not needed
            raise
        early.finish()

    def write(self, rollout: Rollout, verdicts: Sequence[Verdict | None]) -> None:
        """Write the verdicts and their weighted sum into a rollout."""
        rollout.early_verdicts = None
        known = [verdict for verdict in verdicts if verdict is not None]  # all of them: models have filled in theirs
        named = list(zip(self.rewards.names, known, strict=True))
        rollout.rewards |= {name: verdict.value for name, verdict in named if verdict.value is not None}
        rollout.not_applicable = [name for name, verdict in named if not verdict.applies]
        rollout.failure = "; ".join(f"{name}: {v.kind}: {v.reason}" for name, v in named if v.failed)
        rollout.seconds = sum(verdict.seconds for verdict in known)
        rollout.verdicts = {
            name: {"reason": verdict.reason, "counts": verdict.counts, "replies": verdict.replies}
            for name, verdict in named
            if name in self.rewards.judges
        }
        if rollout.failure:
            return
        total, given = combine(known, self.weights), given_rewards(rollout)
        if total is None and not given and self.needed:
            rollout.failure = NO_REWARD
            return
        total = (total or 0.0) + sum(given.values())
        if penalty := self.overlong_penalty(len(rollout.sample) - len(rollout.prompt.tokens)):
            rollout.rewards["overlong"] = -penalty
            total -= penalty
        rollout.sample.reward = total

    def terms(self, rollout: Rollout) -> tuple[tuple[float, float], ...]:
        """Return weight and value of each part of a scored rollout's reward, in the same order for all rollouts."""
        named = zip(self.rewards.names, self.weights, strict=True)
        own = [(weight, rollout.rewards.get(name, math.nan)) for name, weight in named if weight]  # NaN: not applicable
        given = sum(given_rewards(rollout).values())
        return (*own, (1.0, given), (1.0, rollout.rewards.get("overlong", 0.0)))

    def first_reward(self, rollout: Rollout) -> float | None:
        """Return the reward that decides whether a completion is correct; None if it does not apply."""
        if self.rewards.names and self.rewards.names[0] in rollout.not_applicable and not given_rewards(rollout):
            return None
        return next(iter(rollout.rewards.values()), None)

    def normalize(self, rollouts: Sequence[Rollout]) -> None:
        """Divide by the deviation of all rewards so far, including these, if asked for; then clip."""
        deviation = 1.0
        if self.statistics is not None:
            self.statistics.add([rollout.sample.reward for rollout in rollouts])
            deviation = self.statistics.deviation or 1.0  # 0: all rewards were equal so far
        for rollout in rollouts:
            low, high = self.clip_bounds
            rollout.sample.reward = max(low, min(high, rollout.sample.reward / deviation))

    def state(self) -> dict[str, float]:
        """Return the running statistics, for a checkpoint."""
        return {} if self.statistics is None else asdict(self.statistics)

    def load_state(self, state: dict[str, float]) -> None:
        if self.statistics is not None:
            self.statistics = RunningStatistics(**state)

    def overlong_penalty(self, tokens: int) -> float:
        """Compute DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), which grows up to the length limit."""
        buffer, penalty, longest = self.overlong
        return penalty * min(1.0, max(0, tokens - (longest - buffer)) / buffer) if buffer else 0.0

    def completions(self, rollouts: Sequence[Rollout]) -> list[Completion]:
        """Convert to the form that reward functions take."""
        return [
            Completion(
                prompt=self.decode(rollout.prompt.tokens.tobytes()),
                messages=rollout.messages or rollout.prompt.messages,
                text=rollout.text,
                finish=rollout.sample.finish,
                tokens=rollout.completion_tokens,
                columns=rollout.prompt.columns,
            )
            for rollout in rollouts
        ]


def recorded_replies(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Return what judges replied about recorded rollouts, by the key of the question; a replay does not ask again."""
    verdicts = [verdict for rollout in rollouts for verdict in rollout.verdicts.values()]
    return {each["key"]: each["reply"] for verdict in verdicts for each in verdict["replies"] if each["reply"]}


@dataclass(slots=True)
class RunningStatistics:
    """Mean and standard deviation of a growing set of numbers, without storing them (Chan, Golub, LeVeque, 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, values: Sequence[float]) -> None:
        if not values:
            return
        new, count = len(values), self.count + len(values)
        mean = math.fsum(values) / new
        gap = mean - self.mean
        self.squares += math.fsum((value - mean) * (value - mean) for value in values)
        self.squares += gap * gap * self.count * new / count
        self.mean += gap * new / count
        self.count = count

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two numbers, or if they differ by rounding only."""
        found = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return found if found > 1e-9 * abs(self.mean) else 0.0


class EarlyScoring:
    """A thread that runs reward functions on finished rollouts while others are still being generated."""

    def __init__(self, scorer: RolloutScorer, count: int, budget: TimeoutBudget) -> None:
        self.scorer, self.budget = scorer, budget
        self.batch_size = max(1, min(scorer.rewards.parallel_completions, count // 4))
        self.queue: SimpleQueue[Rollout | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, name="early rewards", daemon=True)
        self.thread.start()

    def add(self, rollout: Rollout) -> None:
        self.queue.put(rollout)

    def finish(self) -> None:
        """Wait until all added rollouts are scored, except for an incomplete last batch."""
        self.queue.put(None)
        self.thread.join()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        try:
            batch: list[Rollout] = []
            while (rollout := self.queue.get()) is not None:
                batch.append(rollout)
                if len(batch) >= self.batch_size:
                    self.score(batch)
                    batch = []
        except BaseException as error:  # raised again by `finish`
            self.error = error
            if not isinstance(error, Exception):
                raise

    def score(self, rollouts: Sequence[Rollout]) -> None:
        verdicts = self.scorer.rewards.score(self.scorer.completions(rollouts), self.budget)
        for rollout, row in zip(rollouts, verdicts, strict=True):
            rollout.early_verdicts = row
