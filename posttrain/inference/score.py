"""A file of answers -> the same rows with rewards: verifiers, functions, services and reward models, weighted."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig
from posttrain.core.errors import DataError, RewardError, UsageError
from posttrain.core.files import file_sha256
from posttrain.core.types import Sample
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import ChatExample
from posttrain.inference.completion_files import Answer, jsonl, read_answers, write_rows
from posttrain.models.paths import resolve_path
from posttrain.rewards.base import Completion, Rewards, Verdict, combine
from posttrain.train.learner import Learner
from posttrain.train.reward_model import check_reward_model
from posttrain.train.run import fingerprint

AT_ONCE = 256  # answers


@dataclass(kw_only=True, slots=True)
class Scoring:
    """A file of answers, and who judges them."""

    file: str
    out: str
    reward: tuple[str, ...]
    weights: tuple[float, ...] = ()  # 1 each
    normalize: bool = False  # relative to mean and deviation of all answers
    timeout_seconds: float = 10.0
    memory_gib: float = 2.0
    workers: int = 2
    max_failure_rate: float = 0.1
    env: tuple[str, ...] = ()  # variables that functions may see
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
        )


@dataclass(slots=True)
class Scored:
    """The rows with `reward` and `rewards`, and what came of them all."""

    rows: list[dict[str, Any]]
    failed: int
    mean: float  # of the rewards as they were said
    deviation: float
    faults: dict[str, int] = field(default_factory=dict)  # last line of a reason: how often


class RewardModel:
    """A score for each answer by a model that `posttrain reward` made, in that model's own tokens."""

    def __init__(self, model: ModelConfig, data: DataConfig) -> None:
        check_reward_model(model.path)
        model = ModelConfig(
            path=resolve_path(model.path), tokenizer=model.tokenizer, dtype=model.dtype, load_in_4bit=model.load_in_4bit
        )
        self.learner = Learner(model, TrainConfig(), head="score", trainable=False)
        vocabulary = int(self.learner.model.config.get_text_config().vocab_size)
        self.encoder = Encoder(self.learner.tokenizer, data, "chat", vocabulary)

    def verdicts(self, answers: Sequence[Answer]) -> list[Verdict]:
        """A score, or why there is none: a conversation may be too long, or beyond the tokenizer."""
        samples: dict[int, Sample] = {}
        faults: dict[int, str] = {}
        for place, answer in enumerate(answers):
            messages = [*answer.prompt, {"role": "assistant", "content": answer.text}]
            try:
                encoded = self.encoder.encode(ChatExample(origin=answer.origin, messages=messages, plain=answer.plain))
            except DataError as error:
                faults[place] = str(error)
                continue
            if encoded:
                samples[place] = encoded[0]
            else:
                faults[place] = f"longer than max_tokens = {self.encoder.config.max_length}"
        scores = dict(zip(samples, self.learner.scores(list(samples.values())), strict=True)) if samples else {}
        return [verdict_of(scores.get(place), faults.get(place, "")) for place in range(len(answers))]


def verdict_of(score: float | None, fault: str) -> Verdict:
    if score is not None and not math.isfinite(score):
        score, fault = None, f"the reward model said {score}"
    return Verdict(value=score, kind="error" if score is None else "ok", reason=fault)


def score_file(config: Scoring, report: Callable[[int, int], None] = lambda *_: None) -> Scored:
    """Write the rows of `file` with their rewards to `out`; `report` is told how many of how many are done."""
    out = jsonl(config.out)
    with config.rewards() as rewards:
        rewards.check()
        for _, path in rewards.models:
            check_reward_model(path)
        answers = read_answers(config.file, config.map_keys, config.max_rows)
        rewards.check(sorted(set.intersection(*(set(answer.columns) for answer in answers))))
        models = load_models(rewards, config.model, config.data)
        total, begun = len(answers), Begun(out.with_name(f"{out.name}.begun"), identity(config, rewards))
        try:
            scored = score(
                answers,
                rewards,
                models,
                normalize=config.normalize,
                report=lambda done: report(done, total),
                begun=begun,
            )
        except RewardError:  # whatever it was, it is to be asked again
            begun.file.unlink()
            raise
    write_rows(out, scored.rows)
    begun.file.unlink()
    return scored


class Begun:
    """Verdicts so far, a line for each AT_ONCE answers: judges may be slow, and dear. Of no use to another question."""

    def __init__(self, file: Path, identity: str) -> None:
        self.file = file
        self.verdicts: list[list[list[Verdict | None]]] = []
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []  # the last may be torn
        file.parent.mkdir(parents=True, exist_ok=True)
        if not lines or lines[0].decode("utf-8", "replace") != identity:
            file.write_text(f"{identity}\n", encoding="utf-8")
            return
        self.verdicts = [
            [[verdict and Verdict(**verdict) for verdict in row] for row in json.loads(line)] for line in lines[1:]
        ]
        os.truncate(file, sum(len(line) + 1 for line in lines))

    def add(self, verdicts: list[list[Verdict | None]]) -> None:
        line = json.dumps([[verdict and asdict(verdict) for verdict in row] for row in verdicts]) + "\n"
        with self.file.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def identity(config: Scoring, rewards: Rewards) -> str:
    """Of a question to judges: the answers, who is asked, and how."""
    digest = hashlib.sha256(Path(config.file).read_bytes() if Path(config.file).is_file() else config.file.encode())
    for spec in rewards.specs:
        place = Path(spec.place)
        content = fingerprint(resolve_path(spec.place)) if spec.kind == "model" else ""
        if spec.kind == "function" and place.is_file():
            content = file_sha256(place)
        digest.update(f"{spec.text} {content}\n".encode())
    how = (config.map_keys, config.max_rows, asdict(config.model), asdict(config.data), AT_ONCE)
    digest.update(json.dumps(how, sort_keys=True).encode())
    return digest.hexdigest()


def score(
    answers: Sequence[Answer],
    rewards: Rewards,
    models: dict[int, RewardModel],
    *,
    normalize: bool = False,
    report: Callable[[int], None] = lambda _: None,
    begun: Begun | None = None,
) -> Scored:
    """Rewards and their parts for each answer; RewardError if more failed than `rewards` allows.

    `models`: reward models by their place among the rewards. With `normalize` the sum of each answer is taken relative
    to the mean and deviation of all answers here.
    """
    verdicts = [of_answer for chunk in begun.verdicts for of_answer in chunk] if begun else []
    for start in range(len(verdicts), len(answers), AT_ONCE):
        chunk = answers[start : start + AT_ONCE]
        completions = [completion_of(answer) for answer in chunk]
        said = rewards.score(completions)
        for place, model in models.items():
            for of_answer, verdict in zip(said, model.verdicts(chunk), strict=True):
                of_answer[place] = verdict
        if models:
            rewards.run_combiner(completions, said)
        verdicts += said
        if begun is not None:
            begun.add(said)
        report(len(verdicts))
    rewards.check_failures(verdicts)
    totals = [combine(of_answer, rewards.weights) for of_answer in verdicts]
    mean, deviation = statistics([total for total in totals if total is not None])
    rows, faults = [], dict[str, int]()
    for answer, total, of_answer in zip(answers, totals, verdicts, strict=True):
        parts, failure = parts_of(rewards.names, of_answer)
        if failure:
            last = failure.strip().rpartition("\n")[2]
            faults[last] = faults.get(last, 0) + 1
        found: dict[str, Any] = {"reward": total}
        if normalize:
            relative = None if total is None else (total - mean) / deviation if deviation else 0.0
            found = {"reward": relative, "raw_reward": total}
        rows.append({**answer.row, **found, "rewards": parts, "failure": failure})
    return Scored(rows, sum(total is None for total in totals), mean, deviation, faults)


def load_models(rewards: Rewards, model: ModelConfig, data: DataConfig) -> dict[int, RewardModel]:
    """The reward models among the rewards, loaded; `model` says how, apart from the path."""
    for _, path in rewards.models:
        check_reward_model(path)
    loaded = {}
    for place, path in rewards.models:
        how = ModelConfig(path=path, dtype=model.dtype, load_in_4bit=model.load_in_4bit)
        try:
            loaded[place] = RewardModel(how, data)
        except UsageError as error:
            raise UsageError(str(error).replace("model.path", "reward", 1)) from error
    return loaded


def completion_of(answer: Answer) -> Completion:
    tokens = answer.row.get("tokens")
    return Completion(
        prompt="\n".join(str(message["content"]) for message in answer.prompt),
        messages=answer.prompt,
        text=answer.text,
        finish=str(answer.row.get("finish", "")),
        tokens=len(tokens) if isinstance(tokens, list) else 0,
        columns=answer.columns,
    )


def parts_of(names: Sequence[str], verdicts: Sequence[Verdict | None]) -> tuple[dict[str, float], str]:
    """What each reward said, and why some said nothing."""
    parts, failures = {}, []
    for name, verdict in named(names, verdicts):
        if verdict.value is None:
            failures.append(f"{name}: {verdict.kind}: {verdict.reason}")
        else:
            parts[name] = verdict.value
    return parts, "; ".join(failures)


def named(names: Sequence[str], verdicts: Sequence[Verdict | None]) -> Iterator[tuple[str, Verdict]]:
    for name, verdict in zip(names, verdicts, strict=True):
        assert verdict is not None, f"the reward model {name} was not asked"
        yield name, verdict


def statistics(values: Sequence[float]) -> tuple[float, float]:
    """Mean and (population) standard deviation; of equal values the deviation is exactly 0."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if min(values) == max(values):
        return values[0], 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
