"""One optimizer step, and what happens when its loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from posttrain.core import ops
from posttrain.core.devices import default_device, device_memory
from posttrain.core.errors import DataError, DivergedError, PosttrainError
from posttrain.core.types import Objective, Sample, count_units
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.memory_plan import estimate_memory, without_cache
from posttrain.train.metric_sums import OUT_OF_MEMORY, averages
from posttrain.train.rank_report import slow_rank_warning
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
    """Make one optimizer step and return its metrics; the only place where a sum of losses is divided.

    `denominator`: the count of the whole step, if samples without a gradient were left out; None: that of `samples`.
    `peak_rate`: replaces train.learning_rate, for the critic.
    """
    denominator = count_units(samples, objective.unit) if denominator is None else denominator
    tokens = sum(len(sample) for sample in samples)
    if not denominator:
        raise DataError(
            f"step {step}: the loss counts no {objective.unit} of its examples; the first is {samples[0].origin}"
        )
    rate = learning_rate(run, step, peak_rate)
    smaller = run.progress.micro_batch_tokens
    if smaller and learner.micro_batch_tokens != smaller:  # another learner of this run was out of memory
        learner.limit_micro_batches(smaller)
    metrics: dict[str, float] = {}
    every = run.config.log.communication_every_steps
    if every and step % every == 0 and learner.workers.size > 1:
        learner.request_communication()
    done = False
    while not done:
        sums = learner.forward_backward(samples, objective, denominator, tokens)
        means = averages(sums, denominator)
        for other in auxiliary:
            if OUT_OF_MEMORY in sums:
                break
            units = count_units(other.samples, other.objective.unit)
            sums = learner.forward_backward(other.samples, other.objective, units, tokens)
            means["pretrain_loss"] = means.get("pretrain_loss", 0.0) + averages(sums, units).get("loss", 0.0)
        if OUT_OF_MEMORY in sums:
            learner.discard()
            shrink_micro_batches(run, learner, samples, step, int(sums[OUT_OF_MEMORY][0]))
            continue
        finite = math.isfinite(means["loss"] + means.get("pretrain_loss", 0.0))
        metrics = means | (learner.step(rate) if finite else learner.discard())
        done = not metrics.get("rescaled")  # float16: repeat the step with a smaller loss scale
    if learner.workers.size > 1:
        run.log.ranks(step, "policy" if peak_rate is None else "critic", [asdict(each) for each in learner.reports])
    if warning := slow_rank_warning(learner.reports, step):
        run.log.warn(warning)
    progress = run.progress
    if metrics["skipped"]:
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        where = run.save_bad_batch(step, samples)
        run.log.warn(f"step {step}: loss or gradient is not finite; the update was skipped. The batch {where}")
    else:
        progress.skipped_in_a_row = 0
    return metrics | {"tokens": float(tokens)}


def shrink_micro_batches(run: Run, learner: LearnerGroup, samples: list[Sample], step: int, tokens: int) -> None:
    """Halve the micro-batches for the rest of the run; raise PosttrainError if they hold one example already."""
    if not tokens:
        largest = max(samples, key=len)
        device = default_device()
        needs = without_cache(estimate_memory(run.config, run.algorithm, device, [largest]))
        parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in needs.phases.items())
        raise PosttrainError(
            f"step {step}: out of memory with one example per micro-batch; the longest has {len(largest):,} tokens "
            f"({largest.origin}). Estimated memory of a step with it: {parts}; {device} has "
            f"{device_memory(device)[1] / 2**30:.2f} GiB. `posttrain plan` shows what takes it. Shorten examples "
            "(data.max_length), or set model.gradient_checkpointing or model.lora_rank, or use more devices. "
            f"Resume: {run.resume_command()}"
        )
    learner.limit_micro_batches(tokens)
    run.progress.micro_batch_tokens = tokens
    run.log.warn(
        f"step {step}: out of memory; micro-batches have at most {tokens:,} tokens from now on, and the step is "
        f"repeated. The result does not change. To start with this size: --train.micro_batch_tokens {tokens}"
    )


def learning_rate(run: Run, step: int, peak_rate: float | None = None) -> float:
    """Return the scheduled learning rate of a step; `peak_rate` replaces the configured one."""
    config, steps = run.config.train, run.data.steps
    warmup = config.warmup_steps or round(config.warmup_ratio * steps)
    peak = config.learning_rate if peak_rate is None else peak_rate
    decay = config.lr_decay_steps or steps
    return ops.learning_rate_at(step, decay, peak, config.lr_scheduler, warmup, config.min_lr_ratio)


def stop_if_diverged(run: Run, policy: LearnerGroup, step: int) -> None:
    """Save and raise DivergedError after several skipped updates in a row."""
    if run.progress.skipped_in_a_row < BAD_STEPS_ALLOWED:
        return
    run.progress.skipped_in_a_row = 0  # a resumed run may skip as many again
    run.save(step, policy)
    raise DivergedError(
        f"loss or gradient was not finite in {BAD_STEPS_ALLOWED} steps in a row, up to step {step}. The weights are "
        f"those of the last good step and are saved; the batches are in {run.directory.bad_batches}. Inspect their "
        f"examples, or lower train.learning_rate ({run.config.train.learning_rate:g}). "
        f"Resume: {run.resume_command()}"
    )
