"""Run benchmarks of posttrain and its peers on the same work: `python -m bench [NAME ...]`.

Each appends a row to bench/results.md. On a CPU only ratios are meaningful; both sides run with one thread.
"""

import argparse
import importlib
import platform
import sys
import time
from pathlib import Path

# bench/<name>.py with a function measure_<name>(options)
TABLES = ("generate", "long", "sft", "dpo", "grpo", "opd", "agents")
CURVES = "curves"
OTHERS = ("data", "convert", "serve", "scale", "stream", "transfer")  # with a function measure_<name>()
CHAOS = "chaos"  # the same; takes long


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    known = (*TABLES, CURVES, *OTHERS, CHAOS)
    names_help = f"{', '.join(known)}; all but {CURVES} and {CHAOS} if none is named"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names_help)
    add = parser.add_argument_group("of the tables and curves").add_argument
    add(
        "--shapes",
        type=listed,
        metavar="A,B",
        help="sizes of models: small, 0.5b, 1.5b, 7b, 30b-a3b, 30b-a3b-4, v2-lite",
    )
    add("--micro_batch_tokens", type=int, metavar="TOKENS", help="train.micro_batch_tokens of posttrain")
    add("--steps", type=int, help="steps of each; the median of the last 7 of 10 counts")
    add("--rounds", type=int, help="rounds of generation; the fastest counts")
    add("--row", type=int, metavar="TOKENS", help="length of all SFT examples (on a GPU), in place of different ones")
    add("--lora_rank", type=int, metavar="N", help="generate with adapters of this rank (on a GPU)")
    add("--quantization", choices=("none", "fp8"), help="generate with 8-bit copies of the weights (on a GPU)")
    add("--kv_cache_dtype", choices=("auto", "fp8"), help="generate with keys and values in 8 bits (on a GPU)")
    add("--fp8", action="store_true", help="train with train.fp8 (on a GPU)")
    add("--sequences", type=int, metavar="N", help="completions generated together (on a GPU), or episodes at a time")
    add("--adapters", type=int, metavar="N", help="with --lora_rank: N adapters mixed in one batch")
    add("--profile", action="store_true", help="print the kernels that take longest")
    add("--peers", type=listed, metavar="A,B", help="of trl, vllm, hf: those that may run, if they are installed")
    add("--model", metavar="FOLDER", help="generate with this model in place of random weights (on a CPU)")
    add("--out", type=Path, metavar="FILE", help="page that results are appended to")
    add("--picture", type=Path, metavar="FILE.png", help="of the curves; their numbers go to FILE.json")
    add("--redraw", action="store_true", help="draw the curves from the numbers that are there")
    chosen = vars(parser.parse_args(arguments))
    names = chosen.pop("names") or [*TABLES, *OTHERS]
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there is {', '.join(known)}")
    import torch  # not above: worker processes read this file too
    import transformers

    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"{time.strftime('%Y-%m-%d')} {device}, torch {torch.__version__}, transformers {transformers.__version__}")
    from bench.common import Options, command_line

    given = {key: value for key, value in chosen.items() if value is not None}
    options = Options(**given, command=command_line(arguments))
    for name in names:
        measure = getattr(importlib.import_module(f"bench.{name}"), f"measure_{name}")
        measure() if name in (*OTHERS, CHAOS) else measure(options)


def listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


if __name__ == "__main__":
    main()
