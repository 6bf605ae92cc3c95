"""The loop of every trainer that learns from its own answers: take, fill, score, update, log, evaluate, save."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.algorithms import ALGORITHMS, OnlineAlgorithm, RolloutSettings
from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import DivergedError, PosttrainError, RewardError, UsageError
from posttrain.core.types import Sample, SamplingDistribution, count
from posttrain.engines.base import Generator, Sampling
from posttrain.rewards.base import Rewards
from posttrain.rollout import records
from posttrain.rollout.environments import Environments
from posttrain.rollout.episodes import EpisodeRunner
from posttrain.rollout.records import Rollout
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.scoring import RolloutScorer
from posttrain.train.evaluation import Examination
from posttrain.train.pretraining_mix import Pretraining
from posttrain.train.roles import Critic, Helpers, RewardModel, check_reward_model, fill_values
from posttrain.train.run import Result, Run, due
from posttrain.train.summary import averaged, closing_words, mixed_versions, summary
from posttrain.train.update import give_up_if_diverged, update

MISMATCHES_ALLOWED = 3
BEFORE_FIRST_STEP = (
    "loss near 0 is normal here: advantages of a batch cancel each other out. Watch reward, length and entropy instead."
)


def train_from(verb: str, config: OnlineConfig) -> Result:
    """Train until all steps are done."""
    with opened(verb, config) as trainer:
        return trainer.train()


@contextmanager
def opened(verb: str, config: OnlineConfig) -> Iterator[Trainer]:
    """A trainer with its models loaded, at the step it has to go on from."""
    algo = make_algorithm(verb, config)
    if config.rollout.samples_per_prompt < algo.min_samples_per_prompt():
        raise UsageError(
            f"rollout.samples_per_prompt is {config.rollout.samples_per_prompt}, but {verb} compares the completions "
            f"of a prompt: set it to at least {algo.min_samples_per_prompt()}"
        )
    if algo.reference_sync_steps() and config.model.lora_rank:
        raise UsageError(
            f"algo.reference is {config.algo.reference}, but with model.lora_rank the reference is the policy without "
            "its adapters, which does not change: leave one of them out"
        )
    with ExitStack() as stack:
        rewards = stack.enter_context(reward_functions(config))
        rewards.check()  # before anything else is read or loaded
        for _, path in rewards.models:
            check_reward_model(path)
        if config.rollout.replay:
            records.find_file(Path(config.rollout.replay))
        environments = environments_of(config)
        if environments is not None:
            stack.enter_context(environments).check()
        run = stack.enter_context(Run.open(verb, config, algo))
        rewards.check(sorted(run.data.train.rows[0][0].columns))  # which columns there are is known now
        trainer = Trainer(run, algo, rewards, environments)
        stack.callback(trainer.record.wait)  # before others may write to the folder
        yield trainer
        trainer.record.flush()


def make_algorithm(verb: str, config: OnlineConfig) -> OnlineAlgorithm:
    """Constructs the algorithm with its options and with what the run decides about completions."""
    algorithm = ALGORITHMS[verb]
    assert issubclass(algorithm, OnlineAlgorithm), f"{verb} does not generate"
    rollout = config.rollout
    distribution = SamplingDistribution(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p
    )
    return algorithm(config.algo, RolloutSettings(max_completion_tokens=rollout.max_tokens, distribution=distribution))


def reward_functions(config: OnlineConfig) -> Rewards:
    limits = config.rewards
    return Rewards(
        config.reward,
        limits.weights,
        timeout_seconds=limits.limits[0],
        memory_gib=limits.limits[1],
        workers=limits.workers,
        max_failure_rate=limits.max_failure_rate,
    )


def environments_of(config: OnlineConfig) -> Environments | None:
    limits = config.rewards
    if not config.rollout.environment:
        return None
    return Environments(
        config.rollout.environment,
        workers=limits.workers,
        timeout_seconds=limits.limits[0],
        memory_gib=limits.limits[1],
        max_failure_rate=limits.max_failure_rate,
    )


class Trainer:
    """The pieces of the loop, to be called in turn; `train` does so."""

    def __init__(
        self, run: Run, algo: OnlineAlgorithm, rewards: Rewards, environments: Environments | None = None
    ) -> None:
        assert isinstance(run.config, OnlineConfig)
        self.run, self.config, self.algo = run, run.config, algo
        self.policy = run.learner()
        self.helpers = Helpers(
            run,
            algo,
            self.policy,
            distribution=algo.rollout.distribution,
            sync_steps=algo.reference_sync_steps(),
        )
        self.scorer = self.make_scorer(rewards)
        self.critic: Critic | None = None
        settings = algo.critic()
        if settings is not None:
            self.critic = Critic(run, settings, self.helpers, next((path for _, path in rewards.models), ""))
        self.sampling = sampling_of(self.config, self.policy.stop_ids())
        self.environments = environments
        self.rollout_workers = run.rollout_workers()
        generator: Generator = self.rollout_workers or self.policy
        self.rollouts = Rollouts(
            generator,
            self.scorer,
            run.data.stream,
            self.config,
            self.sampling,
            run.tokenizer,
            phase=run.log.phase,
            greedy_baseline=algo.greedy_baseline,
            episodes=self.dialogues(generator, self.sampling),
            recorded=records.read_steps(Path(self.config.rollout.replay)) if self.config.rollout.replay else None,
            update_weights=self.rollout_workers.update
            if self.rollout_workers
            else lambda _: self.policy.refresh_sampler(),
        )
        self.pretraining = Pretraining(run, algo) if algo.pretrain_files() else None
        self.objective = run.objective()
        run.parts = {"online": self} | ({"critic": self.critic.model} if self.critic else {})
        self.step = run.resume(self.policy)
        self.rollouts.version = self.step
        if self.rollouts.recorded is not None:
            for _ in range(self.step):
                next(self.rollouts.recorded, None)
        self.record = records.RolloutWriter(run.folder.path, self.step)

    def train(self) -> Result:
        run, metrics = self.run, dict[str, float]()
        if self.step == 0:
            run.log.message(BEFORE_FIRST_STEP)
        while self.step < run.data.steps:
            rollouts = self.make_experience()
            metrics = self.train_step(rollouts)
            if run.data.eval and due(self.step, self.config.eval.every, run.data.steps):
                with run.log.phase("eval"):
                    metrics |= self.evaluate()
            run.log.step(self.step, metrics)
            self.check_mismatch(metrics)
            give_up_if_diverged(run, self.policy, self.step)
            if due(self.step, self.config.save.every, run.data.steps) or run.progress.best_step == self.step:
                with run.log.phase("save"):
                    run.save(self.step, self.policy)
            run.stop_if_asked(self.step, self.policy)
        self.record.flush()
        run.log.done(closing_words(run, metrics))
        return Result(run.folder.path, run.data.steps, metrics)

    def update_weights(self, version: int) -> None:
        """Bring the policy's current weights to the generator."""
        if self.rollout_workers is not None:
            self.rollout_workers.update(version)
        else:
            self.policy.refresh_sampler()

    def make_experience(self) -> list[Rollout]:
        """A batch of judged answers, filled with what the algorithm needs and scored."""
        self.run.places.step = self.step + 1
        self.helpers.renew_reference(self.run, self.step)
        try:
            rollouts = self.rollouts.next_batch()
        except RewardError as error:
            raise self.with_answers(error) from None
        samples = usable(rollouts, self.step + 1)
        with self.run.log.phase("logprobs"):
            self.helpers.fill(samples)
            if self.critic is not None:
                self.critic.fill(samples)
            elif "values" in self.helpers.needs:
                fill_values(self.policy, samples)
        self.algo.assign_credit(samples)
        return rollouts

    def with_answers(self, error: RewardError) -> RewardError:
        """Records the answers that could not be judged, so that they can be looked at; a resume drops them."""
        if not error.rollouts:
            return error
        self.record.add(error.rollouts, self.step + 1)
        self.record.flush()
        folder = self.run.folder.path
        return RewardError(
            f"{error}\n\nthe answers: posttrain samples {folder} --failed\n"
            f"judge them again: posttrain rewards check {folder / records.FILE} --reward {' '.join(self.config.reward)}"
        )

    def train_step(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Learn from a batch; its metrics."""
        self.step += 1
        samples = usable(rollouts, self.step)
        metrics = summary(rollouts, self.step - 1)
        if self.config.rollout.inflight:
            metrics["mixed_versions"] = mixed_versions(samples)
        with self.run.log.phase("train"), self.helpers.here("optimizer", self.policy):
            metrics |= self.update(samples)
        self.algo.after_step(metrics, len(samples))
        metrics["epoch"] = self.run.data.stream.position / self.run.data.stream.rows_per_epoch
        metrics["tokens"] = float(sum(len(sample) for sample in samples))
        self.rollouts.version = self.step
        if self.rollout_workers is not None:
            metrics |= {
                "sync_bytes": float(self.rollout_workers.last_transfer.bytes),
                "sync_seconds": self.rollout_workers.last_transfer.seconds,
            }
        with self.run.log.phase("record"):
            self.record.add(rollouts, self.step)
        return metrics

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """Passes over shuffled mini-batches; an optimizer step each, of the policy and of the critic."""
        run, step = self.run, self.step
        found: list[dict[str, float]] = []
        for chosen in mini_batches(samples, self.algo.config, (self.config.seed, step)):
            part: dict[str, float] = {}
            if self.critic is not None:
                with self.helpers.here("critic", self.critic.model):
                    fitted = update(
                        run, self.critic.model, chosen, self.critic.objective, step, peak_rate=self.critic.learning_rate
                    )
                part |= {f"critic/{name}": value for name, value in fitted.items() if name != "tokens"}
            if not self.algo.policy_frozen(step):
                moving = self.with_gradient(chosen)
                besides = self.pretraining.take() if self.pretraining else []
                if moving or besides:
                    whole = count(chosen, self.objective.unit)
                    part |= update(run, self.policy, moving, self.objective, step, denominator=whole, besides=besides)
            found.append(part)
        return averaged(found) | {"updates": float(len(found))}

    def with_gradient(self, samples: list[Sample]) -> list[Sample]:
        """Leaves out samples without a gradient, for example those of a group with equal rewards."""
        if self.config.model.router_loss:  # every token contributes to it
            return samples
        return [sample for sample in samples if self.algo.has_gradient(sample)]

    def evaluate(self) -> dict[str, float]:
        """The policy as it is now on the evaluation prompts."""
        assert self.run.data.eval is not None, "there is no evaluation data: set data.eval"
        exam = Examination(self.config, self.sampling, self.scorer, self.run.tokenizer, self.dialogues)
        if self.rollout_workers is not None:  # learners that generate elsewhere have no room for a whole model
            self.rollouts.wait()
            self.rollout_workers.update(self.step)
        found = exam.hold(self.rollout_workers or self.policy, [row[0] for row in self.run.data.eval.rows])
        progress = self.run.progress
        if progress.best is None or found["reward"] > progress.best:
            progress.best, progress.best_step = found["reward"], self.step
        return {f"eval/{name}": value for name, value in found.items()}

    def dialogues(self, policy: Generator, sampling: Sampling) -> EpisodeRunner | None:
        if self.environments is None:
            return None
        return EpisodeRunner(self.environments, policy, self.config, sampling, self.run.tokenizer)

    def check_mismatch(self, metrics: dict[str, float]) -> None:
        """Sampler and trainer must agree on what was sampled, or the gradient is of something else."""
        limit, progress = self.config.rollout.max_mismatch, self.run.progress
        found = metrics.get("sampler_kl", 0.0)
        if self.config.rollout.replay or not limit or found < limit / 10:
            progress.mismatched_in_a_row = 0
            return
        self.run.log.warn(
            f"step {self.step}: sampler and trainer disagree by a KL of {found:.3g} a token "
            f"(ratio {metrics['sampler_ratio']:.3f}); the run stops at {limit:g} (rollout.max_mismatch)"
        )
        progress.mismatched_in_a_row = progress.mismatched_in_a_row + 1 if found >= limit else 0
        if progress.mismatched_in_a_row >= MISMATCHES_ALLOWED:
            progress.mismatched_in_a_row = 0
            self.run.save(self.step, self.policy)
            raise DivergedError(
                f"sampler and trainer disagreed by more than rollout.max_mismatch = {limit:g} (KL a token) in "
                f"{MISMATCHES_ALLOWED} steps in a row: what is trained is not what was sampled. Lower "
                f"update.learning_rate or rollout.ahead, or use model.dtype float32. Go on: {self.run.resume_command()}"
            )

    # What a checkpoint holds besides weights

    def save(self, folder: Path) -> None:
        self.record.flush()
        pending = self.rollouts.state()  # first: batches that are still being made change the state of the scorer
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in pending)
        (folder / "pending.jsonl").write_text(lines, encoding="utf-8")
        state = {
            "algo": self.algo.state(),
            "pretraining": self.pretraining.position if self.pretraining else [],
            "judge": self.scorer.state(),
        }
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        with (folder / "pending.jsonl").open(encoding="utf-8") as lines:
            self.rollouts.load_state([json.loads(line) for line in lines])
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        self.algo.load_state(state["algo"])
        self.scorer.load_state(state.get("judge", {}))  # absent in checkpoints of old
        if self.pretraining:
            self.pretraining.position = state["pretraining"]

    def make_scorer(self, rewards: Rewards) -> RolloutScorer:
        normalize = self.config.rewards.normalize == "saved"
        models: dict[int, Any] = {
            place: RewardModel(self.run, path, self.helpers, place=place, normalize=normalize)
            for place, path in rewards.models
        }
        return RolloutScorer(rewards, models, self.config, self.run.tokenizer)


def sampling_of(config: OnlineConfig, stop_ids: list[int]) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=tuple(stop_ids),
        stop_texts=rollout.stop,
    )


def usable(rollouts: list[Rollout], step: int) -> list[Sample]:
    """Samples of the answers that could be scored."""
    samples = [rollout.sample for rollout in rollouts if not rollout.failure]
    if not samples:
        raise PosttrainError(f"step {step}: no answer could be scored; the first: {rollouts[0].failure}")
    return samples


def mini_batches(
    samples: list[Sample], config: OnlineAlgorithm.Config, seed: tuple[int, ...]
) -> Iterator[list[Sample]]:
    """`epochs_per_batch` passes over the samples in parts of `mini_batch_size`, in an order that the seed decides."""
    size = config.mini_batch_size or len(samples)
    for epoch in range(config.epochs_per_batch):
        order = np.arange(len(samples))
        if config.shuffle_mini_batch and size < len(samples):
            order = np.random.default_rng((*seed, epoch)).permutation(len(samples))
        for start in range(0, len(samples), size):
            yield [samples[i] for i in order[start : start + size]]


__all__ = ["Trainer", "opened", "train_from"]
