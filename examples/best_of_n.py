"""A custom pipeline: best-of-n distillation. A teacher generates, rewards select, a student is trained.

From the top of the repository: python examples/best_of_n.py [DIRECTORY]
After an interruption the same command continues.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.engines.base import Sampling
from posttrain.inference.completion_files import read_completions, write_rows
from posttrain.inference.generate import Generation
from posttrain.inference.score import Scoring
from posttrain.pipelines import Generate, Score, Select, Stage, Train, run_stages


@dataclass
class WithoutRepeats(Stage):
    """A custom stage: keeps each different completion of a prompt once."""

    file: str
    out: Path

    def reads(self) -> list[str]:
        return [self.file]

    def settings(self) -> dict[str, Any]:
        return {}  # the result depends only on the input

    def run(self, quiet: bool) -> dict[str, float]:
        completions = read_completions(self.file)
        kept = {(one.group, one.text.strip()): one.row for one in reversed(completions)}  # the first of equal ones
        write_rows(self.out, reversed(kept.values()))
        return {"completions": len(completions), "kept": len(kept)}


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/best-of-n")
student = {
    "model": {"path": "pico"},
    "data": {"train": [str(folder / "best.jsonl")]},
    "train": {"epochs": 3, "batch_size": 4, "learning_rate": 1e-3},
}
stages = [
    Generate(
        Generation(
            model=ModelConfig(path="pico"),  # the teacher
            data=DataConfig(train=("examples/data/questions.jsonl",)),
            out=str(folder / "completions.jsonl"),
            sampling=Sampling(max_tokens=32, temperature=0.8),
            n=8,
        )
    ),
    WithoutRepeats(file=str(folder / "completions.jsonl"), out=folder / "different.jsonl"),
    Score(
        Scoring(
            file=str(folder / "different.jsonl"),
            out=str(folder / "scored.jsonl"),
            reward=("gsm8k", "examples/reward.py:letters"),
            weights=(1.0, 0.2),
        )
    ),
    Select(method="best-of-n", file=str(folder / "scored.jsonl"), out=folder / "best.jsonl"),
    Train(verb="sft", out=folder / "student", options=student),
]

if __name__ == "__main__":
    *_, trained = run_stages(folder, stages)
    print(f"the student is {folder / 'student'}; its loss is {trained['loss']:.3f}")
