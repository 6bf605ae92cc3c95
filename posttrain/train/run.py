"""A run: its directory, log, data, progress and checkpoints. The loops decide when these are used."""

from __future__ import annotations

import gc
import json
import math
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from transformers import PreTrainedModel

from posttrain.algorithms import Algorithm, OnlineAlgorithm
from posttrain.algorithms.opd import SELF, is_address
from posttrain.checkpoints import checkpoint, random_state
from posttrain.cluster.placement import Placement
from posttrain.config import sections as configs
from posttrain.config.compare import changed_options, flat
from posttrain.config.renames import renamed_settings
from posttrain.config.sections import Config, LogConfig, ModelConfig, OnlineConfig
from posttrain.core import accelerators
from posttrain.core import logging as logs
from posttrain.core.errors import CheckpointError, PosttrainError, Stopped, UsageError, WorkerError
from posttrain.core.files import read_json, write_json
from posttrain.core.metrics_sinks import Trackers
from posttrain.core.types import Sample
from posttrain.models.export import load_trained_model
from posttrain.models.loading import vocabulary_size
from posttrain.models.paths import model_fingerprint, resolve_path
from posttrain.models.tokenizers import load_tokenizer
from posttrain.train import WORKER_MODULES
from posttrain.train.callbacks import CallbackRunner, EarlyStopping, MetricFunctions, TrainingState
from posttrain.train.inputs import NO_INPUTS, RunInputs
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.run_data import RunData, check_lengths, describe, load_data, previews
from posttrain.train.run_directory import RunDirectory, StopSignals
from posttrain.train.task_eval import remove_evaluations_after
from posttrain.train.verification import find_checkpoint

# Parts of names of metrics, and whole words of them, of which smaller values are better.
SMALLER_IS_BETTER = re.compile(
    r"loss|perplexity|bits_per_byte|failures|truncated|error|brier|"
    r"(?<![a-z])(kl|nll|ppl|ter|wer|cer|mse|rmse|mae)(?![a-z])"
)
RESUMED_KEYS = ("step", "position", "progress", "fingerprints", "rng", "config")  # of a checkpoint's state.json
ORDER_OPTIONS = ("seed", "data.shuffle")  # with other values of these, the stream has other examples at a position
DATA_FINGERPRINTS = ("data", "evaluation data")
UNCOMPARED = ("output_dir", "resume", "allow_changed_data", "quiet")  # options that do not change what is computed


def changes_since(before: dict[str, Any], config: Config) -> dict[str, str]:
    """Describe the options that differ from those of a checkpoint, maybe of the previous version, by name."""
    now = flat(json.loads(json.dumps(configs.as_mapping(config))))
    saved = flat(renamed_settings(before, now))
    compared = {name: value for name, value in now.items() if name in saved and name not in UNCOMPARED}
    return changed_options(saved, compared, {})


@dataclass(slots=True)
class Result:
    """What a finished run returns to Python."""

    output_dir: Path  # the run directory
    steps: int
    metrics: dict[str, float]  # of the last step
    stopped_early: str = ""
    """Why a callback stopped the run before its last step; empty: all steps are done."""

    @property
    def folder(self) -> Path:
        """The name of `output_dir` in version 0.1."""
        return self.output_dir

    def model(self) -> PreTrainedModel:
        """Load the trained model from the newest checkpoint, with adapters merged into it."""
        return load_trained_model(str(self.output_dir))


def best_metric(config: Config) -> tuple[str, Literal["min", "max"]]:
    """Return the metric that decides which checkpoint is the best, and whether smaller or larger values are better."""
    chosen = config.eval.metric_for_best_model.removeprefix("eval/")
    name = chosen or ("reward" if isinstance(config, OnlineConfig) else "loss")
    mode = config.eval.metric_mode
    if mode == "auto":
        mode = "min" if SMALLER_IS_BETTER.search(name.lower()) else "max"
    return f"eval/{name}", mode


def early_stopping(config: Config) -> tuple[EarlyStopping, ...]:
    """Return the callback that ends the run when the metric of the best checkpoint does not improve, if it is set."""
    if not config.eval.early_stopping_patience:
        return ()
    metric, mode = best_metric(config)
    patience, threshold = config.eval.early_stopping_patience, config.eval.early_stopping_threshold
    return (EarlyStopping(metric, patience, mode, threshold),)


class CheckpointPart(Protocol):
    """Something that a checkpoint holds besides the policy, in a directory of its own."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


@dataclass(slots=True)
class Progress:
    """Counters that a checkpoint saves besides the weights."""

    best: float | None = None  # the best value of eval.metric_for_best_model so far
    best_step: int | None = None
    best_metric: str = ""  # whose value it is; empty in checkpoints of earlier versions: the default one
    best_mode: str = ""  # min or max: how values were compared
    skipped_in_a_row: int = 0
    skipped: int = 0
    micro_batch_tokens: int = 0  # of smaller micro-batches, since the run was out of memory; 0: as configured
    mismatched_in_a_row: int = 0  # steps whose sampler and trainer differ too much; see OnlineLoop.check_mismatch


class SaveInProgress:
    """A thread that completes the checkpoint of a step, whose files are written."""

    def __init__(self, step: int, complete: Callable[[], Path]) -> None:
        self.step, self.complete = step, complete
        self.outcome: Path | BaseException | None = None
        self.thread = threading.Thread(target=self.work, name="save", daemon=True)
        self.thread.start()

    def work(self) -> None:
        try:
            self.outcome = self.complete()
        except BaseException as error:
            self.outcome = error  # raised by `result` in the thread of the loop
            if not isinstance(error, Exception):
                raise

    def result(self) -> Path:
        """Wait for the checkpoint, and raise the error of a save that failed."""
        self.thread.join()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


@dataclass(slots=True)
class Run:
    """One training run. `Run.open` is a context manager: leaving it closes workers, log and directory."""

    verb: str
    config: Config
    model: ModelConfig  # as configured, with its path resolved once: a run directory's newest checkpoint may change
    directory: RunDirectory
    signals: StopSignals
    log: logs.Log
    tokenizer: Any
    data: RunData
    fingerprints: dict[str, str]
    placement: Placement
    algorithm: Algorithm
    callbacks: CallbackRunner
    metric_functions: MetricFunctions
    from_python: bool = False
    newest: Path | None = None  # the checkpoint to resume from, which was verified
    progress: Progress = field(default_factory=Progress)
    parts: dict[str, CheckpointPart] = field(default_factory=dict)
    saved_step: int = 0  # of the newest checkpoint
    saving: SaveInProgress | None = None  # of a checkpoint that is being synced and sealed beside training
    data_changes: list[dict[str, Any]] = field(default_factory=list)  # that allow_changed_data let pass, by step

    @classmethod
    @contextmanager
    def open(cls, verb: str, config: Config, algorithm: Algorithm, inputs: RunInputs = NO_INPUTS) -> Iterator[Run]:
        """Open the run directory, read and encode all data, and make every check that needs no weights."""
        trackers = make_trackers(config.log)
        trackers.check()
        logs.quiet_libraries()
        with ExitStack() as stack:
            folder: RunDirectory | None = None
            if inputs.has_objects:
                folder = stack.enter_context(RunDirectory.open(config.output_dir, verb, config.resume))
                config = inputs.write(config, folder)
            models = {"model": resolve_path(config.model.path)} | helper_model_paths(algorithm)
            model = config.model if config.model.path == "pico" else replace(config.model, path=models["model"])
            tokenizer = load_tokenizer(model)
            folder = folder or stack.enter_context(RunDirectory.open(config.output_dir, verb, config.resume))
            vocabulary = min(vocabulary_size(ModelConfig(path=path)) for path in with_own_tokens(models, algorithm))
            data = load_data(config, algorithm, tokenizer, vocabulary, folder.path)
            too_long = check_lengths(models["model"], data, config)
            fingerprints = fingerprints_of(verb, data, models)
            placement = Placement(config.cluster, folder.logs, WORKER_MODULES)
            workers = stack.enter_context(ExitStack())
            workers.callback(placement.close)
            newest, verification_seconds = None, 0.0
            if config.resume:
                newest, verification_seconds = find_checkpoint(folder.checkpoints, placement)
            start = checkpoint.step_of(newest) if newest else 0
            log = logs.Log(
                folder.path,
                total_steps=data.steps,
                quiet=config.quiet,
                trackers=trackers,
                config=configs.as_mapping(config),
                start_step=start if config.resume else None,
            )
            log.devices = config.cluster.devices
            stack.enter_context(log)
            if newest is not None:
                log.phases.add("resume", verification_seconds)
            for line in (*data.train.descriptions, *describe(config, data, folder.path)):
                log.message(line)
            if config.eval.metric_for_best_model:
                metric, mode = best_metric(config)
                log.message(f"best checkpoint: the {'smallest' if mode == 'min' else 'largest'} {metric}")
            if too_long:
                log.warn(too_long)
            signals = stack.enter_context(StopSignals())
            stack.enter_context(workers.pop_all())  # they end before the log does
            stack.callback(gc.unfreeze)
            state = TrainingState(folder.path, start, data.steps)
            run = cls(
                verb=verb,
                config=config,
                model=model,
                directory=folder,
                signals=signals,
                log=log,
                tokenizer=tokenizer,
                data=data,
                fingerprints=fingerprints,
                placement=placement,
                algorithm=algorithm,
                callbacks=CallbackRunner((*inputs.callbacks, *early_stopping(config)), state),
                metric_functions=inputs.metrics,
                from_python=inputs.from_python,
                newest=newest,
            )
            try:
                yield run
                run.finish_save()
            except WorkerError as error:
                run.finish_save_after(error)
                raise run.with_resume_hint(error) from None
            except BaseException as error:
                run.finish_save_after(error)
                raise

    @contextmanager
    def saved_if_refused(self, step: int, policy: LearnerGroup) -> Iterator[None]:
        """Save before an evaluation refuses an option, which ends the run: the steps before it were good."""
        try:
            yield
        except UsageError as error:
            self.save(step, policy)
            raise UsageError(f"{error}\nStep {step} is saved; with another value: {self.resume_command()}") from None

    def note_best(self, step: int, metrics: dict[str, float]) -> None:
        """Remember this step if its evaluation is the best so far; `metrics`: those of the evaluation."""
        name, mode = best_metric(self.config)
        if name not in metrics:
            raise UsageError(
                f"eval.metric_for_best_model is {name.removeprefix('eval/')}, which this evaluation does not measure. "
                f"Choose one of: {', '.join(each.removeprefix('eval/') for each in metrics)}"
            )
        value, progress = metrics[name], self.progress
        if progress.best_metric not in ("", name) or progress.best_mode not in ("", mode):
            progress.best = progress.best_step = None
        progress.best_metric, progress.best_mode = name, mode
        if not math.isfinite(value):
            return
        if progress.best is None or (value < progress.best if mode == "min" else value > progress.best):
            progress.best, progress.best_step = value, step

    def resume(self, policy: LearnerGroup) -> int:
        """Restore everything from the newest valid checkpoint; return the step it was written after, or 0."""
        if accelerators.is_in_use():
            gc.collect()  # frees what loading has left on the device
        gc.freeze()  # a full garbage-collection pass over library objects costs more than a short step
        random_state.seed_everything(self.config.seed)
        newest = self.newest
        if newest is None:
            if self.config.resume:
                self.log.message("no checkpoint yet: starting from step 0")
                remove_evaluations_after(self.directory.path, 0)
            else:
                first, is_pair = self.data.train.examples[:3], self.algorithm.example_kind == "pair"
                rows = (previews(self.tokenizer, example, is_pair=is_pair) for example in first)
                self.log.samples(0, [row for each in rows for row in each])
            self.write_config()
            return 0
        state = read_json(newest / "state.json")
        if missing := [key for key in RESUMED_KEYS if key not in state]:
            raise CheckpointError(f"{newest / 'state.json'}: has no {', '.join(missing)}; it was not written by a run")
        changed = changes_since(state["config"], self.config)
        self.check_unchanged(newest, state, changed)
        with self.log.phase("resume"):
            policy.load(newest)
            for name, part in self.parts.items():
                part.load(newest / name)
        self.progress = Progress(**state["progress"])
        if self.progress.micro_batch_tokens:
            policy.limit_micro_batches(self.progress.micro_batch_tokens)
        self.data.stream.position = state["position"]
        random_state.restore_rng(state["rng"])
        self.saved_step = state["step"]
        remove_evaluations_after(self.directory.path, self.saved_step)
        self.data_changes = state.get("data_changes", []) + self.data_changes
        self.write_config()
        self.log.message(f"resuming from step {state['step']} ({newest})")
        # A process that was killed may not have deleted them.
        if deleted := self.delete_old_checkpoints(newest, self.progress.best_step):
            names = ", ".join(path.name for path in deleted)
            self.log.message(f"deleted checkpoints beyond save.max_checkpoints or save.max_gigabytes: {names}")
        if changed:
            self.log.message(f"changed since then: {'; '.join(changed.values())}")
        return state["step"]

    def check_unchanged(self, newest: Path, state: dict[str, Any], changed: dict[str, str]) -> None:
        """Raise CheckpointError if the examples, their order or a model changed since the checkpoint `newest`.

        With `allow_changed_data` changed examples and their order are a warning, and recorded in the checkpoints.
        """
        order = " and ".join(text for name, text in changed.items() if name in ORDER_OPTIONS)
        if order:
            held_out = " and which of them are held out" if self.config.data.eval_fraction else ""
            self.refuse_changed_data(
                f"{newest}: {order}, which changes the order of the examples{held_out}: some would be used twice and "
                "others not at all. Use the earlier value",
                state["step"],
            )
        for name, value in self.fingerprints.items():
            if state["fingerprints"].get(name) == value:
                continue
            if name not in DATA_FINGERPRINTS:
                raise CheckpointError(
                    f"{newest}: the {name} changed since this run was started, so it cannot be resumed. "
                    f"Restore the {name} it was started with, or start a new run with another --output_dir."
                )
            if order and self.config.data.eval_fraction:  # a consequence of what is reported above
                continue
            options = "; ".join(text for option, text in changed.items() if option.startswith("data."))
            why = f" ({options})" if options else ": the content of its files differs"
            self.refuse_changed_data(
                f"{newest}: the {name} changed since this run was started{why}. Restore the {name} it was started with",
                state["step"],
            )

    def refuse_changed_data(self, what: str, step: int) -> None:
        """Raise CheckpointError, or warn and record the change if allow_changed_data is set."""
        if not self.config.allow_changed_data:
            raise CheckpointError(
                f"{what}, or start a new run from this one with --model {self.directory.path} and another "
                "--output_dir. --allow_changed_data resumes nevertheless and records the change."
            )
        self.log.warn(f"{what.rpartition('. ')[0]}. Resuming nevertheless (allow_changed_data)")
        self.data_changes.append({"step": step, "change": what.rpartition(". ")[0]})

    def write_config(self) -> None:
        """Write config.yaml, once all models are loaded: a directory whose start failed can be used again.

        A resumed run writes it again, because options may have changed and a later resume reads them from there.
        """
        config = replace(self.config, resume=False, allow_changed_data=False)
        self.directory.write_config(configs.as_yaml(self.verb, config))

    def save(self, step: int, policy: LearnerGroup, *, wait: bool = True) -> Path:
        """Write a checkpoint, return its path and delete those that save.max_checkpoints no longer covers.

        Without `wait` its files are written, and a thread syncs and seals them while training goes on. `finish_save`
        ends that; until then the checkpoint before it is the newest one.
        """

        def write_and_hash(folder: Path) -> None:
            self.write_checkpoint(folder, step, policy)
            groups = {folder: policy} | {
                folder / name: part for name, part in self.parts.items() if isinstance(part, LearnerGroup)
            }
            hashing.extend(group.start_hashing(folder, place) for place, group in groups.items())

        def hashed() -> checkpoint.FileEntries:
            try:
                return {name: entry for wait in hashing for name, entry in wait().items()}
            except WorkerError:  # the files are complete, and a worker that is lost now must not cost the checkpoint
                return {}

        hashing: list[Callable[[], checkpoint.FileEntries]] = []
        self.finish_save()
        seal = checkpoint.start_checkpoint(self.directory.checkpoints, step, write_and_hash, hashed)
        best_step = self.progress.best_step

        def complete() -> Path:
            path = seal()
            self.delete_old_checkpoints(path, best_step)
            return path

        self.saving = SaveInProgress(step, complete)
        self.finish_save(wait=wait or self.callbacks.expects_saves)
        return checkpoint.checkpoint_path(self.directory.checkpoints, step)

    def write_checkpoint(self, folder: Path, step: int, policy: LearnerGroup) -> None:
        """Write the files of a checkpoint: the policy, the other parts and the state of the run."""
        for name, part in self.parts.items():  # first: saving one may wait for a batch, which advances the position
            (folder / name).mkdir()
            part.save(folder / name)
        policy.save(folder)
        state = {
            "step": step,
            "verb": self.verb,
            "position": self.data.stream.position,
            "progress": {name: getattr(self.progress, name) for name in Progress.__slots__},
            "fingerprints": self.fingerprints,
            "rng": random_state.rng_state(),
            "config": configs.as_mapping(replace(self.config, allow_changed_data=False)),
        }
        write_json(folder / "state.json", state | ({"data_changes": self.data_changes} if self.data_changes else {}))

    def finish_save(self, *, wait: bool = True) -> None:
        """Wait for the save in progress, if there is one; without `wait` only if its thread has ended."""
        if self.saving is None or (not wait and self.saving.thread.is_alive()):
            return
        saving, self.saving = self.saving, None
        path = saving.result()
        self.saved_step = saving.step
        self.callbacks.call("on_save", saving.step, path)

    def finish_save_after(self, error: BaseException) -> None:
        """Wait for the save in progress when a run ends with an error, which is more important than one of the save.

        A second interrupt does not wait: the checkpoint before stays the newest one.
        """
        saving, self.saving = self.saving, None
        if saving is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        try:
            saving.result()
        except CheckpointError as failed:
            self.log.warn(str(failed))

    def delete_old_checkpoints(self, newest: Path, best_step: int | None) -> list[Path]:
        """Delete and return the checkpoints before `newest` that save.max_checkpoints and others do not cover."""
        save = self.config.save
        return checkpoint.delete_old_checkpoints(
            self.directory.checkpoints, save.max_checkpoints, save.max_gigabytes, best_step, newest
        )

    def with_resume_hint(self, error: WorkerError) -> WorkerError:
        """Add to the message how to resume from the last checkpoint."""
        error.folder = self.directory.path
        saved = next(filter(checkpoint.looks_complete, checkpoint.list_checkpoints(self.directory.checkpoints)), None)
        if saved is not None:  # verified when the run resumes
            error.args = (f"{error} Resume from step {checkpoint.step_of(saved)}: {self.resume_command()}",)
        return error

    def stop_if_signalled(self, step: int, policy: LearnerGroup) -> None:
        """Save and exit with the signal's code if one arrived; called after a step."""
        number = self.signals.received
        if number is None:
            return
        self.finish_save()
        if self.saved_step != step:
            self.save(step, policy)
        name = signal.Signals(number).name
        raise Stopped(f"stopped by {name} after step {step}; saved. Resume: {self.resume_command()}", number)

    def result(self, step: int, metrics: dict[str, float]) -> Result:
        """Return what the calling Python code is given at the end."""
        early = self.callbacks.stop_reason if step < self.data.steps else ""
        return Result(self.directory.path, step, metrics, early)

    def resume_command(self, steps: str = "") -> str:
        """Return what resumes the run, on the command line or in Python; `steps`: its new number of steps."""
        path = str(self.directory.path)
        if self.from_python:
            return f"posttrain.load_run({path!r}).resume({f'max_steps={steps}' if steps else ''})"
        more = f" --train.max_steps {steps}" if steps else ""
        return f"posttrain {self.verb} --output_dir {shlex.quote(path)} --resume{more}"

    def save_bad_batch(self, step: int, samples: list[Sample]) -> str:
        """Write the samples of a step whose loss or gradient is not finite to a file; return where they are."""
        rows = [{"origin": s.origin, "tokens": s.tokens.tolist(), "mask": s.mask.tolist()} for s in samples]
        try:
            return f"is in {self.directory.write_bad_batch(step, rows)}"
        except (OSError, PosttrainError) as error:
            return f"is lost: {error}"


def make_trackers(log: LogConfig) -> Trackers:
    """Return where the run reports to."""
    return Trackers(
        names=log.report_to,
        project=log.project,
        run_name=log.run_name,
        group=log.group,
        directory=log.tracker_dir,
        tensorboard_dir=log.tensorboard_dir,
        prometheus_file=log.prometheus_file,
    )


def fingerprints_of(verb: str, data: RunData, models: dict[str, str]) -> dict[str, str]:
    """Return what identifies data and models; a resumed run must have the same ones."""
    found = {"verb": verb, "data": data.train.fingerprint}
    found |= {name: model_fingerprint(path) for name, path in models.items()}
    if data.eval is not None:
        found["evaluation data"] = data.eval.fingerprint
    return found


def helper_model_paths(algorithm: Algorithm) -> dict[str, str]:
    """Return where the reference and the teacher are, if the algorithm has them at a path of their own."""
    found: dict[str, str] = {}
    paths = {"reference": algorithm.reference_path(), "teacher": algorithm.teacher_path()}
    settings = algorithm.teachers() if isinstance(algorithm, OnlineAlgorithm) else None
    if settings is not None:
        asked = [path for path in settings.teachers if path != SELF and not is_address(path)]
        paths |= {f"teacher-{number}": path for number, path in enumerate(asked)}
    for name, path in paths.items():
        if not path:
            continue
        try:
            found[name] = resolve_path(path)
            vocabulary_size(ModelConfig(path=found[name]))  # reads its configuration, so that it must exist
        except UsageError as error:
            option = "algo.teachers" if len(paths) > 3 else f"algo.{name.partition('-')[0]}"
            raise UsageError(str(error).replace("model.path", option, 1)) from error
    return found


def with_own_tokens(models: dict[str, str], algorithm: Algorithm) -> list[str]:
    """Return the paths of the models that read the policy's tokens: all but teachers with another tokenizer."""
    settings = algorithm.teachers() if isinstance(algorithm, OnlineAlgorithm) else None
    others = settings is not None and bool(settings.tokenizer)
    return [path for name, path in models.items() if not (others and name.startswith("teacher"))]


def due(step: int, every: int, last: int) -> bool:
    """Whether what happens every `every` steps (0: never), and after step `last`, happens after this step."""
    return step == last or bool(every and step % every == 0)
