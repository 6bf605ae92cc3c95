"""Loads a model and runs the tasks of an evaluation harness with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.harness.base import EvaluatedModel, HarnessScores, HarnessTasks, check_tasks, evaluate_tasks
from posttrain.inference.model import InferenceModel


@dataclass(kw_only=True, slots=True)
class HarnessRun(HarnessTasks):
    """Settings: a model, and the tasks of a harness."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)  # its chat template


def run_harness(config: HarnessRun) -> HarnessScores:
    """Run the tasks; UsageError if the harness is not installed, or has no such task."""
    check_tasks(config)
    model = InferenceModel(config.model, config.data)
    learner = model.learner
    learner.model.eval()
    return evaluate_tasks(
        config,
        EvaluatedModel(
            name=model.name,
            tokenizer=model.tokenizer,
            runner=learner.runner,
            stop_ids=model.stop_ids,
            context=model.context,
            min_shared_prefix=learner.min_shared_prefix,
            pack=learner.pack,
            encode=model.encode,
            generate=model.generate,
        ),
    )
