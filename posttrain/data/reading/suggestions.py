"""Suggest what to do with a record that fits no format: formats that come near, and a map_keys that would do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.core.types import ExampleKind
from posttrain.data.reading.format_table import Format
from posttrain.data.reading.records import Record

NEAR_SHOWN = 3
NAMES: dict[str, tuple[str, ...]] = {
    "prompt": (
        "question", "query", "problem", "instruction", "input", "inputs", "request", "user", "human", "task", "source",
        "text", "title", "post", "context", "document", "dialogue", "problem_statement", "description",
        "question_content",
    ),
    "completion": (
        "response", "answer", "output", "outputs", "target", "targets", "reply", "solution", "label", "assistant",
        "bot", "gpt", "summary", "generation", "highlights", "code", "canonical_solution", "translation", "best_answer",
        "correct_answer", "model_answer", "content", "edited_response", "patch",
    ),
    "messages": ("conversations", "conversation", "dialogue", "dialog", "turns", "chat", "history", "talk"),
    "chosen": (
        "accepted", "better", "preferred", "winner", "positive", "win", "good", "best", "chosen_response", "selected",
        "edited_response",
    ),
    "rejected": (
        "worse", "dispreferred", "loser", "negative", "lose", "bad", "worst", "rejected_response", "original_response",
    ),
    "label": ("is_good", "good", "desirable", "rating", "is_correct", "correct", "preference", "thumbs", "feedback"),
    "completions": ("steps", "solution_steps", "process"),
    "labels": ("ratings", "step_labels", "scores", "gt_step_labels"),
    "text": ("content", "body", "document", "article", "raw", "code", "markdown"),
    "ground_truth": ("answer", "final_answer", "target", "label", "solution", "expected_answer", "gt", "reference",
                     "reference_answer", "correct_answer", "best_answer"),
}  # fmt: skip
"""Names under which data sets often have what our column means, the most usual first."""
CANONICAL: dict[ExampleKind, tuple[tuple[str, ...], ...]] = {
    "text": (("text",),),
    "chat": (("messages",), ("prompt", "completion")),
    "pair": (("prompt", "chosen", "rejected"),),
    "labelled": (("prompt", "completion", "label"),),
    "stepwise": (("prompt", "completions", "labels"),),
    "prompt": (("prompt", "ground_truth"), ("prompt",)),
}
"""The columns that a map_keys is suggested for, by kind of example."""


def suggestion(
    record: Record,
    kinds: Sequence[ExampleKind],
    formats: Sequence[Format],
    is_known: Callable[[dict[str, str], ExampleKind], bool],
) -> str:
    """Return sentences about near formats and a possible map_keys, to be appended to a message.

    `is_known`: whether the record has a format for a kind of example after a map_keys was applied.
    """
    values = record.values
    candidates = ((_mapping(values, columns), kind) for kind in kinds for columns in CANONICAL[kind])
    mappings = [mapping for mapping, kind in candidates if mapping and is_known(mapping, kind)]
    sentences: list[str] = []
    if near := _near(values, kinds, formats):
        sentences.append("Formats that come near: " + "; ".join(near))
    if mappings:
        shown = " or ".join(f"--data.map_keys '{json.dumps(mapping)}'" for mapping in mappings[:2])
        sentences.append(f"If these columns are meant, map them: {shown}")
    else:
        wanted = dict.fromkeys(" and ".join(columns) for kind in kinds for columns in CANONICAL[kind])
        example = f"--data.map_keys '{json.dumps({CANONICAL[kinds[0]][-1][0]: 'COLUMN'})}'"
        sentences.append(
            f"Map the columns to {' or to '.join(wanted)}, for example {example}; paths, texts of several columns and "
            "functions are possible"
        )
    return "".join(f" {sentence}." for sentence in sentences) + " docs/data.md lists all formats."


def _mapping(values: dict[str, Any], columns: tuple[str, ...]) -> dict[str, str]:
    """Return our columns -> those of the record by usual names; {} if one of them is not found."""
    normal = {re.sub(r"[^a-z0-9]+", "_", str(name).lower()).strip("_"): name for name in values}
    found: dict[str, str] = {}
    for column in columns:
        names = [name for name in (column, *NAMES[column]) if name in normal and normal[name] not in found.values()]
        fitting = [normal[name] for name in names if _fits(column, values[normal[name]])]
        if not fitting:
            return {}
        found[column] = fitting[0]
    return {column: name for column, name in found.items() if column != name}


def _fits(column: str, value: Any) -> bool:
    """Whether a value is of the type that our column has."""
    if column == "messages":
        return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if column in ("completions", "labels"):
        return isinstance(value, list)
    if column == "label":
        return isinstance(value, bool | int)
    if column == "ground_truth":
        return value is not None
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _near(values: dict[str, Any], kinds: Sequence[ExampleKind], formats: Sequence[Format]) -> list[str]:
    """Return the formats of which most columns are there, and what is missing."""
    ranked: list[tuple[float, str]] = []
    for form in formats:
        missing = [column for column in form.columns if column not in values]
        if not any(form.provides(kind) for kind in kinds) or len(missing) == len(form.columns):
            continue
        if missing:
            lack = f"{form.name} ({', '.join(missing)} missing)"
        else:
            wrong = [column for column in form.excluded if column in values]
            lack = f"{form.name} (but there is {', '.join(wrong)})" if wrong else f"{form.name} (other values)"
        ranked.append((len(missing) / len(form.columns), lack))
    return list(dict.fromkeys(lack for _, lack in sorted(ranked, key=lambda entry: entry[0])))[:NEAR_SHOWN]
