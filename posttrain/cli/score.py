"""`posttrain score FILE --reward ... --out scored.jsonl`."""

from __future__ import annotations

import argparse
import sys

from posttrain.cli.generate import add_model, add_template, model_of
from posttrain.config import DataConfig
from posttrain.verbs import TOOLS


def run(args: list[str]) -> int:
    """0 when the scored rows are written."""
    options = parser().parse_args(args)
    from posttrain.log import quiet_libraries
    from posttrain.rewards.base import Rewards
    from posttrain.serve.answers import new_file, read_answers, write_rows

    quiet_libraries()
    out = new_file(options.out, options.overwrite, options.file)
    with Rewards(
        options.reward,
        options.weights,
        timeout_seconds=options.timeout_seconds,
        workers=options.workers,
        memory_gib=options.memory_gib,
        max_failure_rate=options.max_failure_rate,
        env=options.env,
    ) as rewards:
        rewards.check()
        answers = read_answers(options.file, options.map_keys, options.max_rows)
        rewards.check(sorted(set.intersection(*(set(answer.columns) for answer in answers))))
        from posttrain.serve.score import load_models, score

        data = DataConfig(
            template=options.template, input_template=options.input_template, max_tokens=options.max_tokens
        )
        models = load_models(rewards, model_of("", options), data)
        terminal = sys.stderr.isatty() and not options.quiet

        def report(done: int) -> None:
            if terminal:
                end = "\n" if done == len(answers) else ""
                print(f"\r\x1b[K{done:,} of {len(answers):,} scored", end=end, file=sys.stderr, flush=True)

        scored = score(answers, rewards, models, normalize=options.normalize, report=report)
    write_rows(out, scored.rows)
    for reason, times in sorted(scored.faults.items(), key=lambda item: -item[1])[:3]:
        print(f"failed {times} time{'s' * (times > 1)}: {reason}", file=sys.stderr)
    given = len(scored.rows) - scored.failed
    print(
        f"done: {given:,} of {len(scored.rows):,} scored, {scored.failed:,} failed; reward {scored.mean:.4g} "
        f"+- {scored.deviation:.4g}{', normalised in the file' if options.normalize else ''}; in {out}"
    )
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="posttrain score", description=TOOLS["score"])
    found.add_argument("file", metavar="FILE", help="answers of posttrain generate, or rows that posttrain sft reads")
    found.add_argument("--out", required=True, help="the .jsonl file to write")
    found.add_argument("--overwrite", action="store_true", help="replace it if it is there")
    found.add_argument(
        "--reward", nargs="+", required=True, help="verifier, file.py:function, http://..., model:RUN_OR_FOLDER"
    )
    found.add_argument("--weights", nargs="+", type=float, default=[], help="one for each reward; default: 1 each")
    found.add_argument("--normalize", action="store_true", help="relative to mean and deviation of all rows")
    found.add_argument("--max_failure_rate", type=float, default=0.1, help="part of the rows that may fail (0.1)")
    found.add_argument("--max_rows", type=int, default=None, help="only the first rows")
    found.add_argument("--map_keys", default="", help='columns under other names, as JSON: {"completion": "text"}')
    found.add_argument("--timeout_seconds", type=float, default=10.0, help="for one answer (10)")
    found.add_argument("--memory_gib", type=float, default=2.0, help="of one process (2)")
    found.add_argument("--workers", type=int, default=2, help="processes for functions (2)")
    found.add_argument("--env", nargs="+", default=[], help="environment variables that functions may see")
    found.add_argument("--quiet", action="store_true", help="no progress, only the last line")
    add_model(found)
    group = found.add_argument_group("for reward models")
    add_template(group)
    group.add_argument("--max_tokens", type=int, default=2048, help="longer conversations lose their end (2048)")
    return found
