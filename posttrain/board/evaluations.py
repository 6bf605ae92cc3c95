"""Evaluations of runs: figures with intervals, and two evaluations compared on the same examples.

They come from two places: a run's directory `evals`, which has one per step that eval.harness evaluated, and the
directories of `posttrain eval`, which belong to the run whose model they evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.board.runs import REPORT, BoardRun, parse
from posttrain.core.errors import UsageError
from posttrain.core.statistics import compare_rows
from posttrain.endpoint.errors import ApiError
from posttrain.plots.runs import is_number

EVALUATIONS, FIGURES, EXAMPLES = "evals", "figures.json", "examples.jsonl"
STEP = re.compile(r"step-(\d{1,12})")
FIGURES_BYTES = 4 * 2**20
EXAMPLES_BYTES = 256 * 2**20
MAX_EVALUATIONS = 500  # of a run
MAX_SHOWN = 50  # examples whose scores differ
REPLY_LETTERS = 4000


@dataclass(slots=True, frozen=True)
class RunEvaluation:
    """The figures of one model, and where the scores of its examples are."""

    run: BoardRun
    place: tuple[str, ...]  # of its files, in the run directory
    label: str
    model: str  # directory of the evaluated model, or its name
    figures: dict[str, dict[str, float]]
    time: float

    @property
    def id(self) -> str:
        return f"{self.run.id}.{self.place[-1]}"

    def describe(self, page: BoardRun) -> dict[str, Any]:
        """Return what the page of a run shows; the label of another run's evaluation begins with its name."""
        label = self.label if self.run is page else f"{self.run.name}: {self.label}"
        return {"id": self.id, "run": self.run.id, "label": label, "figures": self.figures, "time": self.time}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of its examples; those that are none are left out."""
        text = self.run.folder.read(*self.place, EXAMPLES, limit=EXAMPLES_BYTES)
        return [row for line in text.split(b"\n") if (row := example_row(line)) is not None]


def example_row(line: bytes) -> dict[str, Any] | None:
    row = parse(line)
    if row is None or not isinstance(row.get("scores"), dict) or not isinstance(row.get("key"), str):
        return None
    scores = {str(name)[:200]: float(value) for name, value in row["scores"].items() if is_number(value)}
    return row | {"scores": scores, "task": str(row.get("task", ""))[:200]}


def evaluations_of(run: BoardRun) -> Iterator[RunEvaluation]:
    """Yield the evaluations that are in a run directory."""
    inside, _ = run.folder.entries(EVALUATIONS)
    for name in inside[-MAX_EVALUATIONS:]:
        step = STEP.fullmatch(name)
        file = run.folder.stat(EVALUATIONS, name, FIGURES)
        if step and file is not None:
            text = run.folder.read(EVALUATIONS, name, FIGURES, limit=FIGURES_BYTES)
            place = (EVALUATIONS, name)
            yield RunEvaluation(
                run, place, f"step {int(step[1])}", str(run.folder.path), as_figures(parse(text)), file.st_mtime
            )
    report = run.folder.stat(REPORT)
    if report is None or run.config().get("verb") != "eval":
        return
    found = parse(run.folder.read(REPORT, limit=FIGURES_BYTES)) or {}
    for letter, figures, model, name in zip(
        "ab", *(as_list(found.get(key)) for key in ("figures", "model_paths", "models")), strict=False
    ):
        short = Path(str(name)).name if str(name).startswith("/") else str(name)
        yield RunEvaluation(run, (letter,), short[:200], str(model), as_figures(figures), report.st_mtime)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_figures(value: Any) -> dict[str, dict[str, float]]:
    """Return the figures among JSON values: value, low and high by name."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, dict[str, float]] = {}
    for name, figure in list(value.items())[:MAX_EVALUATIONS]:
        numbers = {key: figure.get(key) for key in ("value", "low", "high")} if isinstance(figure, dict) else {}
        finite = {key: each for key, each in numbers.items() if each is not None and is_number(each)}
        if len(finite) == 3:
            found[str(name)[:200]] = finite
    return found


def evaluations_page(run: BoardRun, runs: Iterable[BoardRun]) -> dict[str, Any]:
    """Return the evaluations of a run's model, and those of others, to compare with."""
    own: list[RunEvaluation] = []
    others: list[RunEvaluation] = []
    for each in runs:
        for evaluation in evaluations_of(each):
            is_own = each is run or Path(evaluation.model).is_relative_to(run.folder.path)
            (own if is_own else others).append(evaluation)
    own.sort(key=lambda evaluation: evaluation.run is not run)
    others.sort(key=lambda evaluation: -evaluation.time)
    return {
        "evaluations": [evaluation.describe(run) for evaluation in own],
        "others": [evaluation.describe(run) for evaluation in others[:MAX_EVALUATIONS]],
    }


def main_figure(run: BoardRun) -> dict[str, Any] | None:
    """Return the first figure of a `posttrain eval`, for the list of runs."""
    if run.config().get("verb") != "eval":
        return None
    figures = next((evaluation.figures for evaluation in evaluations_of(run)), {})
    return next(({"name": name, "value": figure["value"]} for name, figure in figures.items()), None)


def compared(first: RunEvaluation, second: RunEvaluation) -> dict[str, Any]:
    """Return the first evaluation against the second on the examples of both, and examples whose scores differ."""
    ours, theirs = first.rows(), second.rows()
    try:
        comparison = compare_rows(ours, theirs)
    except UsageError as error:
        raise ApiError(409, str(error)) from None
    by_key = {row["key"]: row for row in theirs}
    pairs = [(row, by_key[row["key"]]) for row in ours if row["key"] in by_key]
    differing = [(a, b) for a, b in pairs if a["scores"] != b["scores"]]
    return {
        "comparison": {name: asdict(found) for name, found in comparison.items()},
        "examples": len(pairs),
        "differing": len(differing),
        "shown": [
            {
                "task": a["task"],
                "index": str(a.get("index"))[:200],
                "target": str(a.get("target"))[:REPLY_LETTERS],
                "scores": [a["scores"], b["scores"]],
                "replies": [reply_text(a), reply_text(b)],
            }
            for a, b in differing[:MAX_SHOWN]
        ],
    }


def reply_text(row: Mapping[str, Any]) -> str:
    replies = row.get("replies")
    texts = replies if isinstance(replies, list) and all(isinstance(reply, str) for reply in replies) else None
    return ("\n\n".join(texts) if texts is not None else json.dumps(replies))[:REPLY_LETTERS]
