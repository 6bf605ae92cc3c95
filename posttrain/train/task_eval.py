"""Evaluation of the policy with the tasks of a harness while it trains: lm-eval or inspect-ai."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.algorithms import Algorithm
from posttrain.config.sections import Config
from posttrain.core.errors import UsageError
from posttrain.harness.base import HarnessTasks, check_tasks
from posttrain.train.learner_group import LearnerGroup

EVALUATIONS = "evals"  # in a run directory: a directory per evaluated step, with figures and scores of each example


def task_settings(config: Config, algorithm: Algorithm) -> HarnessTasks | None:
    """Return the tasks of eval.harness, checked before a model is loaded; None without a harness."""
    chosen = config.eval
    if not chosen.harness:
        return None
    if algorithm.head == "score":
        raise UsageError(
            f"eval.harness is {chosen.harness}, but a reward model has no tokens to generate or to rate: leave it out"
        )
    settings = HarnessTasks(
        harness=chosen.harness,
        tasks=chosen.tasks,
        num_fewshot=chosen.num_fewshot,
        apply_chat_template=chosen.apply_chat_template,
        max_examples=chosen.max_task_examples,
        seed=config.seed,
    )
    check_tasks(settings)
    return settings


@dataclass(slots=True)
class TaskEval:
    """Evaluates the policy's current weights, and writes the scores into the run directory."""

    settings: HarnessTasks
    policy: LearnerGroup
    run_directory: Path

    def run(self, step: int) -> dict[str, float]:
        """Return the figures as metrics: eval/TASK/METRIC."""
        folder = self.run_directory / EVALUATIONS / f"step-{step:08}"
        folder.mkdir(parents=True, exist_ok=True)  # a resumed run may evaluate a step again
        scores = self.policy.evaluate_tasks(replace(self.settings, log_dir=str(folder / "inspect")))
        scores.write(folder)
        return {metric_name(name): figure.value for name, figure in scores.figures.items()}


def remove_evaluations_after(run_directory: Path, step: int) -> None:
    """Delete evaluations of later steps, which a resumed run makes again, maybe with other weights."""
    for folder in (run_directory / EVALUATIONS).glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


def metric_name(figure: str) -> str:
    """Return the name of a figure as a metric that every tracker accepts."""
    return "eval/" + re.sub(r"[^\w./@-]+", "_", figure).strip("_")
