"""Sums of metrics: accumulated on the device over micro-batches, added over workers, divided once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.core.types import Metrics

LARGEST = "largest_"
"""Metrics with this prefix are the largest of all micro-batches and ranks, not sums."""
OUT_OF_MEMORY = "out_of_memory"
"""Replaces all sums if a pass ran out of memory: the largest micro-batch, in tokens, to repeat the step with."""

Sums = dict[str, tuple[float, float | None]]
"""Metric -> (sum, count); a count of None stands for the objective's own denominator."""


class MetricSums:
    """Accumulates metrics on the device, so that no micro-batch waits for the host."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | None = None) -> None:
        total = total.detach().double()
        if name.startswith(LARGEST):
            self.sums[name] = torch.maximum(self.sums[name], total) if name in self.sums else total
            self.counts[name] = torch.ones_like(total)
            return
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        if count is not None:
            count = count.detach().double()
            self.counts[name] = self.counts[name] + count if name in self.counts else count

    def add_all(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.add(name, *value) if isinstance(value, tuple) else self.add(name, value)

    def read(self) -> Sums:
        """Copy all sums to the host in one transfer."""
        values = [*self.sums.values(), *self.counts.values()]
        numbers = iter(torch.stack(values).tolist() if values else [])
        sums = {name: next(numbers) for name in self.sums}
        counts = {name: next(numbers) for name in self.counts}
        return {name: (total, counts.get(name)) for name, total in sums.items()}


def add_sums(parts: Sequence[Sums]) -> Sums:
    """Add the sums of several workers or batches."""
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
    """Divide each sum by its own count, or by the objective's denominator; leave out what was never counted."""
    means = {}
    for name, (total, count) in sums.items():
        by = denominator if count is None else count
        if by:
            means[name] = total / by
    return means
