"""`posttrain samples RUN`: prints recorded completions of a run, with their rewards."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.config.tools import ToolArgs, check_at_least, positional, read_tool
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError
from posttrain.rollout import records

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEFAULT_COUNT = 5  # of the best and of the worst completions, if no number is given
PIPED_WIDTH = 160  # characters per line if the output is not a terminal
MAX_SHORTENED = 400  # characters of a text that is shown on one line
SHOWN_FIELDS = (
    *("step", "group", "origin", "version", "reward", "rewards"),
    *("finish", "turns", "failure", "prompt", "text"),
)

Row = dict[str, Any]


@dataclass(kw_only=True)
class SamplesArgs(ToolArgs):
    """Options of `posttrain samples`."""

    verb: ClassVar[str] = "samples"
    about: ClassVar[str] = TOOLS["samples"]
    example: ClassVar[str] = "posttrain samples runs/grpo-001 --best 5"

    run: str = positional()
    """Run directory, or a rollouts.jsonl."""
    step: int | None = None
    """Step to show; the newest if it is not set."""
    best: int = 0
    """Show this many completions with the highest reward; without best and worst: 5 of each."""
    worst: int = 0
    """Show this many completions with the lowest reward."""
    prompt: str = ""
    """Show all completions of one prompt, given as file:line or by the number of its group."""
    failed: bool = False
    """Show the completions that could not be scored, and why."""
    full: bool = False
    """Show texts in full instead of one line each."""
    json: bool = False
    """Print one JSON object per line, with full texts."""


ARGS = (SamplesArgs,)


def run(args: list[str]) -> int:
    """Show recorded completions; 0 if there are some."""
    options = read_tool(SamplesArgs(), args)
    check_at_least(options, best=0, worst=0)
    path = records.find_file(Path(options.run))
    newest = records.last_step(path)
    if newest < 0:
        raise UsageError(f"{path}: nothing is recorded there yet")
    if options.failed:
        rows = [row for row in read_shown_rows(path, options.step) if row["failure"]]
        if options.json:
            print_json(rows)
        else:
            print_failures(rows, make_console())
    elif options.prompt:
        rows = rows_of_prompt(path, options.prompt)
        if options.json:
            print_json(rows)
        else:
            print_prompt(rows, make_console(), options.full)
    else:
        step = newest if options.step is None else options.step
        rows = list(read_shown_rows(path, step))
        if not rows:
            raise UsageError(f"{path}: there is no step {step}; the newest is {newest}")
        print_step(step, rows, options)
    return 0


# Reading: one whole row in memory at a time; rows that are shown are kept without their tokens


def read_shown_rows(path: Path, step: int | None = None) -> Iterator[Row]:
    """Yield the rows of a step, or of all steps, without their tokens."""
    for _, row in records.read_rows(path, step):
        if row is not None:
            yield without_tokens(row)


def without_tokens(row: Row) -> Row:
    """Return the fields that are shown, with per-token values replaced by their number or mean."""
    kept = {name: row[name] for name in SHOWN_FIELDS}
    kept["length"] = row["mask"].count("1")
    if "advantages" in row:
        kept["advantage"] = sum(row["advantages"]) / max(1, kept["length"])
    for name in ("messages", "turn_seconds", "branch"):
        if name in row:
            kept[name] = row[name]
    if "turn_credits" in row:
        kept["turn_tokens"] = [row["mask"][first:end].count("1") for first, end, _, _ in row["turn_credits"]]
        kept["turn_rewards"] = [reward for _, _, reward, _ in row["turn_credits"]]
    elif "messages" in row:  # of earlier versions
        kept["turn_tokens"] = [len(ones) for ones in re.findall("1+", row["mask"])]
    return kept


def rows_of_prompt(path: Path, wanted: str) -> list[Row]:
    """Return all completions of a prompt, given as file:line or by the number of one of its groups."""
    origin = wanted
    if wanted.isdigit():
        origin = next((row["origin"] for row in read_shown_rows(path) if row["group"] == int(wanted)), "")
    rows = [row for row in read_shown_rows(path) if row["origin"] == origin or row["origin"].endswith(f"/{origin}")]
    if not origin or not rows:
        first = next(read_shown_rows(path))
        raise UsageError(
            f"{path}: no completion of a prompt {wanted!r}. Give its file:line, as {first['origin']}, or its group, as "
            f"{first['group']}"
        )
    return rows


# Printing


def print_step(step: int, rows: Sequence[Row], options: SamplesArgs) -> None:
    scored = sorted((row for row in rows if not row["failure"]), key=lambda row: -row["reward"])
    if options.best or options.worst:
        best, worst = scored[: options.best], scored[::-1][: options.worst]
    else:  # none is shown twice
        best, worst = scored[:DEFAULT_COUNT], scored[DEFAULT_COUNT:][::-1][:DEFAULT_COUNT]
    if options.json:
        print_json(best + worst)
        return
    console = make_console()
    mean = f"mean reward {sum(row['reward'] for row in scored) / len(scored):.4g}, " if scored else ""
    failures = len(rows) - len(scored)
    print_line(
        console, f"step {step}: {len(rows)} completions, {mean}{failures} failed" + " (--failed)" * bool(failures)
    )
    for name, part in (("best", best), ("worst", worst)):
        if part:
            print_line(console, f"\n{name}:")
            console.print(completion_table(part, options.full))


def print_prompt(rows: Sequence[Row], console: Console, full: bool) -> None:
    """Print the completions of one prompt, step by step, with the mean reward of each step."""
    print_line(console, f"{visible(rows[0]['origin'])}: {last_message(rows[0]['prompt'])}\n")
    console.print(completion_table(rows, full, with_prompt=False))
    rewards: dict[int, list[float]] = {}
    for row in rows:
        if not row["failure"]:
            rewards.setdefault(row["step"], []).append(row["reward"])
    means = ", ".join(f"{sum(of_step) / len(of_step):.4g} (step {step})" for step, of_step in rewards.items())
    print_line(console, f"\nmean reward: {means}")


def print_failures(rows: Sequence[Row], console: Console) -> None:
    """Print the completions that failed, and the text of each distinct failure."""
    if not rows:
        print_line(console, "no completion failed")
        return
    console.print(completion_table(rows, full=False))
    for text, times in Counter(row["failure"] for row in rows).most_common():
        print_line(console, f"\n{times} time{'s' * (times > 1)}:")
        print_line(console, "\n".join(visible(line) for line in text.splitlines()))


def completion_table(rows: Sequence[Row], full: bool, with_prompt: bool = True) -> Table:
    from rich.table import Table
    from rich.text import Text

    overflow: Any = "fold" if full else "ellipsis"
    table = Table(box=None, pad_edge=False, expand=True, show_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    if with_prompt:
        table.add_column("prompt", ratio=2, no_wrap=not full, overflow=overflow)
    table.add_column("completion", ratio=3, no_wrap=not full, overflow=overflow)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("rewards", ratio=2, no_wrap=not full, overflow=overflow)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("finish", no_wrap=True)
    for row in rows:
        cells = [str(row["step"]), *([last_message(row["prompt"])] if with_prompt else []), completion_text(row, full)]
        reward = "-" if row["failure"] else f"{row['reward']:.4g}"
        cells += [reward, rewards_text(row), str(row["length"]), row["finish"]]
        table.add_row(*(Text(cell if full else cell[:MAX_SHORTENED]) for cell in cells))
    return table


def last_message(messages: Sequence[dict[str, Any]]) -> str:
    """Return the last message of a prompt, after dots if there are earlier ones."""
    if not messages:
        return ""
    return ("... " if len(messages) > 1 else "") + visible(str(messages[-1].get("content", "")))


def completion_text(row: Row, full: bool = False) -> str:
    """Return the last completion, and the number of turns if there were several; in full, all of them."""
    if full and row["turns"] > 1:
        return "\n".join(transcript(row))
    return (f"[{row['turns']} turns] " if row["turns"] > 1 else "") + visible(row["text"])


def transcript(row: Row) -> Iterator[str]:
    """Yield the messages after the prompt; of each reply its trained tokens, its reward, and how long it took."""
    counts = row["turn_tokens"] if len(row["turn_tokens"]) == row["turns"] else ()
    tokens, seconds, rewards = iter(counts), iter(row.get("turn_seconds", ())), iter(row.get("turn_rewards", ()))
    for message in row["messages"][len(row["prompt"]) :]:
        notes = []
        if message["role"] == "assistant":
            notes += [f"{count} tokens" for count in islice(tokens, 1)]
            notes += [f"reward {reward:.4g}" for reward in islice(rewards, 1) if reward]
            notes += [f"{model:.2f} s after {program:.2f} s" for program, model in islice(seconds, 1)]
        note = f" [{', '.join(notes)}]" if notes else ""
        name = f" {visible(str(message['name']))}" if message["role"] == "tool" and message.get("name") else ""
        yield f"{message['role']}{name}{note}: {visible(str(message['content']))}"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            yield f"  calls {visible(str(function['name']))} {visible(json.dumps(function['arguments']))}"


def rewards_text(row: Row) -> str:
    """Return the value of each reward, or the last line of the failure."""
    if row["failure"]:
        return visible(row["failure"].strip().splitlines()[-1])
    return " ".join(f"{name} {value:.4g}" for name, value in row["rewards"].items())


def visible(text: str) -> str:
    """Escape line breaks and control characters, so that generated text cannot control the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def print_json(rows: Sequence[Row]) -> None:
    for row in rows:
        print(json.dumps(row))  # ASCII only: generated text cannot control the terminal


def make_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH, no_color=True)


def print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
