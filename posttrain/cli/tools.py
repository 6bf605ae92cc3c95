"""The verbs that do not train, a function each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.options import Parser
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.errors import UsageError


def run(verb: str, args: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "demo": demo,
        "data": data,
        "rewards": rewards,
        "generate": generate,
        "score": score,
        "select": select,
        "eval": evaluate,
        "chat": chat,
        "serve": serve,
        "samples": samples,
        "plan": plan,
        "slurm": slurm,
        "export": export,
        "convert": convert,
        "inspect": inspect,
        "diff": diff,
        "cluster": cluster,
        "doctor": doctor,
    }
    return commands[verb](args)


def parser_for(verb: str) -> argparse.ArgumentParser:
    return Parser(prog=f"posttrain {verb}", description=TOOLS[verb])


def demo(args: list[str]) -> int:
    parser = parser_for("demo")
    parser.add_argument("--out", default="", help="run folder; default: the next free runs/demo-NNN")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same result")
    options = parser.parse_args(args)
    from posttrain.cli.demo import run_demo

    return run_demo(options.out, options.seed)


def data(args: list[str]) -> int:
    from posttrain.cli.data import run as run_data

    return run_data(args)


def rewards(args: list[str]) -> int:
    from posttrain.cli.rewards import run as run_rewards

    return run_rewards(args)


def generate(args: list[str]) -> int:
    from posttrain.cli.generate import run as run_generate

    return run_generate(args)


def score(args: list[str]) -> int:
    from posttrain.cli.score import run as run_score

    return run_score(args)


def select(args: list[str]) -> int:
    from posttrain.cli.select import run as run_select

    return run_select(args)


def evaluate(args: list[str]) -> int:
    from posttrain.cli.eval import run as run_eval

    return run_eval(args)


def chat(args: list[str]) -> int:
    from posttrain.cli.chat import run as run_chat

    return run_chat(args)


def serve(args: list[str]) -> int:
    from posttrain.cli.serve import run as run_serve

    return run_serve(args)


def samples(args: list[str]) -> int:
    from posttrain.cli.samples import run as run_samples

    return run_samples(args)


def plan(args: list[str]) -> int:
    """`plan CONFIG.yaml ...` when the file names its verb, `plan sft --model.path ...` otherwise."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: posttrain plan [VERB] [CONFIG.yaml] [--section.option value ...]\n\n" + TOOLS["plan"])
        print("\nVERB may be left out when the file has a line like `verb: sft`.")
        print(
            "--device_gib N plans for accelerators of so much memory that are not here, one or many (cluster.devices)."
        )
        return 0
    from posttrain.cli.plan import plan as show
    from posttrain.cli.train import read
    from posttrain.config.parsing import verb_of_file

    parser = Parser(prog="posttrain plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--device_gib", type=float, default=0.0)
    options, args = parser.parse_known_args(args)
    if args[0] in ALGORITHMS or args[0] in PIPELINES:
        verb, rest = args[0], args[1:]
    else:
        verb, rest = verb_of_file(Path(args[0])), args
        if verb not in ALGORITHMS and verb not in PIPELINES:
            raise UsageError(f"{args[0]} does not say what it is for: posttrain plan VERB {args[0]}")
    if verb in PIPELINES:
        from posttrain.cli.plan_pipeline import plan as show_pipeline
        from posttrain.pipelines.settings import parse

        return show_pipeline(verb, parse(verb, rest), options.device_gib)
    return show(verb, read(verb, rest, data=False), options.device_gib)


def slurm(args: list[str]) -> int:
    from posttrain.cli.slurm import run as run_slurm

    return run_slurm(args)


def export(args: list[str]) -> int:
    parser = parser_for("export")
    parser.add_argument("source", help="run folder, or one of its checkpoints")
    parser.add_argument("out", help="folder to write; must not exist or be empty")
    parser.add_argument("--ema", action="store_true", help="take the average of the weights (train.ema_decay)")
    parser.add_argument("--no_merge", action="store_true", help="keep LoRA adapters apart instead of merging them")
    options = parser.parse_args(args)
    from posttrain.core.logging import quiet_libraries
    from posttrain.models.export import export as write

    quiet_libraries()
    report = write(options.source, Path(options.out), merge=not options.no_merge, use_ema=options.ema)
    merged = ", adapters merged" * report["merged"] + ", average of the weights" * report["averaged"]
    print(f"from: {report['source']}{merged}")
    print(f"{report['architecture']}, {report['parameters']:,} parameters in {report['dtype']}")
    if report["rounding"] > 1e-5:  # of half precision; else it is no more than another order of sums
        print(f"rounding merged weights to {report['dtype']} changes outputs by {report['rounding']:.2g} of their size")
    print(f"done: {options.out} was read back and computes the same as {options.source}")
    return 0


def convert(args: list[str]) -> int:
    from posttrain.cli.convert import run as run_convert

    return run_convert(args)


def inspect(args: list[str]) -> int:
    from posttrain.cli.inspect import run as run_inspect

    return run_inspect(args)


def diff(args: list[str]) -> int:
    from posttrain.cli.diff import run as run_diff

    return run_diff(args)


def cluster(args: list[str]) -> int:
    from posttrain.cli.cluster import run as run_cluster

    return run_cluster(args)


def doctor(args: list[str]) -> int:
    parser_for("doctor").parse_args(args)
    from posttrain.cli.doctor import doctor as examine

    return examine()
