"""Process reward model: after each step's placeholder, is the right-token or the wrong-token more likely?

Cross-entropy at the placeholders, over the reward tokens (as in Math-Shepherd, arXiv:2312.08935) or over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.algorithms.base import Algorithm, register
from posttrain.core.errors import UsageError
from posttrain.core.types import ForwardRequest, Loss, MicroBatch, Outputs


@register("prm", help="train a process reward model on completions labelled step by step")
class ProcessReward(Algorithm):
    """Trains on one label per step: hard (right 1, wrong 0) or soft (the probability of right)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        placeholder: str = "ки"
        """Token that ends every step; the model scores the step there."""
        positive_token: str = "+"
        """Token that stands for a correct step."""
        negative_token: str = "-"
        """Token that stands for a wrong step."""
        among: Literal["reward_tokens", "vocabulary"] = "reward_tokens"
        """Tokens that the softmax at a placeholder runs over: the positive and the negative one, or all."""

    config: Config

    example_kind = "stepwise"
    unit = "token"  # the placeholders are the tokens that count
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-6}

    def check(self) -> None:
        config = self.config
        if config.positive_token == config.negative_token:
            raise UsageError(
                f"algo.positive_token and algo.negative_token are both {config.positive_token!r}: give two different "
                "tokens"
            )
        for name, token in (("positive_token", config.positive_token), ("negative_token", config.negative_token)):
            if config.placeholder == token:
                raise UsageError(f"algo.placeholder {token!r} is also algo.{name}: choose another placeholder")

    def reward_tokens(self) -> tuple[str, str]:
        """Return the token for a correct step and the one for a wrong step."""
        return self.config.positive_token, self.config.negative_token

    def placeholder(self) -> str:
        return self.config.placeholder

    def outputs(self) -> set[str]:
        return {"choices"}

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        ids = tuple(token_id(text) for text in self.reward_tokens())
        among_all = self.config.among == "vocabulary"
        return ForwardRequest(names=frozenset(self.outputs()), choice_ids=ids, among_all=among_all)

    def annotations(self) -> dict[str, Any]:
        return {"placeholder_token": self.config.placeholder, "reward_tokens": list(self.reward_tokens())}

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.choices is not None and batch.targets is not None
        right, wrong = out.choices.unbind(-1)
        target = batch.targets[batch.counted]
        per_step = -(target * right + (1 - target) * wrong)
        return Loss(total=per_step.sum(), metrics={"accuracy": ((right > wrong) == (target > 0.5)).sum()})
