"""The offline loop: trains on given examples (SFT, reward models, preference learning, distillation)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from posttrain.algorithms import Algorithm
from posttrain.core.errors import DivergedError
from posttrain.core.types import Floats, Objective, Sample, count_units
from posttrain.data.dataset import ExampleStream
from posttrain.train.callbacks import add_custom_metrics
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.metric_sums import Sums, add_sums, averages
from posttrain.train.profiler import StepProfiler
from posttrain.train.run import Result, Run, due
from posttrain.train.streams import StreamFiller
from posttrain.train.summary import closing_message
from posttrain.train.task_eval import TaskEval
from posttrain.train.update import stop_if_diverged, update


@dataclass(slots=True, frozen=True, eq=False)
class Prediction:
    """An evaluation sample and what the policy computes for it; passed to custom metrics of offline trainers."""

    sample: Sample  # tokens, mask, group (the two sides of a pair share it), label, origin
    logprobs: Floats | None = None  # of each counted token, 0 elsewhere; language models
    score: float | None = None  # reward models


@dataclass(kw_only=True, slots=True, eq=False)
class OfflineLoop:
    """The loop and the objects it uses; setup.py builds them."""

    run: Run
    algorithm: Algorithm
    objective: Objective
    policy: LearnerGroup
    streams: StreamFiller
    tasks: TaskEval | None = None
    step: int = 0  # number of finished steps

    def train(self) -> Result:
        """Train until all steps are done."""
        run, config, steps, metrics = self.run, self.run.config, self.run.data.steps, dict[str, float]()
        run.callbacks.call("on_start", self.step)
        profiler = StepProfiler(run, self.policy, self.step)
        while self.step < steps and not run.callbacks.stop_reason:
            profiler.before(self.step)
            metrics = self.train_step(self.next_batch())
            profiler.after(self.step)
            if (run.data.eval or self.tasks) and due(self.step, config.eval.every_steps, steps):
                with (
                    run.log.phase("eval"),
                    run.saved_if_refused(self.step, self.policy),
                    self.policy.saved_weights(),
                ):
                    metrics |= self.evaluate()
            if self.step == steps and self.algorithm.head == "score":
                with run.log.phase("eval"):
                    self.annotate_scores()
            run.callbacks.call("on_step", self.step, metrics=run.log.step(self.step, metrics))
            stop_if_diverged(run, self.policy, self.step)
            run.finish_save(wait=False)
            if due(self.step, config.save.every_steps, steps) or run.progress.best_step == self.step:
                with run.log.phase("save"):
                    run.save(self.step, self.policy, wait=False)
            run.stop_if_signalled(self.step, self.policy)
        run.finish_save()
        if run.callbacks.stop_reason and self.step < steps:
            if self.algorithm.head == "score":  # the checkpoint of this step has no statistics yet
                self.annotate_scores()
                run.saved_step = 0
            if run.saved_step != self.step:
                run.save(self.step, self.policy)
        if run.progress.skipped == steps:
            raise DivergedError(
                f"loss or gradient was not finite in any of the {steps} steps: nothing was learnt. "
                f"The batches are in {run.directory.bad_batches}."
            )
        run.log.done(closing_message(run, self.step, metrics))
        return run.result(self.step, metrics)

    def next_batch(self) -> list[Sample]:
        """Take the examples of the next step, fill what the algorithm needs and assign credit."""
        self.run.placement.step = self.step + 1
        with self.run.log.phase("data"):
            samples = self.algorithm.prepare(self.run.data.next_examples(self.step + 1))
        with self.run.log.phase("helpers"):
            if self.streams.reference is not None:
                self.streams.reference.sync(self.step)
            self.streams.fill(samples)
            return self.algorithm.assign_credit(samples)

    def train_step(self, samples: list[Sample]) -> dict[str, float]:
        """Make one optimizer step and return its metrics."""
        self.step += 1
        data = self.run.data
        with self.run.log.phase("train"):
            metrics = update(self.run, self.policy, samples, self.objective, self.step)
            metrics["epoch"] = data.examples_after[self.step] / data.stream.examples_per_epoch
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Return metrics on the evaluation examples and of the harness's tasks, and remember the best step."""
        metrics = (
            {f"eval/{name}": value for name, value in self.held_out_metrics().items()} if self.run.data.eval else {}
        )
        if self.tasks is not None:
            metrics |= self.tasks.run(self.step)
        self.run.note_best(self.step, metrics)
        self.run.callbacks.call("on_evaluate", self.step, metrics)
        return metrics

    def held_out_metrics(self) -> dict[str, float]:
        """Return metrics on the evaluation examples."""
        run, algorithm = self.run, self.algorithm
        assert run.data.eval is not None
        examples, size = run.data.eval.sample_groups, run.config.train.batch_size
        sums: list[Sums] = []
        denominator = 0
        strata = [algorithm.stratum(example[0]) for example in examples]
        stream = ExampleStream(examples, size, seed=0, shuffle=False, strata=strata)
        chunks = max(1, len(examples) // size)  # of nearly equal size, so that none is very small
        for c in range(chunks):
            samples = algorithm.prepare(stream.take(len(examples) * (c + 1) // chunks - len(examples) * c // chunks))
            self.streams.fill(samples, keep=True)
            samples = algorithm.assign_credit(samples)
            sums.append(self.policy.evaluate(samples, self.objective))
            denominator += count_units(samples, self.objective.unit)
        means = averages(add_sums(sums), denominator)
        if run.metric_functions:
            add_custom_metrics(run.metric_functions, self.predictions(), means)
        return means

    def predictions(self) -> list[Prediction]:
        """Return what the policy computes for each evaluation sample, for custom metrics."""
        assert self.run.data.eval is not None
        samples = list(self.run.data.eval.samples())
        if self.algorithm.head == "score":
            return [Prediction(sample, score=x) for sample, x in zip(samples, self.policy.scores(samples), strict=True)]
        streams = self.policy.logprobs(samples)
        return [Prediction(sample, logprobs=stream) for sample, stream in zip(samples, streams, strict=True)]

    def annotate_scores(self) -> None:
        """Write mean and standard deviation of a reward model's scores into the config that is saved with it."""
        with self.policy.saved_weights():
            self.policy.annotate(self.score_statistics())

    def score_statistics(self, max_examples: int = 1000) -> dict[str, float]:
        """Return mean and standard deviation of the scores of the first examples, for later normalisation."""
        data = self.run.data
        examples = (data.eval or data.train).sample_groups[:max_examples]
        scores = self.policy.scores([sample for example in examples for sample in example])
        mean = sum(scores) / len(scores)
        variance = sum((score - mean) ** 2 for score in scores) / max(1, len(scores) - 1)
        return {"score_mean": mean, "score_std": math.sqrt(variance)}
