"""`posttrain diff A B`: which tensors of two checkpoints differ and by how much; their formats may differ."""

from __future__ import annotations

from pathlib import Path

from posttrain.cli.options import Parser
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError


def run(args: list[str]) -> int:
    """Print differences; 0: none, 1: some, as `diff` does."""
    parser = Parser(prog="posttrain diff", description=TOOLS["diff"])
    parser.add_argument("a", help="Hugging Face folder, Megatron checkpoint, run, checkpoint of a run, adapters")
    parser.add_argument("b", help="another one")
    parser.add_argument("--original", help="Hugging Face folder with config.json, for one that has none")
    parser.add_argument("--rows", type=int, default=20, help="how many tensors to list, the most different first")
    options = parser.parse_args(args)
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    from posttrain.convert.diff import differences, only_in
    from posttrain.convert.inspect import describe_format, describe_layout, inspect_checkpoint

    original = Path(options.original) if options.original else None
    sides = [inspect_checkpoint(Path(folder), original) for folder in (options.a, options.b)]
    for checkpoint in sides:
        if checkpoint.problem:
            raise UsageError(f"{checkpoint.folder}: {checkpoint.problem}")
    if sides[0].recognised != sides[1].recognised:
        raise UsageError("one of them holds adapters: posttrain export merges them, posttrain convert --lora too")
    for letter, checkpoint in zip("AB", sides, strict=True):
        print(f"{letter}  {checkpoint.folder}: {describe_format(checkpoint)}, {describe_layout(checkpoint)}")
    try:
        found = list(differences(*sides))
    finally:
        for checkpoint in sides:
            checkpoint.source.close()
    apart = sorted((row for row in found if row.unequal), key=lambda row: -row.largest)
    if apart:
        print(f"\n{'largest':>10} {'mean':>10} {'of':>10} {'unequal':>22}  tensor")
    for row in apart[: options.rows]:
        count = f"{row.unequal:,} ({row.unequal / max(1, elements(row.shape)):.1%})"
        kinds = row.types[0] if row.types[0] == row.types[1] else " / ".join(row.types)
        shape = " x ".join(map(str, row.shape))
        print(f"{row.largest:>10.3g} {row.mean:>10.3g} {row.scale:>10.3g} {count:>22}  {row.name} [{shape}] {kinds}")
    if len(apart) > options.rows:
        print(f"... and {len(apart) - options.rows} more")
    alone = [only_in(sides[0], sides[1]), only_in(sides[1], sides[0])]
    for letter, missing in zip("AB", alone, strict=True):
        for name, size in missing[: options.rows]:
            print(f"only in {letter}: {name} {size[0]} x {size[1]}")
    types = sum(row.types[0] != row.types[1] for row in found)
    print(
        f"\n{len(found) - len(apart)} of {len(found)} tensors are equal, {len(apart)} differ; "
        f"{len(alone[0])} only in A, {len(alone[1])} only in B" + (f"; {types} have another type" if types else "")
    )
    return 1 if apart or alone[0] or alone[1] else 0


def elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
