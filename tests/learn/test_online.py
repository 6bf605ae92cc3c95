"""Reward rises: four algorithms teach a random toy model to write printable text, from three seeds each.

On-policy distillation takes a random toy model towards one that was trained.
"""

import json

import pytest

from posttrain.train.launch import train
from tests.e2e.rows import write_rows

PRINTABLE = """
def score(text):
    return sum(letter.isascii() and letter.isprintable() for letter in text) / max(1, len(text))
"""


def run(verb, tmp_path, seed, algo, steps=20):
    """Train with the share of printable letters as reward, and return the metrics of each step."""
    (tmp_path / "printable.py").write_text(PRINTABLE)
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
        steps=steps,
        out=str(tmp_path / "run"),
        quiet=True,
    )
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("verb", ["grpo", "rloo", "ppo", "reinforce"])
def test_reward_rises(verb, seed, tmp_path):
    algo = {"kl_coef": 0.0} | ({"critic_learning_rate": 1e-3} if verb == "ppo" else {})
    rewards = [row["reward"] for row in run(verb, tmp_path, seed, algo)]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.5 and last > first + 0.15, rewards


def test_completions_drawn_by_reward_teach_too(tmp_path):
    """PF-PPO."""
    algo = {"kl_coef": 0.0, "critic_learning_rate": 1e-3, "resample_by_reward": "power"}
    rewards = [row["reward"] for row in run("ppo", tmp_path, 0, algo)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards[:3] + rewards[-3:]


def test_covariant_tokens_that_are_held_keep_the_entropy(tmp_path):
    """KL-Cov."""
    several = {"kl_coef": 0.0, "mini_batch_size": 16, "epochs_per_batch": 2, "clip_low": 0.0, "clip_high": 0.0}
    entropies = []
    for held in ({}, {"kl_cov_fraction": 0.5, "kl_cov_coef": 5.0}):
        folder = tmp_path / str(len(entropies))
        folder.mkdir()
        entropies.append(run("grpo", folder, 0, several | held, steps=8)[-1]["entropy"])
    assert entropies[1] > entropies[0] + 0.1, entropies


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A toy model that has seen the letters of a few texts."""
    folder = tmp_path_factory.mktemp("teacher")
    train(
        "sft",
        model={"path": "pico"},
        data={"train": [write_rows("chat", folder)]},
        train={"max_steps": 15, "batch_size": 4, "learning_rate": 3e-3},
        output_dir=str(folder / "run"),
        quiet=True,
    )
    return str(folder / "run")


@pytest.mark.parametrize(
    "algo",
    [
        {"divergence": "reverse_kl"},
        {"divergence": "jsd", "divergence_top_k": 20},
        {"objective": "policy_gradient"},
        {"divergence_top_k": 20, "teacher_context_column": "prompt"},
    ],
    ids=lambda algo: "-".join(map(str, algo.values())),
)
def test_a_student_approaches_its_teacher(teacher, algo, tmp_path):
    train(
        "opd",
        model={"path": "pico"},
        data={"train": [write_rows("prompt", tmp_path)]},
        rollout={"max_tokens": 8, "samples_per_prompt": 4},
        train={"max_steps": 15, "batch_size": 8, "learning_rate": 2e-3},
        save={"every_steps": 0},
        algo={"teacher": teacher} | algo,
        output_dir=str(tmp_path / "run"),
        quiet=True,
    )
    found = [json.loads(line)["divergence"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, last = sum(found[:2]) / 2, sum(found[-2:]) / 2
    assert last < 0.6 * first, found
