"""`posttrain data mix`: makes one file of several, by weights and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.algorithms import example_kind
from posttrain.cli.arguments import reading_progress
from posttrain.config.tools import ToolArgs, positional, read_tool, required


@dataclass(kw_only=True)
class MixArgs(ToolArgs):
    """Options of `posttrain data mix`."""

    verb: ClassVar[str] = "data mix"
    about: ClassVar[str] = "mix several files into one, by weights and limits, in an order that the seed determines"
    example: ClassVar[str] = "posttrain data mix a.jsonl b.jsonl --weights 0.7 0.3 --output_file mixed.jsonl"

    files: tuple[str, ...] = positional(())
    """Files, directories, globs or dataset names, as in data.train."""
    output_file: str = required()
    """Required. The .jsonl file to write."""
    overwrite: bool = False
    """Replace the output file if it exists."""
    weights: tuple[float, ...] = ()
    """Share of each file in the mixture, as data.weights; empty: all examples of every file."""
    max_examples: tuple[int, ...] = ()
    """Most examples of each file, drawn at random; one number for all files or one per file; 0: all."""
    total_examples: int = 0
    """Examples of the output file; 0: as many as the weights and limits allow."""
    repeat: bool = False
    """With weights: repeat small files until every file is used up, instead of ending with the first."""
    shuffle: bool = True
    """Write the examples in random order; otherwise files keep their order."""
    seed: int = 0
    """The same seed gives the same file."""
    normalize: bool = False
    """Write all examples in one format (messages); otherwise rows are kept, and the files must have one format."""
    trainer: str = ""
    """Trainer that the file is for, such as dpo; empty: the first kind of example that all files give."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the files by the names used here, as JSON; the output has the names used here."""


def run(args: list[str]) -> int:
    """Write the mixture and print how much of each file is in it."""
    options = read_tool(MixArgs(), args)
    kind = example_kind(options.trainer)
    from posttrain.data.curation.mix import MixConfig, mix
    from posttrain.inference.completion_files import new_file

    out = new_file(options.output_file, options.overwrite, options.files)
    config = MixConfig(
        weights=options.weights,
        max_examples=options.max_examples,
        total_examples=options.total_examples,
        repeat=options.repeat,
        shuffle=options.shuffle,
        seed=options.seed,
        normalize=options.normalize,
        kind=kind,
        map_keys=options.map_keys,
    )
    with reading_progress(options.files) as (meter, progress):
        found = mix(options.files, out, config, progress, meter)
    total = sum(source.written for source in found)
    for source in found:
        share = source.written / total
        print(f"{source.name}: {source.written:,} of {source.read:,} examples, {share:.1%} of the mixture")
    print(f"done: {total:,} examples in {out}")
    return 0
