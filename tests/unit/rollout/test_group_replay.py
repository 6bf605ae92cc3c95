"""Groups without signal are replaced by earlier ones with signal; a resumed run replays the same groups."""

import json

import numpy as np
import pytest

from posttrain import GRPOTrainer
from posttrain.core.types import Sample
from posttrain.rollout.group_replay import GroupReplay
from posttrain.rollout.records import Rollout
from tests.unit.rollout.made import prompt


def group(number, rewards):
    asked = prompt("q")
    tokens = np.concatenate([asked.tokens, np.array([7, 8], dtype=np.int32)])
    mask = np.arange(len(tokens)) >= len(asked.tokens)
    made = []
    for reward in rewards:
        sample = Sample(tokens=tokens, mask=mask, reward=reward, group=number, logprobs=-mask.astype(np.float32))
        sample.advantages = mask.astype(np.float32)
        made.append(Rollout(sample=sample, prompt=asked, text="x"))
    return made


def numbers(rollouts, **wanted):
    return [r.sample.group for r in rollouts if all(getattr(r, name) == value for name, value in wanted.items())][::2]


def test_the_newest_groups_with_signal_take_the_place_of_those_without():
    replay = GroupReplay(max_age=2)
    first = replay.replace_groups([*group(0, (0, 1)), *group(1, (1, 0)), *group(2, (1, 1))], 1)
    assert numbers(first) == [0, 1, 2] and not any(r.replaced or r.replayed for r in first), "nothing earlier yet"
    second = replay.replace_groups([*group(3, (0, 0)), *group(4, (0, 1))], 2)
    assert numbers(second) == [3, 4, 1] and numbers(second, replaced=True) == [3]
    assert numbers(second, replayed=True) == [1], "the newest of the first step"
    assert all(r.sample.advantages is None and r.sample.logprobs is not None for r in second if r.replayed)
    third = replay.replace_groups([*group(5, (0, 0)), *group(6, (1, 1)), *group(7, (1, 1))], 3)
    assert numbers(third, replayed=True) == [0, 4] and numbers(third, replaced=True) == [5, 6], "each once more"
    replay.replace_groups(group(8, (0, 1)), 4)
    late = replay.replace_groups(group(9, (1, 1)), 7)
    assert numbers(late, replayed=True) == [] and not late[0].replaced, "too old"


def test_the_state_is_json():
    replay, other = GroupReplay(3), GroupReplay(3)
    replay.replace_groups([*group(0, (0, 1)), *group(1, (1, 0.25))], 1)
    other.load_state(json.loads(json.dumps(replay.state())))
    assert [(step, [r.sample.reward for r in found]) for step, found in other.groups] == [(1, [0, 1]), (1, [1, 0.25])]
    assert other.state() == replay.state()


CODE = """
def score(text, prompt):
    return float(len(text.encode()) % 2) if "odd" in prompt else 1.0
"""


def trainer(folder, **more):
    rows = [{"prompt": f"{'odd' if i % 2 else 'even'} {i}"} for i in range(8)]
    (folder / "r.py").write_text(CODE)
    config = {
        "train": {"batch_size": 4, "max_steps": 4, "learning_rate": 1e-3},
        "rollout": {"max_tokens": 6, "samples_per_prompt": 4, "replay_max_age": 3, **more.pop("rollout", {})},
        "output_dir": str(folder / "run"),
        "quiet": True,
    }
    return GRPOTrainer("pico", f"{folder}/r.py:score", rows, config | more)


@pytest.mark.parametrize("rollout", [{}, {"ahead": 1}])
def test_a_resumed_run_replays_the_same_groups(rollout, tmp_path):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    with trainer(tmp_path / "whole", rollout=rollout) as run:
        run.train()
    with trainer(tmp_path / "parts", rollout=rollout) as run:
        for _ in range(2):
            run.train_step(run.make_experience())
        run.save()
    with trainer(tmp_path / "parts", rollout=rollout, resume=True) as run:
        run.train()
    rows = [
        [json.loads(line) for line in (tmp_path / name / "run/metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    names = ("loss", "reward", "replayed_groups", "staleness", "policy_drift", "grad_norm")
    seen = [[{name: row.get(name) for name in names} for row in found] for found in rows]
    assert seen[0] == seen[1]
    assert rows[0][0]["replayed_groups"] == 0 and sum(row["replayed_groups"] for row in rows[0]) > 0
    assert sum(row.get("policy_drift", 0.0) for row in rows[0]) > 0, "replayed completions are of older weights"
    recorded = (tmp_path / "whole/run/rollouts.jsonl").read_text().splitlines()
    assert len(recorded) == 4 * 4 * 4, "a replayed completion is recorded once"
