"""Files of completions: reads rows with a prompt and a completion, whatever their columns are called; writes rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
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
class CompletionExample:
    """A prompt with one completion, from a row of a file."""

    prompt: list[Message]
    plain: bool  # prompt and completion are plain strings: no chat template is needed
    text: str
    row: dict[str, Any]  # as it is in the file
    origin: str  # file:line

    @property
    def group(self) -> str:
        """A key that is the same for all completions of one prompt of the data."""
        return json.dumps([self.row.get("index"), self.prompt], sort_keys=True)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that reward functions are given: of the example that the prompt came from, else of this row."""
        columns = self.row.get("columns")
        return columns if isinstance(columns, dict) else self.row

    @property
    def reward(self) -> float | None:
        """None if the completion could not be scored."""
        if "reward" not in self.row:
            raise DataError(f"{self.origin}: the row has no reward; add rewards with: posttrain score")
        value = self.row["reward"]
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise DataError(f"{self.origin}: reward: expected a number or null, found {value!r}")
        return value

    @property
    def trainable_prompt(self) -> list[Message] | str:
        """The prompt as trainers read it."""
        return self.prompt[0]["content"] if self.plain else self.prompt


def read_completions(
    file: str, map_keys: str | Mapping[str, Any] = "", max_rows: int | None = None
) -> list[CompletionExample]:
    """Read the rows that `posttrain generate` wrote, or of any file that `posttrain sft` reads."""
    source, keys = SourceFormat("chat", "", map_keys), KeyMap.parse(map_keys)
    completions = []
    for number, row in enumerate(read_records(file)):
        if max_rows is not None and number >= max_rows:
            break
        completions.append(completion_example(row, source, keys))
    if not completions:
        raise DataError(f"{file}: the file has no rows")
    return completions


def completion_example(row: Record, source: SourceFormat, keys: KeyMap) -> CompletionExample:
    renamed = keys.apply(row)
    values = renamed.values
    if "prompt" in values and isinstance(values.get("completion"), str):  # which may be empty
        prompt = prompt_of(renamed, "prompt", allow_tools=True)
        text = text_of(renamed, "completion", values["completion"])
        return CompletionExample(
            prompt=prompt, plain=isinstance(values["prompt"], str), text=text, row=row.values, origin=row.origin
        )
    (example,) = source.examples(row)
    if not isinstance(example, ChatExample):
        raise DataError(f"{row.origin}: {source.description}: there is no prompt apart from the completion")
    *prompt, last = example.messages
    if not prompt:
        raise DataError(f"{row.origin}: there is no prompt before the completion")
    return CompletionExample(
        prompt=prompt, plain=example.plain, text=last["content"], row=row.values, origin=row.origin
    )


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write all rows or none: a kill leaves the old file, or no file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, as_lines(rows))


def jsonl(out: str) -> Path:
    """Return the file to write; UsageError unless its name ends in .jsonl, by which other commands know its format."""
    path = Path(out).expanduser()
    if not out or path.is_dir() or path.suffix != ".jsonl":
        raise UsageError(f"output_file is {out!r}; name a file to write that ends in .jsonl")
    return path


def new_file(out: str, overwrite: bool, inputs: Sequence[str]) -> Path:
    """Return the file to write; UsageError if it is one of the inputs, or exists and may not be replaced."""
    path = jsonl(out)
    if path.exists() and any(Path(name).exists() and path.samefile(name) for name in inputs):
        raise UsageError(f"output_file {out} is also the input; name another file")
    if path.exists() and not overwrite:
        raise UsageError(f"output_file {out} already exists. Add --overwrite to replace it, or name another file.")
    return path
