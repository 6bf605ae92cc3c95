"""Reward models: one class for reinforcement learning, `posttrain score` and `posttrain serve`.

A completion is encoded as `posttrain reward` encodes the examples that such a model is trained on: with its own
tokenizer and chat template, the prompt, the completion and the end-of-turn. Two cases need a rule:

- A completion that was cut off at a limit of tokens gets no end-of-turn, like an example that training truncates.
- Tokens that the policy sampled are used as they are if it has the same tokenizer and chat template. They differ from
  the encoding of their text only where that text does not give them back: bytes that are not valid UTF-8, control
  tokens in the middle, a division into tokens that the tokenizer does not choose, a stop text instead of an
  end-of-turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from posttrain.config.sections import DataConfig, ModelConfig, TrainConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import Sample
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import LabelledExample, Message
from posttrain.models.loading import read_config
from posttrain.models.paths import resolve_path
from posttrain.rewards.verdict import Verdict
from posttrain.rollout.records import Rollout
from posttrain.train.learner import Learner

CUT_OFF = "length"  # `finish` of a completion that ended at a limit of tokens


class ScoreHead(Protocol):
    """A model with a score head, in this process or on workers."""

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return the output of the score head for each sample."""


class RewardModel:
    """Scores completions by a model that `posttrain reward` trained, or any model with a score head."""

    def __init__(
        self,
        model: ScoreHead,
        encoder: Encoder,
        *,
        policy_tokenizer: Any = None,
        statistics: tuple[float, float] = (0.0, 1.0),
        on_device: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`policy_tokenizer`: of the policy that samples rollouts, with its chat template.

        `statistics`: a mean, which is subtracted from scores, and a deviation, by which they are divided.

        `on_device`: keeps the model on its device within a block.
        """
        self.model, self.encoder, self.on_device = model, encoder, on_device
        self.mean, self.deviation = statistics
        self.takes_sampled_tokens = policy_tokenizer is not None and same_encoding(encoder.tokenizer, policy_tokenizer)

    @classmethod
    def load(cls, model: ModelConfig, data: DataConfig) -> RewardModel:
        """Load a reward model into this process; `data`: its chat template and limit of tokens."""
        check_reward_model(model.path)
        model = ModelConfig(
            path=resolve_path(model.path), tokenizer=model.tokenizer, dtype=model.dtype, load_in_4bit=model.load_in_4bit
        )
        learner = Learner(model, TrainConfig(), head="score", trainable=False)
        vocabulary = int(learner.model.config.get_text_config().vocab_size)
        return cls(learner, Encoder(learner.tokenizer, data, "labelled", vocabulary))

    def score(self, completions: Sequence[LabelledExample | Sample]) -> list[Verdict]:
        """Return a score for each, or a reason: a conversation may be too long, or the tokenizer cannot encode it.

        A Sample is a completion that is encoded already.
        """
        samples: dict[int, Sample] = {}
        faults: dict[int, str] = {}
        for index, completion in enumerate(completions):
            try:
                encoded = [completion] if isinstance(completion, Sample) else self.encoder.encode(completion)
            except DataError as error:
                faults[index] = str(error)
                continue
            if encoded:
                samples[index] = encoded[0]
            else:
                faults[index] = f"longer than max_tokens = {self.encoder.config.max_length}"
        scores: dict[int, float] = {}
        if samples:
            with self.on_device():
                scores = dict(zip(samples, self.model.scores(list(samples.values())), strict=True))
        return [self.verdict(scores.get(index), faults.get(index, "")) for index in range(len(completions))]

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return a score for each rollout, or a reason why it has none."""
        return self.score([self.of_rollout(rollout) for rollout in rollouts])

    def of_rollout(self, rollout: Rollout) -> LabelledExample | Sample:
        if self.takes_sampled_tokens:
            return rollout.sample
        reply = {"role": "assistant", "content": rollout.text}
        *prompt, last = rollout.messages or [*rollout.prompt.messages, reply]
        return self.completion(prompt, str(last["content"]), finish=rollout.sample.finish, origin=rollout.sample.origin)

    def completion(self, prompt: list[Message], text: str, *, finish: str, origin: str) -> LabelledExample:
        """Return a completion as the example to encode; without a chat template the texts of its prompt are joined."""
        plain = not self.encoder.tokenizer.chat_template
        if plain:
            prompt = [{"role": "user", "content": "".join(str(message["content"]) for message in prompt)}]
        reply: list[Message] = [{"role": "assistant", "content": text}]
        return LabelledExample(
            origin=origin, prompt=prompt, completion=reply, label=0.0, plain=plain, cut_off=finish == CUT_OFF
        )

    def verdict(self, score: float | None, fault: str) -> Verdict:
        if score is not None and not math.isfinite(score):
            score, fault = None, f"the reward model returned {score}"
        if score is None:
            return Verdict(value=None, kind="error", reason=fault)
        return Verdict(value=(score - self.mean) / self.deviation, kind="ok")


def same_encoding(first: Any, second: Any) -> bool:
    """Whether two tokenizers have the same vocabulary and the same chat template."""
    return first.chat_template == second.chat_template and first.get_vocab() == second.get_vocab()


def check_reward_model(path: str) -> None:
    """Raise UsageError, before any model is loaded, if there is no reward model at this path."""
    try:
        described = read_config(resolve_path(path), "score")
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "reward", 1)) from error
    if not any("SequenceClassification" in name for name in described.architectures or ()):
        raise UsageError(f"reward: model:{path} has no score head. Train a reward model with: posttrain reward")
