"""Adds rewards to a file of completions: by verifiers, functions, services and reward models, weighted."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.disk import disk_errors
from posttrain.core.errors import RewardError, UsageError
from posttrain.core.files import file_sha256
from posttrain.core.progress import ProgressDisplay, time_left
from posttrain.data.reading.examples import LabelledExample
from posttrain.inference.completion_files import CompletionExample, jsonl, read_completions, write_rows
from posttrain.models.paths import model_fingerprint, resolve_path
from posttrain.rewards.base import Completion, Rewards, Verdict, combine, group_by_prompt
from posttrain.rewards.verdict import NO_REWARD
from posttrain.train.reward_model import RewardModel, check_reward_model

BATCH_SIZE = 256  # completions that are scored, and saved for a resume, together


@dataclass(kw_only=True, slots=True)
class Scoring:
    """Settings: a file of completions, and the rewards to compute."""

    file: str
    out: str
    reward: tuple[str, ...]
    weights: tuple[float, ...] = ()  # 1 each
    normalize: bool = False  # relative to mean and deviation of all completions
    timeout_seconds: float = 10.0
    memory_gib: float = 2.0
    workers: int = 2
    max_failure_rate: float = 0.1
    env: tuple[str, ...] = ()  # variables that functions may see
    allow_unprotected_code: bool = False  # see Rewards
    map_keys: str | Mapping[str, Any] = ""
    max_rows: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)  # how reward models are loaded
    data: DataConfig = field(default_factory=DataConfig)  # their template and longest conversation

    def rewards(self) -> Rewards:
        return Rewards(
            self.reward,
            self.weights,
            timeout_seconds=self.timeout_seconds,
            memory_gib=self.memory_gib,
            workers=self.workers,
            max_failure_rate=self.max_failure_rate,
            env=self.env,
            allow_unprotected_code=self.allow_unprotected_code,
        )


@dataclass(slots=True)
class Scored:
    """The rows with `reward` and `rewards`, and statistics."""

    rows: list[dict[str, Any]]
    failed: int
    mean: float  # of the rewards before normalization
    deviation: float
    faults: dict[str, int] = field(default_factory=dict)  # last line of a failure's reason, and how often it occurred


def score_file(config: Scoring, report: Callable[[int, int], None] = lambda *_: None) -> Scored:
    """Write the rows of `file` with their rewards to `out`.

    `report` receives the numbers of scored and of all rows, first of those that an earlier process has scored.
    """
    out = jsonl(config.out)
    with config.rewards() as rewards:
        rewards.check()
        for _, path in rewards.models:
            check_reward_model(path)
        completions = read_completions(config.file, config.map_keys, config.max_rows)
        rewards.check(sorted(set.intersection(*(set(completion.columns) for completion in completions))))
        models = load_models(rewards, config.model, config.data)
        total, partial = len(completions), PartialScores(out.with_name(f"{out.name}.begun"), identity(config, rewards))
        try:
            scored = score(
                completions,
                rewards,
                models,
                normalize=config.normalize,
                report=lambda done: report(done, total),
                partial=partial,
            )
        except RewardError:  # failed verdicts must not be reused
            partial.file.unlink()
            raise
    write_rows(out, scored.rows)
    partial.file.unlink()
    return scored


class ScoreProgress:
    """Shows how many completions are scored, and the remaining time at the speed of this process."""

    def __init__(self, display: ProgressDisplay) -> None:
        self.display = display
        self.resumed, self.started = 0, 0.0

    def report(self, done: int, total: int) -> None:
        if not self.started:
            self.resumed, self.started = done, time.monotonic()
        if self.resumed < done < total or self.display.on_terminal:  # the end has a line of its own
            eta = time_left(self.started, done - self.resumed, total - self.resumed)
            self.display.update(f"{done:,} of {total:,} scored", done=done, total=total, eta=eta)


class PartialScores:
    """A resume file, valid only for identical settings: verdicts so far, one line per BATCH_SIZE completions."""

    def __init__(self, file: Path, identity: str) -> None:
        self.file = file
        self.verdicts: list[list[list[Verdict | None]]] = []
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []  # the last line may be incomplete
        file.parent.mkdir(parents=True, exist_ok=True)
        if not lines or lines[0].decode("utf-8", "replace") != identity:
            with disk_errors(file):
                file.write_text(f"{identity}\n", encoding="utf-8")
            return
        self.verdicts = [
            [[verdict and Verdict(**verdict) for verdict in row] for row in json.loads(line)] for line in lines[1:]
        ]
        os.truncate(file, sum(len(line) + 1 for line in lines))

    def add(self, verdicts: list[list[Verdict | None]]) -> None:
        line = json.dumps([[verdict and asdict(verdict) for verdict in row] for row in verdicts]) + "\n"
        with disk_errors(self.file), self.file.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def identity(config: Scoring, rewards: Rewards) -> str:
    """Return a digest of everything that decides the verdicts: completions, rewards, settings."""
    digest = hashlib.sha256(Path(config.file).read_bytes() if Path(config.file).is_file() else config.file.encode())
    for spec in rewards.specs:
        place = Path(spec.place)
        content = model_fingerprint(resolve_path(spec.place)) if spec.kind == "model" else ""
        if spec.kind in ("function", "judge") and place.is_file():
            content = file_sha256(place)
        digest.update(f"{spec.text} {content}\n".encode())
    how = (config.map_keys, config.max_rows, asdict(config.model), asdict(config.data), BATCH_SIZE)
    digest.update(json.dumps(how, sort_keys=True).encode())
    return digest.hexdigest()


def score(
    completions: Sequence[CompletionExample],
    rewards: Rewards,
    models: dict[int, RewardModel],
    *,
    normalize: bool = False,
    report: Callable[[int], None] = lambda _: None,
    partial: PartialScores | None = None,
) -> Scored:
    """Compute the reward of each completion and its parts; RewardError if more failed than `rewards` allows.

    `models`: reward models by their index among the rewards. With `normalize` each sum has the mean of all completions
    subtracted and is divided by their standard deviation.
    """
    verdicts = [of_completion for chunk in partial.verdicts for of_completion in chunk] if partial else []
    report(len(verdicts))
    for start in range(len(verdicts), len(completions), BATCH_SIZE):
        chunk = completions[start : start + BATCH_SIZE]
        inputs = [reward_input(completion) for completion in chunk]
        new = rewards.score(inputs)
        for place, model in models.items():
            examples = [reward_model_input(model, completion) for completion in chunk]
            for of_completion, verdict in zip(new, model.score(examples), strict=True):
                of_completion[place] = verdict
        if models and not rewards.comparing:
            rewards.run_combiner(inputs, new)
        verdicts += new
        if partial is not None:
            partial.add(new)
        report(len(verdicts))
    if rewards.comparing:  # now that all completions of a prompt are there
        inputs = [reward_input(completion) for completion in completions]
        rewards.compare(inputs, group_by_prompt(inputs), verdicts)
        rewards.run_combiner(inputs, verdicts)
    rewards.check_failures(verdicts)
    totals = [combine(of_completion, rewards.weights) for of_completion in verdicts]
    mean, deviation = statistics([total for total in totals if total is not None])
    rows, faults = [], dict[str, int]()
    for completion, total, of_completion in zip(completions, totals, verdicts, strict=True):
        parts, failure = reward_parts(rewards.names, of_completion)
        if total is None and not failure:
            failure = NO_REWARD
        if failure:
            last = failure.strip().rpartition("\n")[2]
            faults[last] = faults.get(last, 0) + 1
        found: dict[str, Any] = {"reward": total}
        if normalize:
            relative = None if total is None else (total - mean) / deviation if deviation else 0.0
            found = {"reward": relative, "raw_reward": total}
        judged = [(n, v) for n, v in named_verdicts(rewards.names, of_completion) if n in rewards.judges]
        explained = {name: {"reason": verdict.reason, "replies": verdict.replies} for name, verdict in judged}
        more = {"verdicts": explained} if explained else {}
        rows.append({**completion.row, **found, "rewards": parts, "failure": failure, **more})
    return Scored(rows, sum(total is None for total in totals), mean, deviation, faults)


def load_models(rewards: Rewards, model: ModelConfig, data: DataConfig) -> dict[int, RewardModel]:
    """Load the reward models among the rewards; `model` holds all settings but the path."""
    for _, path in rewards.models:
        check_reward_model(path)
    loaded = {}
    for place, path in rewards.models:
        how = ModelConfig(path=path, dtype=model.dtype, load_in_4bit=model.load_in_4bit)
        try:
            loaded[place] = RewardModel.load(how, data)
        except UsageError as error:
            raise UsageError(str(error).replace("model.path", "reward", 1)) from error
    return loaded


def reward_input(completion: CompletionExample) -> Completion:
    """Return the completion as reward functions receive it."""
    tokens = completion.row.get("tokens")
    return Completion(
        prompt="\n".join(str(message["content"]) for message in completion.prompt),
        messages=completion.prompt,
        text=completion.text,
        finish=str(completion.row.get("finish", "")),
        tokens=len(tokens) if isinstance(tokens, list) else 0,
        columns=completion.columns,
    )


def reward_model_input(model: RewardModel, completion: CompletionExample) -> LabelledExample:
    """Return the completion as a reward model receives it."""
    finish = str(completion.row.get("finish", ""))
    return model.completion(completion.prompt, completion.text, finish=finish, origin=completion.origin)


def reward_parts(names: Sequence[str], verdicts: Sequence[Verdict | None]) -> tuple[dict[str, float], str]:
    """Return each reward by name, and the reasons of those that failed."""
    parts, failures = {}, []
    for name, verdict in named_verdicts(names, verdicts):
        if verdict.failed:
            failures.append(f"{name}: {verdict.kind}: {verdict.reason}")
        elif verdict.value is not None:
            parts[name] = verdict.value
    return parts, "; ".join(failures)


def named_verdicts(names: Sequence[str], verdicts: Sequence[Verdict | None]) -> Iterator[tuple[str, Verdict]]:
    for name, verdict in zip(names, verdicts, strict=True):
        assert verdict is not None, f"the reward model {name} was not called"
        yield name, verdict


def statistics(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and (population) standard deviation; of equal values the deviation is exactly 0."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if min(values) == max(values):
        return values[0], 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
