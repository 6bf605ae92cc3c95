"""A trainer of one's own in one file: dynamic fine-tuning (DFT, arXiv:2508.05629).

SFT in which a token weighs as much as the model believes in it now: what it finds absurd pulls less. Everything else,
data, packing, checkpoints, resume, is the loop's. From the top of the repository:

    python examples/custom_algorithm.py --model.path pico --data.train examples/data/chat.jsonl --steps 20
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from posttrain.algorithms import Algorithm
from posttrain.algorithms.base import register
from posttrain.cli.main import main
from posttrain.config.verbs import TRAINERS
from posttrain.core.errors import UsageError
from posttrain.core.types import Batch, Loss, Outputs

TRAINERS["dft"] = "SFT that trusts a token as much as the model does"


@register("dft")
class DynamicFineTuning(Algorithm):
    """-p^power log p of each token that counts; no gradient passes through the weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        power: float = 1.0
        """How much the probability weighs: 0 is plain SFT, 1 is DFT."""

    rows = "chat"
    unit = "token"
    separable = True  # no token's part reads another's log-probability

    def check(self) -> None:
        if self.config.power < 0:
            raise UsageError(f"algo.power is {self.config.power}: it must not be negative")

    def loss(self, out: Outputs, batch: Batch) -> Loss:
        """A sum over tokens: the learner divides it."""
        assert out.logprobs is not None
        logprobs = out.logprobs[batch.counted]
        weight = (self.config.power * logprobs.detach()).exp()
        return Loss(
            total=-(weight * logprobs).sum(),
            metrics={"nll": -logprobs.detach().sum(), "weight": weight.sum()},
        )


if __name__ == "__main__":
    sys.exit(main(["dft", *sys.argv[1:]]))
