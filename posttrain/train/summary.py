"""A step in numbers: what its answers look like, what its updates came to, the last words of a run."""

from __future__ import annotations

import shlex

import numpy as np

from posttrain.core.types import Sample
from posttrain.rollout.records import Rollout
from posttrain.rollout.rollouts import by_group, has_signal
from posttrain.train.run import Run


def averaged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; of `largest_...` the largest, of `skipped` the sum."""
    reduced: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if name.startswith("largest_"):
            reduced[name] = max(values)
        else:
            reduced[name] = sum(values) / (1 if name.endswith("skipped") else len(values))
    return reduced


def summary(rollouts: list[Rollout], version: int) -> dict[str, float]:
    """What a batch of answers looks like."""
    scored = [rollout for rollout in rollouts if not rollout.failure]
    rewards = np.array([rollout.sample.reward for rollout in scored])
    groups = [group for group in by_group(rollouts) if len(group) > 1]
    found = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "length": float(np.mean([rollout.completion_tokens for rollout in scored])),
        "truncated": float(np.mean([rollout.sample.finish == "length" for rollout in scored])),
        "failures": float(len(rollouts) - len(scored)),
        "staleness": float(np.mean([version - rollout.sample.version for rollout in scored])),
    }
    if groups:  # where a prompt has one answer there is nothing to compare
        found["no_signal"] = sum(not has_signal(group) for group in groups) / len(groups)
    for name in dict.fromkeys(name for rollout in scored for name in rollout.rewards):
        found[f"rewards/{name}"] = float(np.mean([r.rewards[name] for r in scored if name in r.rewards]))
    return found


def mixed_versions(samples: list[Sample]) -> float:
    """The part of them that weights of more than one version have drawn."""
    return float(np.mean([sample.newest > sample.version for sample in samples]))


def closing_words(run: Run, metrics: dict[str, float]) -> str:
    names = ("reward", "eval/reward", "eval/accuracy", "length", "entropy", "kl")
    shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
    folder = shlex.quote(str(run.folder.path))
    return (
        f"done: {run.data.steps} steps; {shown or 'nothing left to do'}. Run folder: {run.folder.path}\n"
        f"answers: posttrain samples {folder}    export: posttrain export {folder} OUT    "
        f"train more: {run.resume_command()} --steps N"
    )
