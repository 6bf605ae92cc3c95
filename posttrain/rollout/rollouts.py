"""Prompts -> scored rollouts: groups, batches generated ahead, dynamic sampling, replay of recorded rollouts.

`next_batch` returns one batch per step. With `rollout.ahead` batches in flight, a thread generates the next ones while
the caller trains, with the weights of the moment at which each was started. Each is started at one fixed point of the
loop, so that equal runs give equal completions regardless of timing. `inflight` gives that up: a batch that is being
generated takes the newest weights as soon as they arrive. With `rollout.partial_prompts` some prompts are not complete
when a batch is: they carry on with the next one (partial.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import DataError
from posttrain.core.types import Prompt, Sample, WeightVersion
from posttrain.data.dataset import ExampleStream
from posttrain.engines.base import GenerationRequest, Generator, Sampling, seed_for
from posttrain.rewards.pool import TimeoutBudget
from posttrain.rollout.curriculum import PromptHistory, Visits
from posttrain.rollout.data_completions import DataCompletions
from posttrain.rollout.episodes import EpisodePlayer
from posttrain.rollout.overlap import OverlappingStages
from posttrain.rollout.partial import PartialGeneration, PromptInProgress, batch_is_complete, from_rows, rows_of
from posttrain.rollout.records import Rollout, as_row, from_row, unscored
from posttrain.rollout.scoring import RolloutScorer
from posttrain.sandbox.supervisor import STOP_SECONDS, RunStoppedError

Phase = Callable[[str], AbstractContextManager[None]]
"""Measures the time of a named phase of a step."""


def no_phase(name: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


class UnscoredBatchError(RunStoppedError):
    """A stop of the run ended the scoring of a batch; a checkpoint holds its completions, to be scored on resume."""

    def __init__(self, rollouts: list[Rollout], greedy: list[Rollout]) -> None:
        """`greedy`: completions that are the baselines of the others' groups."""
        super().__init__("the run was asked to stop while a batch was being scored")
        self.rollouts, self.greedy = rollouts, greedy


class Rollouts:
    """A stream of scored batches, one per step."""

    def __init__(
        self,
        generator: Generator,
        scorer: RolloutScorer,
        stream: ExampleStream,
        config: OnlineConfig,
        sampling: Sampling,
        tokenizer: Any,
        *,
        update_weights: Callable[[WeightVersion], None],
        phase: Phase = no_phase,
        greedy_baseline: bool = False,
        episodes: EpisodePlayer | None = None,
        recorded: Iterator[tuple[int, list[Rollout]]] | None = None,
        stages: OverlappingStages | None = None,
        data_completions: DataCompletions | None = None,
    ) -> None:
        """`update_weights`: brings the policy's current weights to the generator, under the version it is given.

        `episodes`: generates in several turns, with an environment or agent; `recorded`: batches to replay;
        `data_completions`: take the place of some generated ones;
        `stages`: what is computed for each part of a batch while the next one is generated (rollout.prompts_per_stage).
        """
        self.generator, self.scorer, self.stream, self.config = generator, scorer, stream, config
        self.sampling, self.tokenizer, self.phase = sampling, tokenizer, phase
        self.greedy_baseline = greedy_baseline
        self.episodes = episodes
        self.recorded = recorded
        self.stages = stages
        self.data_completions = data_completions
        self.update_weights = update_weights
        self.history = PromptHistory(config.rollout, config.seed, scorer.first_reward)
        self.skipped = 0  # prompts that the batch returned last has left out
        self.batches: deque[BatchJob] = deque()  # started and not returned yet
        self.in_progress: list[PromptInProgress] = []  # after the batch that was started last
        self.position = 0  # of the stream, after the batch that was returned last; batches ahead are not counted

    def next_batch(self, version: WeightVersion) -> list[Rollout]:
        """Return the next batch, including rollouts whose scoring failed; `version`: of the policy's weights now."""
        ahead = self.config.rollout.ahead
        while len(self.batches) <= ahead:
            self.start_batch(version)
        with self.phase("idle") if ahead else nullcontext():
            job = self.batches[0]
            rollouts = job.result()
        self.batches.popleft()
        self.position, self.skipped = job.position, job.choice.skipped
        self.history.visits |= job.choice.dropped
        for group in by_group(rollouts):
            self.history.add(group, self.epoch_of(group[0].sample.group), has_signal(group))
        return rollouts

    def epoch_of(self, position: int) -> int:
        return position // self.stream.examples_per_epoch

    def start_batch(self, version: WeightVersion) -> None:
        """Start the next batch with the current weights."""
        rollout = self.config.rollout
        if not rollout.ahead:
            self.sync_weights(version)
            choice = PromptChoice(self.stream, self.history.copy())
            rollouts = self.make_batch(version, self.phase, choice)
            self.batches.append(BatchJob.completed(rollouts, self.stream.position, choice))
            return
        if rollout.inflight_updates:  # the batch in progress takes them too
            self.sync_weights(version)
        with self.phase("idle"):
            self.wait()  # one batch at a time: they share the generator's weights and the stream of prompts
        for job in self.batches:
            if isinstance(job.error, RunStoppedError):
                raise job.error
        if not rollout.inflight_updates:
            self.sync_weights(version)

        choice = PromptChoice(self.stream, self.history.copy())
        self.batches.append(
            BatchJob.start(
                lambda: self.make_batch(version, no_phase, choice),
                lambda: self.stream.position,
                choice,
            )
        )

    def sync_weights(self, version: WeightVersion) -> None:
        with self.phase("sync"):
            self.update_weights(version)

    def wait(self) -> None:
        """Wait until no batch is in progress."""
        for job in self.batches:
            job.wait()

    def make_batch(self, version: WeightVersion, phase: Phase, choice: PromptChoice) -> list[Rollout]:
        """Make a batch; if a stop of the run ends this before all is generated, its prompts are the next ones again."""
        position, statistics, in_progress = self.stream.position, self.scorer.state(), self.in_progress
        try:
            return self.generate_and_score(version, phase, choice)
        except UnscoredBatchError:
            raise
        except RunStoppedError:
            self.stream.position, self.in_progress = position, in_progress
            self.scorer.load_state(statistics)
            raise

    def generate_and_score(self, version: WeightVersion, phase: Phase, choice: PromptChoice) -> list[Rollout]:
        """Make a batch: prompts, completions, rewards."""
        if self.recorded is not None:
            return self.replay_batch(self.recorded, phase)
        wanted = self.config.train.batch_size
        batch: list[Rollout] = []
        rollout = self.config.rollout
        if rollout.partial_prompts or self.in_progress:
            return self.make_partial_rollouts(wanted, version, phase, choice)
        for _ in range(rollout.dynamic_sampling_max_batches if rollout.dynamic_sampling else 1):
            rollouts = self.make_rollouts([choice.next_prompt() for _ in range(wanted)], version, phase)
            if not rollout.dynamic_sampling:
                return rollouts
            useful = [group for group in by_group(rollouts) if has_signal(group)]
            choice.drop(group for group in by_group(rollouts) if not has_signal(group))
            batch += [rollout for group in useful for rollout in group]
            groups = list(by_group(batch))
            if len(groups) >= wanted:
                return [rollout for group in groups[:wanted] for rollout in group]
        return batch or rollouts  # all prompts are too easy or too hard: the log reports it

    def replay_batch(self, recorded: Iterator[tuple[int, list[Rollout]]], phase: Phase) -> list[Rollout]:
        """Score the next recorded batch again."""
        _, batch = next(recorded, (0, None))
        if batch is None:
            raise DataError(f"{self.config.rollout.replay}: there are fewer recorded batches than steps")
        replayed = [unscored(rollout) for rollout in batch]
        self.stream.position += len(list(by_group(replayed)))  # its prompts count as used
        with phase("reward"):
            self.scorer.score(replayed)
        return replayed

    def make_rollouts(self, prompts: list[tuple[int, Prompt]], version: WeightVersion, phase: Phase) -> list[Rollout]:
        """Generate and score completions of all prompts; those of one prompt are neighbours and form a group."""
        count = len(prompts) * self.config.rollout.samples_per_prompt
        budget = self.timeout_budget(count + len(prompts) * self.greedy_baseline)
        rollouts: list[Rollout] = []
        greedy: list[Rollout] = []
        try:
            with phase("generate"), self.scorer.score_early(count, budget) as early:
                generated = self.generate_groups(prompts, version, early.add, phase)
                if self.greedy_baseline:
                    greedy = self.generate(prompts, [0] * len(prompts), greedy=True)
                rollouts = generated
            return self.score(rollouts, greedy, phase, budget)
        except RunStoppedError:
            # Without batches ahead the same batch can be made again after a resume. Others have the weights of an
            # earlier step, which are lost then; with dynamic sampling more completions may be needed.
            if self.config.rollout.ahead and not self.config.rollout.dynamic_sampling and rollouts:
                raise UnscoredBatchError(rollouts, greedy) from None
            raise

    def make_partial_rollouts(
        self, wanted: int, version: WeightVersion, phase: Phase, choice: PromptChoice
    ) -> list[Rollout]:
        """Generate until `wanted` prompts are complete, and score those; the others carry on with the next batch."""
        rollout, in_progress = self.config.rollout, [prompt.copy() for prompt in self.in_progress]
        n, seed, oldest = rollout.samples_per_prompt, self.config.seed, version - rollout.max_staleness
        cut = rollout.partial_tokens if rollout.max_staleness else 0
        generation = PartialGeneration(self.generator, self.sampling, self.tokenizer, cut)
        if not batch_is_complete(in_progress, wanted, oldest):  # else nothing would advance
            while len(in_progress) < wanted + (rollout.partial_prompts if rollout.max_staleness else 0):
                in_progress.append(PromptInProgress.begin(*choice.next_prompt(), version, seed, n))
        budget = self.timeout_budget(len(in_progress) * n + wanted * self.greedy_baseline)
        rollouts: list[Rollout] = []
        greedy: list[Rollout] = []
        try:
            with phase("generate"), self.scorer.score_early(len(in_progress) * n, budget) as early:
                while not batch_is_complete(in_progress, wanted, oldest):
                    generation.advance(in_progress, version, early.add)
                complete = [prompt for prompt in in_progress if prompt.is_complete][:wanted]
                if self.greedy_baseline:
                    prompts = [(prompt.position, prompt.prompt) for prompt in complete]
                    greedy = self.generate(prompts, [0] * len(prompts), greedy=True)
                # Here, because the end of this block may raise: the batch is kept then, and the others with it.
                self.in_progress = [prompt for prompt in in_progress if prompt not in complete]
                rollouts = [one for prompt in complete for one in prompt.rollouts]
            return self.score(rollouts, greedy, phase, budget)
        except RunStoppedError:
            if rollout.ahead and rollouts:  # as in make_rollouts
                raise UnscoredBatchError(rollouts, greedy) from None
            raise

    def generate_groups(
        self,
        prompts: list[tuple[int, Prompt]],
        version: WeightVersion,
        on_rollout: Callable[[Rollout], None],
        phase: Phase,
    ) -> list[Rollout]:
        """Generate all completions; with overlapping stages, part by part, and finish those stages."""
        if self.stages is None:
            return self.generate_part(prompts, version, on_rollout)
        size, rollouts = self.config.rollout.prompts_per_stage, list[Rollout]()
        running = self.stages.start()
        try:
            for first in range(0, len(prompts), size):
                part = self.generate_part(prompts[first : first + size], version, on_rollout)
                running.add(part)
                rollouts += part
        except BaseException:
            running.cancel()
            raise
        with phase("logprobs"):
            running.finish()
        return rollouts

    def generate_part(
        self, prompts: list[tuple[int, Prompt]], version: WeightVersion, on_rollout: Callable[[Rollout], None]
    ) -> list[Rollout]:
        """Generate samples_per_prompt completions of each prompt."""
        n, seed = self.config.rollout.samples_per_prompt, self.config.seed
        repeated = [(position, prompt, k) for position, prompt in prompts for k in range(n)]
        given = self.data_completions
        taken = [given is not None and given.is_taken(position, k) for position, _, k in repeated]
        asked = [each for each, from_data in zip(repeated, taken, strict=True) if not from_data]
        seeds = [seed_for(seed, position, k) for position, _, k in asked]
        own = [(position, prompt) for position, prompt, _ in asked]
        rollouts = self.generate(own, seeds, on_rollout=on_rollout) if own else []
        if given is not None:  # one rollout per request: agents, whose conversations may fork, are refused with it
            generated = iter(rollouts)
            rollouts = [
                given.rollout(position, prompt) if from_data else next(generated)
                for (position, prompt, _), from_data in zip(repeated, taken, strict=True)
            ]
        if not self.config.rollout.inflight_updates:  # in-flight updates: the generator records the versions
            for rollout in rollouts:
                rollout.sample.version = rollout.sample.newest = version
        return rollouts

    def timeout_budget(self, completions: int) -> TimeoutBudget:
        """Return the budget of a batch; after a stop only a batch that would be made differently is waited for."""
        rollout = self.config.rollout
        differs = rollout.ahead and rollout.dynamic_sampling
        return self.scorer.rewards.timeout_budget(completions, stop_seconds=STOP_SECONDS if differs else 0.0)

    def score(
        self, rollouts: list[Rollout], greedy: list[Rollout], phase: Phase, budget: TimeoutBudget
    ) -> list[Rollout]:
        """Score generated completions; `greedy`: the baselines of their groups, if there are any."""
        with phase("reward"):
            self.scorer.score(rollouts + greedy, budget=budget)
        for baseline, group in zip(greedy, by_group(rollouts), strict=False):
            for rollout in group:
                rollout.sample.baseline = baseline.sample.reward
                rollout.failure = rollout.failure or baseline.failure
        return rollouts

    def generate(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        seeds: Sequence[int],
        *,
        greedy: bool = False,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Generate one completion per prompt, or play one episode with an environment, tools or an agent."""
        if self.episodes is not None:
            return self.episodes.play(prompts, seeds, greedy=greedy)
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        return generate_rollouts(self.generator, prompts, seeds, sampling, self.tokenizer, on_rollout)

    # Checkpoints: no prompt is lost and none is used twice

    def state(self) -> list[dict[str, Any]]:
        """Return the batches that are made but not returned yet, as JSON rows; waits for the one in progress.

        A batch whose scoring was ended by a stop of the run is `unscored`. One that was not even generated is left out:
        its prompts are the next ones again.
        """
        self.wait()
        rows: list[dict[str, Any]] = []
        for number, job in enumerate(self.batches):
            if isinstance(job.error, UnscoredBatchError):
                for greedy, rollouts in enumerate((job.error.rollouts, job.error.greedy)):
                    added = {"position": job.position, "unscored": True, "greedy": bool(greedy)}
                    rows += [as_row(rollout, number) | added | job.choice_state() for rollout in rollouts]
            elif not isinstance(job.error, RunStoppedError):
                added = {"position": job.position}
                rows += [as_row(rollout, number) | added | job.choice_state() for rollout in job.result()]
        return rows

    def state_in_progress(self) -> list[dict[str, Any]]:
        """Return the prompts that carry on with the next batch, as JSON rows; `state` comes first."""
        return rows_of(self.in_progress)

    def load_in_progress(self, rows: Sequence[dict[str, Any]]) -> None:
        """Restore what `state_in_progress` returned."""
        self.in_progress = from_rows(rows)

    def load_state(self, rows: Sequence[dict[str, Any]]) -> None:
        """Restore the batches that `state` returned; those that are not scored yet are scored now."""
        self.batches.clear()
        for _, members in groupby(rows, key=lambda row: row["step"]):
            batch = list(members)
            # Checkpoints of 0.1.0 have no position: that of the last prompt is the same without dynamic sampling.
            position = batch[-1].get("position", batch[-1]["group"] + 1)
            if batch[0].get("unscored"):
                self.batches.append(self.start_scoring(batch, position))
            else:
                choice = PromptChoice.restored(batch[0])
                self.batches.append(BatchJob.completed([from_row(row) for row in batch], position, choice))

    def start_scoring(self, rows: Sequence[dict[str, Any]], position: int) -> BatchJob:
        """Start to score a batch whose scoring was ended by a stop of the run."""
        rollouts, greedy = ([from_row(row) for row in rows if row["greedy"] == which] for which in (False, True))
        earlier = list(self.batches)

        def score() -> list[Rollout]:
            for job in earlier:  # running statistics of rewards depend on the order
                job.wait()
            try:
                return self.score(rollouts, greedy, no_phase, self.timeout_budget(len(rows)))
            except RunStoppedError:
                raise UnscoredBatchError(rollouts, greedy) from None

        return BatchJob.start(score, lambda: position, PromptChoice.restored(rows[0]))


class PromptChoice:
    """Takes the prompts of one batch from the stream; those that are not due are left out and counted."""

    def __init__(self, stream: ExampleStream | None = None, history: PromptHistory | None = None) -> None:
        """`history`: of the moment at which the batch was started."""
        self.stream, self.history = stream, history
        self.skipped = 0
        self.dropped: Visits = {}  # groups that dynamic sampling replaced

    @classmethod
    def restored(cls, row: dict[str, Any]) -> PromptChoice:
        """Return the choice of a batch that a checkpoint holds."""
        choice = cls()
        choice.skipped = row.get("skipped", 0)
        choice.dropped = {origin: tuple(visit) for origin, visit in row.get("dropped", {}).items()}
        return choice

    def drop(self, groups: Iterable[list[Rollout]]) -> None:
        """Remember groups without signal, which are not trained on."""
        assert self.stream is not None and self.history is not None
        for group in groups:
            self.history.add(group, group[0].sample.group // self.stream.examples_per_epoch, has_signal=False)
            if (origin := group[0].prompt.origin) in self.history.visits:
                self.dropped[origin] = self.history.visits[origin]

    def next_prompt(self) -> tuple[int, Prompt]:
        """Return the position and the prompt that is due next; if none of an epoch is, the next one."""
        assert self.stream is not None and self.history is not None
        size, left_out = self.stream.examples_per_epoch, 0
        while True:
            position, index = self.stream.next_index()
            prompt = self.stream.examples[index][0]
            due = not self.history.is_used or self.history.is_due(prompt.origin, position, position // size)
            if due or left_out >= size:
                self.skipped += left_out
                return position, prompt
            left_out += 1


class BatchJob:
    """A batch that a daemon thread makes."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.position = 0  # of the stream, after the prompts of this batch
        self.choice = PromptChoice()
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    @classmethod
    def completed(cls, rollouts: list[Rollout], position: int, choice: PromptChoice) -> BatchJob:
        job = cls()
        job.rollouts, job.position, job.choice = rollouts, position, choice
        return job

    @classmethod
    def start(
        cls, make_batch: Callable[[], list[Rollout]], position: Callable[[], int], choice: PromptChoice
    ) -> BatchJob:
        """Start to make a batch; `position`: returns the position of the stream after it."""
        job = cls()
        job.choice = choice

        def run() -> None:
            try:
                job.rollouts = make_batch()
            except BaseException as error:  # raised again by `result`
                job.error = error
                if not isinstance(error, Exception):
                    raise
            finally:
                job.position = position()

        job.thread = threading.Thread(target=run, name="rollouts", daemon=True)
        job.thread.start()
        return job

    def choice_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the choice of prompts; nothing if all were taken."""
        choice = {"skipped": self.choice.skipped, "dropped": self.choice.dropped}
        return {name: value for name, value in choice.items() if value}

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def result(self) -> list[Rollout]:
        self.wait()
        if self.error is not None:
            raise self.error
        return self.rollouts


def generate_rollouts(
    generator: Generator,
    prompts: Sequence[tuple[int, Prompt]],
    seeds: Sequence[int],
    sampling: Sampling,
    tokenizer: Any,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> list[Rollout]:
    """Generate one completion per (position, prompt); `on_rollout` may be called with some before all are finished."""
    requests = [
        GenerationRequest(prompt=prompt.tokens, group=position, seed=seed)
        for (position, prompt), seed in zip(prompts, seeds, strict=True)
    ]
    rollouts: dict[int, Rollout] = {}

    def add(index: int, sample: Sample) -> Rollout:
        position, prompt = prompts[index]
        sample.group, sample.origin = position, prompt.origin
        text = tokenizer.decode(sample.tokens[sample.mask], skip_special_tokens=True)
        rollouts[index] = Rollout(sample=sample, prompt=prompt, text=text)
        return rollouts[index]

    def report(index: int, sample: Sample) -> None:
        assert on_rollout is not None
        on_rollout(add(index, sample))

    samples = generator.generate(requests, sampling, on_completion=report if on_rollout is not None else None)
    return [rollouts.get(index) or add(index, sample) for index, sample in enumerate(samples)]


def by_group(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    """Group neighbours whose prompt is the same one of the stream."""
    for _, members in groupby(rollouts, key=lambda rollout: rollout.sample.group):
        yield list(members)


def has_signal(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group differ, so that there is something to learn from comparing its completions."""
    return len({rollout.sample.reward for rollout in group if not rollout.failure}) > 1
