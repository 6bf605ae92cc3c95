"""`posttrain generate MODEL DATA ... --out answers.jsonl`; and the options that commands with a model share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.options import Parser, parse
from posttrain.config.parsing import json_option
from posttrain.config.sections import ClusterConfig, DataConfig, ModelConfig
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    from posttrain.engines.base import Sampling


def run(args: list[str]) -> int:
    """0 when all answers are in the file."""
    options = parse(parser(), args)
    from posttrain.core.logging import quiet_libraries
    from posttrain.core.progress import ProgressDisplay

    quiet_libraries()
    from posttrain.inference.generate import Generation, generate, manifest_of
    from posttrain.inference.model import CONDITION
    from posttrain.inference.workers import engine_of_words

    config = Generation(
        model=model_of(options.model, options),
        data=data_of(options, options.data),
        out=options.out,
        sampling=sampling_of(options),
        n=options.n,
        seed=options.seed,
        window=window_of(options.window),
        condition=options.condition,
        condition_template=options.condition_template or CONDITION,
        batch=options.batch,
        engine=engine_of_words(options.engine),
        cluster=ClusterConfig(devices=options.devices),
        resume=options.resume,
    )
    try:
        with ProgressDisplay(stream=sys.stderr, quiet=options.quiet, seconds_between_lines=10) as display:
            progress = generate(config, lambda progress: progress.show_on(display))
    except KeyboardInterrupt:
        print(
            f"stopped; finished completions are in {options.out}. To continue, add --resume to the same command",
            file=sys.stderr,
        )
        raise
    made = progress.done - progress.resumed
    for reason, rows in progress.left_out.items():
        where = f"; they are in {options.out}.quarantine.jsonl" if reason == "quarantined" else ""
        print(f"{rows:,} row{'s' * (rows > 1)} of the data {reason}{where}", file=sys.stderr)
    before = f" ({progress.resumed:,} were there already)" if progress.resumed else ""
    print(f"done: {made:,} answers{before} in {options.out}; settings in {manifest_of(Path(options.out)).name}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="posttrain generate", description=TOOLS["generate"])
    found.add_argument("model", metavar="MODEL", help="folder, hub name, run folder (its newest checkpoint) or pico")
    found.add_argument("data", metavar="DATA", nargs="+", help="files, folders, globs or hub names with prompts")
    found.add_argument("--out", required=True, help="the .jsonl file to write, a line an answer")
    found.add_argument("--n", type=int, default=1, help="answers to each prompt")
    add_sampling(found, max_tokens=512, temperature=1.0)
    found.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers")
    found.add_argument("--window", default="", metavar="K:SIZE", help="3:2048: only the third 2,048 prompts")
    add_condition(found)
    found.add_argument("--batch", type=int, default=512, help="answers made and written at a time")
    add_workers(found)
    found.add_argument("--resume", action="store_true", help="go on with a file that is not complete")
    found.add_argument("--quiet", action="store_true", help="no progress, only the last line")
    add_model(found)
    add_data(found)
    return found


# Options that chat, score and others have, too


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int, temperature: float) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument("--max_tokens", type=int, default=max_tokens, help=f"longest answer ({max_tokens})")
    group.add_argument(
        "--temperature", type=float, default=temperature, help=f"0 takes the likeliest token ({temperature:g})"
    )
    group.add_argument("--greedy", action="store_true", help="the same as --temperature 0")
    group.add_argument("--top_p", type=float, default=1.0, help="only the likeliest tokens with this probability")
    group.add_argument("--top_k", type=int, default=0, help="only so many of the likeliest tokens; 0: all")
    group.add_argument("--min_p", type=float, default=0.0, help="only tokens this times as likely as the likeliest")
    group.add_argument("--repetition_penalty", type=float, default=1.0, help="above 1: less likely what was there")
    group.add_argument(
        "--stop", nargs="+", default=[], metavar="TEXT", help="texts that end an answer, besides its end"
    )


def sampling_of(options: argparse.Namespace) -> Sampling:
    from posttrain.engines.base import Sampling

    return Sampling(
        max_tokens=options.max_tokens,
        temperature=0.0 if options.greedy else options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop_texts=tuple(options.stop),
    )


def add_condition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--condition", type=float, default=None, metavar="REWARD", help="ask for answers worth this")
    add_condition_template(parser)


def add_condition_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--condition_template", default="", help='default: "{prompt} <rm_score>: {reward:.2f} ", the same everywhere'
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", type=int, default=1, help="worker processes of this machine, one a device, each with a whole model"
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        default=["local"],
        metavar="ENGINE",
        help="local (beams=4 behind it searches), or vllm and options of its own: vllm max_num_seqs=256",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the weights"
    )
    group.add_argument("--load_in_4bit", action="store_true", help="weights in 4 bits; needs bitsandbytes")


def model_of(path: str, options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(path=path, dtype=options.dtype, load_in_4bit=options.load_in_4bit)


def add_template(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--template",
        default="",
        help='chat template by name or file instead of the model\'s own, or "Human: {}\\nAssistant: "',
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add_template(group)
    group.add_argument("--map_keys", default="", help='columns under other names, as JSON: {"prompt": "question"}')
    group.add_argument("--max_rows", type=int, default=None, help="only the first rows")
    group.add_argument("--max_prompt_tokens", type=int, default=2048, help="longest prompt (2048)")
    group.add_argument("--on_long", choices=("error", "drop"), default="error", help="what happens to longer ones")
    group.add_argument(
        "--on_bad_row", choices=("stop", "quarantine"), default="stop", help="quarantine: leave them out"
    )


def data_of(options: argparse.Namespace, files: list[str]) -> DataConfig:
    if options.max_rows is not None and options.max_rows < 1:
        raise UsageError(f"max_rows is {options.max_rows}; it must be at least 1.")
    return DataConfig(
        train=tuple(files),
        chat_template=options.template,
        map_keys=json_option("map_keys", options.map_keys),
        max_examples=options.max_rows or 0,
        max_length=options.max_prompt_tokens,
        on_overlong=options.on_long,
        on_bad_example=options.on_bad_row,
    )


def window_of(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    number, _, size = text.partition(":")
    if not (number.isdigit() and size.isdigit()):
        raise UsageError(f"--window {text}: expected K:SIZE, as 3:2048 for the third 2,048 prompts")
    return int(number), int(size)
