"""Reward models in a run: a score for each completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.core.errors import UsageError
from posttrain.core.types import Sample
from posttrain.models.loading import read_config
from posttrain.models.paths import resolve_path
from posttrain.rollout.records import Rollout
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.offload import Offloader


class RolloutRewardModel:
    """Scores rollouts by a model that `posttrain reward` trained, or any model with a score head."""

    def __init__(
        self, model: LearnerGroup, tokenizer: Any, offloader: Offloader, *, same_tokens: bool, normalize: bool
    ) -> None:
        """`same_tokens`: its tokenizer is the policy's; else conversations are encoded with its own `tokenizer`."""
        self.model, self.tokenizer, self.offloader, self.same_tokens = model, tokenizer, offloader, same_tokens
        self.mean, self.deviation = model.score_statistics() if normalize else (0.0, 1.0)
        offloader.offload("reward", model)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        samples = [rollout.sample if self.same_tokens else self.encode(rollout) for rollout in rollouts]
        with self.offloader.on_device("reward", self.model):
            return [(score - self.mean) / self.deviation for score in self.model.scores(samples)]

    def encode(self, rollout: Rollout) -> Sample:
        """Encodes the conversation with the reward model's own tokenizer and chat template."""
        messages = rollout.messages or [*rollout.prompt.messages, {"role": "assistant", "content": rollout.text}]
        if self.tokenizer.chat_template:
            ids = self.tokenizer.apply_chat_template(messages, return_dict=False)
        else:
            ids = self.tokenizer("".join(str(message["content"]) for message in messages))["input_ids"]
        tokens = np.array(ids, dtype=np.int32)
        return Sample(tokens=tokens, mask=np.zeros(len(tokens), dtype=np.bool_), origin=rollout.sample.origin)


def check_reward_model(path: str) -> None:
    """Raises UsageError, before any model is loaded, if there is no reward model at this path."""
    try:
        described = read_config(resolve_path(path), "score")
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "reward", 1)) from error
    if not any("SequenceClassification" in name for name in described.architectures or ()):
        raise UsageError(f"reward: model:{path} has no score head. Train a reward model with: posttrain reward")
