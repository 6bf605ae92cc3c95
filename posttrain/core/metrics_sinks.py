"""Writes the metrics of a run to metrics.jsonl, TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import math
import uuid
from pathlib import Path
from typing import Any, Protocol

from posttrain.core.errors import UsageError
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
    "tensorboard": "log.report_to tensorboard needs the package tensorboard: pip install 'tensorboard>=2.19'",
    "wandb": "log.report_to wandb needs the package wandb: pip install 'wandb>=0.20'",
}

Metrics = dict[str, float]


def is_wall_clock(key: str) -> bool:
    """Whether a metric depends on the clock or the machine, so that a comparison of two runs leaves it out."""
    return key.startswith("time/") or key.rpartition("/")[2] in WALL_CLOCK_KEYS


def check_sinks(tensorboard: bool, wandb: str) -> None:
    """Raise UsageError if a sink's package is missing. Imports nothing, so that it can run before everything else."""
    for name, wanted in (("tensorboard", tensorboard), ("wandb", bool(wandb))):
        if wanted and importlib.util.find_spec(name) is None:
            raise UsageError(INSTALL[name])


class MetricsSink(Protocol):
    """Receives the metrics of every step."""

    def step(self, step: int, metrics: Metrics) -> None: ...

    def close(self, failed: bool) -> None: ...


class MetricsFile:
    """metrics.jsonl: one JSON object per step, written at once."""

    def __init__(self, folder: Path, start_step: int | None) -> None:
        path = folder / "metrics.jsonl"
        cut_after(path, start_step)
        self.file = LineFile(path)

    def step(self, step: int, metrics: Metrics) -> None:
        self.file.append(json_line({"step": step, **metrics}))

    def close(self, failed: bool) -> None:
        self.file.close()


class TensorBoardSink:
    """Event files in a directory; "": logs/tensorboard of the run directory."""

    def __init__(self, folder: Path, start_step: int | None, directory: str = "") -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if start_step is None else start_step + 1
        self.writer = SummaryWriter(directory or str(folder / "logs" / "tensorboard"), purge_step=purge)

    def step(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WandbSink:
    """A wandb run; a resumed run continues the same one. WANDB_MODE=offline works.

    Without a name it is named after the run directory, and without a directory its files are in logs there.
    """

    def __init__(
        self, folder: Path, project: str, config: dict[str, Any], quiet: bool, name: str = "", directory: str = ""
    ) -> None:
        import wandb

        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)

        id_file = folder / "logs" / "wandb-id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        try:
            self.run = wandb.init(
                project=project,
                name=name or folder.resolve().name,
                id=id_file.read_text(),
                resume="allow",
                dir=directory or folder / "logs",
                config=config,
                settings=wandb.Settings(silent=quiet),
            )
        except wandb.Error as error:
            raise UsageError(
                f"log.report_to wandb: {str(error).rstrip('.')}. Run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def step(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=1 if failed else 0)


def json_line(row: Metrics) -> str:
    """Encode metrics as JSON; NaN and infinity, which JSON lacks, become null, and `not_finite` lists their names."""
    not_finite = [key for key, value in row.items() if not math.isfinite(value)]
    plain: dict[str, Any] = {key: None if key in not_finite else value for key, value in row.items()}
    if not_finite:
        plain["not_finite"] = not_finite
    return json.dumps(plain, allow_nan=False) + "\n"
