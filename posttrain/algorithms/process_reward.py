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


@register("prm", help="a process reward model from answers labelled step by step")
class ProcessReward(Algorithm):
    """Trains on one label per step: hard (right 1, wrong 0) or soft (the probability of right)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        placeholder: str = "ки"
        """Token that ends every step; the model judges the step there."""
        reward_tokens: tuple[str, ...] = ("+", "-")
        """The token for a right step, then the token for a wrong one."""
        among: Literal["reward_tokens", "vocabulary"] = "reward_tokens"
        """What these compete with: each other, or all tokens, which then lose their probability there."""

    config: Config

    example_kind = "stepwise"
    unit = "token"  # the placeholders are the tokens that count
    defaults: ClassVar[dict[str, Any]] = {"train.learning_rate": 1e-6}

    def check(self) -> None:
        tokens = self.config.reward_tokens
        if len(tokens) != 2 or tokens[0] == tokens[1]:
            raise UsageError(
                f"algo.reward_tokens is {list(tokens)}: give two different tokens, the one for a right step first"
            )
        if self.config.placeholder in tokens:
            raise UsageError(
                f"algo.placeholder {self.config.placeholder!r} is also in algo.reward_tokens {list(tokens)}: "
                "choose another placeholder"
            )

    def placeholder(self) -> str:
        return self.config.placeholder

    def outputs(self) -> set[str]:
        return {"choices"}

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        ids = tuple(token_id(text) for text in self.config.reward_tokens)
        among_all = self.config.among == "vocabulary"
        return ForwardRequest(names=frozenset(self.outputs()), choice_ids=ids, among_all=among_all)

    def annotations(self) -> dict[str, Any]:
        return {"placeholder_token": self.config.placeholder, "reward_tokens": list(self.config.reward_tokens)}

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        assert out.choices is not None and batch.targets is not None
        right, wrong = out.choices.unbind(-1)
        target = batch.targets[batch.counted]
        per_step = -(target * right + (1 - target) * wrong)
        return Loss(total=per_step.sum(), metrics={"accuracy": ((right > wrong) == (target > 0.5)).sum()})
