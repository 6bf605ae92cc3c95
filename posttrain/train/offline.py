"""The loop of every trainer that learns from given rows: take, score, update, evaluate, log, save."""

from __future__ import annotations

import math
import shlex

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import Config
from posttrain.core.errors import DivergedError
from posttrain.core.types import Objective, count
from posttrain.data.dataset import ExampleStream
from posttrain.train.learner import Sums
from posttrain.train.learner_group import LearnerGroup, add_up, averages
from posttrain.train.roles import Helpers
from posttrain.train.run import Result, Run, due
from posttrain.train.update import give_up_if_diverged, update


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
            run.places.step = step
            with run.log.phase("data"):
                samples = algo.prepare(run.data.stream.take(run.data.rows_at[step] - run.data.rows_at[step - 1]))
            with run.log.phase("helpers"):
                helpers.fill(samples)
                samples = algo.assign_credit(samples)
            with run.log.phase("train"):
                metrics = update(run, policy, samples, objective, step)
                metrics["epoch"] = run.data.rows_at[step] / run.data.stream.rows_per_epoch
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


def evaluate(run: Run, policy: LearnerGroup, objective: Objective, helpers: Helpers, step: int) -> dict[str, float]:
    """Metrics on the evaluation rows; remembers the best step by loss."""
    assert run.data.eval is not None
    rows, size = run.data.eval.rows, run.config.update.rows_per_step
    parts: list[Sums] = []
    denominator = 0
    stream = ExampleStream(rows, size, seed=0, shuffle=False, strata=[run.algo.stratum(row[0]) for row in rows])
    chunks = max(1, len(rows) // size)
    for c in range(chunks):
        samples = run.algo.prepare(stream.take(len(rows) * (c + 1) // chunks - len(rows) * c // chunks))
        helpers.fill(samples, keep=True)
        samples = run.algo.assign_credit(samples)
        parts.append(policy.evaluate(samples, objective))
        denominator += count(samples, objective.unit)
    means = averages(add_up(parts), denominator)
    if math.isfinite(means["loss"]) and (run.progress.best is None or means["loss"] < run.progress.best):
        run.progress.best, run.progress.best_step = means["loss"], step
    return {f"eval/{name}": value for name, value in means.items()}


def score_statistics(run: Run, policy: LearnerGroup, most_rows: int = 1000) -> dict[str, float]:
    """Mean and standard deviation of a reward model's scores, saved with it so that inference can normalise."""
    rows = (run.data.eval or run.data.train).rows[:most_rows]
    scores = policy.scores([sample for row in rows for sample in row])
    mean = sum(scores) / len(scores)
    variance = sum((score - mean) ** 2 for score in scores) / max(1, len(scores) - 1)
    return {"score_mean": mean, "score_std": math.sqrt(variance)}


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
