"""`posttrain diff A B`: prints which tensors of two checkpoints differ and by how much; their formats may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from posttrain.config.tools import ToolArgs, check_at_least, positional, read_tool
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    from posttrain.convert.diff import TensorDifference
    from posttrain.convert.inspect import InspectedCheckpoint


@dataclass(kw_only=True)
class DiffArgs(ToolArgs):
    """Options of `posttrain diff`."""

    verb: ClassVar[str] = "diff"
    about: ClassVar[str] = TOOLS["diff"]
    example: ClassVar[str] = "posttrain diff my-model runs/sft"

    a: str = positional()
    """Hugging Face model, Megatron checkpoint, run directory, checkpoint of a run, or LoRA adapters."""
    b: str = positional()
    """The checkpoint to compare with."""
    original: str = ""
    """Hugging Face directory with config.json, for a checkpoint that has none."""
    max_tensors: int = 20
    """Number of tensors to list, the most different first."""


ARGS = (DiffArgs,)


def run(args: list[str]) -> int:
    """Print differences; 0: none, 1: some, as `diff` does."""
    options = read_tool(DiffArgs(), args)
    check_at_least(options, max_tensors=0)
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    from posttrain.convert.diff import differences, only_in
    from posttrain.convert.inspect import describe_format, describe_layout, inspect_checkpoint

    original = Path(options.original) if options.original else None
    a, b = (inspect_checkpoint(Path(folder), original) for folder in (options.a, options.b))
    check_comparable(a, b)
    for letter, checkpoint in (("A", a), ("B", b)):
        print(f"{letter}  {checkpoint.folder}: {describe_format(checkpoint)}, {describe_layout(checkpoint)}")
    try:
        compared = list(differences(a, b))
    finally:
        a.source.close()
        b.source.close()
    differing = sorted((row for row in compared if row.unequal), key=lambda row: -row.largest)
    print_differing(differing, options.max_tensors)
    only_in_a, only_in_b = only_in(a, b), only_in(b, a)
    for letter, missing in (("A", only_in_a), ("B", only_in_b)):
        for name, size in missing[: options.max_tensors]:
            print(f"only in {letter}: {name} {size[0]} x {size[1]}")
    retyped = sum(row.types[0] != row.types[1] for row in compared)
    print(
        f"\n{len(compared) - len(differing)} of {len(compared)} tensors are equal, {len(differing)} differ; "
        f"{len(only_in_a)} only in A, {len(only_in_b)} only in B"
        + (f"; {retyped} have different types" if retyped else "")
    )
    return 1 if differing or only_in_a or only_in_b else 0


def check_comparable(a: InspectedCheckpoint, b: InspectedCheckpoint) -> None:
    """Raise UsageError unless the parameters of both are known, or both hold adapters."""
    for checkpoint in (a, b):
        if checkpoint.problem:
            raise UsageError(f"{checkpoint.folder}: {checkpoint.problem}")
    if a.recognised != b.recognised:
        raise UsageError(
            "one of the two holds adapters, the other a whole model. Merge the adapters first, with posttrain export "
            "or posttrain convert --lora."
        )


def print_differing(rows: Sequence[TensorDifference], max_tensors: int) -> None:
    """Print a line for each tensor that differs, up to a number of them."""
    if rows:
        print(f"\n{'largest':>10} {'mean':>10} {'scale':>10} {'unequal':>22}  tensor")
    for row in rows[:max_tensors]:
        count = f"{row.unequal:,} ({row.unequal / max(1, prod(row.shape)):.1%})"
        types = row.types[0] if row.types[0] == row.types[1] else " / ".join(row.types)
        shape = " x ".join(map(str, row.shape))
        print(f"{row.largest:>10.3g} {row.mean:>10.3g} {row.scale:>10.3g} {count:>22}  {row.name} [{shape}] {types}")
    if len(rows) > max_tensors:
        print(f"... and {len(rows) - max_tensors} more")
