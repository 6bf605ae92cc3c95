"""`posttrain inspect PATH`: describes a directory of weights. Only headers are read, and no pickle is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.config.tools import ToolArgs, positional, read_tool
from posttrain.config.verbs import TOOLS


@dataclass(kw_only=True)
class InspectArgs(ToolArgs):
    """Options of `posttrain inspect`."""

    verb: ClassVar[str] = "inspect"
    about: ClassVar[str] = TOOLS["inspect"]
    example: ClassVar[str] = "posttrain inspect my-model"

    path: str = positional()
    """Hugging Face model, Megatron checkpoint, run directory, checkpoint of a run, or LoRA adapters."""
    original: str = ""
    """Hugging Face directory with config.json, if the checkpoint has none."""
    tensors: bool = False
    """List every tensor with its file, type and shape."""
    hashes: bool = False
    """Read all weights, print the sha256 of every tensor, and compare it with the recorded one."""


ARGS = (InspectArgs,)


def run(args: list[str]) -> int:
    """Print what a directory holds; 1 if something is wrong with it."""
    options = read_tool(InspectArgs(), args)
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    from posttrain.convert.inspect import check_checkpoint, describe_checkpoint, inspect_checkpoint, list_tensors

    checkpoint = inspect_checkpoint(Path(options.path), Path(options.original) if options.original else None)
    try:
        for name, text in describe_checkpoint(checkpoint):
            print(f"{name:<11} {text}")
        if options.tensors or options.hashes:
            if options.hashes:
                check_checkpoint(checkpoint)
            print_columns([("file", "tensor", "type", "shape", "sha256"), *list_tensors(checkpoint, options.hashes)])
            if options.hashes and checkpoint.source.hashes:
                print("\nall tensors have the sha256 that convert.json records")
    finally:
        checkpoint.source.close()
    return 1 if checkpoint.problem else 0


def print_columns(rows: list[tuple[str, str, str, str, str]]) -> None:
    """Print columns below each other; the last one, a hash, has no fixed width."""
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print()
    for *words, last in rows:
        cells = [f"{word:<{width}}" for word, width in zip(words, widths, strict=True)]
        print("  ".join([*cells, last]).rstrip())
