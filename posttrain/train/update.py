"""One optimizer step, and what happens when its loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core import ops
from posttrain.core.errors import DataError, DivergedError
from posttrain.core.types import Objective, Sample, count
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.metric_sums import averages
from posttrain.train.run import Run

BAD_STEPS_ALLOWED = 3


@dataclass(slots=True, frozen=True)
class AuxiliaryLoss:
    """Other samples with an objective of their own, whose gradient is added to that of a step."""

    samples: list[Sample]
    objective: Objective


def update(
    run: Run,
    learner: LearnerGroup,
    samples: list[Sample],
    objective: Objective,
    step: int,
    *,
    denominator: int | None = None,
    peak_rate: float | None = None,
    auxiliary: Sequence[AuxiliaryLoss] = (),
) -> dict[str, float]:
    """Makes one optimizer step and returns its metrics; the only place where a sum of losses is divided.

    `denominator`: the count of the whole step, where samples without a gradient were left out.
    """
    denominator = count(samples, objective.unit) if denominator is None else denominator
    tokens = sum(len(sample) for sample in samples)
    if not denominator:
        raise DataError(
            f"step {step}: no {objective.unit} of its examples counts; the first example: {samples[0].origin}"
        )
    rate = learning_rate(run, step, peak_rate)
    metrics: dict[str, float] = {"rescaled": 1.0}
    while metrics.pop("rescaled", False):  # float16: again with a smaller loss scale
        means = averages(learner.forward_backward(samples, objective, denominator, tokens), denominator)
        for other in auxiliary:
            by = count(other.samples, other.objective.unit)
            sums = learner.forward_backward(other.samples, other.objective, by, tokens)
            means["pretrain_loss"] = means.get("pretrain_loss", 0.0) + averages(sums, by)["loss"]
        finite = math.isfinite(means["loss"] + means.get("pretrain_loss", 0.0))
        metrics = means | (learner.step(rate) if finite else learner.discard())
    progress = run.progress
    if metrics["skipped"]:
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        kept = run.keep_batch(step, samples)
        run.log.warn(f"step {step}: loss or gradient is not finite; the update was skipped. The batch is in {kept}")
    else:
        progress.skipped_in_a_row = 0
    return metrics | {"tokens": float(tokens)}


def learning_rate(run: Run, step: int, peak_rate: float | None = None) -> float:
    """Returns the scheduled learning rate of a step; `peak_rate` replaces the configured one."""
    config, steps = run.config.train, run.data.steps
    warmup = config.warmup_steps or round(config.warmup_ratio * steps)
    peak = config.learning_rate if peak_rate is None else peak_rate
    return ops.learning_rate_at(step, steps, peak, config.lr_scheduler, warmup, config.min_lr_ratio)


def stop_if_diverged(run: Run, policy: LearnerGroup, step: int) -> None:
    """Saves and raises DivergedError after several skipped updates in a row."""
    if run.progress.skipped_in_a_row < BAD_STEPS_ALLOWED:
        return
    run.progress.skipped_in_a_row = 0  # a resumed run may skip as many again
    run.save(step, policy)
    raise DivergedError(
        f"loss or gradient was not finite in {BAD_STEPS_ALLOWED} steps in a row, up to step {step}. The weights are "
        f"those of the last good step and are saved; the batches are in {run.folder.bad_batches}. Inspect their "
        f"examples, or lower train.learning_rate ({run.config.train.learning_rate:g}). "
        f"Resume: {run.resume_command()}"
    )
