"""A run: its directory, log, data, progress and checkpoints. The loops decide when these are used."""

from __future__ import annotations

import gc
import hashlib
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from posttrain.algorithms import Algorithm
from posttrain.checkpoints import checkpoint, random_state
from posttrain.cluster.placement import Placement
from posttrain.config import sections as configs
from posttrain.config.sections import Config, ModelConfig
from posttrain.core import logging as logs
from posttrain.core.errors import CheckpointError, Stopped, UsageError, WorkerError
from posttrain.core.files import read_json, write_json
from posttrain.core.metrics_sinks import check_sinks
from posttrain.core.types import Sample
from posttrain.models.loading import vocabulary_size
from posttrain.models.paths import resolve_path
from posttrain.models.tokenizers import load_tokenizer
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.run_data import RunData, check_lengths, describe, load_data, preview
from posttrain.train.run_directory import RunDirectory, StopSignals


@dataclass(slots=True)
class Result:
    """What a finished run returns to Python."""

    folder: Path
    steps: int
    metrics: dict[str, float]  # of the last step


class CheckpointPart(Protocol):
    """Something that a checkpoint holds besides the policy, in a directory of its own."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


@dataclass(slots=True)
class Progress:
    """What a run remembers from step to step besides weights."""

    best: float | None = None
    best_step: int | None = None
    skipped_in_a_row: int = 0
    skipped: int = 0
    mismatched_in_a_row: int = 0


@dataclass(slots=True)
class Run:
    """Opened by `Run.open`; closed by leaving the `with`."""

    verb: str
    config: Config
    model: ModelConfig  # as configured, with its path resolved once: a run directory's newest checkpoint may change
    folder: RunDirectory
    signals: StopSignals
    log: logs.Log
    tokenizer: Any
    data: RunData
    fingerprints: dict[str, str]
    placement: Placement
    progress: Progress = field(default_factory=Progress)
    parts: dict[str, CheckpointPart] = field(default_factory=dict)
    saved_step: int = 0

    @classmethod
    @contextmanager
    def open(cls, verb: str, config: Config, algorithm: Algorithm) -> Iterator[Run]:
        """Reads and checks everything that needs no model."""
        check_sinks("tensorboard" in config.log.report_to, config.log.wandb_project)
        logs.quiet_libraries()
        with ExitStack() as stack:
            models = {"model": resolve_path(config.model.path)} | helper_model_paths(algorithm)
            model = config.model if config.model.path == "pico" else replace(config.model, path=models["model"])
            tokenizer = load_tokenizer(model)
            folder = stack.enter_context(RunDirectory.open(config.output_dir, verb, config.resume))
            vocabulary = min(vocabulary_size(ModelConfig(path=path)) for path in models.values())
            data = load_data(config, algorithm, tokenizer, vocabulary, folder.path)
            too_long = check_lengths(models["model"], data, config)
            fingerprints = {"verb": verb, "data": data.train.fingerprint}
            fingerprints |= {name: fingerprint(path) for name, path in models.items()}
            if data.eval is not None:
                fingerprints["evaluation data"] = data.eval.fingerprint
            newest = checkpoint.newest_valid(folder.checkpoints) if config.resume else None
            start = checkpoint.step_of(newest) if newest else 0
            log = logs.Log(
                folder.path,
                total_steps=data.steps,
                quiet=config.quiet,
                tensorboard="tensorboard" in config.log.report_to,
                wandb=config.log.wandb_project,
                config=configs.as_mapping(config),
                start_step=start if config.resume else None,
            )
            stack.enter_context(log)
            for line in (*data.train.descriptions, *describe(config, data, folder.path)):
                log.message(line)
            if too_long:
                log.warn(too_long)
            signals = stack.enter_context(StopSignals())
            placement = Placement(config.cluster, folder.logs)
            stack.callback(placement.close)
            stack.callback(gc.unfreeze)
            run = cls(verb, config, model, folder, signals, log, tokenizer, data, fingerprints, placement)
            try:
                yield run
            except WorkerError as error:
                raise run.with_resume_hint(error) from None

    def resume(self, policy: LearnerGroup) -> int:
        """Restores everything from the newest valid checkpoint; returns the step it was written after, or 0."""
        if torch.cuda.is_initialized():
            gc.collect()  # frees what loading has left on the device
        gc.freeze()  # a full garbage-collection pass over library objects costs more than a short step
        random_state.seed_everything(self.config.seed)
        newest = checkpoint.newest_valid(self.folder.checkpoints) if self.config.resume else None
        if newest is None:
            if self.config.resume:
                self.log.message("no checkpoint yet: starting from step 0")
            else:
                first = [entry for row in self.data.train.rows[:3] for entry in row]
                self.log.samples(0, [preview(self.tokenizer, entry) for entry in first])
            self.write_config()
            return 0
        state = read_json(newest / "state.json")
        for name, value in self.fingerprints.items():
            if state["fingerprints"].get(name) != value:
                raise CheckpointError(
                    f"{newest}: the {name} changed since this run was started, so it cannot be resumed. "
                    f"Restore the {name} it was started with, or start a new run with another --output_dir."
                )
        policy.load(newest)
        for name, part in self.parts.items():
            part.load(newest / name)
        self.progress = Progress(**state["progress"])
        self.data.stream.position = state["position"]
        random_state.restore_rng(state["rng"])
        self.saved_step = state["step"]
        self.write_config()
        self.log.message(f"resuming from step {state['step']} ({newest})")
        return state["step"]

    def write_config(self) -> None:
        """Called once all models are loaded, so that a start that failed does not block the next.

        On resume too: options may have changed, and a later resume without options must know them.
        """
        self.folder.write_config(configs.as_yaml(self.verb, replace(self.config, resume=False)))

    def save(self, step: int, policy: LearnerGroup) -> Path:
        """Writes a checkpoint and deletes those that save.max_checkpoints no longer covers."""

        def write(folder: Path) -> None:
            for name, part in self.parts.items():  # first: one of them may wait for what advances the position
                (folder / name).mkdir()
                part.save(folder / name)
            policy.save(folder)
            write_json(
                folder / "state.json",
                {
                    "step": step,
                    "verb": self.verb,
                    "position": self.data.stream.position,
                    "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
                    "fingerprints": self.fingerprints,
                    "rng": random_state.rng_state(),
                    "config": configs.as_mapping(self.config),
                },
            )

        path = checkpoint.write_checkpoint(self.folder.checkpoints, step, write)
        save = self.config.save
        checkpoint.delete_old_checkpoints(
            self.folder.checkpoints, save.max_checkpoints, save.max_gigabytes, self.progress.best_step, newest=path
        )
        self.saved_step = step
        return path

    def with_resume_hint(self, error: WorkerError) -> WorkerError:
        """Adds to the message how to resume from the last checkpoint."""
        error.folder = self.folder.path
        saved = checkpoint.newest_valid(self.folder.checkpoints)
        if saved is not None:
            error.args = (f"{error} Resume from step {checkpoint.step_of(saved)}: {self.resume_command()}",)
        return error

    def stop_if_asked(self, step: int, policy: LearnerGroup) -> None:
        """Saves and exits with the signal's code if one arrived; called after a step."""
        number = self.signals.received
        if number is None:
            return
        if self.saved_step != step:
            self.save(step, policy)
        name = signal.Signals(number).name
        raise Stopped(f"stopped by {name} after step {step}; saved. Resume: {self.resume_command()}", number)

    def resume_command(self) -> str:
        return f"posttrain {self.verb} --output_dir {shlex.quote(str(self.folder.path))} --resume"

    def keep_batch(self, step: int, samples: list[Sample]) -> Path:
        """Writes the samples of a step whose loss or gradient is not finite to a file."""
        rows = [{"origin": s.origin, "tokens": s.tokens.tolist(), "mask": s.mask.tolist()} for s in samples]
        return self.folder.write_bad_batch(step, rows)


def helper_model_paths(algorithm: Algorithm) -> dict[str, str]:
    """Returns where the reference and the teacher are, if the algorithm has them at a path of their own."""
    found: dict[str, str] = {}
    for name, path in (("reference", algorithm.reference_path()), ("teacher", algorithm.teacher_path())):
        if not path:
            continue
        try:
            found[name] = resolve_path(path)
            vocabulary_size(ModelConfig(path=found[name]))  # reads its configuration, so that it must exist
        except UsageError as error:
            raise UsageError(str(error).replace("model.path", f"algo.{name}", 1)) from error
    return found


def due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def fingerprint(folder: str) -> str:
    """Returns a hash of a model's files: names, sizes and content (of large files: at 64 places)."""
    path = Path(folder)
    if not path.is_dir():
        return folder  # a hub name
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")) + sorted(path.glob("*config.json")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        block = 2**20
        with file.open("rb") as stream:
            for place in range(0, size, max(block, size // 64)):
                stream.seek(place)
                digest.update(stream.read(block))
    return digest.hexdigest()
