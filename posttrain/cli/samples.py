"""`posttrain samples RUN`: what a run answered and what it was worth, from its record."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.options import Parser
from posttrain.core.errors import UsageError
from posttrain.rollout import records

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ABOUT = "answers of a run: the best and worst of a step, one prompt over all steps, failures"
SHOWN = 5  # best and worst, if no number is given
PIPED_WIDTH = 160  # characters of a line where there is no terminal
MOST_SHORTENED = 400  # characters of a text that a line is made of
KEPT = ("step", "group", "origin", "version", "reward", "rewards", "finish", "turns", "failure", "prompt", "text")

Row = dict[str, Any]


def run(args: list[str]) -> int:
    """`posttrain samples RUN ...`: 0 if there was something to show."""
    options = parser().parse_args(args)
    path = records.find_file(Path(options.run))
    newest = records.last_step(path)
    if newest < 0:
        raise UsageError(f"{path}: nothing is recorded there yet")
    if options.failed:
        rows = failed(path, options.step)
        as_json(rows) if options.json else show_failures(rows, make_console())
    elif options.prompt is not None:
        rows = of_prompt(path, options.prompt)
        as_json(rows) if options.json else show_prompt(rows, make_console(), options.full)
    else:
        step = newest if options.step is None else options.step
        rows = list(slim_rows(path, step))
        if not rows:
            raise UsageError(f"{path}: there is no step {step}; the newest is {newest}")
        show_step(step, rows, options)
    return 0


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="posttrain samples", description=ABOUT)
    found.add_argument("run", metavar="RUN", help=f"run folder, or a {records.FILE}")
    found.add_argument("--step", type=int, default=None, help="of this step; default: the newest")
    found.add_argument("--best", type=count, default=0, metavar="K", help="answers with the highest reward")
    found.add_argument("--worst", type=count, default=0, metavar="K", help="answers with the lowest reward")
    found.add_argument("--prompt", default=None, metavar="PROMPT", help="all answers to one: file:line, or its group")
    found.add_argument("--failed", action="store_true", help="answers that could not be scored, and why")
    found.add_argument("--full", action="store_true", help="texts in full, not a line of each")
    found.add_argument("--json", action="store_true", help="a JSON object a line, texts in full")
    return found


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


# What is read: one row in memory at a time, and of those that are shown all but their tokens


def slim_rows(path: Path, step: int | None = None) -> Iterator[Row]:
    for _, row in records.read_rows(path, step):
        if row is not None:
            yield slim(row)


def slim(row: Row) -> Row:
    """Without what belongs to single tokens."""
    kept = {name: row[name] for name in KEPT}
    kept["length"] = row["mask"].count("1")
    if "advantages" in row:
        kept["advantage"] = sum(row["advantages"]) / max(1, kept["length"])
    if "messages" in row:
        kept["messages"] = row["messages"]
    return kept


def failed(path: Path, step: int | None) -> list[Row]:
    return [row for row in slim_rows(path, step) if row["failure"]]


def of_prompt(path: Path, wanted: str) -> list[Row]:
    """All answers to the prompt of this file:line; a group, which is one visit to a prompt, stands for its prompt."""
    origin = wanted
    if wanted.isdigit():
        origin = next((row["origin"] for row in slim_rows(path) if row["group"] == int(wanted)), "")
    rows = [row for row in slim_rows(path) if row["origin"] == origin or row["origin"].endswith(f"/{origin}")]
    if not origin or not rows:
        first = next(slim_rows(path))
        raise UsageError(
            f"{path}: no answer to a prompt {wanted!r}. Give its file:line, as {first['origin']}, or its group, as "
            f"{first['group']}"
        )
    return rows


# What is shown


def show_step(step: int, rows: Sequence[Row], options: argparse.Namespace) -> None:
    scored = sorted((row for row in rows if not row["failure"]), key=lambda row: -row["reward"])
    both = not options.best and not options.worst
    chosen = {
        "best": scored[: SHOWN if both else options.best],
        "worst": scored[SHOWN:][::-1][:SHOWN] if both else scored[::-1][: options.worst],  # none is shown twice
    }
    if options.json:
        as_json([row for part in chosen.values() for row in part])
        return
    console = make_console()
    mean = f"mean reward {sum(row['reward'] for row in scored) / len(scored):.4g}, " if scored else ""
    failures = len(rows) - len(scored)
    print_line(console, f"step {step}: {len(rows)} answers, {mean}{failures} failed" + " (--failed)" * bool(failures))
    for name, part in chosen.items():
        if part:
            print_line(console, f"\n{name}:")
            console.print(table(part, options.full))


def show_prompt(rows: Sequence[Row], console: Console, full: bool) -> None:
    """One prompt's answers, step after step, with the mean of each step."""
    print_line(console, f"{visible(rows[0]['origin'])}: {said(rows[0]['prompt'])}\n")
    console.print(table(rows, full, with_prompt=False))
    rewards: dict[int, list[float]] = {}
    for row in rows:
        if not row["failure"]:
            rewards.setdefault(row["step"], []).append(row["reward"])
    means = ", ".join(f"{sum(of_step) / len(of_step):.4g} (step {step})" for step, of_step in rewards.items())
    print_line(console, f"\nmean reward: {means}")


def show_failures(rows: Sequence[Row], console: Console) -> None:
    """Which, and the text of each different fault."""
    if not rows:
        print_line(console, "no answer failed")
        return
    console.print(table(rows, full=False))
    for text, times in Counter(row["failure"] for row in rows).most_common():
        print_line(console, f"\n{times} time{'s' * (times > 1)}:")
        print_line(console, "\n".join(visible(line) for line in text.splitlines()))


def table(rows: Sequence[Row], full: bool, with_prompt: bool = True) -> Table:
    from rich.table import Table
    from rich.text import Text

    overflow: Any = "fold" if full else "ellipsis"
    found = Table(box=None, pad_edge=False, expand=True, show_edge=False)
    found.add_column("step", justify="right", no_wrap=True)
    if with_prompt:
        found.add_column("prompt", ratio=2, no_wrap=not full, overflow=overflow)
    found.add_column("answer", ratio=3, no_wrap=not full, overflow=overflow)
    found.add_column("reward", justify="right", no_wrap=True)
    found.add_column("of", ratio=2, no_wrap=not full, overflow=overflow)
    found.add_column("tokens", justify="right", no_wrap=True)
    found.add_column("finish", no_wrap=True)
    for row in rows:
        cells = [str(row["step"]), *([said(row["prompt"])] if with_prompt else []), answered(row)]
        reward = "-" if row["failure"] else f"{row['reward']:.4g}"
        cells += [reward, parts_of(row), str(row["length"]), row["finish"]]
        found.add_row(*(Text(cell if full else cell[:MOST_SHORTENED]) for cell in cells))
    return found


def said(messages: Sequence[dict[str, Any]]) -> str:
    """The last message of a prompt, and that there were others."""
    if not messages:
        return ""
    return ("... " if len(messages) > 1 else "") + visible(str(messages[-1].get("content", "")))


def answered(row: Row) -> str:
    """The last reply; of a conversation with an environment how many there were."""
    return (f"[{row['turns']} turns] " if row["turns"] > 1 else "") + visible(row["text"])


def parts_of(row: Row) -> str:
    if row["failure"]:
        return visible(row["failure"].strip().splitlines()[-1])
    return " ".join(f"{name} {value:.4g}" for name, value in row["rewards"].items())


def visible(text: str) -> str:
    """In one line, with every character that a terminal could obey written out: a model may say anything."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def as_json(rows: Sequence[Row]) -> None:
    for row in rows:
        print(json.dumps(row))  # all but ASCII escaped: a terminal obeys nothing in it


def make_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_WIDTH, no_color=True)


def print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
