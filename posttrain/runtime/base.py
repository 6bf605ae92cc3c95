"""Workers: plain objects, one a device, called together. The loops hold this handle and never know the transport."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from posttrain.engines.base import Request, Sampling
from posttrain.learner import LARGEST, PLAIN, Part, Sums
from posttrain.types import Drawing, Floats, Objective, Sample

T = TypeVar("T")


class Workers(Protocol):
    """Calls a method on every worker and returns the answers in order of rank."""

    size: int

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same arguments for all."""

    def scatter(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """A first argument of its own for each."""


class LearnerGroup:
    """The learners of all workers as one: the same methods as learner.Learner."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def forward_backward(self, samples: Sequence[Sample], objective: Objective, denominator: int, tokens: int) -> Sums:
        shards = self.shards(samples, objective.group_size)
        return add_up(self.workers.scatter("forward_backward", shards, objective, denominator, tokens))

    def step(self, learning_rate: float) -> dict[str, float]:
        return self.workers.call("step", learning_rate)[0]

    def discard(self) -> dict[str, float]:
        return self.workers.call("discard")[0]

    def evaluate(self, samples: Sequence[Sample], objective: Objective) -> Sums:
        return add_up(self.workers.scatter("evaluate", self.shards(samples, objective.group_size), objective))

    def logprobs(self, samples: Sequence[Sample], *, adapters: bool = True, drawing: Drawing = PLAIN) -> list[Floats]:
        return joined(self.workers.scatter("logprobs", self.shards(samples), adapters=adapters, drawing=drawing))

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return joined(self.workers.scatter("values", self.shards(samples)))

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, current: bool = False) -> list[Sample]:
        return joined(self.workers.scatter("generate", self.shards(requests), sampling, current=current))

    def refresh_sampler(self) -> None:
        self.workers.call("refresh_sampler")

    def stop_ids(self) -> list[int]:
        return self.workers.call("stop_ids")[0]

    def score_statistics(self) -> tuple[float, float]:
        return self.workers.call("score_statistics")[0]

    def offload(self, part: Part) -> None:
        self.workers.call("offload", part)

    def onload(self, part: Part) -> None:
        self.workers.call("onload", part)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        return joined(self.workers.scatter("scores", self.shards(samples)))

    def annotate(self, facts: dict[str, Any]) -> None:
        self.workers.call("annotate", facts)

    def save(self, folder: Any) -> None:
        self.workers.call("save", folder)

    def load(self, folder: Any) -> None:
        self.workers.call("load", folder)

    def shards(self, samples: Sequence[T], group_size: int = 1) -> list[list[T]]:
        """Consecutive whole groups, as evenly as they go."""
        groups, n = len(samples) // group_size, self.workers.size
        edges = [group_size * (groups * rank // n) for rank in range(n + 1)]
        return [list(samples[a:b]) for a, b in pairwise(edges)]


def add_up(parts: Sequence[Sums]) -> Sums:
    """Sums of several workers as one."""
    total: Sums = {}
    for part in parts:
        for name, (value, count) in part.items():
            if name.startswith(LARGEST):
                total[name] = (max(value, total.get(name, (value, 1.0))[0]), 1.0)
                continue
            value_before, count_before = total.get(name, (0.0, None if count is None else 0.0))
            assert (count is None) == (count_before is None), f"{name} is counted in two ways"
            total[name] = (value_before + value, None if count is None else (count_before or 0.0) + count)
    return total


def averages(sums: Sums, denominator: int) -> dict[str, float]:
    """Each sum over its count, or over the objective's denominator; what was never counted is left out."""
    means = {}
    for name, (total, count) in sums.items():
        by = denominator if count is None else count
        if by:
            means[name] = total / by
    return means


def joined(parts: Sequence[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]
