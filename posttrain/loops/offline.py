"""The loop of every trainer that learns from given rows: take, score, update, evaluate, log, save."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain import ops
from posttrain.algos import ALGORITHMS
from posttrain.algos.base import Algorithm
from posttrain.config import Config, from_mapping
from posttrain.data.dataset import RowStream
from posttrain.errors import DataError, DivergedError
from posttrain.learner import Sums
from posttrain.loops.run import Run
from posttrain.runtime.base import LearnerGroup, add_up, averages
from posttrain.types import Objective, Sample, count

BAD_STEPS_ALLOWED = 3


@dataclass(slots=True)
class Result:
    """What a finished run hands back to Python."""

    folder: Path
    steps: int
    metrics: dict[str, float]  # of the last step


def train(verb: str, /, **options: Any) -> Result:
    """`posttrain <verb>` from Python: options as nested dicts, as in the YAML file."""
    algorithm = ALGORITHMS[verb]
    return train_from(verb, from_mapping(verb, algorithm.Config, algorithm.defaults, options))


def train_from(verb: str, config: Config) -> Result:
    """Train until all steps are done."""
    algo = ALGORITHMS[verb](config.algo)
    with Run.open(verb, config, algo) as run:
        objective = run.objective()
        policy = run.learner()
        policy.annotate(algo.annotations())
        helpers = Helpers(run, algo, policy)
        metrics: dict[str, float] = {}
        for step in range(run.resume(policy) + 1, run.data.steps + 1):
            with run.log.phase("data"):
                samples = algo.prepare(run.data.stream.take(run.data.rows_at[step] - run.data.rows_at[step - 1]))
            with run.log.phase("helpers"):
                helpers.fill(samples)
                samples = algo.score(samples)
            with run.log.phase("train"):
                metrics = update(run, policy, samples, objective, step)
            if run.data.eval and due(step, config.eval.every, run.data.steps):
                with run.log.phase("eval"):
                    metrics |= evaluate(run, policy, objective, helpers, step)
            if step == run.data.steps and algo.head == "score":
                with run.log.phase("eval"):
                    policy.annotate(score_statistics(run, policy))
            run.log.step(step, metrics)
            give_up_if_diverged(run, policy, step)
            if due(step, config.save.every, run.data.steps) or run.progress.best_step == step:
                with run.log.phase("save"):
                    run.save(step, policy)
            run.stop_if_asked(step, policy)
        if run.progress.skipped == run.data.steps:
            raise DivergedError(
                f"loss or gradient was not finite in any of the {run.data.steps} steps: nothing was learnt. "
                f"The batches are in {run.folder.bad_batches}."
            )
        run.log.done(closing_words(run, metrics))
        return Result(run.folder.path, run.data.steps, metrics)


def update(run: Run, policy: LearnerGroup, samples: list[Sample], objective: Objective, step: int) -> dict[str, float]:
    """One optimizer step; the only place where a sum of losses is divided."""
    config = run.config.update
    denominator = count(samples, objective.unit)
    tokens = sum(len(sample) for sample in samples)
    if not denominator:
        raise DataError(f"step {step}: no {objective.unit} of its rows counts; first row: {samples[0].origin}")
    means = averages(policy.forward_backward(samples, objective, denominator, tokens), denominator)
    warmup = config.warmup_steps or round(config.warmup_fraction * run.data.steps)
    rate = ops.learning_rate_at(
        step, run.data.steps, config.learning_rate, config.schedule, warmup, config.min_lr_ratio
    )
    metrics = means | (policy.step(rate) if math.isfinite(means["loss"]) else policy.discard())
    progress = run.progress
    if metrics["skipped"]:
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        kept = run.keep_batch(step, samples)
        run.log.warn(f"step {step}: loss or gradient is not finite; nothing was applied. The batch is in {kept}")
    else:
        progress.skipped_in_a_row = 0
    return metrics | {"tokens": float(tokens), "epoch": run.data.rows_at[step] / run.data.stream.rows_per_epoch}


def give_up_if_diverged(run: Run, policy: LearnerGroup, step: int) -> None:
    if run.progress.skipped_in_a_row < BAD_STEPS_ALLOWED:
        return
    run.progress.skipped_in_a_row = 0  # a resumed run has as many tries again
    run.save(step, policy)
    raise DivergedError(
        f"loss or gradient was not finite in {BAD_STEPS_ALLOWED} steps in a row, up to step {step}. The weights are "
        f"those of the last good step and are saved; the batches are in {run.folder.bad_batches}. Look at their rows, "
        f"or lower update.learning_rate ({run.config.update.learning_rate:g}). Go on: {run.resume_command()}"
    )


def evaluate(run: Run, policy: LearnerGroup, objective: Objective, helpers: Helpers, step: int) -> dict[str, float]:
    """Metrics on the evaluation rows; remembers the best step by loss."""
    assert run.data.eval is not None
    rows, size = run.data.eval.rows, run.config.update.rows_per_step
    parts: list[Sums] = []
    denominator = 0
    stream = RowStream(rows, size, seed=0, shuffle=False, strata=[run.algo.stratum(row[0]) for row in rows])
    chunks = max(1, len(rows) // size)
    for c in range(chunks):
        samples = run.algo.prepare(stream.take(len(rows) * (c + 1) // chunks - len(rows) * c // chunks))
        helpers.fill(samples, keep=True)
        samples = run.algo.score(samples)
        parts.append(policy.evaluate(samples, objective))
        denominator += count(samples, objective.unit)
    means = averages(add_up(parts), denominator)
    if math.isfinite(means["loss"]) and (run.progress.best is None or means["loss"] < run.progress.best):
        run.progress.best, run.progress.best_step = means["loss"], step
    return {f"eval/{name}": value for name, value in means.items()}


def due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def score_statistics(run: Run, policy: LearnerGroup, most_rows: int = 1000) -> dict[str, float]:
    """Mean and standard deviation of a reward model's scores, saved with it so that inference can normalise."""
    rows = (run.data.eval or run.data.train).rows[:most_rows]
    scores = policy.scores([sample for row in rows for sample in row])
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / max(1, len(scores) - 1)
    return {"score_mean": mean, "score_std": math.sqrt(variance)}


class Helpers:
    """Fills samples with what the algorithm needs from other models."""

    def __init__(self, run: Run, algo: Algorithm, policy: LearnerGroup) -> None:
        self.algo, self.policy = algo, policy
        self.needs = algo.needs()
        self.reference: LearnerGroup | None = None
        # New adapters start as the identity, so the policy without them is the reference, at no cost.
        self.adapters_off = bool(run.config.model.lora_rank) and not algo.reference()
        self.precomputed = algo.precomputes()
        if "ref_logprobs" in self.needs and not self.adapters_off:
            self.reference = run.frozen(algo.reference())
        if self.precomputed:
            run.log.message("computing the reference's log-probabilities of all rows")
            datasets = [run.data.train, run.data.eval] if run.data.eval else [run.data.train]
            for dataset in datasets:
                dataset.rows.hold()
            self.fill_reference([sample for dataset in datasets for row in dataset.rows for sample in row])
            self.reference = None

    def fill(self, samples: list[Sample], *, keep: bool = False) -> None:
        """`keep` leaves alone what an earlier call filled: right only if the same samples always come together.

        Sums are rounded differently in other company, so a number kept from another batch would make a resumed run
        differ in its last digits.
        """
        if "ref_logprobs" in self.needs and not self.precomputed:
            self.fill_reference([s for s in samples if s.ref_logprobs is None] if keep else samples)
        if "logprobs" in self.needs:
            wanted = [sample for sample in samples if self.algo.fills("logprobs", sample)]
            for sample, stream in zip(wanted, self.policy.logprobs(wanted), strict=True):
                sample.logprobs = stream

    def fill_reference(self, samples: list[Sample]) -> None:
        if self.adapters_off:
            streams = self.policy.logprobs(samples, adapters=False)
        else:
            assert self.reference is not None, "the reference was freed too early"
            streams = self.reference.logprobs(samples)
        for sample, stream in zip(samples, streams, strict=True):
            sample.ref_logprobs = stream


def closing_words(run: Run, metrics: dict[str, float]) -> str:
    skipped = f", {run.progress.skipped} skipped" if run.progress.skipped else ""
    shown = ", ".join(
        f"{k} {metrics[k]:.4g}" for k in ("loss", "eval/loss", "accuracy", "eval/accuracy") if k in metrics
    )
    folder = run.folder.path
    return (
        f"done: {run.data.steps} steps{skipped}; {shown or 'nothing left to do'}. Run folder: {folder}\n"
        f"export: posttrain export {shlex.quote(str(folder))} OUT    train more: {run.resume_command()} --steps N"
    )
