"""A pipeline of one's own: best-of-n distillation. A teacher answers, rewards choose, a student learns.

From the top of the repository: python examples/best_of_n.py [FOLDER]
Killed anywhere, the same command goes on where it was.
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
    """A stage of one's own: every prompt keeps each answer once, so that n counts different answers."""

    file: str
    out: Path

    def reads(self) -> list[str]:
        return [self.file]

    def settings(self) -> dict[str, Any]:
        return {}  # nothing but what it reads decides what it makes

    def run(self, quiet: bool) -> dict[str, float]:
        answers = read_completions(self.file)
        kept = {(answer.group, answer.text.strip()): answer.row for answer in reversed(answers)}  # the first of equals
        write_rows(self.out, reversed(kept.values()))
        return {"answers": len(answers), "kept": len(kept)}


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
            out=str(folder / "answers.jsonl"),
            sampling=Sampling(max_tokens=32, temperature=0.8),
            n=8,
        )
    ),
    WithoutRepeats(file=str(folder / "answers.jsonl"), out=folder / "different.jsonl"),
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
