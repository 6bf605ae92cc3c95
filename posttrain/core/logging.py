"""What a run tells: the progress line, metrics.jsonl, samples, logs/run.log, TensorBoard and wandb, time per phase."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import shutil
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from posttrain.core.errors import PosttrainError, UsageError

WALL_CLOCK_KEYS = frozenset({"tokens_per_second", "memory_gib"})
"""Metrics that differ between two equal runs, besides all that begin with `time/`."""

NOT_TRAINING = ("load", "eval", "save")
"""Phases that do not count in tokens_per_second."""

INSTALL = {
    "tensorboard": "log.to tensorboard needs the package tensorboard: pip install 'tensorboard>=2.19'",
    "wandb": "log.to wandb:PROJECT needs the package wandb: pip install 'wandb>=0.20'",
}

Metrics = dict[str, float]


def is_wall_clock(key: str) -> bool:
    """Whether a metric depends on the clock or the machine, so that a comparison of two runs leaves it out."""
    return key.startswith("time/") or key in WALL_CLOCK_KEYS


def check_sinks(tensorboard: bool, wandb: str) -> None:
    """Raise UsageError if a sink's package is missing; imports nothing, so it can be asked before all else."""
    for name, wanted in (("tensorboard", tensorboard), ("wandb", bool(wandb))):
        if wanted and importlib.util.find_spec(name) is None:
            raise UsageError(INSTALL[name])


def quiet_libraries() -> None:
    """Stop transformers' and the hub's chatter and progress bars; what the user set in the environment wins."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it; it misses kernels nobody asked for
    if "transformers" not in sys.modules:
        return  # it reads these variables when it is imported; importing it here would cost a second
    from transformers.utils import logging as transformers_logging

    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        transformers_logging.set_verbosity_error()
    if os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1":
        transformers_logging.disable_progress_bar()


def memory_gib() -> float:
    """Most memory held so far: of the accelerator if there is one, else of this process."""
    torch = sys.modules.get("torch")  # whoever has a model has imported it
    if torch is not None and torch.accelerator.is_available() and torch.accelerator.current_accelerator().type != "mps":
        graphs = sys.modules.get("posttrain.nn.training_graphs")
        held = graphs.graph_memory_bytes() if graphs is not None else 0
        return float(torch.accelerator.max_memory_allocated() + held) / 2**30
    status = Path("/proc/self/status")
    if status.exists():
        peak = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if peak is not None:
            return int(peak.split()[1]) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_rss / (2**30 if sys.platform == "darwin" else 2**20)


SECONDS_BETWEEN_LINES = 5.0  # where the output is no terminal


class Log:
    """One run's voice. Use as a context manager; call `step` once a step, after its evaluation."""

    def __init__(
        self,
        folder: Path | None,
        *,
        total_steps: int,
        quiet: bool,
        tensorboard: bool,
        wandb: str,
        config: dict[str, Any],
        start_step: int | None = None,
    ) -> None:
        """`start_step`: on resume, the steps already done; what a killed run logged after them is dropped."""
        check_sinks(tensorboard, wandb)
        assert total_steps > 0, "a run has steps"
        assert folder is not None or not (tensorboard or wandb), "sinks need a run folder"
        self.folder = folder
        self.phases = Phases()
        self.console = Console(total_steps=total_steps, quiet=quiet)
        self.metrics_file: BinaryIO | None = None
        self.run_file: BinaryIO | None = None
        self.sinks: list[Sink] = []
        self.handler = _ToConsole(self)
        if folder is None:
            return
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        cut_after(folder / "metrics.jsonl", start_step)
        if start_step is not None:
            for path in (folder / "samples").glob("step-*.jsonl"):
                if int(path.stem.removeprefix("step-")) > start_step:
                    path.unlink()
        self.metrics_file = (folder / "metrics.jsonl").open("ab", buffering=0)
        self.run_file = (folder / "logs" / "run.log").open("ab", buffering=0)
        if tensorboard:
            self.sinks.append(TensorBoard(folder, start_step))
        if wandb:
            self.sinks.append(WeightsAndBiases(folder, wandb, config, quiet))

    def __enter__(self) -> Log:
        logging.getLogger("posttrain").addHandler(self.handler)
        self.phases.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("posttrain").removeHandler(self.handler)
        if error is not None:
            with contextlib.suppress(PosttrainError):  # a full disk must not hide the error that is under way
                self._record("error", "".join(traceback.format_exception(error)).rstrip())
        self.console.end()
        self._close_sinks(failed=error is not None)
        for file in (self.metrics_file, self.run_file):
            if file is not None:
                file.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time spent inside as `time/<name>` of the current step; an inner phase is not counted twice."""
        self.phases.enter(name)
        try:
            yield
        finally:
            self.phases.leave()

    def step(self, step: int, metrics: Metrics) -> None:
        """Log one step, evaluation included (as eval/...). With `tokens` among the metrics, the speed is added."""
        seconds = self.phases.restart()
        row: Metrics = {"step": step}
        if "loss" in metrics:
            row["loss"] = metrics["loss"]
        row |= metrics
        working = sum(s for name, s in seconds.items() if name not in NOT_TRAINING)
        if "tokens" in metrics and "tokens_per_second" not in metrics and working > 0:
            row["tokens_per_second"] = round(metrics["tokens"] / working, 1)
        row.setdefault("memory_gib", round(memory_gib(), 3))
        row |= {f"time/{name}": round(s, 6) for name, s in seconds.items()}
        row = {key: value if isinstance(value, int) else float(value) for key, value in row.items()}

        if self.metrics_file is not None:
            append(self.metrics_file, _json_line(row))
        for sink in self.sinks:
            sink.step(step, {key: value for key, value in row.items() if key != "step"})
        self.console.step(step, row)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append rows (a prompt, its answer, its score, say) to samples/step-<step>.jsonl."""
        if self.folder is None:
            return
        path = self.folder / "samples" / f"step-{step:08d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab", buffering=0) as file:
            append(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def message(self, text: str) -> None:
        """Something worth knowing, above the progress line; --quiet keeps it to logs/run.log."""
        self._record("info", text)
        self.console.message(text)

    def warn(self, text: str) -> None:
        """Something that may be wrong; shown even with --quiet."""
        self._record("warning", text)
        self.console.warn(text)

    def done(self, text: str) -> None:
        """The last line; shown even with --quiet."""
        self._record("info", text)
        self.console.end()
        self._close_sinks(failed=False)  # wandb has last words of its own
        if not _parts:
            self.console.last(text)

    def _close_sinks(self, failed: bool) -> None:
        while self.sinks:
            self.sinks.pop().close(failed)

    def _record(self, level: str, text: str) -> None:
        if self.run_file is not None:
            append(self.run_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level}: {text}\n")


_parts: list[str] = []  # what runs are parts of now


@contextlib.contextmanager
def part_of(whole: str) -> Iterator[None]:
    """Runs in here leave the last words to what they are a part of."""
    _parts.append(whole)
    try:
        yield
    finally:
        _parts.pop()


class Phases:
    """A stopwatch with one hand: at any moment the time goes to the innermost open phase, or to `other`."""

    def __init__(self) -> None:
        self.open = ["other"]
        self.seconds: dict[str, float] = {}
        self.since = time.perf_counter()

    def enter(self, name: str) -> None:
        self._charge()
        self.open.append(name)

    def leave(self) -> None:
        self._charge()
        self.open.pop()

    def restart(self) -> dict[str, float]:
        """Seconds of each phase since the last restart, `other` last; their sum is the wall time."""
        self._charge()
        seconds, self.seconds = self.seconds, {}
        seconds["other"] = seconds.pop("other", 0.0)
        return seconds

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self.open[-1]] = self.seconds.get(self.open[-1], 0.0) + now - self.since
        self.since = now


class Console:
    """The progress line: rewritten in place on a terminal, else a plain line now and then."""

    def __init__(self, *, total_steps: int, quiet: bool) -> None:
        self.total_steps = total_steps
        self.quiet = quiet
        self.out = sys.stdout
        self.terminal = self.out.isatty()
        self.first_step_ended = 0.0
        self.steps_seen = 0
        self.shown_at = -math.inf
        self.on_screen = ""  # the line that is being rewritten
        self.waiting = ""  # the newest step's line, if it has not been shown yet

    def step(self, step: int, row: Metrics) -> None:
        now = time.monotonic()
        self.steps_seen += 1
        if self.steps_seen == 1:
            self.first_step_ended = now
        if self.quiet:
            return
        evaluation = [f"{key} {value:.4g}" for key, value in row.items() if key.startswith("eval/")]
        if evaluation:
            self.message(f"step {step}  " + "  ".join(evaluation))
        due = now - self.shown_at >= (0.1 if self.terminal else SECONDS_BETWEEN_LINES)
        self.waiting = self._line(step, row)
        if due or self.steps_seen == 1 or step == self.total_steps:
            self._show()
            self.shown_at = now

    def message(self, text: str) -> None:
        if not self.quiet:
            self._above(text, self.out)

    def warn(self, text: str) -> None:
        yellow = self.terminal and sys.stderr.isatty() and "NO_COLOR" not in os.environ
        self._above(f"\x1b[33mwarning:\x1b[0m {text}" if yellow else f"warning: {text}", sys.stderr)

    def last(self, text: str) -> None:
        self._write(text + "\n", self.out)

    def end(self) -> None:
        """Show the last step if it was skipped, and leave the line where it is."""
        if self.waiting:
            self._show()
        if self.on_screen:
            self._write("\n", self.out)
            self.on_screen = ""

    def _line(self, step: int, row: Metrics) -> str:
        parts = [f"step {step}/{self.total_steps}"]
        if self.terminal:
            full = 20 * step // self.total_steps
            parts.append(f"[{'#' * full}{'-' * (20 - full)}]")
        if "reward" in row:
            parts += _of_answers(row)
        elif "loss" in row:
            parts.append(f"loss {row['loss']:.4f}")
            parts += [f"{name} {row[name]:.3g}" for name in ("accuracy", "margin") if name in row]  # of pairs
        if "tokens_per_second" in row:
            parts.append(f"{_short(row['tokens_per_second'])} tokens/s")
        # The first step also pays for what happens once; it counts only while nothing else is known.
        if self.steps_seen == 1:
            seconds_a_step = sum(row[key] for key in row if key.startswith("time/") and key != "time/load")
        else:
            seconds_a_step = (time.monotonic() - self.first_step_ended) / (self.steps_seen - 1)
        parts.append(f"eta {_duration(seconds_a_step * max(self.total_steps - step, 0))}")
        parts.append(f"{row['memory_gib']:.2f} GiB")
        return "  ".join(parts)

    def _show(self) -> None:
        if self.terminal:
            self.on_screen = self.waiting[: shutil.get_terminal_size().columns - 1]
            self._write(f"\r{self.on_screen}\x1b[K", self.out)
        else:
            self._write(self.waiting + "\n", self.out)
        self.waiting = ""

    def _above(self, text: str, stream: Any) -> None:
        if self.on_screen:
            self._write("\r\x1b[K", self.out)
        self._write(text + "\n", stream)
        if self.on_screen:
            self._write(self.on_screen, self.out)

    def _write(self, text: str, stream: Any) -> None:
        # A closed terminal or pipe (`| head`) must not end a run that writes its files well.
        with contextlib.suppress(OSError):
            encoding = stream.encoding or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()


class Sink(Protocol):
    """Another place that metrics go to."""

    def step(self, step: int, metrics: Metrics) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in logs/tensorboard."""

    def __init__(self, folder: Path, start_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if start_step is None else start_step + 1
        self.writer = SummaryWriter(str(folder / "logs" / "tensorboard"), purge_step=purge)

    def step(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A wandb run named after the run folder; a resumed run goes on in the same one. WANDB_MODE=offline works."""

    def __init__(self, folder: Path, project: str, config: dict[str, Any], quiet: bool) -> None:
        import wandb

        id_file = folder / "logs" / "wandb-id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        try:
            self.run = wandb.init(
                project=project,
                name=folder.resolve().name,
                id=id_file.read_text(),
                resume="allow",
                dir=folder / "logs",
                config=config,
                settings=wandb.Settings(silent=quiet),
            )
        except wandb.Error as error:
            raise UsageError(
                f"log.to wandb: {str(error).rstrip('.')}. Run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def step(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=1 if failed else 0)


class _ToConsole(logging.Handler):
    """Warnings of the logger `posttrain` go through the console, so that they do not tear the progress line."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        self.log.warn(record.getMessage())


def _json_line(row: Metrics) -> str:
    """JSON has no NaN and no infinity: they become null, and `not_finite` names them."""
    not_finite = [key for key, value in row.items() if not math.isfinite(value)]
    plain: dict[str, Any] = {key: None if key in not_finite else value for key, value in row.items()}
    if not_finite:
        plain["not_finite"] = not_finite
    return json.dumps(plain, allow_nan=False) + "\n"


def append(file: BinaryIO, text: str) -> None:
    data = memoryview(text.encode())
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        raise PosttrainError(f"{file.name}: cannot write: {error.strerror}. Free some space, then --resume") from error


def cut_after(path: Path, start_step: int | None) -> None:
    """Drop a last line that a kill tore, and steps after `start_step`: they will be done again."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"}\n") or (start_step is not None and json.loads(line)["step"] > start_step):
                break
            kept += len(line)
    if kept < path.stat().st_size:
        os.truncate(path, kept)


def _of_answers(row: Metrics) -> list[str]:
    """What matters of a step that learnt from its own answers."""
    shown = [f"reward {row['reward']:.3f}"]
    judges = {key.removeprefix("rewards/"): value for key, value in row.items() if key.startswith("rewards/")}
    if len(judges) > 1:
        shown.append("(" + " ".join(f"{name} {value:.3f}" for name, value in judges.items()) + ")")
    shown.append(f"length {row['length']:.0f}")
    shown += [f"{name} {row[name]:.3g}" for name in ("entropy", "kl") if name in row]
    shares = {"clipped": "clipped", "no_signal": "no signal", "truncated": "cut off"}
    shown += [f"{words} {row[name]:.0%}" for name, words in shares.items() if row.get(name)]
    if row["failures"]:
        shown.append(f"failed {row['failures']:.0f}")
    return shown


def _short(number: float) -> str:
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
