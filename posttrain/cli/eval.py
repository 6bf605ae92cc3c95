"""`posttrain eval MODEL DATA ... --reward ... [--against MODEL2]`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.generate import (
    add_condition,
    add_data,
    add_model,
    add_sampling,
    add_workers,
    data_of,
    model_of,
    sampling_of,
)
from posttrain.cli.options import Parser, add_rewards, parse, rewards_of
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    from posttrain.inference.evaluation import PromptResult
    from posttrain.pipelines import Stage

FAILURES = "failures.jsonl"
FREE = ("out", "quiet", "shown", "right", "workers", "devices", "engine")  # the stages know what decides answers
WIDTH = 60  # characters of a text in the table


def run(args: list[str]) -> int:
    """0 when the figures are known."""
    options = parse(parser(), args)
    if options.shown < 0:
        raise UsageError(f"shown is {options.shown}; it must be at least 0.")
    from posttrain.core.files import atomic_write_json
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    from posttrain.inference.completion_files import read_completions, write_rows
    from posttrain.inference.evaluation import failures, figures, results_by_prompt
    from posttrain.pipelines.stage import REPORT, open_folder, run_in

    with open_folder("eval", options.out, vars(options), free=FREE) as folder:
        models = [options.model, *([options.against] if options.against else [])]
        lists = [
            stages_of(options, folder.path / f"{letter}", path) for letter, path in zip("ab", models, strict=False)
        ]
        say = print if not options.quiet else (lambda _: None)
        run_in(folder.path, [stage for stages in lists for stage in stages], quiet=options.quiet, say=say)
        prompts = [results_by_prompt(read_completions(str(stages[-1].out)), options.right) for stages in lists]
        found = [figures(of_model) for of_model in prompts]
        report: dict[str, Any] = {
            "models": models,
            "prompts": len(prompts[0]),
            "answers": sum(len(result.completions) for result in prompts[0].values()),
            "failed": sum(result.failed for result in prompts[0].values()),
            "figures": [{name: asdict(figure) for name, figure in of_model.items()} for of_model in found],
        }
        if options.against:
            report["comparison"] = compared(*prompts)
        rows = failures(prompts[0])
        write_rows(folder.path / FAILURES, rows)
        atomic_write_json(folder.path / REPORT, report)
        show(report, rows[: options.shown], len(rows), folder.path)
    return 0


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="posttrain eval", description=TOOLS["eval"])
    found.add_argument("model", metavar="MODEL", help="folder, hub name, run folder (its newest checkpoint) or pico")
    found.add_argument("data", metavar="DATA", nargs="+", help="files, folders, globs or hub names with prompts")
    add_rewards(found)
    found.add_argument("--max_failure_rate", type=float, default=0.1, help="part of the answers that may fail (0.1)")
    found.add_argument("--against", default="", metavar="MODEL2", help="a second model: which is better, and surely?")
    found.add_argument("--n", type=int, default=1, help="answers to each prompt: n of mean@n, and of pass@k")
    found.add_argument("--right", type=float, default=0.5, help="right is a first reward above this (0.5)")
    found.add_argument("--shown", type=int, default=10, help="failures to show; all are in failures.jsonl (10)")
    found.add_argument(
        "--output_dir", "--out", dest="out", default="", help="folder; default: the next free runs/eval-NNN"
    )
    add_sampling(found, max_tokens=512, temperature=0.0)
    found.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers")
    add_condition(found)
    found.add_argument("--batch", type=int, default=512, help="answers made and written at a time")
    add_workers(found)
    found.add_argument("--quiet", action="store_true", help="only the figures")
    add_model(found)
    add_data(found)
    return found


def stages_of(options: argparse.Namespace, place: Path, model: str) -> list[Stage]:
    """Answers of one model and what they are worth."""
    from posttrain.config.sections import ClusterConfig, DataConfig
    from posttrain.inference.generate import Generation
    from posttrain.inference.model import CONDITION
    from posttrain.inference.score import Scoring
    from posttrain.inference.workers import engine_of_words
    from posttrain.pipelines import Generate, Score

    generation = Generation(
        model=model_of(model, options),
        data=data_of(options, options.data),
        out=str(place / "answers.jsonl"),
        sampling=sampling_of(options),
        n=options.n,
        seed=options.seed,
        condition=options.condition,
        condition_template=options.condition_template or CONDITION,
        batch=options.batch,
        engine=engine_of_words(options.engine),
        cluster=ClusterConfig(devices=options.devices),
    )
    scoring = Scoring(
        file=generation.out,
        out=str(place / "scored.jsonl"),
        reward=tuple(options.reward),
        max_failure_rate=options.max_failure_rate,
        model=model_of("", options),
        data=DataConfig(max_length=options.max_prompt_tokens + options.max_tokens + 64),
        **rewards_of(options),
    )
    return [Generate(generation), Score(scoring)]


def compared(first: dict[str, PromptResult], second: dict[str, PromptResult]) -> dict[str, Any]:
    """The first model against the second, by reward and by accuracy."""
    from posttrain.inference.evaluation import compare, paired

    pairs = paired(second, first)
    return {
        "reward": asdict(compare([a.reward for a, _ in pairs], [b.reward for _, b in pairs])),
        "accuracy": asdict(compare([a.accuracy for a, _ in pairs], [b.accuracy for _, b in pairs])),
    }


def show(report: dict[str, Any], failures: list[dict[str, object]], wrong: int, folder: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from posttrain.cli.samples import visible

    console = Console(highlight=False)
    table = Table("", *map(escape, report["models"]))
    for name in report["figures"][0]:
        cells = [interval(of_model[name]) if name in of_model else "-" for of_model in report["figures"]]
        table.add_row(name, *map(escape, cells))
    if failures:
        worst = Table("row", "right", "prompt", "expected", "answer", "reward", title="failures")
        for row in failures:
            texts = [visible(shortened(row[name])) for name in ("prompt", "expected", "answer")]
            worst.add_row(*map(escape, (shortened(row["origin"]), str(row["right"]), *texts, f"{row['reward']:.4g}")))
        console.print(worst)
    console.print(table)
    answers = f"{report['prompts']:,} prompts, {report['answers']:,} answers, {report['failed']:,} could not be scored"
    console.print(f"{answers}; in brackets 95% confidence intervals", soft_wrap=True)
    for name, found in report.get("comparison", {}).items():
        difference = interval(found["difference"], sign="+")
        counts = f"{found['better']} prompts better, {found['worse']} worse, {found['same']} the same"
        line = f"{name}: {report['models'][0]} - {report['models'][1]} = {difference}; {counts}; p = {found['p']:.4g}"
        console.print(line, markup=False, soft_wrap=True)
    place = shlex.quote(str(folder))
    last = f"done: {wrong:,} prompts with wrong answers in {place}/{FAILURES}, all answers and figures beside it"
    console.print(last, markup=False, soft_wrap=True)


def interval(figure: dict[str, float], sign: str = "") -> str:
    return f"{figure['value']:{sign}.4g} [{figure['low']:.4g}, {figure['high']:.4g}]"


def shortened(value: object) -> str:
    """The end of a long text: there the answer is."""
    text = " ".join(("" if value is None else str(value)).split())
    return text if len(text) <= WIDTH else f"...{text[-WIDTH:]}"
