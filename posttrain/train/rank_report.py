"""What each rank reports of a step, and the metrics that follow: memory, utilisation, communication, slow ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from posttrain.core.device_rates import rates_of

SLOW = 1.2  # times the median computation, from which a rank is named


@dataclass(slots=True, frozen=True)
class RankReport:
    """What one rank has done since its last report."""

    host: str
    device: str  # torch's name, such as `NVIDIA H100 80GB HBM3`
    memory_gib: float  # largest so far
    seconds: float  # of forward and backward passes and the optimizer step
    flops: float  # of its samples, as model FLOP utilisation counts them
    communication_seconds: float | None = None  # if it was measured


def rank_metrics(reports: Sequence[RankReport], ranks_per_sample: int, stages: int = 1) -> dict[str, float]:
    """Return the metrics of a step from the reports of all ranks, of which neighbours have the same samples.

    With pipeline stages, each of as many equal parts of the ranks has all samples.
    """
    metrics = {"memory_gib": round(max(report.memory_gib for report in reports), 3)}
    seconds, rates = max(report.seconds for report in reports), rates_of(reports[0].device)
    if rates is not None and seconds:
        flops = sum(report.flops for report in reports[: len(reports) // stages : ranks_per_sample])
        metrics["model_flop_utilisation"] = round(flops / seconds / len(reports) / rates.flops, 4)
    times = [report.communication_seconds for report in reports if report.communication_seconds is not None]
    if len(times) == len(reports):
        metrics["communication_seconds"] = round(sum(times) / len(times), 6)
        rank, ratio = slowest_rank(reports)
        metrics |= {"slowest_rank": float(rank), "slowest_rank_ratio": round(ratio, 3)}
    return metrics


def slowest_rank(reports: Sequence[RankReport]) -> tuple[int, float]:
    """Return the rank that computes longest, and how many times the median. The others wait for it in collectives."""
    computing = [max(0.0, report.seconds - (report.communication_seconds or 0.0)) for report in reports]
    rank = max(range(len(reports)), key=lambda index: computing[index])
    others = [seconds for index, seconds in enumerate(computing) if index != rank]
    typical = median(others) if others else computing[rank]
    return rank, computing[rank] / typical if typical else 1.0


def slow_rank_warning(reports: Sequence[RankReport], step: int) -> str:
    """Return a sentence that names a rank for which the others wait; empty if there is none, or it is not known."""
    if len(reports) < 2 or any(report.communication_seconds is None for report in reports):
        return ""
    rank, ratio = slowest_rank(reports)
    if ratio < SLOW:
        return ""
    slow = reports[rank]
    return (
        f"step {step}: rank {rank} on {slow.host} ({slow.device}) computes {ratio:.1f} times as long as the other "
        "ranks, which wait for it. Check its device (clocks, temperature, other processes) and the lengths of its "
        "samples."
    )
