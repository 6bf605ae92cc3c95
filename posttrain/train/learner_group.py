"""The learners of all workers of a role, called as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from posttrain.checkpoints.checkpoint import FileEntries
from posttrain.cluster.base import Workers, split_evenly
from posttrain.cluster.local import LocalWorkers
from posttrain.core.errors import UsageError
from posttrain.core.types import ExpertUse, Floats, Ints, Objective, Sample, SamplingDistribution, WeightVersion
from posttrain.engines.base import GenerationRequest, OnCompletion, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.harness.base import HarnessScores, HarnessTasks
from posttrain.train.learner import PLAIN, Part
from posttrain.train.metric_sums import Sums, add_sums
from posttrain.train.rank_report import RankReport, rank_metrics

T = TypeVar("T")
HASH_POLL_SECONDS = 0.05  # between two questions whether files are hashed


class LearnerGroup:
    """Calls a method of learner.Learner on all workers, each with its part of the samples, and joins the results.

    Consecutive `ranks_per_sample` workers, which divide the heads or tokens of the same samples (parallel/fsdp.py), get
    the same samples; the result of the first is taken. With `stages` the workers are as many parts that hold different
    layers, and all parts get the same samples; the results are those of the last.
    """

    def __init__(self, workers: Workers, ranks_per_sample: int = 1, stages: int = 1) -> None:
        size = workers.size // stages
        assert size * stages == workers.size and size % ranks_per_sample == 0, (workers.size, stages, ranks_per_sample)
        self.workers, self.ranks_per_sample, self.stages = workers, ranks_per_sample, stages
        self.micro_batch_tokens = 0  # of `limit_micro_batches`; 0: as configured
        self.reports: list[RankReport] = []  # of the ranks on their last optimizer step

    def forward_backward(self, samples: Sequence[Sample], objective: Objective, denominator: int, tokens: int) -> Sums:
        return add_sums(self.spread("forward_backward", samples, objective.group_size, objective, denominator, tokens))

    def step(self, learning_rate: float) -> dict[str, float]:
        return self.with_rank_metrics(self.workers.call("step", learning_rate)[0])

    def discard(self) -> dict[str, float]:
        return self.with_rank_metrics(self.workers.call("discard")[0])

    def request_communication(self) -> None:
        """Measure the time in communication until the next optimizer step."""
        self.workers.call("request_communication")

    def with_rank_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add what follows from the reports of all ranks; `memory_gib` is that of the device that has used the most."""
        self.reports = self.workers.call("rank_report")
        found = rank_metrics(self.reports, self.ranks_per_sample, self.stages)
        if isinstance(self.workers, LocalWorkers):  # the memory of this process is logged anyway
            del found["memory_gib"]
        return metrics | found

    def start_profile(self, ranks: Sequence[int]) -> None:
        self.workers.scatter("start_profile", [rank in ranks for rank in range(self.workers.size)])

    def stop_profile(self, files: dict[int, Path]) -> dict[int, list[dict[str, Any]]]:
        """Write the trace of each chosen rank, and return its operators by rank."""
        found = self.workers.scatter("stop_profile", [files.get(rank) for rank in range(self.workers.size)])
        return {rank: rows for rank, rows in enumerate(found) if rows}

    def limit_micro_batches(self, tokens: int) -> None:
        self.micro_batch_tokens = tokens
        self.workers.call("limit_micro_batches", tokens)

    @contextmanager
    def saved_weights(self) -> Iterator[None]:
        """Compute with the weights that a checkpoint gets; after an error of a worker nothing is restored."""
        self.workers.call("use_average")
        try:
            yield
        except UsageError:  # of options of the evaluation: the run can still be saved
            self.workers.call("use_trained")
            raise
        self.workers.call("use_trained")

    def evaluate(self, samples: Sequence[Sample], objective: Objective) -> Sums:
        return add_sums(self.spread("evaluate", samples, objective.group_size, objective))

    def logprobs(
        self,
        samples: Sequence[Sample],
        *,
        adapters: bool = True,
        distribution: SamplingDistribution = PLAIN,
        experts: ExpertUse = "ignore",
    ) -> list[Floats]:
        how: dict[str, Any] = {"adapters": adapters, "distribution": distribution, "experts": experts}
        return concatenate(self.spread("logprobs", samples, **how))

    def token_statistics(
        self, samples: Sequence[Sample], distribution: SamplingDistribution, experts: ExpertUse
    ) -> list[Floats]:
        return concatenate(self.spread("token_statistics", samples, distribution=distribution, experts=experts))

    def likeliest(self, samples: Sequence[Sample], count: int, temperature: float) -> list[tuple[Ints, Floats]]:
        return concatenate(self.spread("likeliest", samples, 1, count, temperature))

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        return concatenate(self.spread("values", samples))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        *,
        current: bool = False,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        shards = split_evenly(requests, self.workers.size)  # every worker generates with a whole model
        options: dict[str, Any] = {"current": current}
        if isinstance(self.workers, LocalWorkers):  # other workers return all samples at once
            options["on_completion"] = on_completion
        return concatenate(self.workers.scatter("generate", shards, sampling, **options))

    def local_engine(self, *, current: bool = False) -> LocalEngine | None:
        """Returns the engine of the only worker, if that is this process; `current`: as for `generate`."""
        return self.workers.call("local_engine", current)[0] if isinstance(self.workers, LocalWorkers) else None

    def evaluate_tasks(self, settings: HarnessTasks) -> HarnessScores:
        """Run the tasks of a harness with the current weights, which all workers gather and the first one uses."""
        first = [rank == 0 for rank in range(self.workers.size)]
        scores: HarnessScores = self.workers.scatter("evaluate_tasks", first, settings)[0]
        return scores

    def update_generator(self, version: WeightVersion) -> None:
        self.workers.call("update_generator", version)

    def stop_ids(self) -> list[int]:
        return self.workers.call("stop_ids")[0]

    def score_statistics(self) -> tuple[float, float]:
        return self.workers.call("score_statistics")[0]

    def offload(self, part: Part) -> None:
        self.workers.call("offload", part)

    def onload(self, part: Part) -> None:
        self.workers.call("onload", part)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        return concatenate(self.spread("scores", samples))

    def annotate(self, entries: dict[str, Any]) -> None:
        self.workers.call("annotate", entries)

    def save_weights(self, folder: Path) -> None:
        self.workers.call("save_weights", folder)

    def save(self, folder: Path) -> None:
        self.workers.call("save", folder)

    def load(self, folder: Path) -> None:
        self.workers.call("load", folder)

    def start_hashing(self, checkpoint: Path, folder: Path) -> Callable[[], FileEntries]:
        """Let each worker sync and hash what it has saved in a folder of a checkpoint, while it trains.

        The returned function waits for the result; another thread may call it. If the only worker is this process,
        there is nothing to divide, and it returns no files.
        """
        if isinstance(self.workers, LocalWorkers):
            return dict
        self.workers.call("start_hashing", checkpoint, folder)

        def wait() -> FileEntries:
            while True:
                found = self.workers.call("hashed_files")
                if all(entries is not None for entries in found):
                    return {name: entry for entries in found for name, entry in entries.items()}
                time.sleep(HASH_POLL_SECONDS)

        return wait

    def spread(
        self, method: str, samples: Sequence[Sample], group_size: int = 1, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call the method with each data rank's part of the samples; return one result per data rank."""
        repeated = [part for part in self.shards(samples, group_size) for _ in range(self.ranks_per_sample)]
        results = self.workers.scatter(method, repeated * self.stages, *args, **kwargs)
        return results[-len(repeated) :: self.ranks_per_sample]

    def shards(self, samples: Sequence[T], group_size: int = 1) -> list[list[T]]:
        """Divide the samples among the data ranks."""
        return split_evenly(samples, self.workers.size // self.stages // self.ranks_per_sample, group_size)


class CurrentWeights:
    """Generates with the current weights of the policy, also while batches in flight use older ones."""

    def __init__(self, policy: LearnerGroup) -> None:
        self.policy = policy

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, on_completion: OnCompletion | None = None
    ) -> list[Sample]:
        return self.policy.generate(requests, sampling, current=True)

    def local_engine(self) -> LocalEngine | None:
        return self.policy.local_engine(current=True)


def concatenate(parts: Sequence[list[T]]) -> list[T]:
    return [item for part in parts for item in part]
