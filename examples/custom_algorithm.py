"""A new algorithm in one file: dynamic fine-tuning (DFT, arXiv:2508.05629).

DFT is SFT in which each token is weighted by the probability that the model gives it now, so that tokens the model
finds implausible have less influence. Data, micro-batches, checkpoints and resume come from the training loop. From the
top of the repository:

    python examples/custom_algorithm.py --model pico --data examples/data/chat.jsonl --train.max_steps 20
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from posttrain.algorithms import Algorithm, register
from posttrain.cli.main import main
from posttrain.core.errors import UsageError
from posttrain.core.types import Loss, MicroBatch, Outputs


@register("dft", help="SFT that weights each token by its probability under the model")
class DynamicFineTuning(Algorithm):
    """Minimises -p^power log p of each token that counts; no gradient passes through the weight p^power."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        power: float = 1.0
        """Exponent of the probability in a token's weight: 0 is SFT, 1 is DFT."""

    config: Config

    example_kind = "chat"
    unit = "token"
    separable = True  # the loss of a token reads no other token's log-probability

    def check(self) -> None:
        if self.config.power < 0:
            raise UsageError(f"algo.power is {self.config.power}: it must not be negative")

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        """Returns a sum over tokens; the learner divides it."""
        assert out.logprobs is not None
        logprobs = out.logprobs[batch.counted]
        weight = (self.config.power * logprobs.detach()).exp()
        return Loss(
            total=-(weight * logprobs).sum(),
            metrics={"nll": -logprobs.detach().sum(), "weight": weight.sum()},
        )


if __name__ == "__main__":
    sys.exit(main(["dft", *sys.argv[1:]]))
