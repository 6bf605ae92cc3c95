"""A file of answers -> the same rows with rewards: verifiers, functions, services and reward models, weighted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.config import DataConfig, ModelConfig, UpdateConfig
from posttrain.data.encode import Encoder
from posttrain.data.examples import Chat
from posttrain.errors import DataError, UsageError
from posttrain.learner import Learner
from posttrain.loops.helpers import check_reward_model
from posttrain.models.load import resolve_path
from posttrain.rewards.base import Completion, Rewards, Verdict, combine
from posttrain.serve.answers import Answer
from posttrain.types import Sample

AT_ONCE = 256  # answers


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
        self.learner = Learner(model, UpdateConfig(), head="score", trainable=False)
        vocabulary = int(self.learner.model.config.get_text_config().vocab_size)
        self.encoder = Encoder(self.learner.tokenizer, data, "chat", vocabulary)

    def verdicts(self, answers: Sequence[Answer]) -> list[Verdict]:
        """A score, or why there is none: a conversation may be too long, or beyond the tokenizer."""
        samples: dict[int, Sample] = {}
        faults: dict[int, str] = {}
        for place, answer in enumerate(answers):
            messages = [*answer.prompt, {"role": "assistant", "content": answer.text}]
            try:
                encoded = self.encoder.encode(Chat(origin=answer.origin, messages=messages, plain=answer.plain))
            except DataError as error:
                faults[place] = str(error)
                continue
            if encoded:
                samples[place] = encoded[0]
            else:
                faults[place] = f"longer than max_tokens = {self.encoder.config.max_tokens}"
        scores = dict(zip(samples, self.learner.scores(list(samples.values())), strict=True)) if samples else {}
        return [verdict_of(scores.get(place), faults.get(place, "")) for place in range(len(answers))]


def verdict_of(score: float | None, fault: str) -> Verdict:
    if score is not None and not math.isfinite(score):
        score, fault = None, f"the reward model said {score}"
    return Verdict(value=score, kind="error" if score is None else "ok", reason=fault)


def score(
    answers: Sequence[Answer],
    rewards: Rewards,
    models: dict[int, RewardModel],
    *,
    normalize: bool = False,
    report: Callable[[int], None] = lambda _: None,
) -> Scored:
    """Rewards and their parts for each answer; RewardError if more failed than `rewards` allows.

    `models`: reward models by their place among the rewards. With `normalize` the sum of each answer is taken relative
    to the mean and deviation of all answers here.
    """
    verdicts: list[list[Verdict | None]] = []
    for start in range(0, len(answers), AT_ONCE):
        chunk = answers[start : start + AT_ONCE]
        said = rewards.score([completion_of(answer) for answer in chunk])
        for place, model in models.items():
            for of_answer, verdict in zip(said, model.verdicts(chunk), strict=True):
                of_answer[place] = verdict
        verdicts += said
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
