"""`posttrain inspect DIR`: what is in a folder with weights. Only headers are read, and no pickle is run."""

from __future__ import annotations

from pathlib import Path

from posttrain.cli.options import Parser
from posttrain.config.verbs import TOOLS


def run(args: list[str]) -> int:
    """Print what is known of a folder."""
    parser = Parser(prog="posttrain inspect", description=TOOLS["inspect"])
    parser.add_argument("folder", help="Hugging Face folder, Megatron checkpoint, run, checkpoint of a run, adapters")
    parser.add_argument("--original", help="Hugging Face folder with config.json, if this one has none")
    parser.add_argument("--tensors", action="store_true", help="a line for every tensor")
    parser.add_argument("--hashes", action="store_true", help="read everything: sha256 of each tensor, and check them")
    options = parser.parse_args(args)
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    from posttrain.convert.inspect import check_checkpoint, describe_checkpoint, inspect_checkpoint, list_tensors

    checkpoint = inspect_checkpoint(Path(options.folder), Path(options.original) if options.original else None)
    try:
        for name, text in describe_checkpoint(checkpoint):
            print(f"{name:<11} {text}")
        if options.tensors or options.hashes:
            if options.hashes:
                check_checkpoint(checkpoint)
            rows = [("file", "tensor", "type", "shape", "sha256"), *list_tensors(checkpoint, options.hashes)]
            widths = [max(len(row[column]) for row in rows) for column in range(4)]
            print()
            for row in rows:
                print(
                    "  ".join(
                        [f"{word:<{width}}" for word, width in zip(row, widths, strict=False)] + [row[4]]
                    ).rstrip()
                )
            if options.hashes and checkpoint.source.hashes:
                print("\nall tensors are what convert.json says was written")
    finally:
        checkpoint.source.close()
    return 1 if checkpoint.problem else 0
