"""Chooses prompts by how they fared so far: leaves out what has no signal, and prefers medium difficulty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np

from posttrain.config.sections import RolloutConfig
from posttrain.rollout.records import Rollout

Visits = dict[str, tuple[int, float, bool]]
"""By origin of the prompt: epoch, share of completions that solved it, whether their rewards differed."""
SOLVED_ABOVE = 0.5  # a completion whose first reward is above this counts as solved
LEAST_CHANCE = 0.1  # of a prompt that is always or never solved, with prompt_sampling difficulty


class PromptHistory:
    """The last visit of each prompt: its epoch, the share of completions that solved it, whether rewards differed.

    It is updated when a batch is returned for training, and a batch that is started works with a copy, so that the
    choice depends on the step only and not on timing. Prompts are identified by their origin, file:line.
    """

    def __init__(
        self, config: RolloutConfig, seed: int, first_reward: Callable[[Rollout], float | None] | None = None
    ) -> None:
        """`first_reward`: returns the reward that decides whether a completion is correct; None: the first it has."""
        self.first_reward = first_reward or (lambda rollout: next(iter(rollout.rewards.values()), 0.0))
        self.skip_epochs, self.by_difficulty, self.seed = (
            config.skip_epochs,
            config.prompt_sampling == "difficulty",
            seed,
        )
        self.visits: Visits = {}

    @property
    def is_used(self) -> bool:
        return self.skip_epochs > 0 or self.by_difficulty

    def copy(self) -> PromptHistory:
        """Return what a batch that is started now works with."""
        found = copy(self)
        found.visits = dict(self.visits) if self.is_used else {}
        return found

    def load(self, visits: dict[str, Any]) -> None:
        """Restore the visits that a checkpoint holds."""
        self.visits = {origin: (visit[0], visit[1], visit[2]) for origin, visit in visits.items()}

    def add(self, group: Sequence[Rollout], epoch: int, has_signal: bool) -> None:
        """Remember a group; one of which nothing could be scored leaves no trace."""
        firsts = [self.first_reward(rollout) for rollout in group if not rollout.failure]
        scored = [value for value in firsts if value is not None]
        if self.is_used and scored:
            share = sum(value > SOLVED_ABOVE for value in scored) / len(scored)
            self.visits[group[0].prompt.origin] = (epoch, share, has_signal)

    def is_due(self, origin: str, position: int, epoch: int) -> bool:
        """Whether to take the prompt at this position of the stream; a new one always."""
        if origin not in self.visits:
            return True
        last, share, has_signal = self.visits[origin]
        if not has_signal and epoch - last <= self.skip_epochs:
            return False
        if not self.by_difficulty:
            return True
        chance = max(LEAST_CHANCE, 4 * share * (1 - share))
        return bool(np.random.default_rng((self.seed, position)).random() < chance)
