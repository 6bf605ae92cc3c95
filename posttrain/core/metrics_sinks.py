"""Writes the metrics of a run to metrics.jsonl and to trackers: TensorBoard, wandb, trackio, MLflow, SwanLab.

A tracker's library is imported in the class of its sink, when a run uses it. A resumed run continues in the same place.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain.core.errors import UsageError
from posttrain.core.files import atomic_write_text
from posttrain.core.jsonl import LineFile, cut_after

WALL_CLOCK_KEYS = frozenset(
    {
        "tokens_per_second",
        "tokens_per_second_per_device",
        "memory_gib",
        "model_flop_utilisation",
        "communication_seconds",
        "slowest_rank",
        "slowest_rank_ratio",
    }
)
"""Metrics that differ between two equal runs, besides all that begin with `time/`."""

INSTALL = {
    "tensorboard": "tensorboard>=2.19",
    "wandb": "wandb>=0.20",
    "trackio": "trackio>=0.40",
    "mlflow": "mlflow-skinny>=3",
    "swanlab": "swanlab>=0.10",
}
"""Tracker -> what pip installs for it; the module has the tracker's name."""
DEFAULT_PROJECT = "posttrain"
TABLE_ROWS = 32  # completions of a step that trackers get; the run directory has all of them

Metrics = dict[str, float]
Row = dict[str, Any]


def is_wall_clock(key: str) -> bool:
    """Whether a metric depends on the clock or the machine, so that a comparison of two runs leaves it out."""
    return key.startswith("time/") or key.rpartition("/")[2] in WALL_CLOCK_KEYS


@dataclass(slots=True, frozen=True, kw_only=True)
class Trackers:
    """Where a run reports to, and under which names."""

    names: tuple[str, ...] = ()
    project: str = ""
    run_name: str = ""  # "": that of the run directory
    group: str = ""
    directory: str = ""  # of local files; "": logs in the run directory
    tensorboard_dir: str = ""
    prometheus_file: str = ""

    def check(self) -> None:
        """Raise UsageError if a package is missing. Imports nothing, so that it can run before everything else."""
        for name in self.names:
            if importlib.util.find_spec(name) is None:
                raise UsageError(f"log.report_to {name} needs a package: pip install '{INSTALL[name]}'")

    def open(self, folder: Path, config: dict[str, Any], *, quiet: bool, start_step: int | None) -> list[MetricsSink]:
        """Return the sinks of a run; `start_step`: on resume, the steps already done."""
        sinks: list[MetricsSink] = [MetricsFile(folder, start_step)]
        if self.prometheus_file:
            sinks.append(PrometheusFile(Path(self.prometheus_file), folder))
        for name in self.names:
            run = TrackedRun(self, folder, config, quiet, start_step)
            sinks.append(SINKS[name](run))
        return sinks


@dataclass(slots=True, frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    trackers: Trackers
    folder: Path
    config: dict[str, Any]
    quiet: bool
    start_step: int | None

    @property
    def project(self) -> str:
        return self.trackers.project or DEFAULT_PROJECT

    @property
    def name(self) -> str:
        return self.trackers.run_name or self.folder.resolve().name

    def directory(self) -> str:
        """Return the directory of local files, which exists."""
        path = Path(self.trackers.directory) if self.trackers.directory else self.folder / "logs"
        path.mkdir(parents=True, exist_ok=True)
        return str(path.resolve())

    def saved_id(self, tracker: str) -> str:
        """Return the tracker's id of this run, which is in the run directory; "" before it was saved."""
        path = self.folder / "logs" / f"{tracker}-id"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def save_id(self, tracker: str, value: str) -> None:
        (self.folder / "logs" / f"{tracker}-id").write_text(value, encoding="utf-8")


class MetricsSink(Protocol):
    """Receives the metrics of every step."""

    def step(self, step: int, metrics: Metrics) -> None: ...

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        """Show completions of a step as a table; all rows have the same keys."""

    def close(self, failed: bool) -> None: ...


class MetricsFile:
    """metrics.jsonl: one JSON object per step, written at once."""

    def __init__(self, folder: Path, start_step: int | None) -> None:
        path = folder / "metrics.jsonl"
        cut_after(path, start_step)
        self.file = LineFile(path)

    def step(self, step: int, metrics: Metrics) -> None:
        self.file.append(json_line({"step": step, **metrics}))

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        pass  # rollouts.jsonl has them

    def close(self, failed: bool) -> None:
        self.file.close()


class PrometheusFile:
    """The newest metrics in Prometheus' text format, for node_exporter; the file is replaced at each step.

    `posttrain_run_up` is 1 until the run ends, 0 after it, and stays 1 after a kill: compare `posttrain_run_timestamp`.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.run, self.last = path, folder.resolve().name, 0
        self.metrics: Metrics = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(1)

    def step(self, step: int, metrics: Metrics) -> None:
        self.metrics, self.last = dict(metrics), step
        self.write(1)

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        pass

    def close(self, failed: bool) -> None:
        self.write(0)

    def write(self, up: int) -> None:
        state = {"run_up": up, "run_timestamp": time.time(), "step": self.last}
        atomic_write_text(self.path, prometheus_text(self.run, self.metrics | state))


def prometheus_text(run: str, metrics: Metrics) -> str:
    """Return metrics in Prometheus' text format, with the run as a label: eval/loss is posttrain_eval_loss."""
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for key in sorted(metrics):
        name = "posttrain_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
        value = metrics[key]
        text = repr(float(value)).replace("inf", "Inf").replace("nan", "NaN")
        lines += [f"# TYPE {name} gauge", f'{name}{{run="{label}"}} {text}']
    return "\n".join(lines) + "\n"


class TensorBoardSink:
    """Event files in a directory; "": logs/tensorboard of the run directory."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.start_step is None else run.start_step + 1
        directory = run.trackers.tensorboard_dir or str(run.folder / "logs" / "tensorboard")
        self.writer = SummaryWriter(directory, purge_step=purge)

    def step(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        self.writer.add_text("completions", markdown_table(rows), step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WandbSink:
    """A wandb run; a resumed run continues the same one. WANDB_MODE=offline works."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self.library = wandb
        if not run.saved_id("wandb"):
            run.save_id("wandb", uuid.uuid4().hex[:8])
        try:
            self.run = wandb.init(
                project=run.project,
                name=run.name,
                group=run.trackers.group or None,
                id=run.saved_id("wandb"),
                resume="allow",
                dir=run.directory(),
                config=run.config,
                settings=wandb.Settings(silent=run.quiet),
            )
        except wandb.Error as error:
            raise UsageError(
                f"log.report_to wandb: {str(error).rstrip('.')}. Run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def step(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        table = self.library.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"completions": table}, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=1 if failed else 0)


class TrackioSink:
    """A trackio run in a local database; `trackio show` displays it."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", run.directory() + "/trackio")  # it is read when trackio is imported
        import trackio

        self.library = trackio
        name = run.saved_id("trackio") or run.name
        run.save_id("trackio", name)
        options = {"group": run.trackers.group} if run.trackers.group else {}
        self.run = trackio.init(
            project=run.project, name=name, resume="allow", config=run.config, embed=False, **options
        )

    def step(self, step: int, metrics: Metrics) -> None:
        self.run.log(dict(metrics), step=step)

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        self.run.log({"completions": self.library.Table(data=[dict(row) for row in rows])}, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish()


class MlflowSink:
    """An MLflow run: on the server of MLFLOW_TRACKING_URI, else in files, which mlflow-skinny can write too."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        where = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not where:
            where = f"file://{run.directory()}/mlruns"
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client = mlflow.MlflowClient(tracking_uri=where)
        self.id = run.saved_id("mlflow")
        if self.id:
            self.client.update_run(self.id, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found is not None else self.client.create_experiment(run.project)
        tags = {"group": run.trackers.group} if run.trackers.group else {}
        self.id = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        run.save_id("mlflow", self.id)
        for key, value in flat_options(run.config).items():
            self.client.log_param(self.id, key, value[:500])  # the length that it allows

    def step(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        found = [Metric(key, float(value), now, step) for key, value in metrics.items()]
        self.send(lambda: self.client.log_batch(self.id, metrics=found))

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        columns = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}  # as log_table writes it
        self.send(lambda: self.client.log_dict(self.id, columns, f"completions/step-{step:08d}.json"))

    def send(self, call: Callable[[], Any]) -> None:
        """Report errors of the server as those of files: the run goes on without this tracker."""
        from mlflow.exceptions import MlflowException

        try:
            call()
        except MlflowException as error:
            raise OSError(str(error)) from error

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class SwanlabSink:
    """A SwanLab experiment; SWANLAB_MODE=local or offline keeps it on this machine."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self.library = swanlab
        options: dict[str, Any] = {"group": run.trackers.group} if run.trackers.group else {}
        if run.saved_id("swanlab"):
            options |= {"id": run.saved_id("swanlab"), "resume": "allow"}
        self.run = swanlab.init(
            project=run.project, name=run.name, config=run.config, log_dir=run.directory(), **options
        )
        run.save_id("swanlab", str(self.run.id))

    def step(self, step: int, metrics: Metrics) -> None:
        self.library.log(dict(metrics), step=step)

    def completions(self, step: int, rows: Sequence[Row]) -> None:
        table = self.library.echarts.Table()
        table.add(list(rows[0]), [list(row.values()) for row in rows])
        self.library.log({"completions": table}, step=step)

    def close(self, failed: bool) -> None:
        self.library.finish(state="crashed", error="the run failed") if failed else self.library.finish()


SINKS: dict[str, Callable[[TrackedRun], MetricsSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
}


def flat_options(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return options by their full names, section.option, as texts."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat_options(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = str(value)
    return found


def markdown_table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown, in which the texts of completions stay text."""

    def cell(value: Any) -> str:
        text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", text).replace("\r", "").replace("\n", "<br>")

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def json_line(row: Metrics) -> str:
    """Encode metrics as JSON; NaN and infinity, which JSON lacks, become null, and `not_finite` lists their names."""
    not_finite = [key for key, value in row.items() if not math.isfinite(value)]
    plain: dict[str, Any] = {key: None if key in not_finite else value for key, value in row.items()}
    if not_finite:
        plain["not_finite"] = not_finite
    return json.dumps(plain, allow_nan=False) + "\n"
