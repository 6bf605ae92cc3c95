"""What an answer is worth: reward functions, reward models, and what the configuration does to their sum."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import RewardError
from posttrain.rewards.base import Completion, Rewards, Verdict, combine
from posttrain.rollout.records import Rollout

PROMPTS_KEPT = 4096  # as texts: the answers to a prompt come one by one
ModelScores = Callable[[Sequence[Rollout]], list[float]]
"""A reward model: a score for each answer."""


class RolloutScorer:
    """Writes rewards into rollouts. One that cannot be scored is marked as failed, and never scored 0."""

    def __init__(self, rewards: Rewards, models: dict[int, ModelScores], config: OnlineConfig, tokenizer: Any) -> None:
        """`models`: reward models by their place among the rewards."""
        self.rewards, self.models, self.tokenizer = rewards, models, tokenizer
        self.weights = list(config.rewards.weights or rewards.weights)
        self.clip = config.rewards.clip
        self.spread = Spread() if config.rewards.normalize == "running" else None
        self.overlong = (*config.rewards.overlong, config.rollout.max_tokens)
        self.text_of = lru_cache(PROMPTS_KEPT)(lambda tokens: tokenizer.decode(np.frombuffer(tokens, dtype=np.int32)))

    def score(self, rollouts: Sequence[Rollout], *, training: bool = True) -> None:
        """Score them all; past what rewards.limits allows the run stops with what went wrong.

        `training`: False leaves sums as they are where training divides them, so that they compare over a run.
        """
        asked = [rollout for rollout in rollouts if not rollout.failure]
        late = [rollout for rollout in asked if rollout.early is None]
        scored = iter(self.rewards.score(self.completions(late), len(asked)))
        verdicts = [next(scored) if rollout.early is None else rollout.early for rollout in asked]
        for place, scores_of in self.models.items():
            for of_answer, score in zip(verdicts, scores_of(asked), strict=True):
                of_answer[place] = Verdict(value=score, kind="ok")
        if self.models:
            self.rewards.conclude(self.completions(asked), verdicts)
        for rollout, of_answer in zip(asked, verdicts, strict=True):
            self.write(rollout, of_answer)
        if training or self.spread is None:
            self.scale([rollout for rollout in asked if not rollout.failure])
        try:
            self.rewards.check_failures(verdicts)
        except RewardError as error:
            raise RewardError(str(error), rollouts) from None

    @contextmanager
    def early(self, count: int) -> Iterator[Early]:
        """Takes answers of which there will be `count`, and lets reward functions judge them beside the caller."""
        early = Early(self, count)
        try:
            yield early
        except BaseException:
            early.told.put(None)  # nobody waits for what it says, but it must end
            raise
        early.finish()

    def write(self, rollout: Rollout, verdicts: Sequence[Verdict | None]) -> None:
        rollout.early = None
        said = [verdict for verdict in verdicts if verdict is not None]  # all: models have filled their places
        named = list(zip(self.rewards.names, said, strict=True))
        rollout.parts |= {name: verdict.value for name, verdict in named if verdict.value is not None}
        rollout.failure = "; ".join(f"{name}: {v.kind}: {v.reason}" for name, v in named if v.value is None)
        rollout.seconds = sum(verdict.seconds for verdict in said)
        total = combine(said, self.weights)
        if total is None:
            return
        total += rollout.parts.get("environment", 0.0)
        if penalty := self.penalty(len(rollout.sample) - len(rollout.prompt.tokens)):
            rollout.parts["overlong"] = -penalty
            total -= penalty
        rollout.sample.reward = total

    def scale(self, rollouts: Sequence[Rollout]) -> None:
        """Divide by the deviation of all rewards so far, these among them, if asked for; then clip."""
        deviation = 1.0
        if self.spread is not None:
            self.spread.add([rollout.sample.reward for rollout in rollouts])
            deviation = self.spread.deviation or 1.0  # nothing has differed yet
        for rollout in rollouts:
            reward = rollout.sample.reward / deviation
            rollout.sample.reward = max(-self.clip, min(self.clip, reward)) if self.clip else reward

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold so that later rewards are divided by the same."""
        return {} if self.spread is None else asdict(self.spread)

    def load_state(self, state: dict[str, float]) -> None:
        if self.spread is not None:
            self.spread = Spread(**state)

    def penalty(self, tokens: int) -> float:
        """DAPO's soft punishment (arXiv:2503.14476, eq. 13): from 0 up to the whole at the longest allowed answer."""
        buffer, whole, longest = self.overlong
        return whole * min(1.0, max(0, tokens - (longest - buffer)) / buffer) if buffer else 0.0

    def completions(self, rollouts: Sequence[Rollout]) -> list[Completion]:
        return [
            Completion(
                prompt=self.text_of(rollout.prompt.tokens.tobytes()),
                messages=rollout.messages or rollout.prompt.messages,
                text=rollout.text,
                finish=rollout.sample.finish,
                tokens=rollout.answer_tokens,
                columns=rollout.prompt.columns,
            )
            for rollout in rollouts
        ]


@dataclass(slots=True)
class Spread:
    """The standard deviation of all numbers it was told of, without keeping them (Chan, Golub and LeVeque, 1979)."""

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
        """The unbiased one; 0 where there are fewer than two numbers, or nothing but rounding between them."""
        found = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return found if found > 1e-9 * abs(self.mean) else 0.0


class Early:
    """A thread that asks reward functions about answers while others are still being written."""

    def __init__(self, scorer: RolloutScorer, count: int) -> None:
        self.scorer, self.count = scorer, count
        self.enough = max(1, min(scorer.rewards.at_once, count // 4))  # to be asked about together
        self.told: SimpleQueue[Rollout | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, name="early rewards", daemon=True)
        self.thread.start()

    def tell(self, rollout: Rollout) -> None:
        self.told.put(rollout)

    def finish(self) -> None:
        """Wait until all that were told of are judged, but for the last few."""
        self.told.put(None)
        self.thread.join()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        try:
            waiting: list[Rollout] = []
            while (rollout := self.told.get()) is not None:
                waiting.append(rollout)
                if len(waiting) >= self.enough:
                    self.ask(waiting)
                    waiting = []
        except BaseException as error:  # raised again by `finish`
            self.error = error
            if not isinstance(error, Exception):
                raise

    def ask(self, rollouts: Sequence[Rollout]) -> None:
        verdicts = self.scorer.rewards.score(self.scorer.completions(rollouts), self.count)
        for rollout, of_answer in zip(rollouts, verdicts, strict=True):
            rollout.early = of_answer
