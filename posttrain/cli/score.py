"""`posttrain score FILE --reward ... --output_file scored.jsonl`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from posttrain.cli.arguments import model_of, rewards_of
from posttrain.config.sections import DataConfig
from posttrain.config.tools import LoadArgs, RewardArgs, ToolArgs, check_at_least, positional, read_tool, required
from posttrain.config.verbs import TOOLS
from posttrain.core.imports import importing_libraries

if TYPE_CHECKING:
    from posttrain.inference.score import Scoring


@dataclass(kw_only=True)
class RewardModelArgs(LoadArgs):
    """How reward models are loaded, and what they read."""

    title: ClassVar[str] = "reward models"

    chat_template: str = ""
    """Chat template of reward models by name, file or text; empty: their own."""
    max_length: int = 2048
    """Longest conversation in tokens; longer ones are truncated."""


@dataclass(kw_only=True)
class ScoreArgs(RewardModelArgs, RewardArgs, ToolArgs):
    """Options of `posttrain score`."""

    verb: ClassVar[str] = "score"
    about: ClassVar[str] = TOOLS["score"]
    example: ClassVar[str] = "posttrain score completions.jsonl --reward gsm8k --output_file scored.jsonl"

    file: str = positional()
    """File that `posttrain generate` wrote, or any file that `posttrain sft` reads."""
    output_file: str = required()
    """Required. The .jsonl file to write."""
    overwrite: bool = False
    """Replace the output file if it exists."""
    normalize: bool = False
    """Write rewards minus the mean of all completions and divided by their standard deviation."""
    max_failure_rate: float = 0.1
    """Share of the completions that may fail before the command stops."""
    max_examples: int = 0
    """Score only this many lines of the file; 0: all."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the file by the names used here, as JSON: {"completion": "text"}."""
    quiet: bool = False
    """Print only warnings, errors and the last line."""


ARGS = (ScoreArgs,)


def run(args: list[str]) -> int:
    """Score; 0 if the completions are written with their rewards."""
    options = read_tool(ScoreArgs(), args)
    check_at_least(options, max_examples=0)
    from posttrain.core.logging import quiet_libraries
    from posttrain.core.progress import ProgressDisplay
    from posttrain.inference.completion_files import new_file

    quiet_libraries()
    out = new_file(options.output_file, options.overwrite, [options.file])
    with importing_libraries():
        from posttrain.inference.score import ScoreProgress, score_file

    with ProgressDisplay(stream=sys.stderr, quiet=options.quiet, seconds_between_lines=10) as display:
        scored = score_file(scoring_of(options), ScoreProgress(display).report)
    for reason, times in sorted(scored.faults.items(), key=lambda item: -item[1])[:3]:
        print(f"failed {times} time{'s' * (times > 1)}: {reason}", file=sys.stderr)
    given = len(scored.rows) - scored.failed
    print(
        f"done: {given:,} of {len(scored.rows):,} scored, {scored.failed:,} failed; reward {scored.mean:.4g} "
        f"+- {scored.deviation:.4g}{', normalised in the file' if options.normalize else ''}; in {out}"
    )
    return 0


def scoring_of(options: ScoreArgs) -> Scoring:
    from posttrain.inference.score import Scoring

    return Scoring(
        file=options.file,
        out=options.output_file,
        reward=options.reward,
        normalize=options.normalize,
        max_failure_rate=options.max_failure_rate,
        map_keys=options.map_keys,
        max_rows=options.max_examples or None,
        model=model_of("", options),
        data=DataConfig(chat_template=options.chat_template, max_length=options.max_length),
        **rewards_of(options),
    )
