"""A variant of GRPO in ten lines: the advantage of a completion is its rank in its group, whatever the size of rewards.

A reward that is a hundred times larger than the others does not dominate its group. Generation, rewards, the loss,
checkpoints and resume come from GRPO and the training loop. From the top of the repository:

    python examples/rank_grpo.py --model pico --data examples/data/questions.jsonl --reward examples/reward.py:letters \
        --rollout.max_tokens 16 --train.max_steps 10 --train.learning_rate 1e-3
"""

import sys

import numpy as np

from posttrain.algorithms import register
from posttrain.algorithms.grpo import GRPO
from posttrain.cli.main import main


@register("rank_grpo", help="GRPO with advantages from ranks instead of rewards")
class RankGRPO(GRPO):
    """Assigns 1 to the best completion of a group, -1 to the worst, and the same to equal rewards."""

    def group_advantages(self, rewards: np.ndarray) -> np.ndarray:
        better_than = (rewards[:, None] > rewards).sum(axis=1)
        worse_than = (rewards[:, None] < rewards).sum(axis=1)
        return (better_than - worse_than) / max(len(rewards) - 1, 1)


if __name__ == "__main__":
    sys.exit(main(["rank_grpo", *sys.argv[1:]]))
