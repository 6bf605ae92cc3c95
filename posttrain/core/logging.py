"""The output of a run: logs/run.log, samples, the console, and metrics through metrics_sinks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.core.host import peak_memory_gib
from posttrain.core.jsonl import LineFile, cut_after
from posttrain.core.metrics_sinks import Metrics, MetricsSink, Trackers
from posttrain.core.phases import PhaseTimer
from posttrain.core.progress import ProgressDisplay, duration, short_number

NOT_TRAINING = ("load", "resume", "eval", "save")
"""Phases that do not count in tokens_per_second."""


def quiet_libraries() -> None:
    """Turn off transformers' and the hub's log lines and progress bars, unless the user's environment sets them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # peft imports bitsandbytes, which warns about kernels that are not used.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if "transformers" not in sys.modules:
        return  # it reads these variables when it is imported; importing it here would cost a second
    from transformers.utils import logging as transformers_logging

    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        transformers_logging.set_verbosity_error()
    if os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1":
        transformers_logging.disable_progress_bar()


class Log:
    """All output of one run. Use as a context manager; call `step` once per step, after its evaluation."""

    def __init__(
        self,
        folder: Path | None,
        *,
        total_steps: int,
        quiet: bool,
        trackers: Trackers = Trackers(),  # noqa: B008  frozen
        config: dict[str, Any],
        start_step: int | None = None,
    ) -> None:
        """`start_step`: on resume, the steps already done; what a killed run logged after them is dropped."""
        trackers.check()
        assert total_steps > 0, "a run has steps"
        assert folder is not None or not trackers.names, "trackers need a run directory"
        self.folder = folder
        self.phases = PhaseTimer()
        self.console = RunConsole(total_steps=total_steps, quiet=quiet)
        self.run_file: LineFile | None = None
        self.rank_file: LineFile | None = None  # from the first report on
        self.start_step = start_step
        self.devices = 1  # over which tokens_per_second_per_device divides
        self.sinks: list[MetricsSink] = []
        self.has_trackers = False
        self.handler = WarningsToLog(self)
        if folder is None:
            return
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if start_step is not None:
            for path in (folder / "samples").glob("step-*.jsonl"):
                if int(path.stem.removeprefix("step-")) > start_step:
                    path.unlink()
        self.run_file = LineFile(folder / "logs" / "run.log")
        self.sinks = trackers.open(folder, config, quiet=quiet, start_step=start_step)
        self.has_trackers = bool(trackers.names)

    def __enter__(self) -> Log:
        logging.getLogger("posttrain").addHandler(self.handler)
        self.phases.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._record("error", "".join(traceback.format_exception(error)).rstrip())
        self.console.end()
        self._close_sinks(failed=error is not None)
        for file in (self.run_file, self.rank_file):
            if file is not None:
                file.close()
        self.run_file = self.rank_file = None
        logging.getLogger("posttrain").removeHandler(self.handler)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time spent inside as `time/<name>` of the current step; an inner phase is not counted twice."""
        self.phases.enter(name)
        try:
            yield
        finally:
            self.phases.leave()

    def step(self, step: int, metrics: Metrics) -> Metrics:
        """Log one step, evaluation included (as eval/...), and return what was logged.

        With `tokens` among the metrics, the speed is added.
        """
        seconds = self.phases.restart()
        row: Metrics = {}
        if "loss" in metrics:
            row["loss"] = metrics["loss"]
        row |= metrics
        training = sum(s for name, s in seconds.items() if name not in NOT_TRAINING)
        if "tokens" in metrics and "tokens_per_second" not in metrics and training > 0:
            row["tokens_per_second"] = round(metrics["tokens"] / training, 1)
            if self.devices > 1:
                row["tokens_per_second_per_device"] = round(metrics["tokens"] / training / self.devices, 1)
        row.setdefault("memory_gib", round(peak_memory_gib(), 3))
        row |= {f"time/{name}": round(s, 6) for name, s in seconds.items()}
        row |= {f"memory/{name}": round(gib, 3) for name, gib in self.phases.take_peaks().items()}
        row = {key: value if isinstance(value, int) else float(value) for key, value in row.items()}
        self._tell_sinks(lambda sink: sink.step(step, row))
        self.console.step(step, row)
        return row

    def completions(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Show completions of a step in the trackers, as a table of rows with the same keys."""
        if rows:
            self._tell_sinks(lambda sink: sink.completions(step, rows))

    def _tell_sinks(self, call: Callable[[MetricsSink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except OSError as error:
                self.sinks.remove(sink)
                self.warn(f"metrics are not written to {type(sink).__name__.removesuffix('Sink')} any more: {error}")

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append rows, each such as a prompt with its completion and score, to samples/step-<step>.jsonl."""
        if self.folder is None:
            return
        path = self.folder / "samples" / f"step-{step:08d}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:
            self.warn(f"{path}: cannot be written: {error.strerror}. The run goes on without these samples")

    def ranks(self, step: int, role: str, rows: list[dict[str, Any]]) -> None:
        """Append what each rank of a role reports of a step, in order of rank, to logs/ranks.jsonl."""
        if self.folder is None:
            return
        if self.rank_file is None:
            path = self.folder / "logs" / "ranks.jsonl"
            cut_after(path, self.start_step)
            self.rank_file = LineFile(path)
        self.rank_file.append(json.dumps({"step": step, "role": role, "ranks": rows}) + "\n")

    def message(self, text: str) -> None:
        """Print a line above the progress; with --quiet it goes to logs/run.log only."""
        self._record("info", text)
        self.console.message(text)

    def warn(self, text: str) -> None:
        """Print a warning, even with --quiet."""
        self._record("warning", text)
        self.console.warn(text)

    def done(self, text: str) -> None:
        """Print the last line, even with --quiet."""
        self._record("info", text)
        self.console.end()
        self._close_sinks(failed=False)  # wandb prints something when it closes
        if not _parts:
            self.console.last(text)

    def _close_sinks(self, failed: bool) -> None:
        while self.sinks:
            self.sinks.pop().close(failed)

    def _record(self, level: str, text: str) -> None:
        if self.run_file is not None:
            self.run_file.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level}: {text}\n")


_parts: list[str] = []  # commands that the current run is a part of


@contextlib.contextmanager
def part_of_command(whole: str) -> Iterator[None]:
    """Mark runs in the block as parts of a larger command, which prints the closing message itself."""
    _parts.append(whole)
    try:
        yield
    finally:
        _parts.pop()


class WarningsToLog(logging.Handler):
    """Sends warnings of the logger `posttrain` to the run's log, so that they appear above the progress line."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.warn(record.getMessage())


class RunConsole:
    """The console of a training run: one progress line, messages above it."""

    def __init__(self, *, total_steps: int, quiet: bool) -> None:
        self.total_steps, self.quiet = total_steps, quiet
        self.display = ProgressDisplay(quiet=quiet)
        self.first_step_ended = 0.0
        self.steps_seen = 0

    def step(self, step: int, row: Metrics) -> None:
        now = time.monotonic()
        self.steps_seen += 1
        if self.steps_seen == 1:
            self.first_step_ended = now
        evaluation = [f"{key} {value:.4g}" for key, value in row.items() if key.startswith("eval/")]
        if evaluation:
            self.message(f"step {step}  " + "  ".join(evaluation))
        # The first step includes one-time costs; its time is used only until there is a second.
        if self.steps_seen == 1:
            seconds_per_step = sum(
                row[key] for key in row if key.startswith("time/") and key not in ("time/load", "time/resume")
            )
        else:
            seconds_per_step = (now - self.first_step_ended) / (self.steps_seen - 1)
        left = duration(seconds_per_step * max(self.total_steps - step, 0))
        details = "  ".join([*shown_metrics(row), f"{row['memory_gib']:.2f} GiB"])
        self.display.update(
            f"step {step}/{self.total_steps}",
            details,
            done=step,
            total=self.total_steps,
            eta=f"eta {left}",
            show=step == self.total_steps,
        )

    def message(self, text: str) -> None:
        if not self.quiet:
            self.display.message(text)

    def warn(self, text: str) -> None:
        yellow = self.display.on_terminal and sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self.display.message(f"\x1b[33mwarning:\x1b[0m {text}" if yellow else f"warning: {text}", sys.stderr)

    def last(self, text: str) -> None:
        self.display.message(text)

    def end(self) -> None:
        self.display.close()


def shown_metrics(row: Metrics) -> list[str]:
    """Return the metrics that the progress line shows, as text."""
    shown: list[str] = []
    if "reward" in row:
        shown += shown_rollout_metrics(row)
    elif "loss" in row:
        shown.append(f"loss {row['loss']:.4f}")
        shown += [f"{name} {row[name]:.3g}" for name in ("accuracy", "margin") if name in row]  # of pairs
    if "tokens_per_second" in row:
        shown.append(f"{short_number(row['tokens_per_second'])} tokens/s")
    return shown


def shown_rollout_metrics(row: Metrics) -> list[str]:
    """Return the same for a step of the online loop."""
    shown = [f"reward {row['reward']:.3f}"]
    rewards = {key.removeprefix("rewards/"): value for key, value in row.items() if key.startswith("rewards/")}
    if len(rewards) > 1:
        shown.append("(" + " ".join(f"{name} {value:.3f}" for name, value in rewards.items()) + ")")
    shown.append(f"length {row['length']:.0f}")
    shown += [f"{name} {row[name]:.3g}" for name in ("entropy", "kl", "divergence") if name in row]
    shares = {"clipped": "clipped", "no_signal": "no signal", "truncated": "truncated"}
    shown += [f"{words} {row[name]:.0%}" for name, words in shares.items() if row.get(name)]
    if row["failures"]:
        shown.append(f"failed {row['failures']:.0f}")
    return shown
