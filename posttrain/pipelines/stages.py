"""The stages that pipelines are made of: generate, score, select, train."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.algorithms import ALGORITHMS
from posttrain.checkpoints.checkpoint import is_run_directory
from posttrain.config.checks import check as check_config
from posttrain.config.compare import option_defaults
from posttrain.config.parsing import from_mapping
from posttrain.config.sections import Config, as_mapping
from posttrain.core.errors import UsageError
from posttrain.core.files import new_folder
from posttrain.core.logging import part_of_command
from posttrain.core.progress import ProgressDisplay
from posttrain.data.reading.sources import find_files, read_records
from posttrain.harness.base import FIGURES
from posttrain.inference.generate import Generation, check_generation, generate
from posttrain.inference.harness import HarnessRun, run_harness
from posttrain.inference.score import ScoreProgress, Scoring, score_file
from posttrain.inference.select import METHODS, select_file
from posttrain.inference.workers import engine_settings
from posttrain.models.export import export
from posttrain.models.paths import resolve_path
from posttrain.pipelines.stage import Figures, Stage
from posttrain.rewards.specs import parse_specs
from posttrain.train.launch import train_from

TARGET_QUANTILE = 0.95  # quantile of the rewards that a conditional model is asked for next


@dataclass(slots=True)
class Generate(Stage):
    """Generates completions for prompts, as `posttrain generate`."""

    config: Generation
    best_of: str = ""
    """Ask for a reward as high as the best ones in this file, which `select condition` wrote."""

    def __post_init__(self) -> None:
        check_generation(self.config)
        self.out = Path(self.config.out)

    def reads(self) -> list[str]:
        return [self.config.model.path, *data_files(self.config.data.train), *([self.best_of] if self.best_of else [])]

    def defaults(self) -> dict[str, Any]:
        return option_defaults(self.config)

    def settings(self) -> dict[str, Any]:
        found = asdict(self.config)
        for name in ("out", "resume", "cluster", "engine", "section"):
            del found[name]
        return found | engine_settings(self.config.engine)

    def run(self, quiet: bool) -> Figures:
        config = replace(self.config, resume=self.out.exists())
        if self.best_of:
            config.condition = best_reward(self.best_of)
        with ProgressDisplay(stream=sys.stderr, quiet=quiet, seconds_between_lines=10) as display:
            progress = generate(config, lambda progress: progress.show_on(display))
        found = {"prompts": progress.total // config.n, "n": config.n, "answers": progress.total}
        return found | ({"condition": config.condition} if config.condition is not None else {})

    def summary(self, figures: Figures) -> str:
        asked = f", asked for reward {figures['condition']:.2f}" if "condition" in figures else ""
        return f"{figures['prompts']:,} prompts x {figures['n']} = {figures['answers']:,} completions{asked}"


@dataclass(slots=True)
class Score(Stage):
    """Scores a file of completions, as `posttrain score`."""

    config: Scoring

    def __post_init__(self) -> None:
        self.out = Path(self.config.out)
        parse_specs(self.config.reward)

    def reads(self) -> list[str]:
        specs = parse_specs(self.config.reward)
        reward_files = [spec.place for spec in specs if spec.kind == "model" or Path(spec.place).is_file()]
        return [self.config.file, *reward_files]

    def defaults(self) -> dict[str, Any]:
        return option_defaults(self.config)

    def settings(self) -> dict[str, Any]:
        found = asdict(self.config)
        for name in ("out", "workers", "timeout_seconds", "memory_gib", "allow_unprotected_code"):
            del found[name]
        return found

    def run(self, quiet: bool) -> Figures:
        with ProgressDisplay(stream=sys.stderr, quiet=quiet, seconds_between_lines=10) as display:
            scored = score_file(self.config, ScoreProgress(display).report)
        return {
            "answers": len(scored.rows),
            "failed": scored.failed,
            "reward": scored.mean,
            "deviation": scored.deviation,
        }

    def summary(self, figures: Figures) -> str:
        worth = f"reward {figures['reward']:.4g} +- {figures['deviation']:.4g}"
        return f"{figures['answers']:,} completions scored, {figures['failed']:,} of them failed; {worth}"


@dataclass(slots=True)
class RunHarness(Stage):
    """Evaluates a model with the tasks of a harness, as `posttrain eval --harness`; writes a row per example."""

    config: HarnessRun
    out: Path

    @property
    def figures_file(self) -> Path:
        return self.out.with_name(FIGURES)

    def reads(self) -> list[str]:
        return [self.config.model.path, *(task for task in self.config.tasks if Path(task).is_file())]

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.config).items() if name != "log_dir"}

    def run(self, quiet: bool) -> Figures:
        scores = run_harness(replace(self.config, log_dir=str(self.out.parent / "inspect")))
        scores.write(self.out.parent)
        return {"examples": len(scores.rows), **{name: figure.value for name, figure in scores.figures.items()}}

    def written_files(self) -> list[Path]:
        return [self.out, self.figures_file]

    def summary(self, figures: Figures) -> str:
        return f"{figures['examples']:,} examples"


@dataclass(slots=True, kw_only=True)
class Select(Stage):
    """Selects training examples from scored completions, as `posttrain select`."""

    method: str
    file: str
    out: Path
    values: tuple[Any, ...] = ()
    """Arguments of the method: the smallest reward, the fraction, or the template of conditions."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"select {self.method}: unknown method; there are {', '.join(METHODS)}")

    def reads(self) -> list[str]:
        return [self.file]

    def settings(self) -> dict[str, Any]:
        return {"method": self.method, "values": list(self.values)}

    def run(self, quiet: bool) -> Figures:
        selected = select_file(self.method, self.file, self.out, *self.values)
        return {"rows": len(selected.rows), **selected.counts}

    def summary(self, figures: Figures) -> str:
        reasons = {name: number for name, number in figures.items() if name not in ("rows", "read", "used") and number}
        dropped = sum(reasons.values())
        counts = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in reasons.items())
        return (
            f"{figures['read']:,} completions = {figures['used']:,} selected + {dropped:,} dropped"
            f"{f' ({counts})' if counts else ''}: {figures['rows']:,} examples"
        )


@dataclass(slots=True, kw_only=True)
class Train(Stage):
    """Runs a trainer. `out` is the trained model, a plain Hugging Face directory; adapters are merged into it.

    Metrics, log and configuration are in `<out>.training` beside it.
    """

    verb: str
    out: Path
    options: dict[str, Any] | Config
    """As from Python: {"model": {"path": "pico"}, "data": {"train": ["rows.jsonl"]}, "train": {"max_steps": 20}}."""
    config: Config = field(init=False)

    def __post_init__(self) -> None:
        found = self.options
        config = (
            from_mapping(self.verb, ALGORITHMS[self.verb], found) if isinstance(found, dict) else check_config(found)
        )
        self.config = replace(config, output_dir=str(self.training))
        ALGORITHMS[self.verb](self.config.algo)  # checks its options

    def reads(self) -> list[str]:
        algo = ALGORITHMS[self.verb](self.config.algo)
        models = [path for path in (self.config.model.path, algo.reference_path(), algo.teacher_path()) if path]
        return [*models, *data_files((*self.config.data.train, *self.config.data.eval))]

    def defaults(self) -> dict[str, Any]:
        return option_defaults(self.config)

    def settings(self) -> dict[str, Any]:
        found = as_mapping(self.config)
        for name in ("output_dir", "resume", "allow_changed_data", "quiet", "log", "save", "cluster"):
            del found[name]
        return {"verb": self.verb, **found}

    def run(self, quiet: bool) -> Figures:
        with part_of_command("a pipeline"):
            result = train_from(self.verb, replace(self.config, quiet=quiet, resume=is_run_directory(self.training)))
        self.publish()
        return {"steps": result.steps, **self.last_metrics()}

    def last_metrics(self) -> Figures:
        """Read the metrics of the last step from the file, as the run may have been killed after it."""
        *_, last = (self.training / "metrics.jsonl").read_text(encoding="utf-8").strip().split("\n")
        return {name: value for name, value in json.loads(last).items() if name in ("loss", "accuracy", "reward")}

    @property
    def training(self) -> Path:
        return self.out.with_name(f"{self.out.name}.training")

    def written_files(self) -> list[Path]:
        return sorted(path for path in self.out.rglob("*") if path.is_file())

    def summary(self, figures: Figures) -> str:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "steps")
        return f"{self.verb}: {figures['steps']:,} steps{f'; {shown}' if shown else ''}"

    def publish(self) -> None:
        """Publish the model of the last checkpoint atomically."""
        if self.out.exists():
            return
        if self.config.model.lora_rank:
            export(str(self.training), self.out)
            return
        with new_folder(self.out) as unfinished:
            shutil.copytree(resolve_path(str(self.training)), unfinished, copy_function=linked, dirs_exist_ok=True)

    def remove_temporary_files(self) -> None:
        """Remove the checkpoints: the optimizer state is larger than the model and only needed to resume."""
        if not self.config.train.ema_decay:  # the average is in the checkpoint, for `posttrain export --ema`
            shutil.rmtree(self.training / "checkpoints", ignore_errors=True)


def linked(source: str, target: str) -> None:
    """Hard-link a file; copy it where the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def data_files(names: tuple[str, ...]) -> list[str]:
    """Return the files of these sources; sources that are not local files are returned by name."""
    found: list[str] = []
    for name in names:
        try:
            found += map(str, find_files(name))
        except UsageError:
            found.append(name)
    return found


def best_reward(file: str) -> float:
    """Return the reward to ask for: the 95th percentile, or the maximum where only few completions are good."""
    rewards = sorted(float(row.values["reward"]) for row in read_records(file))
    typical = rewards[int(TARGET_QUANTILE * (len(rewards) - 1))]
    return typical if typical > rewards[len(rewards) // 2] else rewards[-1]


__all__ = ["Generate", "Score", "Select", "Stage", "Train"]
