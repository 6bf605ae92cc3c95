"""`posttrain rewards`: `check` scores saved completions, `list` lists verifiers, `audit` measures them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.cli.arguments import rewards_of
from posttrain.config.tools import RewardArgs, ToolArgs, check_at_least, positional, read_tool
from posttrain.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.rewards.base import Completion, Rewards, Verdict

COMMANDS = {
    "check": "score saved completions and print value, reason and time for each",
    "list": "list the built-in verifiers",
    "audit": "score labelled hard cases and print precision and recall of each verifier beside other libraries' rules",
}
TEXT_COLUMNS = ("text", "completion", "response", "output", "prediction", "solution_str")
REASON_WIDTH = 80  # characters of a reason in the table
BATCH_SIZE = 256  # completions that are scored together


@dataclass(kw_only=True)
class RewardsCheckArgs(RewardArgs, ToolArgs):
    """Options of `posttrain rewards check`."""

    verb: ClassVar[str] = "rewards check"
    about: ClassVar[str] = COMMANDS["check"]
    example: ClassVar[str] = "posttrain rewards check completions.jsonl --reward gsm8k"

    file: str = positional()
    """Recorded rollouts of a run, or data with a column text, completion, response, output or prediction."""
    max_examples: int = 0
    """Score only this many lines of the file; 0: all."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the file by the names used here, as JSON: {"text": "answer"}."""
    label_column: str = ""
    """Column with the known quality of each completion, a number or true or false: agreement with it is measured."""
    full: bool = False
    """Print whole reasons instead of their last line."""


@dataclass(kw_only=True)
class RewardsListArgs(ToolArgs):
    """`posttrain rewards list` has no options."""

    verb: ClassVar[str] = "rewards list"
    about: ClassVar[str] = COMMANDS["list"]
    example: ClassVar[str] = "posttrain rewards list"


@dataclass(kw_only=True)
class RewardsAuditArgs(ToolArgs):
    """Options of `posttrain rewards audit`."""

    verb: ClassVar[str] = "rewards audit"
    about: ClassVar[str] = COMMANDS["audit"]
    example: ClassVar[str] = "posttrain rewards audit --verifiers math gsm8k"

    verifiers: tuple[str, ...] = ()
    """Verifiers to audit: math, gsm8k, choice, format, code; empty: all."""
    cases: str = ""
    """File of labelled cases instead of those of the package: lines with completion, correct, truth and verifier."""
    timeout_seconds: float = 10.0
    """Time limit for one completion; beyond it the completion counts as not correct."""
    allow_unprotected_code: bool = False
    """Run the programs of the cases (code) also where they cannot be isolated, with the rights of this user."""
    full: bool = False
    """Print every case that was decided wrongly."""


ARGS = (RewardsCheckArgs, RewardsListArgs, RewardsAuditArgs)


def run(args: list[str]) -> int:
    """`posttrain rewards check|list|audit ...`."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: posttrain rewards COMMAND ...\n")
        print("\n".join(f"  {name:<6} {text}" for name, text in COMMANDS.items()))
        print("\nposttrain rewards COMMAND --help lists the options of a command.")
        return 0
    if args[0] == "check":
        return check_completions(args[1:])
    if args[0] == "list":
        return list_verifiers(args[1:])
    if args[0] == "audit":
        return audit_verifiers(args[1:])
    raise UsageError(f"there is no `posttrain rewards {args[0]}`; there are {', '.join(COMMANDS)}")


def list_verifiers(args: list[str]) -> int:
    read_tool(RewardsListArgs(), args)
    from posttrain.rewards.builtin import verifiers

    for name, found in verifiers().items():
        print(f"{name:<22}{found.summary}")
    return 0


def audit_verifiers(args: list[str]) -> int:
    """Audit verifiers; 1 if one accepts a wrong completion, or finds fewer right ones than another library's rule."""
    options = read_tool(RewardsAuditArgs(), args)
    from posttrain.rewards.audit import AUDITED, OWN, audit, read_case_file

    if unknown := [name for name in options.verifiers if name not in AUDITED]:
        raise UsageError(f"verifiers: there are no cases for {unknown[0]!r}; there are for {', '.join(AUDITED)}")
    limits = {
        "timeout_seconds": options.timeout_seconds,
        "allow_unprotected_code": options.allow_unprotected_code,
    }
    names: tuple[str, ...] = options.verifiers or AUDITED
    given = read_case_file(options.cases) if options.cases else None
    if given is not None:
        names = tuple(name for name in names if any(case.verifier == name for case in given))
        if not names:
            raise UsageError(f"cases {options.cases}: no case is for {' or '.join(options.verifiers or AUDITED)}")
    results = audit(names, given, **limits)
    good = True
    print(f"{'verifier':<10}{'scorer':<16}{'cases':>6}{'precision':>11}{'recall':>8}{'false positives':>17}")
    for result in results:
        numbers = f"{result.precision:>11.3f}{result.recall:>8.3f}{len(result.false_positives):>17}"
        print(f"{result.verifier:<10}{result.scorer:<16}{result.cases:>6}{numbers}")
        if result.scorer == OWN:
            best = max(other.recall for other in results if other.verifier == result.verifier)
            good = good and not result.false_positives and result.recall >= best
    for result in results if options.full else ():
        for kind, cases in (("accepted", result.false_positives), ("not accepted", result.false_negatives)):
            for case in cases:
                print(f"{result.verifier}, {result.scorer}: {kind}: {case.completion!r} {case.columns}")
    return int(not good)


def check_completions(args: list[str]) -> int:
    """Score all completions of a file; returns 0 if no function failed and no reward is biased, else 1."""
    options = read_tool(RewardsCheckArgs(), args)
    check_at_least(options, max_examples=0)
    if not all(isinstance(name, str) for name in options.map_keys.values()):
        raise UsageError(
            f'map_keys is {options.map_keys}; it must have names of columns, such as {{"text": "answer"}}.'
        )
    from rich.console import Console

    from posttrain.rewards.base import Rewards, group_by_prompt

    console = Console(highlight=False, soft_wrap=True)
    with Rewards(options.reward, **rewards_of(options), max_failure_rate=1.0) as rewards:  # failures are shown, too
        rewards.measure_order()
        if rewards.models:
            raise UsageError(f"model:{rewards.models[0][1]}: use posttrain score for reward models; leave it out here")
        origins, completions = read_for_scoring(options.file, options.map_keys, options.max_examples)
        rewards.check(sorted(set.intersection(*(set(row.columns) for row in completions))))
        labels = read_labels(completions, origins, options.label_column)
        verdicts: list[list[Verdict | None]] = []
        for start in range(0, len(completions), BATCH_SIZE):
            verdicts += rewards.score(completions[start : start + BATCH_SIZE])
        groups = group_by_prompt(completions)
        if rewards.has_open_verdicts:
            rewards.compare(completions, groups, verdicts)
            rewards.run_combiner(completions, verdicts)
        show_rows(rewards, origins, verdicts, options.full, console)
        show_summary(rewards, origins, verdicts, console)
        trusted = show_trust(rewards, completions, labels, groups, verdicts, console)
    return int(not trusted or any(verdict is not None and verdict.failed for row in verdicts for verdict in row))


def read_for_scoring(name: str, map_keys: Mapping[str, str], limit: int = 0) -> tuple[list[str], list[Completion]]:
    """Read completions and their origins (file:line); a DataError for an example without a completion."""
    from posttrain.data.reading.sources import read_records

    origins: list[str] = []
    completions: list[Completion] = []
    for number, row in enumerate(read_records(name)):
        if limit and number >= limit:
            break
        values = row.values | {ours: row.values[theirs] for ours, theirs in map_keys.items() if theirs in row.values}
        origins.append(row.origin)
        completions.append(completion_for_scoring(values, row.origin, "text" if "text" in map_keys else None))
    if not completions:
        raise DataError(f"{name}: the file has no completions")
    return origins, completions


def completion_for_scoring(values: dict[str, Any], origin: str, column: str | None = None) -> Completion:
    """Read a record of a run (`text`, `prompt`, `columns`), or a row with its completion in one of its columns."""
    from posttrain.rewards.base import Completion

    column = column or next((name for name in TEXT_COLUMNS if name in values), None)
    if column is None:
        raise DataError(f"{origin}: no completion: none of the columns {', '.join(TEXT_COLUMNS)}; use --map_keys")
    text, prompt = values[column], values.get("prompt", values.get("question", ""))
    if isinstance(text, list):  # messages
        text = "".join(str(message.get("content", "")) for message in text if isinstance(message, dict))
    if not isinstance(text, str):
        raise DataError(f"{origin}: {column}: expected text, found {type(text).__name__}")
    messages = values.get("messages", prompt if isinstance(prompt, list) else [])
    if isinstance(prompt, list):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    if not messages:
        messages = [{"role": "user", "content": str(prompt)}]
    columns = values.get("columns")
    if not isinstance(columns, dict):
        columns = {name: value for name, value in values.items() if name != column}
    tokens = values.get("tokens", 0)
    return Completion(
        prompt=str(prompt),
        messages=messages,
        text=text,
        finish=str(values.get("finish", "")),
        tokens=len(tokens) if isinstance(tokens, list) else int(tokens or 0),
        columns=columns,
    )


def show_rows(
    rewards: Rewards, origins: Sequence[str], verdicts: Sequence[Sequence[Verdict | None]], full: bool, console: Console
) -> None:
    """Print a line for each completion and reward."""
    from rich.markup import escape

    where = max(map(len, origins))
    width = max(map(len, rewards.names))
    for origin, row in zip(origins, verdicts, strict=True):
        for name, verdict in zip(rewards.names, row, strict=True):
            assert verdict is not None
            shown = (
                f"{verdict.value:8.4g}"
                if verdict.value is not None
                else f"{verdict.kind if verdict.applies else '-':>8}"
            )
            reason = verdict.reason.strip()
            if not full:
                reason = reason.rpartition("\n")[2][:REASON_WIDTH]
            line = f"{origin:<{where}}  {name:<{width}}  {shown}  {verdict.seconds * 1000:9.2f} ms  {reason}"
            console.print(f"[red]{escape(line)}[/]" if verdict.failed else escape(line))


def show_summary(
    rewards: Rewards, origins: Sequence[str], verdicts: Sequence[Sequence[Verdict | None]], console: Console
) -> None:
    """Print mean, failures and the slowest completion of each reward, then the mean of the weighted sum."""
    from posttrain.rewards.base import combine

    console.print()
    for index, name in enumerate(rewards.names):
        column = [row[index] for row in verdicts]
        found = [verdict for verdict in column if verdict is not None]
        counts = Counter(verdict.kind for verdict in found)
        values = [verdict.value for verdict in found if verdict.value is not None]
        mean = f"{sum(values) / len(values):.4f}" if values else "-"
        slowest = max(range(len(found)), key=lambda index: found[index].seconds)
        numbers = ", ".join(f"{counts[kind]} {kind}" for kind in ("ok", "error", "timeout"))
        if counts["not_applicable"]:
            numbers += f", {counts['not_applicable']} not applicable"
        time = f"slowest {found[slowest].seconds * 1000:.2f} ms ({origins[slowest]})"
        console.print(f"{name}: mean {mean}; {numbers}; {time}", markup=False)
    sums = [total for row in verdicts if (total := combine(row, rewards.weights)) is not None]
    mean = f"{sum(sums) / len(sums):.4f}" if sums else "-"
    console.print(f"reward: mean {mean} over {len(sums)} of {len(verdicts)} completions", markup=False)


def read_labels(completions: Sequence[Completion], origins: Sequence[str], column: str) -> list[float]:
    """Return the known quality of each completion; [] if no column is given, a DataError for one without a number."""
    labels: list[float] = []
    for completion, origin in zip(completions, origins, strict=True) if column else ():
        value = completion.columns.get(column)
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise DataError(f"{origin}: {column}: expected a number or true or false, found {value!r}")
        labels.append(float(value))
    return labels


def show_trust(
    rewards: Rewards,
    completions: Sequence[Completion],
    labels: Sequence[float],
    groups: Sequence[int],
    verdicts: Sequence[Sequence[Verdict | None]],
    console: Console,
) -> bool:
    """Print agreement with the labels and what is known about judges; returns whether nothing speaks against them."""
    from posttrain.rewards.agreement import concerns, measure, total_counts

    lengths, trusted = [len(completion.text) for completion in completions], True
    for index, spec in enumerate(rewards.specs):
        column = [verdict for row in verdicts if (verdict := row[index]) is not None]
        found = measure(labels, [verdict.value for verdict in column], lengths, groups) if labels else None
        counts = total_counts(column)
        if found is not None:
            where = "of one prompt" if found.within_prompts else "of all prompts"
            print_line(
                console, f"{spec.name}: agrees with the labels in {found.agreeing:.1%} of {found.pairs} pairs {where}"
            )
            longer = f"{found.longer_preferred:.1%}; by the labels {found.longer_is_better:.1%} of them are better"
            print_line(console, f"{spec.name}: prefers the longer completion in {longer}")
        elif labels:
            print_line(console, f"{spec.name}: no two labels of scored completions differ, so nothing can be compared")
        if spec.kind == "judge":
            for line in judge_lines(counts):
                print_line(console, f"{spec.name}: {line}")
        for concern in concerns(found, counts):
            trusted = False
            console.print(f"[red]{spec.name}: do not train with it: {concern}[/]")
    return trusted


def judge_lines(counts: Mapping[str, float]) -> Iterator[str]:
    """Yield what a judge needed, and how its verdicts came out."""
    numbers = {name: int(counts.get(name, 0)) for name in ("requests", "cached", "refused", "unreadable")}
    yield ", ".join(f"{number} {name}" for name, number in numbers.items())
    tokens = " + ".join(f"{int(counts.get(name, 0)):,}" for name in ("prompt_tokens", "completion_tokens"))
    yield f"{tokens} tokens of prompts and verdicts, cost {counts.get('cost', 0.0):.4g}"
    if swapped := counts.get("swapped", 0.0):
        flips = f"{counts.get('flipped', 0.0) / swapped:.1%} of {swapped:.0f} verdicts flip when the order is swapped"
        first = counts.get("first_preferred", 0.0) / (counts.get("decided") or 1.0)
        yield f"{flips}; the first is preferred in {first:.1%}"


def print_line(console: Console, line: str) -> None:
    console.print(line, markup=False)
