"""`posttrain select METHOD FILE --out rows.jsonl`."""

from __future__ import annotations

import argparse

from posttrain.cli.generate import add_condition_template
from posttrain.cli.options import Parser, parse
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

METHODS = {
    "best-of-n": "the answer with the highest reward to each prompt, for sft",
    "pairs": "the best against the worst answer to each prompt, for dpo and others",
    "condition": "all answers, to prompts that say what the answer is worth, for sft",
    "threshold": "answers with at least --min_reward, for sft",
    "top-fraction": "the best --fraction of all answers, for sft",
}


def run(args: list[str]) -> int:
    """0 when there are rows and they are written."""
    options = parse(parser(), args)
    from posttrain.inference.completion_files import new_file
    from posttrain.inference.select import select_file

    values = values_of(options)
    out = new_file(options.out, options.overwrite, options.file)
    selected = select_file(options.method, options.file, out, *values, map_keys=options.map_keys)
    print(f"done: {len(selected.rows):,} rows in {out}; answers: {selected}")
    return 0


def values_of(options: argparse.Namespace) -> list[object]:
    """What the method wants to know."""
    for name, method in (("min_reward", "threshold"), ("fraction", "top-fraction")):
        value = {"min_reward": options.min_reward, "fraction": options.fraction}[name]
        if method == options.method and value is None:
            raise UsageError(f"select {method} needs --{name}")
        if method != options.method and value is not None:
            raise UsageError(f"--{name} is for select {method}, not for {options.method}")
        if method == options.method:
            return [value]
    if options.condition_template and options.method != "condition":
        raise UsageError(f"--condition_template is for select condition, not for {options.method}")
    return [options.condition_template] if options.condition_template else []


def parser() -> argparse.ArgumentParser:
    found = Parser(
        prog="posttrain select",
        description=TOOLS["select"],
        epilog="\n".join(f"{name:<13} {text}" for name, text in METHODS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("method", metavar="METHOD", choices=list(METHODS), help="see below")
    found.add_argument("file", metavar="FILE", help="rows of posttrain score")
    found.add_argument("--out", required=True, help="the .jsonl file to write")
    found.add_argument("--overwrite", action="store_true", help="replace it if it is there")
    found.add_argument("--min_reward", type=float, default=None, help="threshold: the least reward that is kept")
    found.add_argument("--fraction", type=float, default=None, help="top-fraction: the part that is kept, as 0.1")
    add_condition_template(found)
    found.add_argument("--map_keys", default="", help='columns under other names, as JSON: {"completion": "text"}')
    return found
