"""Split examples into files for training, evaluation and test, without examples of one group in two files.

A group has the examples of one prompt and near-duplicates. Which groups are held out depends on the seed alone, and
the rows of each file keep their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import ExampleKind
from posttrain.data.curation.formats import open_sources, refuse_overwriting
from posttrain.data.curation.near_duplicates import Groups, NearDuplicates
from posttrain.data.curation.row_spool import RowSpool
from posttrain.data.curation.words import first_prompt, texts_of
from posttrain.data.reading.examples import Example
from posttrain.data.reading.records import ReadProgress

SPLIT = 0x5B118  # keeps its random numbers apart from those of training
TRAIN, EVAL, TEST = "train", "eval", "test"
SHORTFALL = 0.1  # of a part, because its groups are too large, that is accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """How many examples are held out, and what stays together."""

    eval_fraction: float = 0.0
    eval_examples: int = 0
    test_fraction: float = 0.0
    test_examples: int = 0
    near_duplicates: bool = True  # these stay together, not only examples of one prompt
    similarity: float = 0.8
    seed: int = 0
    kind: ExampleKind | None = None
    map_keys: Mapping[str, Any] | None = None

    def check(self) -> None:
        for part in (EVAL, TEST):
            fraction, examples = getattr(self, f"{part}_fraction"), getattr(self, f"{part}_examples")
            if not 0 <= fraction < 1:
                raise UsageError(f"{part}_fraction is {fraction}; it must be at least 0 and below 1")
            if examples < 0:
                raise UsageError(f"{part}_examples is {examples}; it must be at least 0")
            if fraction and examples:
                raise UsageError(f"{part}_fraction and {part}_examples are both set; set one of them")
        if not any((self.eval_fraction, self.eval_examples, self.test_fraction, self.test_examples)):
            raise UsageError(
                "nothing is held out: set eval_fraction or eval_examples, for example --eval_fraction 0.05"
            )

    def sizes(self, examples: int) -> dict[str, int]:
        """Return the wanted number of examples of the parts that are held out."""
        wanted = {
            TEST: self.test_examples or (max(1, round(self.test_fraction * examples)) if self.test_fraction else 0),
            EVAL: self.eval_examples or (max(1, round(self.eval_fraction * examples)) if self.eval_fraction else 0),
        }
        if sum(wanted.values()) >= examples:
            raise UsageError(
                f"{sum(wanted.values()):,} examples are to be held out of {examples:,}; none is left to train on"
            )
        return {part: size for part, size in wanted.items() if size}


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What was written."""

    files: dict[str, Path]
    examples: dict[str, int]  # of each file
    groups: int
    largest_group: int


def files_of(folder: Path, config: SplitConfig, overwrite: bool) -> dict[str, Path]:
    """Return the files to write; UsageError if the options are wrong, or if one exists and may not be replaced."""
    config.check()
    held_out = [
        part for part in (EVAL, TEST) if getattr(config, f"{part}_fraction") or getattr(config, f"{part}_examples")
    ]
    files = {part: folder / f"{part}.jsonl" for part in (TRAIN, *held_out)}
    there = [path for path in (folder / f"{part}.jsonl" for part in (TRAIN, EVAL, TEST)) if path.exists()]
    if there and not overwrite:
        raise UsageError(f"{there[0]} already exists. Add --overwrite to replace it, or name another directory.")
    if others := [path for path in there if path not in files.values()]:
        raise UsageError(
            f"{others[0]} is from another split, and examples of it may be in these files; remove it first"
        )
    return files


def split(
    names: Sequence[str],
    files: dict[str, Path],
    config: SplitConfig,
    progress: Callable[[int], None] | None = None,
    meter: ReadProgress | None = None,
) -> SplitReport:
    """Write the files of `files_of` and return counts."""
    refuse_overwriting(names, files.values())
    sources = open_sources(names, config.kind, config.map_keys or {}, normalize=False)
    duplicates = NearDuplicates(config.similarity) if config.near_duplicates else None
    prompts: dict[bytes, int] = {}  # the first example with this prompt
    same_prompt: list[tuple[int, int]] = []
    with RowSpool(files[TRAIN]) as lines:
        for source in sources:
            for row, examples in source.rows(normalize=False, meter=meter):
                firsts = {prompts.setdefault(_prompt_digest(example), len(lines)) for example in examples}
                same_prompt += [(len(lines), first) for first in firsts if first != len(lines)]
                if duplicates is not None:
                    texts = dict.fromkeys(text.content for example in examples for text in texts_of(example))
                    duplicates.add("\n".join(texts))
                lines.add(row)
                if progress is not None and len(lines) % 1000 == 0:
                    progress(len(lines))
        groups = duplicates.groups() if duplicates is not None else Groups(len(lines))
        for number, first in same_prompt:
            groups.join(number, first)
        roots = groups.roots()
        part_of = assign(roots, config)
        for part, path in reversed(files.items()):  # that of training last: if it is there, all are
            lines.write(path, np.flatnonzero(part_of == part).tolist())
    sizes = np.unique(roots, return_counts=True)[1]
    counts = {part: int((part_of == part).sum()) for part in files}
    return SplitReport(files, counts, len(sizes), int(sizes.max()))


def assign(roots: npt.NDArray[np.int64], config: SplitConfig) -> npt.NDArray[np.str_]:
    """Return the part of each example, given the group of each."""
    names, group_of, sizes = np.unique(roots, return_inverse=True, return_counts=True)
    part_of_group = np.full(len(names), TRAIN, dtype="<U5")
    order = np.random.default_rng([config.seed, SPLIT]).permutation(len(names)).tolist()
    for part, wanted in config.sizes(len(roots)).items():
        left = wanted
        for group in order:
            if part_of_group[group] == TRAIN and sizes[group] <= left:
                part_of_group[group] = part
                left -= int(sizes[group])
            if not left:
                break
        if left > SHORTFALL * wanted:
            raise DataError(
                f"only {wanted - left:,} of the {wanted:,} examples for {part} can be held out: {len(roots):,} "
                f"examples form {len(names):,} groups of one prompt or of near-duplicates, the largest of "
                f"{sizes.max():,}. "
                "Raise --similarity, add --no_near_duplicates, or hold out another number"
            )
    return part_of_group[group_of]


def _prompt_digest(example: Example) -> bytes:
    return hashlib.blake2b(first_prompt(example).encode("utf-8", "surrogatepass"), digest_size=16).digest()
