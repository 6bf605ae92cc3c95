"""Callbacks and custom metrics: Python code that a run calls, in the controller's process only.

Imports nothing heavy: `import posttrain` loads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.metrics_sinks import WALL_CLOCK_KEYS

METRIC_PREFIXES = ("eval/", "time/", "rewards/", "critic/")
ADDED_BY_LOG = {"step", "tokens", "not_finite", *WALL_CLOCK_KEYS}

MetricFunctions = Mapping[str, Callable[[Any], float]]


@dataclass(slots=True)
class TrainingState:
    """What callbacks are given: how far the run is. `stop` ends the run after this step."""

    run_directory: Path
    step: int
    """Steps that are done."""
    max_steps: int
    """Steps of the whole run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, as metrics.jsonl has them; those of an evaluation begin with eval/."""
    stop_reason: str = ""

    def stop(self, reason: str) -> None:
        """End the run after this step: its checkpoint is saved, and `Result.stopped_early` is the reason."""
        self.stop_reason = self.stop_reason or reason or "a callback stopped the run"

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of all logged steps, from metrics.jsonl; a resumed run has those of before, too."""
        file = self.run_directory / "metrics.jsonl"
        if not file.is_file():
            return []
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a full disk may leave half a line


class Callback:
    """Base class of callbacks: override the methods you need. An exception in one of them ends the run."""

    def on_start(self, state: TrainingState) -> None:
        """Called before the first step, and again when a run is resumed."""

    def on_step(self, state: TrainingState) -> None:
        """Called after each step, when its metrics are logged."""

    def on_evaluate(self, state: TrainingState, metrics: dict[str, float]) -> None:
        """Called after each evaluation with its metrics, whose names begin with eval/; they are logged afterwards."""

    def on_save(self, state: TrainingState, path: Path) -> None:
        """Called after each checkpoint was written to `path`."""


class EarlyStopping(Callback):
    """Stops the run when a metric has not improved in `patience` measurements in a row.

    A resumed run continues the count: measurements of before are read from metrics.jsonl. One that would already have
    been stopped makes no further step; give it more patience to train on.
    """

    def __init__(
        self,
        metric: str = "eval/loss",
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        """`mode`: whether smaller (min) or larger (max) is better. `min_delta`: smaller improvements do not count."""
        if patience < 1:
            raise UsageError(f"EarlyStopping: patience is {patience}; it must be at least 1")
        if mode not in ("min", "max"):
            raise UsageError(f"EarlyStopping: mode is {mode!r}; it must be min or max")
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best = math.inf
        self.since_best = 0  # measurements

    def on_start(self, state: TrainingState) -> None:
        self.best, self.since_best = math.inf, 0
        for row in state.history:
            self.measure(row)
        self.stop_without_improvement(state)

    def on_step(self, state: TrainingState) -> None:
        if state.step == state.max_steps and self.metric not in {key for row in state.history for key in row}:
            raise UsageError(f"EarlyStopping: no step has logged the metric {self.metric!r}")
        self.measure(state.metrics)
        self.stop_without_improvement(state)

    def stop_without_improvement(self, state: TrainingState) -> None:
        if self.since_best >= self.patience:
            best = self.best if self.mode == "min" else -self.best
            state.stop(f"{self.metric} has not improved on {best:.4g} in {self.since_best} measurements")

    def measure(self, row: Mapping[str, Any]) -> None:
        value = row.get(self.metric)
        if self.metric not in row:
            return
        cost = math.inf if value is None else value if self.mode == "min" else -value  # null: it was not finite
        if cost < self.best - self.min_delta or (self.best == math.inf and cost < math.inf):
            self.best, self.since_best = cost, 0
        else:
            self.since_best += 1


class CallbackRunner:
    """Calls all callbacks of a run with the same state."""

    def __init__(self, callbacks: Sequence[Callback], state: TrainingState) -> None:
        self.callbacks, self.state = callbacks, state

    @property
    def stop_reason(self) -> str:
        return self.state.stop_reason

    @property
    def expects_saves(self) -> bool:
        """Whether a callback has the method on_save, which is called before the next step begins."""
        return any(type(callback).on_save is not Callback.on_save for callback in self.callbacks)

    def call(self, event: str, step: int, *details: Any, metrics: dict[str, float] | None = None) -> None:
        """Call the method `event` of each callback, after `step` steps; `metrics`: those of the step, if logged."""
        self.state.step = step
        if metrics is not None:
            self.state.metrics = metrics
        for callback in self.callbacks:
            try:
                getattr(callback, event)(self.state, *details)
            except PosttrainError:
                raise
            except Exception as error:  # code of the user
                raise PosttrainError(
                    f"step {step}: the callback {type(callback).__name__}.{event} raised "
                    f"{type(error).__name__}: {error}"
                ) from error


def check_callbacks(callbacks: Sequence[Any]) -> tuple[Callback, ...]:
    """Return the callbacks; UsageError for an object that is none."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            what = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise UsageError(
                f"callbacks: {what} is not a callback: give objects of subclasses of posttrain.Callback"
                + (f", as {what}()" if isinstance(callback, type) else "")
            )
    return tuple(callbacks)


def check_metric_names(functions: MetricFunctions) -> None:
    """Raise UsageError for a metric that is no function, or whose name the framework gives to its own metrics."""
    for name, function in functions.items():
        if not callable(function):
            raise UsageError(f"metrics: {name} is a {type(function).__name__}; it must be a function")
        if not name or name in ADDED_BY_LOG or name.startswith(METRIC_PREFIXES):
            raise UsageError(f"metrics: {name!r} is a name of built-in metrics; choose another")


def add_custom_metrics(functions: MetricFunctions, values: Any, metrics: dict[str, float]) -> None:
    """Add the value of each function, called with `values`; refuse to replace a built-in metric."""
    for name, function in functions.items():
        if name in metrics:
            raise UsageError(f"metrics: {name!r} is the name of a built-in metric; choose another")
        try:
            metrics[name] = float(function(values))
        except Exception as error:  # code of the user
            raise PosttrainError(f"the metric {name} raised {type(error).__name__}: {error}") from error
