"""`posttrain data split`: divides examples into files for training, evaluation and test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from posttrain.algorithms import example_kind
from posttrain.cli.arguments import reading_progress
from posttrain.config.tools import ToolArgs, positional, read_tool, required


@dataclass(kw_only=True)
class SplitArgs(ToolArgs):
    """Options of `posttrain data split`."""

    verb: ClassVar[str] = "data split"
    about: ClassVar[str] = (
        "split files into train, eval and test; examples of one prompt and near-duplicates stay together"
    )
    example: ClassVar[str] = "posttrain data split chat.jsonl --eval_fraction 0.05 --output_dir split"

    files: tuple[str, ...] = positional(())
    """Files, directories, globs or dataset names of one format, as in data.train."""
    output_dir: str = required()
    """Required. Directory for train.jsonl, eval.jsonl and test.jsonl."""
    overwrite: bool = False
    """Replace files that exist."""
    eval_fraction: float = 0.0
    """Share of the examples for eval.jsonl."""
    eval_examples: int = 0
    """Number of examples for eval.jsonl, instead of a share."""
    test_fraction: float = 0.0
    """Share of the examples for test.jsonl."""
    test_examples: int = 0
    """Number of examples for test.jsonl, instead of a share."""
    near_duplicates: bool = True
    """Keep near-duplicates in one file; otherwise only examples of one prompt stay together."""
    similarity: float = 0.8
    """Lowest Jaccard similarity of near-duplicates, from 0.3 to 1."""
    seed: int = 0
    """The same seed gives the same files."""
    trainer: str = ""
    """Trainer that the files are for, such as dpo; empty: the first kind of example that all files give."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the files by the names used here, as JSON; the output has the names used here."""


def run(args: list[str]) -> int:
    """Write the files and print their sizes."""
    options = read_tool(SplitArgs(), args)
    kind = example_kind(options.trainer)
    from posttrain.data.curation.split import SplitConfig, files_of, split

    config = SplitConfig(
        eval_fraction=options.eval_fraction,
        eval_examples=options.eval_examples,
        test_fraction=options.test_fraction,
        test_examples=options.test_examples,
        near_duplicates=options.near_duplicates,
        similarity=options.similarity,
        seed=options.seed,
        kind=kind,
        map_keys=options.map_keys,
    )
    files = files_of(Path(options.output_dir).expanduser(), config, options.overwrite)
    with reading_progress(options.files) as (meter, progress):
        found = split(options.files, files, config, progress, meter)
    total = sum(found.examples.values())
    for part, path in files.items():
        print(f"{path}: {found.examples[part]:,} examples, {found.examples[part] / total:.1%}")
    together = "examples of one prompt"
    if options.near_duplicates:
        together += f" and near-duplicates (similarity from {options.similarity:g})"
    print(f"{together} are in one file: {found.groups:,} groups, the largest of {found.largest_group:,}")
    print(f"done: posttrain sft --model MODEL --data {options.output_dir}:train --data.eval {options.output_dir}:eval")
    return 0
