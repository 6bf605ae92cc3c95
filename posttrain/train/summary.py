"""Metrics of a step from its rollouts and updates, and the closing message of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.types import Sample, WeightVersion
from posttrain.rewards.verdict import NO_REWARD
from posttrain.rollout.data_completions import FROM_DATA
from posttrain.rollout.records import Rollout
from posttrain.rollout.rollouts import by_group, has_signal
from posttrain.train.run import Run

OFFLINE_METRICS = ("loss", "eval/loss", "accuracy", "eval/accuracy")
ONLINE_METRICS = ("reward", "eval/reward", "eval/accuracy", "length", "entropy", "kl", "divergence")


def average_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """Average the metrics of a step's updates; take the largest of `largest_...` and memory, the sum of `skipped`."""
    reduced: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in updates for name in metrics):
        values = [metrics[name] for metrics in updates if name in metrics]
        if name.startswith("largest_") or name.endswith("memory_gib"):
            reduced[name] = max(values)
        elif name.endswith("slowest_rank"):  # ranks have no average: that of the update with the longest wait
            measured = [metrics for metrics in updates if name in metrics]
            reduced[name] = max(measured, key=lambda metrics: metrics[f"{name}_ratio"])[name]
        else:
            reduced[name] = sum(values) / (1 if name.endswith("skipped") else len(values))
    return reduced


def rollout_metrics(rollouts: list[Rollout], version: WeightVersion) -> dict[str, float]:
    """Return metrics of a batch of rollouts; `version`: of the weights that train on it."""
    scored = [rollout for rollout in rollouts if not rollout.failure]
    forks = sum(rollout.branch > 0 for rollout in rollouts)
    given = [rollout for rollout in scored if rollout.sample.finish == FROM_DATA]
    if len(given) < len(scored):
        scored = [rollout for rollout in scored if rollout.sample.finish != FROM_DATA]  # what the policy generated
    rewards = np.array([rollout.sample.reward for rollout in scored])
    groups = [group for group in by_group(rollouts) if len(group) > 1]
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "length": float(np.mean([rollout.completion_tokens for rollout in scored])),
        "truncated": float(np.mean([rollout.sample.finish == "length" for rollout in scored])),
        "failures": float(sum(bool(rollout.failure) and rollout.failure != NO_REWARD for rollout in rollouts)),
        "staleness": float(np.mean([version - rollout.sample.version for rollout in scored])),
    }
    if groups:  # with one completion per prompt there is nothing to compare
        metrics["no_signal"] = sum(not has_signal(group) for group in groups) / len(groups)
    if given:
        metrics["data_completions"] = float(len(given))
    if forks:
        metrics["forks"] = float(forks)
    if preemptions := sum(rollout.sample.preemptions for rollout in rollouts):
        metrics["preemptions"] = float(preemptions)
    if any(rollout.sample.reused for rollout in rollouts):
        metrics["prefix_hits"] = float(np.mean([rollout.sample.reused for rollout in rollouts]))
    if drafted := sum(rollout.sample.draft_tokens for rollout in rollouts):
        metrics["draft_acceptance"] = sum(rollout.sample.accepted_tokens for rollout in rollouts) / drafted
    if unrewarded := sum(rollout.failure == NO_REWARD for rollout in rollouts):
        metrics["no_reward"] = float(unrewarded)
    for name in dict.fromkeys(name for rollout in scored for name in (*rollout.rewards, *rollout.not_applicable)):
        applying = [rollout for rollout in scored if name not in rollout.not_applicable]
        if len(applying) < len(scored):
            metrics[f"rewards/{name}_applies"] = len(applying) / len(scored)
        if applying:
            # A part that a completion does not have, such as the penalty of an overlong one, is 0 in its sum.
            metrics[f"rewards/{name}"] = float(np.mean([rollout.rewards.get(name, 0.0) for rollout in applying]))
    return metrics | judge_metrics(rollouts)


def judge_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns sums of what judges needed, and the share of verdicts that changed with the order of completions."""
    sums: dict[str, float] = {}
    for name, verdict in ((name, verdict) for rollout in rollouts for name, verdict in rollout.verdicts.items()):
        for key, number in verdict["counts"].items():
            sums[f"{name}/{key}"] = sums.get(f"{name}/{key}", 0.0) + number
    for name in [key.removesuffix("/swapped") for key in sums if key.endswith("/swapped")]:
        sums[f"{name}/flip_rate"] = sums.pop(f"{name}/flipped", 0.0) / sums.pop(f"{name}/swapped")
        decided, first = sums.pop(f"{name}/decided", 0.0), sums.pop(f"{name}/first_preferred", 0.0)
        sums[f"{name}/first_rate"] = first / decided if decided else 0.5
    return sums


def mixed_versions(samples: list[Sample]) -> float:
    """Return the fraction of samples that weights of more than one version have generated."""
    return float(np.mean([sample.newest > sample.version for sample in samples]))


def closing_message(run: Run, step: int, metrics: dict[str, float]) -> str:
    """Return what a finished run prints: its last metrics, and commands for what usually comes next."""
    online = isinstance(run.config, OnlineConfig)
    shown = ", ".join(f"{k} {metrics[k]:.4g}" for k in (ONLINE_METRICS if online else OFFLINE_METRICS) if k in metrics)
    skipped = f", {run.progress.skipped} skipped" if run.progress.skipped else ""
    folder = shlex.quote(str(run.directory.path))
    done = f"done: {run.data.steps} step{'s' * (run.data.steps != 1)}"
    if step < run.data.steps:
        done = f"stopped early after {step} of {run.data.steps} steps: {run.callbacks.stop_reason}"
    samples = f"completions: posttrain samples {folder}    " if online else ""
    evaluation, best = run.config.eval, ""
    if run.progress.best_step and (evaluation.metric_for_best_model or evaluation.early_stopping_patience):
        best = f"; best {run.progress.best_metric} {run.progress.best:.4g} at step {run.progress.best_step}"
    more = run.resume_command("N")
    if step < run.data.steps and evaluation.early_stopping_patience:
        more += " --eval.early_stopping_patience 0"  # with the same patience it would stop at once
    return (
        f"{done}{skipped}; {shown or 'nothing left to do'}{best}. Run directory: {run.directory.path}\n"
        f"{samples}export: posttrain export {folder} OUT    train more: {more}"
    )
