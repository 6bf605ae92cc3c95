"""`python -m bench [NAME ...]`: each benchmark runs ours and its peer on the same work in one process, in turns.

On a CPU only the ratio means something; it is taken with one thread each.
"""

import argparse
import importlib
import platform
import time

BENCHMARKS = ("sft", "data", "engine", "steps", "convert")  # bench/<name>.py with a function measure_<name>


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), metavar="NAME", help=", ".join(BENCHMARKS))
    names = parser.parse_args().names
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(unknown)}; there is {', '.join(BENCHMARKS)}")
    import torch  # not above: worker processes read this file too
    import transformers

    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"{time.strftime('%Y-%m-%d')} {device}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name in names:
        getattr(importlib.import_module(f"bench.{name}"), f"measure_{name}")()


if __name__ == "__main__":
    main()
