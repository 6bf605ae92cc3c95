"""A run: its folder, log, data, models and checkpoints. The loops say when; this says how."""

from __future__ import annotations

import gc
import hashlib
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from posttrain.algorithms.base import Algorithm
from posttrain.checkpoints import checkpoint, random_state
from posttrain.cluster.placement import Placement
from posttrain.cluster.worker_host import RoleRef
from posttrain.config import sections as configs
from posttrain.config.sections import Config, ModelConfig, OnlineConfig
from posttrain.core import logging as logs
from posttrain.core.errors import CheckpointError, DataError, Stopped, UsageError, WorkerError
from posttrain.core.files import read_json, write_json
from posttrain.core.types import Objective, Prompt, Sample
from posttrain.data.dataset import Dataset, Encoder, ExampleStream, load_dataset, split_examples
from posttrain.models.loading import is_adapter, load_tokenizer, read_config, resolve_path, vocabulary_size
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers, WeightSender
from posttrain.train.run_directory import RunFolder, StopSignals


@dataclass(slots=True)
class Data:
    """Rows to train and to evaluate on, encoded and checked."""

    train: Dataset
    eval: Dataset | None
    stream: ExampleStream
    rows_at: list[int]  # rows_at[step]: rows of the stream that are used up after that step

    @property
    def steps(self) -> int:
        return len(self.rows_at) - 1


@dataclass(slots=True)
class Result:
    """What a finished run hands back to Python."""

    folder: Path
    steps: int
    metrics: dict[str, float]  # of the last step


class Part(Protocol):
    """What a checkpoint holds besides the policy, each in a folder of its own."""

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
    model: ModelConfig  # as configured, its path resolved: a run's newest checkpoint is looked for once, and stays it
    algo: Algorithm
    folder: RunFolder
    signals: StopSignals
    log: logs.Log
    tokenizer: Any
    data: Data
    fingerprints: dict[str, str]
    places: Placement
    progress: Progress = field(default_factory=Progress)
    parts: dict[str, Part] = field(default_factory=dict)
    saved_step: int = 0

    @classmethod
    @contextmanager
    def open(cls, verb: str, config: Config, algo: Algorithm) -> Iterator[Run]:
        """Read and check everything that needs no model."""
        logs.check_sinks(config.log.tensorboard, config.log.wandb)
        logs.quiet_libraries()
        with ExitStack() as stack:
            models = {"model": resolve_path(config.model.path)} | helper_models(config, algo)
            model = config.model if config.model.path == "pico" else replace(config.model, path=models["model"])
            tokenizer = load_tokenizer(model)
            folder = stack.enter_context(RunFolder.open(config.out, verb, config.resume))
            vocabulary = min(vocabulary_size(ModelConfig(path=path)) for path in models.values())
            data = load_data(config, algo, tokenizer, vocabulary, folder.path)
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
                tensorboard=config.log.tensorboard,
                wandb=config.log.wandb,
                config=configs.as_mapping(config),
                start_step=start if config.resume else None,
            )
            stack.enter_context(log)
            for line in (*data.train.verdicts, *ledger(config, data, folder.path)):
                log.message(line)
            if too_long:
                log.warn(too_long)
            signals = stack.enter_context(StopSignals())
            places = Placement(config.cluster, folder.logs)
            stack.callback(places.close)
            stack.callback(gc.unfreeze)
            run = cls(verb, config, model, algo, folder, signals, log, tokenizer, data, fingerprints, places)
            try:
                yield run
            except WorkerError as error:
                raise run.explained(error) from None

    def learner(self) -> LearnerGroup:
        """The model that is trained."""
        teacher = replace(self.model, path=self.algo.teacher_path(), lora_rank=0) if self.algo.teacher_path() else None
        template = self.config.data.template
        extra: dict[str, Any] = {}
        if isinstance(self.config, OnlineConfig):
            ahead = bool(self.config.rollout.ahead) and not self.places.rollouts_apart
            extra = {"sampler_copy": ahead, "value_head": "values" in self.algo.outputs()}
            if not self.places.rollouts_apart:
                extra["engine"] = self.config.rollout.engine
        extra |= {"head": self.algo.head, "teacher": teacher, "template": template}
        return self.start(self.model, role="actor", trainable=True, **extra)

    def rollout_workers(self) -> RolloutWorkers | None:
        """Who generates, if that is not the learners: workers on devices of their own, with the learners' weights."""
        if not self.places.rollouts_apart:
            return None
        assert isinstance(self.config, OnlineConfig)
        model = replace(self.model, lora_rank=0, router_loss=0.0)  # adapters arrive merged
        engine, template, seed = self.config.rollout.engine, self.config.data.template, self.config.seed
        tensor_parallel = self.config.cluster.of("rollout").tensor_parallel
        if tensor_parallel > 1:
            engine = (*engine, f"tensor_parallel_size={tensor_parallel}")
        sender = self.places.pool("actor").start("actor.sender", WeightSender, RoleRef("actor"))
        slots = self.places.rollout_slots(
            lambda pool: pool.start("rollout", RolloutWorker, model, engine, template, seed)
        )
        return RolloutWorkers(slots, sender, self.places.rendezvous)

    def frozen(self, path: str) -> LearnerGroup:
        """A model that only looks, as the reference."""
        model = replace(self.model, path=path or self.model.path, lora_rank=0, router_loss=0.0)
        return self.start(model, role="reference", head="token", trainable=False)

    def start(self, model: ModelConfig, *, role: str, **options: Any) -> LearnerGroup:
        """A model on the devices of its role."""
        cluster, update = self.config.cluster, self.config.update
        found = cluster.of(role)
        layout = ParallelLayout(
            found.tensor_parallel,
            found.zero,
            frozenset(cluster.offload),
            context_parallel=found.context_parallel,
            expert_parallel=found.expert_parallel,
        )
        pool = self.places.pool(role)
        self.log.message(f"loading {model.path}" + f" ({role})" * (role != "actor"))
        with self.log.phase("load"):
            workers = pool.start(role, Learner, model, update, seed=self.config.seed, layout=layout, **options)
        return LearnerGroup(workers, layout.ranks_per_sample)

    def objective(self) -> Objective:
        request = replace(self.algo.forward_request(self.token_id), router_loss=self.config.model.router_loss)
        return self.algo.objective(request)

    def token_id(self, text: str) -> int:
        """The id of a text that must be one token."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise UsageError(f"algo.reward_tokens: {text!r} is {len(ids)} tokens in this tokenizer; it must be one.")
        if ids[0] == self.tokenizer.unk_token_id:
            raise UsageError(f"algo.reward_tokens: this tokenizer does not know {text!r}.")
        return ids[0]

    def resume(self, policy: LearnerGroup) -> int:
        """Bring everything back to the newest valid checkpoint; the step it was written after, or 0."""
        if torch.cuda.is_initialized():
            gc.collect()  # what loading has left on the device
        gc.freeze()  # libraries and models stay: to look through them for garbage takes longer than a quick step
        random_state.seed_everything(self.config.seed)
        newest = checkpoint.newest_valid(self.folder.checkpoints) if self.config.resume else None
        if newest is None:
            if self.config.resume:
                self.log.message("no checkpoint yet: starting from step 0")
            else:
                first = [entry for row in self.data.train.rows[:3] for entry in row]
                self.log.samples(0, [shown(self.tokenizer, entry) for entry in first])
            self.write_config()
            return 0
        state = read_json(newest / "state.json")
        for name, value in self.fingerprints.items():
            if state["fingerprints"].get(name) != value:
                raise CheckpointError(
                    f"{newest}: the {name} changed since this run was started, so it cannot go on from here. "
                    f"Bring back the {name} it was started with, or start a new run with another --out."
                )
        policy.load(newest)
        for name, part in self.parts.items():
            part.load(newest / name)
        self.progress = Progress(**state["progress"])
        self.data.stream.position = state["position"]
        random_state.restore_rng(state["rng"])
        self.saved_step = state["step"]
        self.write_config()
        self.log.message(f"going on from step {state['step']} ({newest})")
        return state["step"]

    def write_config(self) -> None:
        """Once all models are loaded, so that a start that failed leaves nothing in the way of the next.

        On resume too: options may have changed, and a later resume without options must know them.
        """
        self.folder.write_config(configs.as_yaml(self.verb, replace(self.config, resume=False)))

    def save(self, step: int, policy: LearnerGroup) -> Path:
        """Write a checkpoint and let go of old ones."""

        def write(folder: Path) -> None:
            for name, part in self.parts.items():  # first: one of them may wait for what moves the position
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
        checkpoint.retain(self.folder.checkpoints, save.keep, save.keep_gigabytes, self.progress.best_step, newest=path)
        self.saved_step = step
        return path

    def explained(self, error: WorkerError) -> WorkerError:
        """The same with how to go on."""
        error.folder = self.folder.path
        saved = checkpoint.newest_valid(self.folder.checkpoints)
        if saved is not None:
            error.args = (f"{error} Go on from step {checkpoint.step_of(saved)}: {self.resume_command()}",)
        return error

    def stop_if_asked(self, step: int, policy: LearnerGroup) -> None:
        """After a step: if a signal came, save and leave with its exit code."""
        number = self.signals.received
        if number is None:
            return
        if self.saved_step != step:
            self.save(step, policy)
        name = signal.Signals(number).name
        raise Stopped(f"stopped by {name} after step {step}; saved. Go on: {self.resume_command()}", number)

    def resume_command(self) -> str:
        return f"posttrain {self.verb} --out {shlex.quote(str(self.folder.path))} --resume"

    def keep_batch(self, step: int, samples: list[Sample]) -> Path:
        """Write down a batch that gave a loss or a gradient that is not finite."""
        rows = [{"origin": s.origin, "tokens": s.tokens.tolist(), "mask": s.mask.tolist()} for s in samples]
        return self.folder.write_bad_batch(step, rows)


def load_data(config: Config, algo: Algorithm, tokenizer: Any, vocabulary: int, folder: Path | None = None) -> Data:
    """Read, recognise and encode all rows; every problem comes up here, before a model is loaded.

    Bad rows are set aside in the run folder, and rows too large for the memory are kept there.
    """
    quarantine = folder / "quarantine.jsonl" if folder else None
    if quarantine:
        quarantine.unlink(missing_ok=True)  # of an earlier start of this run
    encoder = Encoder(tokenizer, config.data, algo.example_kind, vocab_size=vocabulary, placeholder=algo.placeholder())
    train = load_dataset(config.data.train, encoder, config.data.max_rows, quarantine=quarantine, cache=folder)
    evaluation: Dataset | None = None
    if config.data.eval_files:
        evaluation = load_dataset(config.data.eval_files, encoder, quarantine=quarantine, cache=folder)
        if evaluation.mixture:
            raise UsageError("data.eval: evaluation takes every row once; leave the weights out")
    elif config.data.eval_fraction:
        train, evaluation = split_examples(train, config.data.eval_fraction, config.seed)
    if evaluation is not None:
        evaluation.rows.hold()  # what helpers write into these is used again at the next evaluation
    strata = [algo.stratum(row[0]) for row in train.rows]
    size = config.update.rows_per_step
    stream = ExampleStream(train.rows, size, config.seed, config.data.shuffle, strata, train.mixture)
    edges = step_edges(config, stream.rows_per_epoch, algo.min_batch_size)
    smallest = min(after - before for before, after in pairwise(edges))
    if smallest < algo.min_batch_size:
        raise UsageError(
            f"{algo.name} needs at least {algo.min_batch_size} rows a step, but a step has {smallest}: "
            f"update.rows_per_step is {size}, and there are {stream.rows_per_epoch} rows."
        )
    if evaluation is not None and len(evaluation.rows) < algo.min_batch_size:
        raise UsageError(
            f"{algo.name} needs at least {algo.min_batch_size} examples to evaluate on, but there are "
            f"{len(evaluation.rows)}."
        )
    return Data(train, evaluation, stream, edges)


def helper_models(config: Config, algo: Algorithm) -> dict[str, str]:
    """Where the reference and the teacher are, if the algorithm has them at a path of their own."""
    found: dict[str, str] = {}
    for name, path in (("reference", algo.reference_path()), ("teacher", algo.teacher_path())):
        if not path:
            continue
        try:
            found[name] = resolve_path(path)
            vocabulary_size(ModelConfig(path=found[name]))  # reads its configuration, so that it must be there
        except UsageError as error:
            raise UsageError(str(error).replace("model.path", f"algo.{name}", 1)) from error
    return found


def check_lengths(model_folder: str, data: Data, config: Config) -> str:
    """A model with a table of positions has no place for longer rows; of one that computes them (RoPE), a warning."""
    if is_adapter(model_folder):
        return ""
    described = read_config(model_folder, "token").get_text_config()
    limit = getattr(described, "max_position_embeddings", None)
    if limit is None:
        return ""
    longest = max(int(part.rows.lengths().max()) for part in (data.train, data.eval) if part)
    answer = config.rollout.max_tokens if isinstance(config, OnlineConfig) else 0
    if hasattr(described, "rope_parameters"):
        if longest + answer <= limit:
            return ""
        return (
            f"sequences may have {longest + answer:,} tokens, but the model was made for {limit:,}: expect poor answers"
        )
    if answer:
        if longest + answer > limit:
            raise DataError(
                f"the longest prompt has {longest} tokens and rollout.max_tokens is {answer}, but the model has places "
                f"for {limit}: lower rollout.max_tokens, or data.max_tokens with data.on_long drop"
            )
        return ""
    too_long = [part.rows for part in (data.train, data.eval) if part and part.rows.lengths().max() > limit]
    for sample in (sample for rows in too_long for row in rows for sample in row):
        if len(sample) > limit:
            raise DataError(
                f"{sample.origin}: {len(sample)} tokens, but the model has places for {limit}. "
                f"Set data.max_tokens to {limit}; data.on_long says what happens to longer rows."
            )
    return ""


def step_edges(config: Config, rows: int, least_rows: int) -> list[int]:
    """Rows used up after each step. By epochs, every row comes up equally often and the last step may be smaller."""
    size = config.update.rows_per_step
    if config.steps:
        return [step * size for step in range(config.steps + 1)]
    total = max(1, round(config.epochs * rows))
    edges = [*range(0, total, size), total]
    if len(edges) > 2 and edges[-1] - edges[-2] < least_rows:  # too few for the loss: they join the step before
        del edges[-2]
    return edges


def due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def ledger(config: Config, data: Data, folder: Path) -> Iterator[str]:
    """What is about to happen, in numbers."""
    rows, counts = len(data.train.rows), data.train.counts
    lengths, trained = data.train.rows.lengths(), data.train.rows.counted()
    notable = ("truncated", "dropped", "quarantined")
    changed = ", ".join(f"{counts[name]:,} {name}" for name in notable if counts[name])
    size = f"{rows:,} rows, {len(lengths):,} samples, {lengths.sum():,} tokens of which {trained:,} count"
    if isinstance(config, OnlineConfig):
        size = f"{rows:,} prompts of {lengths.min()} to {lengths.max()} tokens"
    yield f"data: {size}" + (f" ({changed})" if changed else "")
    if data.eval is not None:
        aside = data.eval.counts["quarantined"] if config.data.eval_files else 0
        yield f"evaluation: {len(data.eval.rows):,} rows" + (f" ({aside:,} quarantined)" if aside else "")
    if counts["quarantined"] or (data.eval is not None and data.eval.counts["quarantined"]):
        yield f"rows that cannot be used are in {folder / 'quarantine.jsonl'}"
    if data.train.mixture is not None:
        shares = zip(data.train.mixture.counts, data.train.mixture.sizes, strict=True)
        yield "an epoch mixes " + ", ".join(f"{count:,} of {size:,} rows" for count, size in shares)
    epochs = data.rows_at[-1] / data.stream.rows_per_epoch
    if isinstance(config, OnlineConfig):
        answers = config.update.rows_per_step * config.rollout.samples_per_prompt
        updates = -(-answers // (config.algo.mini_batch_size or answers)) * config.algo.epochs_per_batch
        yield (
            f"a step: {config.update.rows_per_step} prompts x {config.rollout.samples_per_prompt} answers of at most "
            f"{config.rollout.max_tokens} tokens = {answers} answers, {updates} optimizer step{'s' * (updates > 1)}"
        )
    yield (
        f"steps: {data.steps:,} of {config.update.rows_per_step} rows = {epochs:.2f} epochs; "
        f"packs of {config.update.tokens_per_device:,} tokens"
    )
    yield f"run: {folder}"


def shown(tokenizer: Any, sample: Sample | Prompt) -> dict[str, Any]:
    """A sample as a person can check it: its whole text, and the part of it that counts; or a prompt."""
    if isinstance(sample, Prompt):
        text = tokenizer.decode(sample.tokens, skip_special_tokens=False)
        return {"origin": sample.origin, "text": text, "tokens": len(sample.tokens), "columns": sample.columns}
    counted = tokenizer.decode(sample.tokens[sample.mask], skip_special_tokens=False)
    whole = tokenizer.decode(sample.tokens, skip_special_tokens=False)
    return {"origin": sample.origin, "text": whole, "counts": counted, "tokens": len(sample)}


def fingerprint(folder: str) -> str:
    """Tells two models apart: names, sizes, and the content of the files (of large ones: of 64 places)."""
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
