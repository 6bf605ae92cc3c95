"""Metrics of a step: the parts of a reward are means over the same completions as the reward."""

import numpy as np
import pytest

from posttrain.core.types import Prompt, Sample
from posttrain.rollout.records import Rollout
from posttrain.train.summary import rollout_metrics


def rollout(group, reward, rewards, failure=""):
    tokens = np.array([1, 2, 3], dtype=np.int32)
    sample = Sample(tokens=tokens, mask=np.array([False, True, True]), group=group)
    sample.reward = reward
    prompt = Prompt(tokens=tokens[:1], messages=[])
    return Rollout(sample=sample, prompt=prompt, text="x", rewards=rewards, failure=failure)


def test_parts_of_the_reward_add_up():
    rollouts = [
        rollout(0, 1.0, {"correct": 1.0}),
        rollout(0, -0.5, {"correct": 0.0, "overlong": -0.5}),
        rollout(1, 0.25, {"correct": 0.5, "overlong": -0.25}),
        rollout(1, 0.0, {"correct": 1.0}, failure="short: timeout"),  # not scored: counts in neither
    ]
    metrics = rollout_metrics(rollouts, version=0)
    parts = {name: value for name, value in metrics.items() if name.startswith("rewards/")}
    assert parts == {"rewards/correct": 0.5, "rewards/overlong": -0.25}
    assert sum(parts.values()) == pytest.approx(metrics["reward"]) and metrics["failures"] == 1


def test_preemptions_are_counted_if_there_are_any():
    rollouts = [rollout(0, 1.0, {}), rollout(0, 0.0, {})]
    assert "preemptions" not in rollout_metrics(rollouts, version=0)
    rollouts[1].sample.preemptions = 3
    assert rollout_metrics(rollouts, version=0)["preemptions"] == 3
    assert "prefix_hits" not in rollout_metrics(rollouts, version=0)
    rollouts[0].sample.reused = 0.5
    assert rollout_metrics(rollouts, version=0)["prefix_hits"] == 0.25
    assert "draft_acceptance" not in rollout_metrics(rollouts, version=0)
    for each, drafted in zip(rollouts, (6, 10), strict=True):
        each.sample.draft_tokens, each.sample.accepted_tokens = drafted, 4
    assert rollout_metrics(rollouts, version=0)["draft_acceptance"] == 0.5
