"""Training with a judge: verdicts in the record and in metrics, a replay without the service, single failures."""

import json

import pytest

from posttrain.core.errors import UsageError
from posttrain.train.launch import train
from tests.e2e.rows import write_rows
from tests.unit.rewards.judging import judging, write_rubric


@pytest.fixture
def server():
    with judging() as found:
        yield found


def options(folder, reward, out="run", **changes):
    return {
        "model": {"path": "pico"},
        "data": {"train": [write_rows("prompt", folder)]},
        "reward": {"functions": [reward], "workers": 1, "timeout_seconds": 60} | changes.pop("reward", {}),
        "rollout": {"samples_per_prompt": 4, "max_tokens": 6} | changes.pop("rollout", {}),
        "train": {"batch_size": 2, "learning_rate": 1e-3, "max_steps": 2},
        "save": {"every_steps": 0},
        "output_dir": str(folder / out),
        "quiet": True,
        **changes,
    }


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["pointwise", "pairwise", "ranking"])
def test_verdicts_are_recorded_and_replayed(server, tmp_path, mode):
    name = f"judge.longer_{mode}"
    how = {"scale": [1, 100], "prompt_price": 1.0}
    train("grpo", **options(tmp_path, write_rubric(tmp_path, server, "longer", mode, **how)))
    asked = len(server.asked)
    assert asked > 0
    recorded, metrics = rows(tmp_path / "run/rollouts.jsonl"), rows(tmp_path / "run/metrics.jsonl")
    used = sum(row[f"{name}/requests"] for row in metrics if f"{name}/requests" in row)
    assert used == asked
    assert sum(row[f"{name}/prompt_tokens"] for row in metrics) == 100 * asked
    assert sum(row[f"{name}/cost"] for row in metrics) == pytest.approx(100 * asked / 1e6)
    if mode != "pointwise":
        assert all(0 <= row[f"{name}/flip_rate"] <= 1 for row in metrics)
    for step in (1, 2):
        batch = [row for row in recorded if row["step"] == step]
        assert len(batch) == 8 and all("seen" in row["verdicts"][name]["reason"] for row in batch)
        for group in {row["group"] for row in batch}:
            members = [row for row in batch if row["group"] == group]
            longest = max(members, key=lambda row: len(row["text"]))
            assert all(row["reward"] <= longest["reward"] for row in members)

    elsewhere = write_rubric(tmp_path, server, "longer", mode, cache=str(tmp_path / "empty"), **how)
    train("grpo", **options(tmp_path, elsewhere, "again", rollout={"replay": str(tmp_path / "run")}))
    assert len(server.asked) == asked, "a replay takes the recorded verdicts"
    replayed = rows(tmp_path / "again/rollouts.jsonl")
    assert [row["reward"] for row in replayed] == [row["reward"] for row in recorded]
    assert rows(tmp_path / "again/metrics.jsonl")[0]["loss"] == metrics[0]["loss"]


def test_a_comparing_judge_needs_several_completions(server, tmp_path):
    reward = write_rubric(tmp_path, server, "longer", "pairwise")
    with pytest.raises(UsageError, match=r"rollout.samples_per_prompt is 1, but judge:.* compares completions"):
        train("reinforce", **options(tmp_path, reward, rollout={"samples_per_prompt": 1}))
