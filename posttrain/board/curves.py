"""Metrics of runs as curves with few enough points to draw, and as CSV with all of them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.board.runs import BoardRun
from posttrain.plots.runs import XAxis, is_number, smoothed, usual_metrics

MAX_POINTS = 1_500  # of a curve
MAX_METRICS = 60  # of one request


def metric_names(runs: Sequence[BoardRun]) -> list[dict[str, Any]]:
    """Return the metrics that runs have logged, those that are usually looked at first."""
    found: dict[str, int] = {}
    usual: dict[str, None] = {}
    for run in runs:
        rows = run.metrics.update()
        usual |= dict.fromkeys(usual_metrics(rows))
        names = {name for row in rows for name, value in row.items() if name != "step" and value is not None}
        for name in names:
            found[name] = found.get(name, 0) + 1
    ordered = [*usual, *sorted(name for name in found if name not in usual)]
    return [{"name": name, "runs": found.get(name, 0), "usual": name in usual} for name in ordered]


def curves(
    runs: Sequence[BoardRun],
    names: Sequence[str],
    x_axis: XAxis,
    smoothing: float,
    shown: tuple[float, float] = (-math.inf, math.inf),
) -> list[dict[str, Any]]:
    """Return for each run its curves by metric: x, y and, if y is smoothed, the values themselves.

    `shown`: the part of the axis to return; its points are smoothed like those of the whole curve.
    """
    found: list[dict[str, Any]] = []
    for run in runs:
        metrics = run.as_plot()
        problem = ""
        if x_axis == "tokens" and any(row.get("tokens") is None for row in metrics.rows):
            problem, places = "this run has not logged the metric tokens", []
        else:
            places = metrics.positions(x_axis)
        drawn: dict[str, Any] = {}
        for name in names[:MAX_METRICS]:
            points = [
                (x, float(row[name]))
                for x, row in zip(places, metrics.rows, strict=bool(places))
                if is_number(row.get(name))
            ]
            if points:
                x, y = [at for at, _ in points], [value for _, value in points]
                smooth = smoothed(y, smoothing) if smoothing > 0 and len(y) > 2 else y
                first, end = bisect.bisect_left(x, shown[0]), bisect.bisect_right(x, shown[1])
                kept = [first + i for i in thinned(smooth[first:end], y[first:end])]
                drawn[name] = {"x": [x[i] for i in kept], "y": [smooth[i] for i in kept], "count": len(y)}
                if smooth is not y:
                    drawn[name]["raw"] = [y[i] for i in kept]
        ends = [places[0], places[-1]] if places else None
        found.append({"run": run.id, "name": run.name, "curves": drawn, "ends": ends, "problem": problem})
    return found


def thinned(shown: Sequence[float], raw: Sequence[float]) -> list[int]:
    """Return which points to draw: all, or of each part of a long curve the first, the lowest and the highest."""
    if len(shown) <= MAX_POINTS:
        return list(range(len(shown)))
    parts = MAX_POINTS // 3
    kept = {len(shown) - 1}
    for part in range(parts):
        place = range(part * len(shown) // parts, (part + 1) * len(shown) // parts)
        kept |= {place[0], min(place, key=raw.__getitem__), max(place, key=raw.__getitem__)}
    return sorted(kept)


def csv_rows(runs: Sequence[BoardRun], names: Sequence[str]) -> Iterator[list[Any]]:
    """Yield a header, then a row per run and step, with all digits; no names: all metrics."""
    chosen = list(names) or [entry["name"] for entry in metric_names(runs)]
    yield ["run", "step", *map(as_cell, chosen)]
    for run in runs:
        for row in run.metrics.update():
            values = [row.get(name) for name in chosen]
            if any(value is not None for value in values):
                yield [as_cell(run.name), row["step"], *("" if value is None else value for value in values)]


def as_cell(text: str) -> str:
    """Return a name that a spreadsheet does not read as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
