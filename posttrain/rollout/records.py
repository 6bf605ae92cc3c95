"""A rollout: an answer, the prompt it belongs to and what became of it; as a line of a file and back."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.errors import DataError, UsageError
from posttrain.core.jsonl import as_line
from posttrain.core.logging import append, cut_after
from posttrain.core.types import Floats, Prompt, Sample
from posttrain.rewards.verdict import Verdict

FILE = "rollouts.jsonl"
ENVIRONMENT_FAILED = "environment: "  # so begins a failure that no reward can mend
STEP = re.compile(rb'\{"step": (\d+),')  # how a line begins
ZERO = np.uint8(ord("0"))
GIVE_WAY = 5e-4  # seconds that a thread may keep others waiting: answers are drawn beside it, a few tokens at a time
REST = 2e-4  # seconds after each line, for the same reason
STREAMS = ("logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One answer. `sample.reward` is the sum that is trained on, `parts` what each reward said."""

    sample: Sample
    prompt: Prompt
    text: str  # of the answer; of its last turn, if there are several
    messages: list[dict[str, Any]] = field(default_factory=list)  # of a conversation with an environment, all of it
    turns: int = 1
    parts: dict[str, float] = field(default_factory=dict)
    failure: str = ""  # why it could not be scored; it is then left out
    seconds: float = 0.0  # that its rewards took
    early: list[Verdict | None] | None = None  # what reward functions said while others were still being written

    @property
    def answer_tokens(self) -> int:
        return int(self.sample.mask.sum())


def as_row(rollout: Rollout, step: int) -> dict[str, Any]:
    """All that is known of it, as JSON can hold it: mask is a text of 0 and 1, streams are of the tokens marked 1."""
    of_tokens = {name: numbers.tolist() for name, numbers in streams(rollout.sample).items()}
    return without_streams(rollout, step) | of_tokens


def without_streams(rollout: Rollout, step: int) -> dict[str, Any]:
    sample = rollout.sample
    row: dict[str, Any] = {
        "step": step,
        "group": sample.group,
        "origin": sample.origin,
        "version": sample.version,
        "newest": sample.newest,
        "finish": sample.finish,
        "reward": sample.reward,
        "baseline": sample.baseline,
        "rewards": dict(rollout.parts),
        "failure": rollout.failure,
        "seconds": round(rollout.seconds, 6),
        "turns": rollout.turns,
        "prompt": rollout.prompt.messages,
        "text": rollout.text,
        "columns": rollout.prompt.columns,
        "prompt_length": len(rollout.prompt.tokens),
        "tokens": sample.tokens.tolist(),
        "mask": (sample.mask + ZERO).tobytes().decode("ascii"),
    }
    if rollout.messages:
        row["messages"] = rollout.messages
    return row


def streams(sample: Sample) -> dict[str, Floats]:
    """What is known of each token marked 1."""
    known = {name: getattr(sample, name) for name in STREAMS}
    return {name: stream[sample.mask] for name, stream in known.items() if stream is not None}


def line_of(row: dict[str, Any], numbers: dict[str, Floats]) -> str:
    """The line of `as_row`, several times as fast: nine digits tell every float32 from its neighbours."""
    text = "".join(
        f', "{name}": [{", ".join(["%.9g"] * len(stream)) % tuple(stream.tolist())}]'
        for name, stream in numbers.items()
    )
    if "nan" in text or "inf" in text or "-0," in text or "-0]" in text:  # JSON writes or reads them otherwise
        return as_line(row | {name: stream.tolist() for name, stream in numbers.items()})
    return f"{as_line(row)[:-2]}{text}}}\n"


def from_row(row: dict[str, Any]) -> Rollout:
    """The inverse of `as_row`."""
    tokens = np.array(row["tokens"], dtype=np.int32)
    mask = np.frombuffer(row["mask"].encode("ascii"), dtype=np.uint8) != ZERO
    known: dict[str, Any] = {name: np.zeros(len(tokens), dtype=np.float32) for name in STREAMS if name in row}
    for name, stream in known.items():
        stream[mask] = row[name]
    prompt = Prompt(
        tokens=tokens[: row["prompt_length"]],
        messages=row["prompt"],
        columns=row["columns"],
        origin=row["origin"],
    )
    sample = Sample(
        tokens=tokens,
        mask=mask,
        reward=row["reward"],
        baseline=row["baseline"],
        group=row["group"],
        version=row["version"],
        newest=row.get("newest", row["version"]),  # absent in records of old
        finish=row["finish"],
        origin=row["origin"],
        **known,
    )
    return Rollout(
        sample=sample,
        prompt=prompt,
        text=row["text"],
        messages=row.get("messages", []),
        turns=row["turns"],
        parts=row["rewards"],
        failure=row["failure"],
        seconds=row["seconds"],
    )


def unscored(rollout: Rollout) -> Rollout:
    """A recorded answer as it was when it was sampled: what was found out later is to be found out again.

    What an environment said of it stays, as it cannot be asked again.
    """
    blamed = rollout.failure.startswith(ENVIRONMENT_FAILED)
    said = {name: value for name, value in rollout.parts.items() if name == "environment"}
    later: dict[str, Any] = dict.fromkeys(name for name in STREAMS if name != "logprobs")
    sample = replace(rollout.sample, reward=0.0, **later)
    return replace(rollout, sample=sample, parts=said, failure=rollout.failure if blamed else "", seconds=0.0)


def read_steps(folder: Path) -> Iterator[tuple[int, list[Rollout]]]:
    """The recorded batches of a run, step by step."""
    path, step = file_of(folder), -1
    batch: list[Rollout] = []
    for number, row in read_rows(path):
        if row is None:  # torn: its batch is not whole
            return
        try:
            rollout = from_row(row)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a recorded answer: {error!r}") from error
        if row["step"] != step and batch:
            yield step, batch
            batch = []
        step = row["step"]
        batch.append(rollout)
    if batch:
        yield step, batch


def file_of(folder: Path) -> Path:
    """The record of a run folder, or the file itself; it must be there."""
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise UsageError(f"{folder}: no recorded answers there (a run of reinforcement learning has {FILE})")
    return path


def read_rows(path: Path, only: int | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Line numbers and rows, one in memory at a time; None in the place of a last line that a kill tore.

    With `only` the rows of that step: others are passed over without being read, which is quick.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                yield number, None
                return
            if only is not None and (found := STEP.match(line)) and int(found[1]) != only:
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a recorded answer: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise DataError(f"{path}:{number}: not a recorded answer: it has no step")
            yield number, row


def newest_step(path: Path) -> int:
    """Of the last whole line; -1 if there is none."""
    newest = -1
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and (found := STEP.match(line)):
                newest = int(found[1])
    return newest


class Record:
    """The answers of a run that goes on after a step; what was written after it is dropped: it is done again.

    A thread writes them while the next ones are drawn. `settle` waits for it: a checkpoint must not be ahead of it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / FILE
        cut_after(path, step)
        self.file = path.open("ab", buffering=0)
        sys.setswitchinterval(min(GIVE_WAY, sys.getswitchinterval()))
        self.writing: threading.Thread | None = None
        self.hurry = threading.Event()  # somebody waits
        self.error: BaseException | None = None

    def add(self, rollouts: Sequence[Rollout], step: int) -> None:
        # Now: samples are free to change.
        rows = [(without_streams(rollout, step), streams(rollout.sample)) for rollout in rollouts]
        self.settle()
        self.hurry.clear()
        self.writing = threading.Thread(target=self.write, args=(rows,), name="record")
        self.writing.start()

    def write(self, rows: Sequence[tuple[dict[str, Any], dict[str, Floats]]]) -> None:
        try:
            lines = []
            for row in rows:
                lines.append(line_of(*row))
                self.hurry.wait(REST)
            append(self.file, "".join(lines))
        except BaseException as error:  # raised again by whoever waits
            self.error = error
            if not isinstance(error, Exception):
                raise

    def settle(self) -> None:
        self.wait()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        if self.writing is not None:
            self.hurry.set()
            self.writing.join()
            self.writing = None
