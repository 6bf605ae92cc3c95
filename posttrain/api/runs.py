"""Reads a run directory: its configuration, metrics, checkpoints and rollouts; plots its curves and resumes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from posttrain.api.options import Data, OnlineOptions, PathLike, Reward, documented
from posttrain.api.training import train_verb
from posttrain.core.errors import UsageError
from posttrain.core.lazy import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from posttrain.rollout.records import Rollout
    from posttrain.train.run import Result


class SavedRun:
    """A run directory on disk, whether its run is finished, stopped or under way."""

    def __init__(self, path: PathLike) -> None:
        from posttrain.checkpoints.checkpoint import is_run_directory

        self.path = Path(path).expanduser()
        if not is_run_directory(self.path):
            raise UsageError(f"{self.path}: no run in this directory; a run directory has config.yaml and checkpoints")

    def __repr__(self) -> str:
        return f"SavedRun({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as nested dicts, as config.yaml has it."""
        import yaml

        found: dict[str, Any] = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        return found

    @property
    def verb(self) -> str:
        """What was run: sft, grpo ..."""
        return str(self.config["verb"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per logged step; a value that was not finite is None."""
        from posttrain.plots.runs import read_metrics

        return read_metrics(self.path / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoint directories, oldest first."""
        from posttrain.checkpoints.checkpoint import list_checkpoints

        return list_checkpoints(self.path / "checkpoints")[::-1]

    @property
    def model_path(self) -> Path:
        """The directory of the newest valid checkpoint's model, in the format of Hugging Face."""
        from posttrain.checkpoints.checkpoint import resolve_model_folder

        return resolve_model_folder(self.path)

    def model(self) -> PreTrainedModel:
        """Load the model of the newest valid checkpoint, with adapters merged into it."""
        from posttrain.models.export import load_trained_model

        return load_trained_model(str(self.path))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer that was saved with the model."""
        from posttrain.config.sections import ModelConfig
        from posttrain.models.tokenizers import load_tokenizer

        return load_tokenizer(ModelConfig(path=str(self.path)))

    def rollouts(self, step: int | None = None) -> Iterator[Rollout]:
        """Yield the recorded completions with their rewards, of all steps or of one; online runs have them."""
        from posttrain.rollout.records import find_file, from_row, read_rows

        for _, row in read_rows(find_file(self.path), step):
            if row is not None:
                yield from_row(row)

    def plot(self, *names: str) -> Any:
        """Draw curves of metrics over the steps and return the figure of matplotlib.

        By default the reward of an online run, the loss of others; `loss` and `eval/loss` share one plot.
        """
        from posttrain.plots.figure import figure
        from posttrain.plots.runs import RunMetrics, panels_of

        return figure(panels_of([RunMetrics(self.path.name, self.path, self.metrics)], names))

    @documented(OnlineOptions)
    def resume(
        self, *, data: Data | None = None, reward: Reward | None = None, **options: Unpack[OnlineOptions]
    ) -> Result:
        """Continue from the newest valid checkpoint, with the saved configuration; arguments change it.

        Callbacks and metrics are not saved: give them again; in a new process also reward functions of a notebook.
        """
        given = {"reward": reward, **options, "resume": True, "output_dir": str(self.path)}
        return train_verb(self.verb, model=None, data=data, config=None, options=given)


def load_run(path: PathLike) -> SavedRun:
    """Open a run directory to read its configuration, metrics, model and rollouts, to plot or to resume it."""
    return SavedRun(path)
