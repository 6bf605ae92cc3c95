"""Reinforcement learning from Python, for those who come from TRL or MindRLHF.

    with GRPOTrainer("pico", rewards=["gsm8k", score], data="rows.jsonl", config={"seed": 1}) as trainer:
        trainer.train()

or step by step: `make_experience()`, `train_step(batch)`, `evaluate()`, `save()`. The options are those of the command
line, as nested dicts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import from_mapping
from posttrain.core.errors import UsageError
from posttrain.rewards.specs import reward_texts
from posttrain.rollout.records import Rollout
from posttrain.train.run import Result
from posttrain.train.setup import open_online

Rewards = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
Data = str | Path | Sequence[str] | Sequence[dict[str, Any]]


class OnlineTrainer:
    """A run that is open: its models are loaded, and it is at the step it has to go on from."""

    verb: ClassVar[str]

    def __init__(
        self, model: str, rewards: Rewards, data: Data, config: dict[str, Any] | None = None, eval_data: Data = ()
    ) -> None:
        """`rewards`: names of verifiers, "file.py:function", "model:PATH", or Python functions."""
        if not isinstance(model, str):
            raise UsageError(f"model must be a folder, a hub name or a run folder, not {type(model).__name__}")
        self._stack = ExitStack()
        options = dict(config or {})
        options["model"] = {"path": model} | options.get("model", {})
        files = {"train": self._files(data), "eval": self._files(eval_data)}
        options["data"] = {name: paths for name, paths in files.items() if paths} | options.get("data", {})
        options["reward"] = reward_texts(listed(rewards))
        try:
            settings: Any = from_mapping(self.verb, ALGORITHMS[self.verb], options)
            self._trainer = self._stack.enter_context(open_online(self.verb, settings))
        except BaseException:
            self._stack.close()
            raise

    def train(self) -> Result:
        """All steps that are left, with saves, evaluations and logs as configured."""
        return self._trainer.train()

    def make_experience(self) -> list[Rollout]:
        """A batch of answers with their rewards and advantages."""
        return self._trainer.make_experience()

    def train_step(self, experience: list[Rollout]) -> dict[str, float]:
        """Learn from a batch; its metrics, which are logged too."""
        metrics = self._trainer.train_step(experience)
        self._trainer.run.log.step(self._trainer.step, metrics)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Reward, accuracy and pass@k of the policy as it is on the evaluation data."""
        return self._trainer.evaluate()

    def save(self) -> Path:
        """A checkpoint of the step that was done last."""
        return self._trainer.run.save(self._trainer.step, self._trainer.policy)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._trainer.run.folder.path

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> OnlineTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _files(self, data: Data) -> list[str]:
        """Rows given as dicts are written to a file that lives as long as the trainer."""
        if isinstance(data, str | Path):
            return [str(data)]
        rows = [entry for entry in data if isinstance(entry, dict)]
        if not rows:
            return [str(entry) for entry in data]
        file = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return [str(file)]


class GRPOTrainer(OnlineTrainer):
    """`posttrain grpo`."""

    verb = "grpo"


class PPOTrainer(OnlineTrainer):
    """`posttrain ppo`."""

    verb = "ppo"


def listed(rewards: Rewards) -> Sequence[str | Callable[..., Any]]:
    return [rewards] if isinstance(rewards, str) or callable(rewards) else rewards
