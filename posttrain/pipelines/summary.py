"""Summarise a pipeline: one table row per iteration."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from posttrain.inference.model import CONDITION
from posttrain.pipelines.stage import Figures, Stage


def by_iteration(stages: Sequence[Stage], figures: Sequence[Figures]) -> list[Figures]:
    """Return one row per iteration; check that the numbers of completions add up."""
    table: dict[int, Figures] = {}
    for stage, found in zip(stages, figures, strict=True):
        place, kind = stage.out.parent.name, stage.out.name.partition(".")[0]
        row = table.setdefault(int(place.rpartition("-")[2]), {})
        match kind:
            case "answers":
                row |= {"prompts": found["prompts"], "n": found["n"], "generated": found["answers"]}
            case "scored":
                row |= {"scored": found["answers"], "failed": found["failed"], "reward": found["reward"]}
            case "selected":
                row |= {"selected": found["used"], "dropped": found["read"] - found["used"], "rows": found["rows"]}
            case "model":
                row |= {"steps": found["steps"], "loss": found.get("loss", 0.0)}
            case "held-out-scored":
                row |= {"held_out_reward": found["reward"], "held_out_answers": found["answers"]}
    for row in table.values():
        if "generated" in row:
            assert row["prompts"] * row["n"] == row["generated"] == row["scored"], f"completions got lost: {row}"
        if "scored" in row:
            assert row["scored"] == row["selected"] + row["dropped"], f"completions got lost: {row}"
    return [{"iteration": number, **row} for number, row in sorted(table.items())]


def closing_lines(table: list[Figures], folder: Path, condition: float | None, template: str) -> list[str]:
    """Return a table and the next commands; `condition` and `template`: the reward to prompt for, and its wording."""
    names = {
        "iteration": "iteration",
        "prompts": "prompts",
        "generated": "completions",
        "reward": "reward",
        "selected": "selected",
        "dropped": "dropped",
        "rows": "examples",
        "steps": "steps",
        "held_out_reward": "held-out reward",
    }
    shown = [name for name in names if any(name in row for row in table)]
    cells = [[names[name] for name in shown]]
    cells += [[f"{row[name]:.6g}" if name in row else "-" for name in shown] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    condition_options = f" --condition {condition:.2f}" if condition is not None else ""
    if condition_options and template != CONDITION:
        condition_options += f" --condition_template {shlex.quote(template)}"
    place = shlex.quote(str(folder))
    return [
        *lines,
        f"done: {table[-1]['iteration']:.0f} iterations. Model: {folder}/model",
        f"chat: posttrain chat {place}{condition_options}    export: posttrain export {place} OUT",
    ]
