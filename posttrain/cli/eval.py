"""`posttrain eval MODEL DATA ... --reward ... [--against MODEL2]`; `posttrain eval MODEL TASK ... --harness NAME`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from posttrain.cli.arguments import data_of, engine_of, model_of, rewards_of
from posttrain.config.compare import option_defaults
from posttrain.config.tools import (
    ConditionArgs,
    EngineArgs,
    LoadArgs,
    PromptArgs,
    RewardArgs,
    SamplingArgs,
    SpeculativeArgs,
    ToolArgs,
    check_at_least,
    positional,
    read_tool,
)
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError
from posttrain.core.imports import importing_libraries

if TYPE_CHECKING:
    from posttrain.pipelines import Stage

FAILURES = "failures.jsonl"
EXAMPLES = "examples.jsonl"  # scores, a row per example
WITH_HARNESS = {"model", "data", "against", "harness", "num_fewshot", "apply_chat_template", "chat_template", "dtype"}
WITH_HARNESS |= {"load_in_4bit", "max_examples", "batch_size", "seed", "output_dir", "quiet"}
MAY_CHANGE_ON_RESUME = (
    "output_dir",
    "quiet",
    "show_failures",
    "pass_threshold",
    "workers",
    "devices",
    "engine",
    "vllm_options",
)
"""Options that may differ when an evaluation is continued; the stages check what decides completions."""
WIDTH = 60  # characters of a text in the table


@dataclass(kw_only=True)
class EvalArgs(PromptArgs, LoadArgs, EngineArgs, SpeculativeArgs, ConditionArgs, SamplingArgs, RewardArgs, ToolArgs):
    """Options of `posttrain eval`."""

    verb: ClassVar[str] = "eval"
    about: ClassVar[str] = TOOLS["eval"]
    example: ClassVar[str] = "posttrain eval MODEL prompts.jsonl --reward gsm8k"

    model: str = positional()
    """Model directory, Hugging Face name, run directory (newest valid checkpoint) or `pico`, a toy model."""
    data: tuple[str, ...] = positional(())
    """Files, directories, globs or dataset names with prompts; with harness, its tasks by name or file."""
    against: str = ""
    """A second model to compare with; with harness also the output_dir of an earlier evaluation."""
    harness: Literal["", "lm-eval", "inspect-ai"] = ""
    """Evaluate with the tasks and scores of this package instead of a reward."""
    num_fewshot: int = -1
    """Solved examples in each prompt of lm-eval; -1: as the task says."""
    apply_chat_template: bool = False
    """Render the prompts of lm-eval as conversations, by the model's chat template."""
    reward: tuple[str, ...] = ()
    """Required without harness. Verifiers by name (`posttrain rewards list`), FILE.py:FUNCTION, judge:RUBRIC.yaml,
    model:PATH or http://..."""
    samples_per_prompt: int = 1
    """Completions per prompt: n of mean@n and pass@k."""
    pass_threshold: float = 0.5
    """A completion is correct if its first reward is above this."""
    max_failure_rate: float = 0.1
    """Share of the completions that may fail before the command stops."""
    show_failures: int = 10
    """Number of prompts with wrong completions to print; all are in failures.jsonl."""
    output_dir: str = ""
    """Directory for completions and figures; empty: the next free runs/eval-NNN."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    seed: int = 0
    """The same seed gives the same completions."""
    quiet: bool = False
    """Print only warnings, errors and the figures."""


ARGS = (EvalArgs,)


def run(args: list[str]) -> int:
    """Evaluate; 0 if the figures are known."""
    options = read_tool(EvalArgs(), args)
    check_at_least(options, show_failures=0, num_fewshot=-1, max_examples=0)
    if options.harness:
        return run_with_harness(options)
    for name in ("num_fewshot", "apply_chat_template"):
        if getattr(options, name) != getattr(EvalArgs(), name):
            raise UsageError(f"--{name} has no effect without --harness lm-eval: leave it out, or set --harness")
    if not options.reward:
        raise UsageError(f"--reward is not set: what scores the completions? Example: {options.example}")
    from posttrain.core.files import atomic_write_json
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    with importing_libraries():
        from posttrain.inference.completion_files import read_completions, write_rows
        from posttrain.inference.evaluation import compare_models, example_rows, failures, figures, results_by_prompt
        from posttrain.pipelines.stage import REPORT, open_folder, run_in

    with open_folder(
        "eval", options.output_dir, saved_options(options), MAY_CHANGE_ON_RESUME, option_defaults(options)
    ) as folder:
        models = [options.model, *([options.against] if options.against else [])]
        lists = [
            model_stages(options, folder.path / f"{letter}", path) for letter, path in zip("ab", models, strict=False)
        ]
        print_line = print if not options.quiet else (lambda _: None)
        run_in(folder.path, [stage for stages in lists for stage in stages], quiet=options.quiet, report=print_line)
        prompts = [results_by_prompt(read_completions(str(stages[-1].out)), options.pass_threshold) for stages in lists]
        found = [figures(of_model) for of_model in prompts]
        report: dict[str, Any] = {
            "models": models,
            "model_paths": list(map(absolute, models)),
            "prompts": len(prompts[0]),
            "answers": sum(len(result.completions) for result in prompts[0].values()),
            "failed": sum(result.failed for result in prompts[0].values()),
            "figures": [{name: asdict(figure) for name, figure in of_model.items()} for of_model in found],
        }
        if options.against:
            report["comparison"] = {name: asdict(found) for name, found in compare_models(*prompts).items()}
        for letter, of_model in zip("ab", prompts, strict=False):
            write_rows(folder.path / letter / EXAMPLES, example_rows(of_model))
        rows = failures(prompts[0])
        write_rows(folder.path / FAILURES, rows)
        atomic_write_json(folder.path / REPORT, report)
        show_figures(report, rows[: options.show_failures], len(rows), folder.path)
    return 0


def run_with_harness(options: EvalArgs) -> int:
    """Evaluate with the tasks of another package."""
    for name, default in vars(EvalArgs()).items():
        if name not in WITH_HARNESS and getattr(options, name) != default:
            raise UsageError(
                f"{name} has no effect with harness {options.harness}, whose tasks decide this: leave it out"
            )
    from posttrain.core.files import atomic_write_json, read_json
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    from posttrain.config.sections import DataConfig
    from posttrain.core.statistics import compare_rows
    from posttrain.harness.base import read_rows
    from posttrain.inference.harness import HarnessRun
    from posttrain.pipelines import RunHarness
    from posttrain.pipelines.stage import REPORT, open_folder, run_in

    def stage(folder: Path, model: str) -> RunHarness:
        assert options.harness
        settings = HarnessRun(
            harness=options.harness,
            tasks=options.data,
            model=model_of(model, options),
            data=DataConfig(chat_template=options.chat_template, max_length=2**30),
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.apply_chat_template,
            max_examples=options.max_examples,
            batch_size=options.batch_size,
            seed=options.seed,
        )
        return RunHarness(settings, folder / EXAMPLES)

    earlier = Path(options.against) / "a" / EXAMPLES
    with open_folder(
        "eval", options.output_dir, saved_options(options), MAY_CHANGE_ON_RESUME, option_defaults(options)
    ) as folder:
        stages = [stage(folder.path / "a", options.model)]
        if options.against and not earlier.is_file():
            stages.append(stage(folder.path / "b", options.against))
        run_in(folder.path, stages, quiet=options.quiet, report=print if not options.quiet else (lambda _: None))
        files = [each.out for each in stages] + ([earlier] if earlier.is_file() else [])
        rows = [read_rows(file) for file in files]
        report: dict[str, Any] = {
            "models": [options.model, *([options.against] if options.against else [])],
            "model_paths": list(map(absolute, [options.model, *([options.against] if options.against else [])])),
            "harness": options.harness,
            "prompts": len(rows[0]),
            "figures": [read_json(file.with_name("figures.json")) for file in files],
        }
        if options.against:
            report["comparison"] = {name: asdict(found) for name, found in compare_rows(*rows).items()}
        atomic_write_json(folder.path / REPORT, report)
        show_figures(report, [], 0, folder.path)
    return 0


def absolute(model: str) -> str:
    """Return the absolute path of a model in a directory; a name of a hub as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def saved_options(options: EvalArgs) -> dict[str, Any]:
    """Return the options as config.yaml stores them."""
    return vars(options) | {"map_keys": json.dumps(options.map_keys) if options.map_keys else ""}


def model_stages(options: EvalArgs, folder: Path, model: str) -> list[Stage]:
    """Return the stages that generate completions of one model and score them."""
    from posttrain.config.sections import ClusterConfig, DataConfig
    from posttrain.engines.base import Sampling
    from posttrain.inference.generate import Generation
    from posttrain.inference.model import CONDITION
    from posttrain.inference.score import Scoring
    from posttrain.pipelines import Generate, Score

    generation = Generation(
        model=model_of(model, options),
        data=data_of(options, options.data),
        out=str(folder / "answers.jsonl"),
        sampling=Sampling.of(options),
        n=options.samples_per_prompt,
        seed=options.seed,
        condition=options.condition,
        condition_template=options.condition_template or CONDITION,
        batch=options.batch_size,
        engine=engine_of(options),
        cluster=ClusterConfig(devices=options.devices),
    )
    scoring = Scoring(
        file=generation.out,
        out=str(folder / "scored.jsonl"),
        reward=options.reward,
        max_failure_rate=options.max_failure_rate,
        model=model_of("", options),
        data=DataConfig(max_length=options.max_prompt_length + options.max_tokens + 64),
        **rewards_of(options),
    )
    return [Generate(generation), Score(scoring)]


def show_figures(report: dict[str, Any], failures: list[dict[str, object]], wrong: int, folder: Path) -> None:
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
        worst = Table("example", "correct", "prompt", "expected", "completion", "reward", title="failures")
        for row in failures:
            texts = [visible(end_of_text(row[name])) for name in ("prompt", "expected", "answer")]
            worst.add_row(*map(escape, (end_of_text(row["origin"]), str(row["right"]), *texts, f"{row['reward']:.4g}")))
        console.print(worst)
    console.print(table)
    counts = f"{report['prompts']:,} prompts"
    if "answers" in report:
        counts += f", {report['answers']:,} completions, {report['failed']:,} not scored"
    console.print(f"{counts}; 95% confidence intervals in brackets", soft_wrap=True)
    for name, found in report.get("comparison", {}).items():
        difference = interval(found["difference"], sign="+")
        counts = f"{found['better']} prompts better, {found['worse']} worse, {found['same']} the same"
        line = f"{name}: {report['models'][0]} - {report['models'][1]} = {difference}; {counts}; p = {found['p']:.4g}"
        console.print(line, markup=False, soft_wrap=True)
    quoted = shlex.quote(str(folder))
    last = f"done: {wrong:,} prompts with wrong completions in {quoted}/{FAILURES}; completions and figures beside it"
    if "harness" in report:
        last = f"done: scores of each example in {quoted}/a/{EXAMPLES}, figures in {quoted}/report.json"
    console.print(last, markup=False, soft_wrap=True)


def interval(figure: dict[str, float], sign: str = "") -> str:
    return f"{figure['value']:{sign}.4g} [{figure['low']:.4g}, {figure['high']:.4g}]"


def end_of_text(value: object) -> str:
    """Return the end of a long text, where the final answer is."""
    text = " ".join(("" if value is None else str(value)).split())
    return text if len(text) <= WIDTH else f"...{text[-WIDTH:]}"
