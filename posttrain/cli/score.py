"""`posttrain score FILE --reward ... --out scored.jsonl`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from posttrain.cli.generate import add_model, add_template, model_of
from posttrain.cli.options import Parser, add_rewards, parse, rewards_of
from posttrain.config.sections import DataConfig
from posttrain.config.verbs import TOOLS

if TYPE_CHECKING:
    from posttrain.inference.score import Scoring


def run(args: list[str]) -> int:
    """0 when the scored rows are written."""
    options = parse(parser(), args)
    from posttrain.core.logging import quiet_libraries
    from posttrain.core.progress import ProgressDisplay
    from posttrain.inference.completion_files import new_file

    quiet_libraries()
    out = new_file(options.out, options.overwrite, options.file)
    from posttrain.inference.score import score_file

    with ProgressDisplay(stream=sys.stderr, quiet=options.quiet, seconds_between_lines=10) as display:

        def report(done: int, total: int) -> None:
            if done < total or display.on_terminal:  # the end has a line of its own
                display.update(f"{done:,} of {total:,} scored", done=done, total=total)

        scored = score_file(scoring_of(options), report)
    for reason, times in sorted(scored.faults.items(), key=lambda item: -item[1])[:3]:
        print(f"failed {times} time{'s' * (times > 1)}: {reason}", file=sys.stderr)
    given = len(scored.rows) - scored.failed
    print(
        f"done: {given:,} of {len(scored.rows):,} scored, {scored.failed:,} failed; reward {scored.mean:.4g} "
        f"+- {scored.deviation:.4g}{', normalised in the file' if options.normalize else ''}; in {out}"
    )
    return 0


def scoring_of(options: argparse.Namespace) -> Scoring:
    from posttrain.inference.score import Scoring

    return Scoring(
        file=options.file,
        out=options.out,
        reward=tuple(options.reward),
        normalize=options.normalize,
        max_failure_rate=options.max_failure_rate,
        map_keys=options.map_keys,
        max_rows=options.max_rows,
        model=model_of("", options),
        data=DataConfig(chat_template=options.template, max_length=options.max_tokens),
        **rewards_of(options),
    )


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="posttrain score", description=TOOLS["score"])
    found.add_argument("file", metavar="FILE", help="answers of posttrain generate, or rows that posttrain sft reads")
    found.add_argument("--out", required=True, help="the .jsonl file to write")
    found.add_argument("--overwrite", action="store_true", help="replace it if it is there")
    add_rewards(found)
    found.add_argument("--normalize", action="store_true", help="relative to mean and deviation of all rows")
    found.add_argument("--max_failure_rate", type=float, default=0.1, help="part of the rows that may fail (0.1)")
    found.add_argument("--max_rows", type=int, default=None, help="only the first rows")
    found.add_argument("--map_keys", default="", help='columns under other names, as JSON: {"completion": "text"}')
    found.add_argument("--quiet", action="store_true", help="no progress, only the last line")
    add_model(found)
    group = found.add_argument_group("for reward models")
    add_template(group)
    group.add_argument("--max_tokens", type=int, default=2048, help="longer conversations lose their end (2048)")
    return found
