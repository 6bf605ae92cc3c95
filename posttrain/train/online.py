"""The online loop: trains on completions of the policy itself, with rewards (GRPO, PPO, REINFORCE and variants)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.algorithms import OnlineAlgorithm
from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import DivergedError, PosttrainError, RewardError, UsageError
from posttrain.core.metrics_sinks import TABLE_ROWS
from posttrain.core.types import Objective, Sample, WeightVersion, count_units
from posttrain.engines.base import Generator
from posttrain.rollout import records
from posttrain.rollout.group_replay import GroupReplay
from posttrain.rollout.records import Rollout
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.scoring import RolloutScorer
from posttrain.sandbox.supervisor import RunStoppedError
from posttrain.train.callbacks import add_custom_metrics
from posttrain.train.critic import Critic
from posttrain.train.held_out_eval import HeldOutEval
from posttrain.train.learner_group import CurrentWeights, LearnerGroup
from posttrain.train.offload import Offloader
from posttrain.train.pretraining_mix import PretrainingMix
from posttrain.train.profiler import StepProfiler
from posttrain.train.reference import ReferenceModel
from posttrain.train.rollout_workers import RolloutWorkers
from posttrain.train.run import Result, Run, due
from posttrain.train.streams import StreamFiller
from posttrain.train.summary import average_updates, closing_message, mixed_versions, rollout_metrics
from posttrain.train.task_eval import TaskEval
from posttrain.train.teachers import Teachers
from posttrain.train.update import stop_if_diverged, update

MISMATCHES_ALLOWED = 3
LOSS_NOTE = (
    "loss near 0 is normal here: advantages of a batch cancel each other out. Watch reward, length and entropy instead."
)


@dataclass(kw_only=True, slots=True, eq=False)
class OnlineLoop:
    """The loop and the objects it uses; setup.py builds them. Its steps may also be called one by one."""

    run: Run
    config: OnlineConfig
    algorithm: OnlineAlgorithm
    objective: Objective
    policy: LearnerGroup
    reference: ReferenceModel | None
    critic: Critic | None
    streams: StreamFiller
    teachers: Teachers | None
    offloader: Offloader
    scorer: RolloutScorer
    rollouts: Rollouts
    rollout_workers: RolloutWorkers | None
    held_out: HeldOutEval | None
    pretraining: PretrainingMix | None
    replay: GroupReplay | None = None
    tasks: TaskEval | None = None
    step: WeightVersion = 0  # number of finished steps
    writer: records.RolloutWriter = field(init=False)

    def resume(self) -> None:
        """Restore everything from the newest checkpoint, if the run is a resumed one."""
        run = self.run
        run.parts = {"online": self} | ({"critic": self.critic.model} if self.critic else {})
        self.step = run.resume(self.policy)
        if self.rollouts.recorded is not None:
            for _ in range(self.step):
                next(self.rollouts.recorded, None)
        self.writer = records.RolloutWriter(run.directory.path, self.step)

    def train(self) -> Result:
        """Train until all steps are done."""
        run, config, steps, metrics = self.run, self.config, self.run.data.steps, dict[str, float]()
        if self.step == 0 and self.algorithm.config.needs_reward():
            run.log.message(LOSS_NOTE)
        run.callbacks.call("on_start", self.step)
        profiler = StepProfiler(run, self.policy, self.step)
        while self.step < steps and not run.callbacks.stop_reason:
            profiler.before(self.step)
            try:
                experience = self.make_experience()
            except RunStoppedError:
                run.stop_if_signalled(self.step, self.policy)
                raise
            metrics = self.train_step(experience)
            profiler.after(self.step)
            if (self.held_out is not None or self.tasks is not None) and due(self.step, config.eval.every_steps, steps):
                with (
                    run.log.phase("eval"),
                    run.saved_if_refused(self.step, self.policy),
                    suppress(RunStoppedError),  # the stop follows below
                ):
                    metrics |= self.evaluate()
            run.callbacks.call("on_step", self.step, metrics=run.log.step(self.step, metrics))
            self.check_mismatch(metrics)
            stop_if_diverged(run, self.policy, self.step)
            run.finish_save(wait=False)
            if due(self.step, config.save.every_steps, steps) or run.progress.best_step == self.step:
                with run.log.phase("save"):
                    run.save(self.step, self.policy, wait=False)
            run.stop_if_signalled(self.step, self.policy)
        run.finish_save()
        if run.callbacks.stop_reason and run.saved_step != self.step:
            run.save(self.step, self.policy)
        self.writer.flush()
        run.log.done(closing_message(run, self.step, metrics))
        return run.result(self.step, metrics)

    # Before the update: rollouts with rewards, log-probabilities, values and advantages

    def make_experience(self) -> list[Rollout]:
        """Return the rollouts of the next step, with everything that the loss reads."""
        self.run.placement.step = self.step + 1
        if self.reference is not None:
            self.reference.sync(self.step)
        try:
            rollouts = self.rollouts.next_batch(self.step)
        except RewardError as error:
            raise self.with_recorded_completions(error) from None
        if self.replay is not None:
            rollouts = self.replay.replace_groups(rollouts, self.step + 1)
        samples = scored_samples(rollouts, self.step + 1)
        for rollout in rollouts:
            if not rollout.failure:
                rollout.sample.reward_terms = self.scorer.terms(rollout)
        unfilled = samples
        if self.rollouts.stages is not None:  # others are filled while the batch is generated
            unfilled = [rollout.sample for rollout in rollouts if rollout.replayed]
        if unfilled:
            with self.run.log.phase("logprobs"):
                self.streams.fill(unfilled)
        if self.teachers is not None:
            with self.run.log.phase("teachers"):
                self.teachers.fill([rollout for rollout in rollouts if not rollout.failure and not rollout.replaced])
        self.algorithm.assign_credit(samples)
        return rollouts

    def with_recorded_completions(self, error: RewardError) -> RewardError:
        """Record the completions that could not be scored and add how to inspect them; a resume drops them."""
        if not error.rollouts:
            return error
        self.writer.add(error.rollouts, self.step + 1)
        self.writer.flush()
        folder = self.run.directory.path
        rewards = " ".join(self.config.reward.functions)
        return RewardError(
            f"{error}\n\nInspect the completions: posttrain samples {folder} --failed\n"
            f"Score them again: posttrain rewards check {folder / records.FILE} --reward {rewards}"
        )

    # The update: mini-batches, each an optimizer step of the critic and of the policy

    def train_step(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Train on a batch of rollouts and return its metrics."""
        self.step += 1
        samples = scored_samples(rollouts, self.step)
        for sample in samples:
            sample.staleness = float(self.step - 1 - sample.version)
        fresh = [rollout for rollout in rollouts if not rollout.replayed]
        metrics = rollout_metrics(fresh, self.step - 1)
        if self.replay is not None:
            metrics["replayed_groups"] = float(len({r.sample.group for r in rollouts if r.replayed}))
        if self.config.rollout.inflight_updates or self.config.rollout.partial_prompts:
            metrics["mixed_versions"] = mixed_versions(samples)
        if self.config.rollout.record_entropy:
            with self.run.log.phase("entropy"):
                self.record_entropy(fresh)
        with self.run.log.phase("train"), self.offloader.on_device("optimizer", self.policy):
            metrics |= self.update(self.trained_samples(samples))
        self.algorithm.after_step(metrics, len(samples))
        metrics["epoch"] = self.rollouts.position / self.run.data.stream.examples_per_epoch
        metrics["tokens"] = float(sum(len(sample) for sample in samples))
        if self.rollout_workers is not None:
            transfer = self.rollout_workers.last_transfer
            metrics |= {"sync_bytes": float(transfer.bytes), "sync_seconds": transfer.seconds}
            metrics |= self.rollout_workers.fault_metrics()
        if self.teachers is not None:
            metrics |= self.teachers.metrics
        if self.rollouts.history.is_used:
            metrics["prompts_skipped"] = float(self.rollouts.skipped)
        add_custom_metrics(self.run.metric_functions, [r for r in fresh if not r.failure], metrics)
        with self.run.log.phase("record"):
            self.writer.add(fresh, self.step)
            every = self.config.log.completions_every_steps
            if every and self.run.log.has_trackers and due(self.step, every, self.run.data.steps):
                self.run.log.completions(self.step, [records.table_row(rollout) for rollout in fresh[:TABLE_ROWS]])
        return metrics

    def record_entropy(self, rollouts: Sequence[Rollout]) -> None:
        """Compute the policy's log-probability and entropy at each token, for the record alone."""
        scored = [rollout for rollout in rollouts if not rollout.failure]
        algorithm = self.algorithm
        found = self.policy.token_statistics(
            [rollout.sample for rollout in scored], algorithm.distribution, algorithm.experts
        )
        for rollout, values in zip(scored, found, strict=True):
            rollout.recorded = {"old_logprobs": values[:, 0], "entropy": values[:, 1]}

    def trained_samples(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples that count in the loss."""
        trained = self.algorithm.trained_samples(samples, (self.config.seed, self.step))
        if not trained:
            self.run.log.warn(
                f"step {self.step}: all completions were truncated, so nothing was trained "
                "(algo.mask_truncated_completions): raise rollout.max_tokens"
            )
        return trained

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """Make an optimizer step for each mini-batch and return the average metrics."""
        updates: list[dict[str, float]] = []
        for mini_batch in mini_batches(samples, self.algorithm.config, (self.config.seed, self.step)):
            metrics = self.update_critic(mini_batch)
            if not self.algorithm.policy_frozen(self.step):
                metrics |= self.update_policy(mini_batch)
            updates.append(metrics)
        return average_updates(updates) | {"updates": float(len(updates))}

    def update_critic(self, samples: list[Sample]) -> dict[str, float]:
        critic = self.critic
        if critic is None:
            return {}
        with self.offloader.on_device("critic", critic.model):
            metrics = update(
                self.run, critic.model, samples, critic.objective, self.step, peak_rate=critic.learning_rate
            )
        return {f"critic/{name}": value for name, value in metrics.items() if name != "tokens"}

    def update_policy(self, samples: list[Sample]) -> dict[str, float]:
        """Make one optimizer step; samples without a gradient are not computed, but count in the denominator."""
        trained, denominator = self.with_gradient(samples), count_units(samples, self.objective.unit)
        auxiliary = self.pretraining.next_losses() if self.pretraining else []
        if not trained and not auxiliary:
            return {}
        return update(
            self.run, self.policy, trained, self.objective, self.step, denominator=denominator, auxiliary=auxiliary
        )

    def with_gradient(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples that have a gradient; those of a group with equal rewards, for example, have none."""
        if self.config.model.router_aux_loss_coef:  # every token contributes to it
            return samples
        return [sample for sample in samples if self.algorithm.has_gradient(sample)]

    # After the update

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the current policy on the evaluation prompts and tasks, and remember the best step."""
        metrics: dict[str, float] = {}
        if self.held_out is not None:
            generator: Generator = CurrentWeights(self.policy)
            if self.rollout_workers is not None:  # learners that generate elsewhere have no memory for a whole model
                self.rollouts.wait()
                self.rollout_workers.update(self.step)
                generator = self.rollout_workers
            metrics = {f"eval/{name}": value for name, value in self.held_out.run(generator).items()}
        if self.tasks is not None:
            metrics |= self.tasks.run(self.step)
        if not metrics:
            raise UsageError("there is no evaluation data: set data.eval or eval.harness")
        self.run.note_best(self.step, metrics)
        self.run.callbacks.call("on_evaluate", self.step, metrics)
        return metrics

    def check_mismatch(self, metrics: dict[str, float]) -> None:
        """Stop the run if the sampler's and the trainer's log-probabilities differ too much for several steps.

        The gradient would be that of another distribution than the one that was sampled from. Completions of older
        weights are left out: there the difference is what the policy has learned since (`policy_drift`).
        """
        limit, progress = self.config.rollout.max_mismatch, self.run.progress
        if "sampler_kl" not in metrics:
            return
        found = metrics["sampler_kl"]
        if self.config.rollout.replay or not limit or found < limit / 10:
            progress.mismatched_in_a_row = 0
            return
        self.run.log.warn(
            f"step {self.step}: sampler and trainer differ by a KL of {found:.3g} per token "
            f"(ratio {metrics['sampler_ratio']:.3f}); the run stops at {limit:g} (rollout.max_mismatch)"
        )
        progress.mismatched_in_a_row = progress.mismatched_in_a_row + 1 if found >= limit else 0
        if progress.mismatched_in_a_row >= MISMATCHES_ALLOWED:
            progress.mismatched_in_a_row = 0
            self.run.save(self.step, self.policy)
            raise DivergedError(
                f"sampler and trainer differed by more than rollout.max_mismatch = {limit:g} (KL per token) in "
                f"{MISMATCHES_ALLOWED} steps in a row: what is trained is not what was sampled. The weights "
                f"were the same, so the engine computes them differently: use model.dtype float32 or another engine. "
                f"Resume: {self.run.resume_command()}"
            )

    # What a checkpoint holds besides weights

    def save(self, folder: Path) -> None:
        self.writer.flush()
        pending = self.rollouts.state()  # first: batches that are still being generated change the state of the scorer
        write_rows(folder / "pending.jsonl", pending)
        if self.config.rollout.partial_prompts or self.rollouts.in_progress:
            write_rows(folder / "partial.jsonl", self.rollouts.state_in_progress())
        state = {
            "algo": self.algorithm.state(),
            "pretraining": self.pretraining.position if self.pretraining else [],
            "judge": self.scorer.state(),  # the key of earlier versions
            "prompts": self.rollouts.history.visits,
        }
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        if self.replay is not None:
            write_rows(folder / "replay.jsonl", self.replay.state())

    def load(self, folder: Path) -> None:
        self.rollouts.load_state(read_rows(folder / "pending.jsonl"))
        if (folder / "partial.jsonl").exists():
            self.rollouts.load_in_progress(read_rows(folder / "partial.jsonl"))
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self.algorithm.load_state(state["algo"])
        self.scorer.load_state(state.get("judge", {}))  # absent in checkpoints of earlier versions
        self.rollouts.history.load(state.get("prompts", {}))  # absent in checkpoints of earlier versions
        if self.pretraining:
            self.pretraining.position = state["pretraining"]
        if self.replay is not None and (folder / "replay.jsonl").is_file():
            self.replay.load_state(read_rows(folder / "replay.jsonl"))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    path.write_text(lines, encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def scored_samples(rollouts: list[Rollout], step: int) -> list[Sample]:
    """Return the samples of the completions that could be scored, and whose group is not replaced by an earlier one."""
    samples = [rollout.sample for rollout in rollouts if not rollout.failure and not rollout.replaced]
    if not samples:
        raise PosttrainError(f"step {step}: no completion could be scored. The first failure: {rollouts[0].failure}")
    return samples


def mini_batches(
    samples: list[Sample], config: OnlineAlgorithm.Config, seed: tuple[int, ...]
) -> Iterator[list[Sample]]:
    """Yield `epochs_per_batch` passes over the samples in parts of `mini_batch_size`, in an order set by the seed."""
    size = config.mini_batch_size or len(samples) or 1
    for epoch in range(config.epochs_per_batch):
        order = np.arange(len(samples))
        if config.shuffle_mini_batch and size < len(samples):
            order = np.random.default_rng((*seed, epoch)).permutation(len(samples))
        for start in range(0, len(samples), size):
            yield [samples[i] for i in order[start : start + size]]
