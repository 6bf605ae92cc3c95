"""`posttrain select METHOD FILE --output_file examples.jsonl`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from posttrain.config.tools import ToolArgs, positional, read_tool, required
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError


@dataclass(kw_only=True)
class SelectArgs(ToolArgs):
    """Options of `posttrain select`."""

    verb: ClassVar[str] = "select"
    about: ClassVar[str] = TOOLS["select"]
    example: ClassVar[str] = "posttrain select best-of-n scored.jsonl --output_file best.jsonl"

    method: Literal["", "best-of-n", "pairs", "condition", "threshold", "top-fraction"] = positional()
    """best-of-n: the completion with the highest reward of each prompt; pairs: the best and the worst completion of
    each prompt, for dpo; condition: all completions, with prompts that state their reward; threshold: completions with
    at least min_reward; top-fraction: the completions with the highest rewards of the file."""
    file: str = positional()
    """File that `posttrain score` wrote."""
    output_file: str = required()
    """Required. The .jsonl file to write."""
    overwrite: bool = False
    """Replace the output file if it exists."""
    min_reward: float | None = None
    """Lowest reward that threshold keeps."""
    fraction: float | None = None
    """Share of the completions that top-fraction keeps, such as 0.1."""
    condition_template: str = ""
    """Text of conditioned prompts; empty: "{prompt} <rm_score>: {reward:.2f} "."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the file by the names used here, as JSON: {"completion": "text"}."""


ARGS = (SelectArgs,)


def run(args: list[str]) -> int:
    """Write the selected examples; 0 if there are some."""
    options = read_tool(SelectArgs(), args)
    from posttrain.inference.completion_files import new_file
    from posttrain.inference.select import select_file

    values = method_values(options)
    out = new_file(options.output_file, options.overwrite, [options.file])
    selected = select_file(options.method, options.file, out, *values, map_keys=options.map_keys)
    print(f"done: {len(selected.rows):,} examples in {out}; completions: {selected}")
    return 0


def method_values(options: SelectArgs) -> list[object]:
    """Return the values that the method takes; raise UsageError for those of other methods."""
    for name, method in (("min_reward", "threshold"), ("fraction", "top-fraction")):
        value = {"min_reward": options.min_reward, "fraction": options.fraction}[name]
        if method == options.method and value is None:
            raise UsageError(f"select {method} needs --{name}")
        if method != options.method and value is not None:
            raise UsageError(f"--{name} is for select {method}, not for {options.method}")
        if method == options.method:
            return [value]
    if options.condition_template and options.method != "condition":
        raise UsageError(f"--condition_template is for select condition, not for {options.method}")
    return [options.condition_template] if options.condition_template else []
