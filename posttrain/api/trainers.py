"""Trainer classes: a run that is open, to train it at once or step by step.

    with SFTTrainer("pico", rows, eval_data=more_rows, max_steps=20) as trainer:
        result = trainer.train()
        print(trainer.evaluate())

They share everything with the functions of training.py and load PyTorch when they are constructed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from posttrain.api.options import (
    ConfigFile,
    Data,
    Model,
    OnlineOptions,
    Reward,
    TrainingOptions,
    documented,
)
from posttrain.core.errors import UsageError
from posttrain.core.lazy import PreTrainedModel

if TYPE_CHECKING:
    from posttrain.rollout.records import Rollout
    from posttrain.train.run import Result


class Trainer:
    """A run whose models are loaded, at the step it starts or resumes from.

    It holds the lock of its run directory until `close`, or the end of a `with` block.
    """

    verb: ClassVar[str]

    @documented(TrainingOptions)
    def __init__(
        self,
        model: Model | None = None,
        data: Data | None = None,
        config: ConfigFile | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        """Read and check everything, and load the models."""
        self._open({"config": config, "model": model, "data": data, **options})

    def _open(self, arguments: Mapping[str, Any]) -> None:
        from posttrain.api.arguments import prepare_run
        from posttrain.config.sections import OnlineConfig
        from posttrain.train.launch import refuse_in_worker
        from posttrain.train.setup import open_offline, open_online

        refuse_in_worker()
        config, inputs = prepare_run(self.verb, arguments)
        self._stack = ExitStack()
        self._loop: Any
        try:
            if isinstance(config, OnlineConfig):
                self._loop = self._stack.enter_context(open_online(self.verb, config, inputs))
            else:
                self._loop = self._stack.enter_context(open_offline(self.verb, config, inputs))
        except BaseException:
            self._stack.close()
            raise
        self._finalizer = weakref.finalize(self, self._stack.close)
        self._loop.run.signals.restore()  # between two calls Ctrl-C interrupts the caller's code as usual

    def train(self) -> Result:
        """Make all steps that are left, with saves, evaluations and logs as configured."""
        with self._loop.run.signals:
            result: Result = self._loop.train()
            return result

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the current model on the evaluation data; their names begin with eval/."""
        if self._loop.run.data.eval is None:
            raise UsageError("there is no evaluation data: give eval_data")
        metrics: dict[str, float] = self._loop.evaluate()
        return metrics

    def save(self) -> Path:
        """Write a checkpoint of the current step and return its directory."""
        path: Path = self._loop.run.save(self._loop.step, self._loop.policy)
        return path

    def model(self) -> PreTrainedModel:
        """Save the current step and load it as a plain model, with adapters merged into it."""
        from posttrain.models.export import load_trained_model

        return load_trained_model(str(self.save()))

    @property
    def step(self) -> int:
        """Steps that are done."""
        step: int = self._loop.step
        return step

    @property
    def output_dir(self) -> Path:
        """The run directory."""
        path: Path = self._loop.run.directory.path
        return path

    @property
    def folder(self) -> Path:
        """The name of `output_dir` in version 0.1."""
        return self.output_dir

    def close(self) -> None:
        """Free the models and release the run directory."""
        self._finalizer()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OnlineTrainer(Trainer):
    """A trainer that learns from its own completions; also step by step: `make_experience`, `train_step`."""

    @documented(OnlineOptions)
    def __init__(
        self,
        model: Model | None = None,
        reward: Reward | None = None,
        data: Data | None = None,
        config: ConfigFile | None = None,
        **options: Unpack[OnlineOptions],
    ) -> None:
        """Read and check everything, and load the models."""
        given: dict[str, Any] = dict(options)
        reward = reward if reward is not None else given.pop("rewards", None)  # its previous name
        self._open({"config": config, "model": model, "data": data, "reward": reward, **given})

    def make_experience(self) -> list[Rollout]:
        """Return the rollouts of the next step: completions with their rewards and advantages."""
        rollouts: list[Rollout] = self._loop.make_experience()
        return rollouts

    def train_step(self, experience: list[Rollout]) -> dict[str, float]:
        """Train on a batch of rollouts; return its metrics, which are logged too."""
        metrics: dict[str, float] = self._loop.train_step(experience)
        row = self._loop.run.log.step(self._loop.step, metrics)
        self._loop.run.callbacks.call("on_step", self._loop.step, metrics=row)
        return metrics

    def __enter__(self) -> OnlineTrainer:
        return self


class SFTTrainer(Trainer):
    """Fine-tunes on conversations: `posttrain sft`."""

    verb = "sft"


class RewardTrainer(Trainer):
    """Trains a reward model on preference pairs: `posttrain reward`."""

    verb = "reward"


class DPOTrainer(Trainer):
    """Trains on preference pairs: `posttrain dpo`."""

    verb = "dpo"


class KTOTrainer(Trainer):
    """Trains on completions that are labelled good or bad: `posttrain kto`."""

    verb = "kto"


class GRPOTrainer(OnlineTrainer):
    """Trains by comparing the completions of a prompt: `posttrain grpo`."""

    verb = "grpo"


class PPOTrainer(OnlineTrainer):
    """Trains with a critic: `posttrain ppo`."""

    verb = "ppo"


class OPDTrainer(OnlineTrainer):
    """Trains a student on its own completions with a teacher's distribution: `posttrain opd`."""

    verb = "opd"
