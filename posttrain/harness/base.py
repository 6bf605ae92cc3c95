"""Scores of evaluation harnesses, lm-eval and inspect-ai, that run a model through the local engine.

The harness has the tasks and computes the scores; the engine computes what it asks for: log-probabilities of
continuations, and completions. Each example's scores are written, so that two models can be compared in pairs.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.core.errors import DataError
from posttrain.core.files import atomic_write_json
from posttrain.core.statistics import Figure, mean, share
from posttrain.core.types import Prompt, Sample
from posttrain.data.reading.examples import Message
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.nn.forward import ModelRunner

MODULES = {"lm-eval": "posttrain.harness.lm_eval", "inspect-ai": "posttrain.harness.inspect_ai"}
EXAMPLES, FIGURES = "examples.jsonl", "figures.json"  # of an evaluation: scores of each example, figures of all
Z = 1.96  # of a 95% confidence interval


@dataclass(kw_only=True, slots=True)
class HarnessTasks:
    """Settings: the tasks of a harness."""

    harness: Literal["lm-eval", "inspect-ai"]
    tasks: tuple[str, ...]
    num_fewshot: int = -1  # -1: as the task says
    apply_chat_template: bool = False
    max_examples: int = 0  # of each task; 0: all
    batch_size: int = 512
    seed: int = 0
    log_dir: str = ""  # where inspect-ai writes its own log


@dataclass(slots=True, kw_only=True)
class EvaluatedModel:
    """What a harness computes with: the forward pass of a model, its engine and its tokenizer."""

    name: str
    tokenizer: Any
    runner: ModelRunner
    stop_ids: tuple[int, ...]
    context: int | None  # tokens of prompt and completion that the model supports, if its configuration states it
    min_shared_prefix: int  # neighbours that share at least this prefix compute it once; 0: not with this model
    pack: Callable[[Sequence[Sample]], list[list[int]]]  # indices of the samples of each micro-batch
    encode: Callable[[list[Message]], Prompt]  # a conversation up to where the completion begins
    generate: Callable[[Sequence[GenerationRequest], Sampling], list[Sample]]


@dataclass(slots=True)
class HarnessScores:
    """What a harness found: figures by task and metric, and a row per example with its scores."""

    figures: dict[str, Figure]
    rows: list[dict[str, Any]]

    def write(self, folder: Path) -> None:
        """Write the figures and the rows as files of an existing directory."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)
        (folder / EXAMPLES).write_text(lines, encoding="utf-8", errors="backslashreplace")
        atomic_write_json(folder / FIGURES, {name: asdict(figure) for name, figure in self.figures.items()})


def check_tasks(settings: HarnessTasks) -> None:
    """Raise UsageError if the harness is not installed, or has no such task."""
    importlib.import_module(MODULES[settings.harness]).check_tasks(settings)


def evaluate_tasks(settings: HarnessTasks, model: EvaluatedModel) -> HarnessScores:
    """Run the tasks with a model that does not train meanwhile."""
    found: HarnessScores = importlib.import_module(MODULES[settings.harness]).evaluate(settings, model)
    return found


def figure_of(value: float, examples: Sequence[float], stderr: float | None) -> Figure:
    """Return a score with its interval.

    If the score is the mean over examples, the interval is Wilson's for values from 0 to 1, and the normal one for
    others; otherwise the harness's standard error counts. Without any, the interval is the value alone.
    """
    if examples and math.isclose(math.fsum(examples) / len(examples), value, rel_tol=1e-9, abs_tol=1e-12):
        return share(examples) if all(0 <= each <= 1 for each in examples) else mean(examples)
    half = Z * stderr if stderr is not None and math.isfinite(stderr) else 0.0
    return Figure(value, value - half, value + half)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the rows that an evaluation wrote; DataError if the file is not one of those."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert all(isinstance(row["scores"], dict) and isinstance(row["key"], str) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise DataError(f"{file}: not scores of a harness: {error!r}") from None
    return rows
