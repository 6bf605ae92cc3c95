"""Rollouts, and their form as lines of a file: rollouts.jsonl of a run."""

from __future__ import annotations

import base64
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
from posttrain.core.jsonl import LineFile, as_line, cut_after
from posttrain.core.types import Floats, Prompt, Sample
from posttrain.rewards.verdict import Verdict

FILE = "rollouts.jsonl"
ENVIRONMENT, AGENT = "environment", "agent"  # rewards that are not computed by reward functions
ENVIRONMENT_FAILED, AGENT_FAILED, TOOLS_FAILED = "environment: ", "agent: ", "tools: "
NOT_REPAIRABLE = (ENVIRONMENT_FAILED, AGENT_FAILED, TOOLS_FAILED)  # prefixes of failures that scoring again cannot fix
STEP = re.compile(rb'\{"step": (\d+),')  # how a line begins
ZERO = np.uint8(ord("0"))
SWITCH_SECONDS = 5e-4  # a thread yields the interpreter at least this often: generation needs it for every few tokens
PAUSE_SECONDS = 2e-4  # between two lines, for the same reason
TABLE_TEXT = 10_000  # characters of a text in a table of a tracker
STREAMS = ("logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")


@dataclass(slots=True, kw_only=True)
class Rollout:
    """A completion with its prompt and rewards. `sample.reward` is the sum that is trained on."""

    sample: Sample
    prompt: Prompt
    text: str  # of the completion; of its last turn, if there are several
    messages: list[dict[str, Any]] = field(default_factory=list)  # the whole conversation, if there is an environment
    turns: int = 1
    turn_seconds: list[tuple[float, float]] = field(default_factory=list)  # of an agent: its own, and the model's
    branch: int = 0  # number among the samples of one conversation of an agent
    rewards: dict[str, float] = field(default_factory=dict)  # by name of the reward
    not_applicable: list[str] = field(default_factory=list)  # rewards that returned None
    failure: str = ""  # why it could not be scored; it is then left out of training
    replayed: bool = False  # generated at an earlier step, and trained on again
    replaced: bool = False  # its group has no signal, and an earlier group is trained on in its place
    seconds: float = 0.0  # that its rewards took
    recorded: dict[str, Floats] = field(default_factory=dict)  # streams that are not trained on, only written
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of judges: reason, counts, replies
    early_verdicts: list[Verdict | None] | None = None  # of rewards that ran while others were still being generated
    model_verdicts: dict[int, Verdict] = field(default_factory=dict)  # likewise, of reward models by their index

    @property
    def completion_tokens(self) -> int:
        return int(self.sample.mask.sum())


def as_row(rollout: Rollout, step: int) -> dict[str, Any]:
    """Convert to JSON values: the mask is a text of 0 and 1, streams hold the tokens marked 1."""
    per_token: dict[str, Any] = {name: numbers.tolist() for name, numbers in streams(rollout.sample).items()}
    experts = rollout.sample.experts
    if experts is not None:  # not in the file of a run, where they would be most of it
        packed = base64.b64encode(experts.astype("<i2").tobytes()).decode("ascii")
        per_token |= {"experts": packed, "experts_shape": experts.shape}
    return without_streams(rollout, step) | per_token


def table_row(rollout: Rollout) -> dict[str, Any]:
    """Return what a table in a tracker shows of a completion; long texts are cut, and say so."""
    messages = rollout.prompt.messages
    texts = [messages] if isinstance(messages, str) else [str(message.get("content", "")) for message in messages]
    return {
        "prompt": shortened("\n".join(texts)),
        "completion": shortened(rollout.text),
        "reward": float(rollout.sample.reward or 0.0),
        "rewards": json.dumps(rollout.rewards),
        "tokens": rollout.completion_tokens,
        "failure": rollout.failure,
    }


def shortened(text: str) -> str:
    return text if len(text) <= TABLE_TEXT else f"{text[:TABLE_TEXT]} ... ({len(text):,} characters)"


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
        "rewards": dict(rollout.rewards),
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
    if rollout.verdicts:
        row["verdicts"] = rollout.verdicts
    if rollout.not_applicable:
        row["not_applicable"] = rollout.not_applicable
    if rollout.turn_seconds:
        row["turn_seconds"] = [[round(program, 6), round(model, 6)] for program, model in rollout.turn_seconds]
    if sample.turns:
        row["turn_credits"] = [list(turn) for turn in sample.turns]
    if sample.version_spans:
        row["version_spans"] = sample.version_spans
    if rollout.branch:
        row["branch"] = rollout.branch
    return row


def streams(sample: Sample) -> dict[str, Floats]:
    """Return the sample's streams at the tokens marked 1."""
    known = {name: getattr(sample, name) for name in STREAMS}
    return {name: stream[sample.mask] for name, stream in known.items() if stream is not None}


def written_streams(rollout: Rollout) -> dict[str, Floats]:
    """Return the streams of a line: those of the sample, and those that are for the record alone."""
    known = {name: stream[rollout.sample.mask] for name, stream in rollout.recorded.items()}
    return known | streams(rollout.sample)


def line_of(row: dict[str, Any], numbers: dict[str, Floats]) -> str:
    """Write the line of `as_row` several times as fast: nine digits distinguish all float32 numbers."""
    text = "".join(
        f', "{name}": [{", ".join(["%.9g"] * len(stream)) % tuple(stream.tolist())}]'
        for name, stream in numbers.items()
    )
    if "nan" in text or "inf" in text or "-0," in text or "-0]" in text:  # JSON writes or reads these differently
        return as_line(row | {name: stream.tolist() for name, stream in numbers.items()})
    return f"{as_line(row)[:-2]}{text}}}\n"


def from_row(row: dict[str, Any]) -> Rollout:
    """Undo `as_row`."""
    tokens = np.array(row["tokens"], dtype=np.int32)
    mask = np.frombuffer(row["mask"].encode("ascii"), dtype=np.uint8) != ZERO
    known: dict[str, Any] = {name: np.zeros(len(tokens), dtype=np.float32) for name in STREAMS if name in row}
    for name, stream in known.items():
        stream[mask] = row[name]
    if "experts" in row:
        known["experts"] = np.frombuffer(base64.b64decode(row["experts"]), dtype="<i2").reshape(row["experts_shape"])
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
        newest=row.get("newest", row["version"]),  # missing in files of the first versions
        version_spans=tuple((version, tokens) for version, tokens in row.get("version_spans", ())),
        finish=row["finish"],
        origin=row["origin"],
        turns=tuple((first, end, reward, state) for first, end, reward, state in row.get("turn_credits", [])),
        **known,
    )
    return Rollout(
        sample=sample,
        prompt=prompt,
        text=row["text"],
        messages=row.get("messages", []),
        turns=row["turns"],
        turn_seconds=[(program, model) for program, model in row.get("turn_seconds", [])],
        branch=row.get("branch", 0),
        rewards=row["rewards"],
        not_applicable=row.get("not_applicable", []),
        failure=row["failure"],
        seconds=row["seconds"],
        verdicts=row.get("verdicts", {}),
    )


def given_rewards(rollout: Rollout) -> dict[str, float]:
    """Return the rewards of an environment or an agent; those of an agent may have names: agent/NAME."""
    return {name: value for name, value in rollout.rewards.items() if name.partition("/")[0] in (ENVIRONMENT, AGENT)}


def unscored(rollout: Rollout) -> Rollout:
    """Return a recorded rollout as it was when it was sampled, to be scored again.

    The reward and the failure of an environment or an agent are kept, since the episode cannot be run again.
    """
    failed = rollout.failure.startswith(NOT_REPAIRABLE)
    kept = given_rewards(rollout)
    computed_later: dict[str, Any] = dict.fromkeys(name for name in STREAMS if name != "logprobs")
    sample = replace(rollout.sample, reward=0.0, **computed_later)
    failure = rollout.failure if failed else ""
    return replace(rollout, sample=sample, rewards=kept, not_applicable=[], failure=failure, seconds=0.0)


def read_steps(folder: Path) -> Iterator[tuple[int, list[Rollout]]]:
    """Yield (step, batch) for each recorded batch of a run."""
    path, step = find_file(folder), -1
    batch: list[Rollout] = []
    for number, row in read_rows(path):
        if row is None:  # an incomplete last line: its batch is incomplete
            return
        try:
            rollout = from_row(row)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a recorded rollout: {error!r}") from error
        if row["step"] != step and batch:
            yield step, batch
            batch = []
        step = row["step"]
        batch.append(rollout)
    if batch:
        yield step, batch


def find_file(folder: Path) -> Path:
    """Return the rollout file of a run directory, or the file itself; raises UsageError if it does not exist."""
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise UsageError(f"{folder}: no recorded rollouts there (a run of reinforcement learning has {FILE})")
    return path


def read_rows(path: Path, only: int | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield line numbers and rows, one in memory at a time; None for a last line that a kill left incomplete.

    `only`: yield the rows of this step; lines of other steps are skipped without being parsed, which is fast.
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
                raise DataError(f"{path}:{number}: not a recorded rollout: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise DataError(f"{path}:{number}: not a recorded rollout: it has no step")
            yield number, row


def last_step(path: Path) -> int:
    """Return the step of the last complete line; -1 if there is none."""
    last = -1
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and (found := STEP.match(line)):
                last = int(found[1])
    return last


class RolloutWriter:
    """Appends the rollouts of a run to its file. Lines after the step at which the run resumes are dropped first.

    A thread writes while the next rollouts are generated. `flush` waits for it: a checkpoint must not be ahead of the
    file, unless the file cannot be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / FILE
        cut_after(path, step)
        self.file = LineFile(path)
        sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        self.thread: threading.Thread | None = None
        self.flushing = threading.Event()  # set while `wait` waits: do not pause between lines
        self.error: BaseException | None = None

    def add(self, rollouts: Sequence[Rollout], step: int) -> None:
        # Convert now: the caller may change the samples afterwards.
        rows = [(without_streams(rollout, step), written_streams(rollout)) for rollout in rollouts]
        self.flush()
        self.flushing.clear()
        self.thread = threading.Thread(target=self.write, args=(rows,), name="rollout writer")
        self.thread.start()

    def write(self, rows: Sequence[tuple[dict[str, Any], dict[str, Floats]]]) -> None:
        try:
            lines = []
            for row in rows:
                lines.append(line_of(*row))
                self.flushing.wait(PAUSE_SECONDS)
            self.file.append("".join(lines))
        except BaseException as error:  # raised again by `flush`
            self.error = error
            if not isinstance(error, Exception):
                raise

    def flush(self) -> None:
        """Wait until all rollouts are written; raises the error of the thread, if there was one."""
        self.wait()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        if self.thread is not None:
            self.flushing.set()
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        """Wait, and write what a full disk has prevented, if that is possible now."""
        self.wait()
        self.file.close()
