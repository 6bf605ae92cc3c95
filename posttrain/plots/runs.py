"""Turns the metrics of runs into panels: metrics by name or pattern, smoothing, and steps, tokens or time below."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import UsageError
from posttrain.plots.chart import Curve, Panel

USUAL = ("reward", "eval/reward", "loss", "eval/loss", "eval/accuracy", "accuracy")
"""Metrics that are shown if none are named: of an online run the first two, else those that are logged."""

XAxis = Literal["step", "tokens", "time"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The logged steps of one run."""

    name: str
    path: Path
    rows: list[Row]

    def positions(self, x_axis: XAxis) -> list[float]:
        """Return where each step lies on the horizontal axis: its number, or the tokens or minutes until its end."""
        if x_axis == "step":
            return [float(row["step"]) for row in self.rows]
        if x_axis == "tokens":
            if any(row.get("tokens") is None for row in self.rows):
                raise UsageError(f"{self.path}: this run has not logged the metric 'tokens'; use --x_axis step")
            return list(accumulate(float(row["tokens"]) for row in self.rows))
        seconds = (sum(v for name, v in row.items() if name.startswith("time/") and v is not None) for row in self.rows)
        return list(accumulate(second / 60 for second in seconds))


def read_metrics(path: Path) -> list[Row]:
    """Return one dict per logged step; a value that was not finite is None. A run under way has an incomplete line."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def open_runs(names: Sequence[str]) -> list[RunMetrics]:
    """Read the metrics of run directories; a run is named by the part of its path that differs from the others."""
    paths = [Path(name).expanduser() for name in names]
    titles = [path.resolve().name for path in paths]
    if len(set(titles)) < len(titles):
        titles = [str(path) for path in paths]
    return [RunMetrics(title, path, _rows(path)) for title, path in zip(titles, paths, strict=True)]


def _rows(path: Path) -> list[Row]:
    file = path if path.is_file() else path / "metrics.jsonl"
    if not file.is_file():
        inside = sorted(found.parent.name for found in path.glob("*/metrics.jsonl")) if path.is_dir() else []
        hint = f"; it has the runs {', '.join(inside)}" if inside else ""
        raise UsageError(f"{path}: no run in this directory: there is no metrics.jsonl{hint}")
    try:
        rows = read_metrics(file)
    except ValueError as error:
        raise UsageError(f"{file}: not the metrics of a run: {error}") from error
    if not rows:
        raise UsageError(f"{file}: no step is logged there yet")
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise UsageError(f"{file}: not the metrics of a run: a line has no 'step'")
    return rows


def panels_of(
    runs: Sequence[RunMetrics],
    patterns: Sequence[str] = (),
    x_axis: XAxis = "step",
    smoothing: float = 0.0,
    log_scale: bool = False,
) -> list[Panel]:
    """Return a panel per metric, with the curves of all runs; `loss` and `eval/loss` share one."""
    if not 0 <= smoothing < 1:
        raise UsageError(f"smoothing is {smoothing}; it must be at least 0 and below 1")
    label = {"step": "step", "tokens": "tokens", "time": "minutes"}[x_axis]
    found: list[Panel] = []
    for title, names in by_panel(chosen_metrics(runs, patterns)).items():
        curves = [
            curve
            for number, run in enumerate(runs)
            for name in names
            if (curve := curve_of(run, name, number, len(runs) > 1, x_axis, smoothing)) is not None
        ]
        if log_scale and (low := min(value for curve in curves for value in (*curve.y, *curve.raw))) <= 0:
            raise UsageError(f"log_scale: {title} has the value {low:.4g}; a logarithmic axis has only positive ones")
        found.append(Panel(title, curves, label, log_scale))
    return found


def curve_of(run: RunMetrics, name: str, number: int, several: bool, x_axis: XAxis, smoothing: float) -> Curve | None:
    points = [
        (x, row[name]) for x, row in zip(run.positions(x_axis), run.rows, strict=True) if is_number(row.get(name))
    ]
    if not points:
        return None
    x, y = [float(at) for at, _ in points], [float(value) for _, value in points]
    held_out = name.startswith("eval/")
    label = (f"{run.name} {name}" if held_out else run.name) if several else name
    smooth = smoothing > 0 and len(y) > 2
    color = number if several else int(held_out)
    return Curve(label, x, smoothed(y, smoothing) if smooth else y, color, held_out, y if smooth else [])


def chosen_metrics(runs: Sequence[RunMetrics], patterns: Sequence[str]) -> list[str]:
    """Return the metrics that patterns name, in the order of the patterns; UsageError for one that matches none."""
    logged = {
        name: None
        for run in runs
        for row in run.rows
        for name, value in row.items()
        if name != "step" and is_number(value)
    }
    if not patterns:
        return list(dict.fromkeys(name for run in runs for name in usual_metrics(run.rows))) or list(logged)[:1]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in logged if fnmatchcase(name, pattern)]
        if not matching:
            places = ", ".join(str(run.path) for run in runs)
            raise UsageError(f"{places}: no step has logged the metric {pattern!r}; there are {', '.join(logged)}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def usual_metrics(rows: Sequence[Row]) -> list[str]:
    logged = {name for row in rows for name in row}
    wanted = [name for name in USUAL if name in logged]
    return [name for name in wanted if name.endswith("reward")] or [n for n in wanted if n.endswith("loss")] or wanted


def by_panel(names: Sequence[str]) -> dict[str, list[str]]:
    """Group metrics that differ only in eval/ into one panel."""
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(name.removeprefix("eval/"), []).append(name)
    return panels


def is_number(value: Any) -> bool:
    """Whether a value can be drawn: a finite number within the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average; the first values are not drawn towards 0 (as in TensorBoard)."""
    found: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        found.append(total / norm)
    return found
