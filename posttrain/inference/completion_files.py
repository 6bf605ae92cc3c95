"""Answers in files: rows with a prompt and a completion, however the file spells them, and what they are worth."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError, UsageError
from posttrain.core.files import atomic_write
from posttrain.core.jsonl import as_lines
from posttrain.data.reading.cells import prompt_of, text_of
from posttrain.data.reading.columns import KeyMap
from posttrain.data.reading.examples import ChatExample, Message
from posttrain.data.reading.formats import SourceFormat
from posttrain.data.reading.records import Record
from posttrain.data.reading.sources import read_records


@dataclass(slots=True, kw_only=True)
class Answer:
    """A row of a file of answers."""

    prompt: list[Message]
    plain: bool  # prompt and answer are mere strings: no chat template is needed
    text: str
    row: dict[str, Any]  # as it stands in the file
    origin: str  # file:line

    @property
    def group(self) -> str:
        """The same for all answers to one row of prompts."""
        return json.dumps([self.row.get("index"), self.prompt], sort_keys=True)

    @property
    def columns(self) -> dict[str, Any]:
        """What reward functions may know: of the row that the prompt came from, or else of this one."""
        columns = self.row.get("columns")
        return columns if isinstance(columns, dict) else self.row

    @property
    def reward(self) -> float | None:
        """None: it could not be scored."""
        if "reward" not in self.row:
            raise DataError(f"{self.origin}: it has no reward; write one with: posttrain score")
        value = self.row["reward"]
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise DataError(f"{self.origin}: reward: expected a number or null, found {value!r}")
        return value

    @property
    def trainable_prompt(self) -> list[Message] | str:
        """The prompt as trainers read it."""
        return self.prompt[0]["content"] if self.plain else self.prompt


def read_answers(file: str, map_keys: str | Mapping[str, Any] = "", max_rows: int | None = None) -> list[Answer]:
    """Rows of `posttrain generate`, or of any file that `posttrain sft` reads."""
    source, keys = SourceFormat("chat", "", map_keys), KeyMap.parse(map_keys)
    answers = []
    for number, row in enumerate(read_records(file)):
        if max_rows is not None and number >= max_rows:
            break
        answers.append(answer_of(row, source, keys))
    if not answers:
        raise DataError(f"{file}: there are no rows in it")
    return answers


def answer_of(row: Record, source: SourceFormat, keys: KeyMap) -> Answer:
    renamed = keys.apply(row)
    values = renamed.values
    if "prompt" in values and isinstance(values.get("completion"), str):  # what a model said: nothing, at times
        prompt = prompt_of(renamed, "prompt", allow_tools=True)
        text = text_of(renamed, "completion", values["completion"])
        return Answer(
            prompt=prompt, plain=isinstance(values["prompt"], str), text=text, row=row.values, origin=row.origin
        )
    (example,) = source.examples(row)
    assert isinstance(example, ChatExample)
    *prompt, last = example.messages
    if not prompt:
        raise DataError(f"{row.origin}: there is no prompt before the answer")
    return Answer(prompt=prompt, plain=example.plain, text=last["content"], row=row.values, origin=row.origin)


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """All of them or none: a kill leaves the old file, or no file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, as_lines(rows))


def jsonl(out: str) -> Path:
    """The file to write; its name must say what it is, or no other command would read it."""
    path = Path(out).expanduser()
    if not out or path.is_dir() or path.suffix != ".jsonl":
        raise UsageError(f"--out {out!r}: name the file to write, with .jsonl at the end")
    return path


def new_file(out: str, overwrite: bool, reads: str) -> Path:
    """Where to write; UsageError if something is there that is not to be lost."""
    path = jsonl(out)
    if path.exists() and Path(reads).exists() and path.samefile(reads):
        raise UsageError(f"--out {out}: is the file that is read; name another")
    if path.exists() and not overwrite:
        raise UsageError(f"--out {out}: is there already. Add --overwrite to replace it, or name another.")
    return path
