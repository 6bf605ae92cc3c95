"""Earlier groups with signal take the place of groups without any: nothing is learned from equal rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.core.types import WeightVersion
from posttrain.rollout.records import STREAMS, Rollout, as_row, from_row
from posttrain.rollout.rollouts import by_group, has_signal

COMPUTED = tuple(name for name in STREAMS if name != "logprobs")  # by the current weights, so again for each update


class GroupReplay:
    """Groups whose rewards differed, each of which may be trained on once more; the newest are taken first."""

    def __init__(self, max_age: int) -> None:
        """`max_age`: in steps; older groups are forgotten."""
        self.max_age = max_age
        self.groups: list[tuple[WeightVersion, list[Rollout]]] = []  # with the step that first trained on them

    def replace_groups(self, rollouts: list[Rollout], step: WeightVersion) -> list[Rollout]:
        """Mark groups without signal as replaced, append as many earlier ones, and keep this batch's for later steps.

        `step`: the one that trains on them.
        """
        fresh = list(by_group(rollouts))
        idle = [group for group in fresh if not has_signal(group)]
        self.groups = [(first, group) for first, group in self.groups if step - first <= self.max_age]
        count = min(len(idle), len(self.groups))
        taken, self.groups = self.groups[len(self.groups) - count :], self.groups[: len(self.groups) - count]
        for group in idle[:count]:
            for rollout in group:
                rollout.replaced = True
        self.groups += [(step, [anew(rollout) for rollout in group]) for group in fresh if has_signal(group)]
        return rollouts + [replace(rollout, replayed=True) for _, group in taken for rollout in group]

    def state(self) -> list[dict[str, Any]]:
        """Return all groups as JSON rows, for a checkpoint."""
        return [as_row(rollout, step) for step, group in self.groups for rollout in group]

    def load_state(self, rows: Sequence[dict[str, Any]]) -> None:
        steps = [row["step"] for row in rows]
        rollouts = [from_row(row) for row in rows]
        self.groups = []
        for group in by_group(rollouts):
            self.groups.append((steps[0], group))
            steps = steps[len(group) :]


def anew(rollout: Rollout) -> Rollout:
    """Return a copy as it was before anything but the sampler computed its tokens."""
    computed: dict[str, Any] = dict.fromkeys(COMPUTED)
    return replace(rollout, sample=replace(rollout.sample, **computed))
