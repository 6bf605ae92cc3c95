"""Reward rises: four algorithms teach a random toy model to write printable text, from three seeds each."""

import json

import pytest

from posttrain.train.launch import train
from tests.e2e.rows import write_rows

PRINTABLE = """
def score(text):
    return sum(letter.isascii() and letter.isprintable() for letter in text) / max(1, len(text))
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("verb", ["grpo", "rloo", "ppo", "reinforce"])
def test_reward_rises(verb, seed, tmp_path):
    (tmp_path / "printable.py").write_text(PRINTABLE)
    algo = {"kl": 0.0} | ({"critic_learning_rate": 1e-3} if verb == "ppo" else {})
    train(
        verb,
        model={"path": "pico"},
        data={"train": [write_rows("prompt", tmp_path)]},
        reward=[f"{tmp_path}/printable.py:score"],
        rollout={"samples_per_prompt": 8, "max_tokens": 8},
        rewards={"workers": 1},
        update={"rows_per_step": 8, "learning_rate": 1e-3},
        save={"every": 0},
        algo=algo,
        seed=seed,
        steps=20,
        out=str(tmp_path / "run"),
        quiet=True,
    )
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.5 and last > first + 0.15, rewards
