"""`posttrain merge MODEL MODEL ...`: merges several models, or adapters on one base, into one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from posttrain.config.tools import ToolArgs, positional, read_tool, required
from posttrain.config.verbs import TOOLS


@dataclass(kw_only=True)
class MergeArgs(ToolArgs):
    """Options of `posttrain merge`."""

    verb: ClassVar[str] = "merge"
    about: ClassVar[str] = TOOLS["merge"]
    example: ClassVar[str] = "posttrain merge runs/sft runs/dpo --output_dir merged --method slerp"

    models: tuple[str, ...] = positional(())
    """Models: run directories, checkpoints, Hugging Face directories or hub names; adapters count with their base."""
    output_dir: str = required()
    """Required. Directory to write; it must be new or empty."""
    method: Literal["linear", "slerp", "ties", "dare_linear", "dare_ties"] = "linear"
    """linear: weighted mean; slerp: on the arc between two models; ties, dare_linear, dare_ties: of differences from
    --base."""
    base: str = ""
    """Model that the others were trained from, for ties and dare."""
    weights: tuple[float, ...] = ()
    """Weight of each model; empty: 1 each. The mean of linear and ties is divided by their sum."""
    t: float = 0.5
    """Position of slerp: 0 is the first model, 1 the second."""
    density: float = 0.5
    """Part of each difference that is kept: the largest values (ties), or random ones (dare)."""
    scale: float = 1.0
    """Factor of the merged difference (ties and dare)."""
    seed: int = 0
    """Seed of dare."""


ARGS = (MergeArgs,)


def run(args: list[str]) -> int:
    """Merge, and print what was written."""
    options = read_tool(MergeArgs(), args)
    from posttrain.core.logging import quiet_libraries
    from posttrain.models.merging import MergeSettings, merge_models

    quiet_libraries()
    settings = MergeSettings(
        method=options.method,
        weights=options.weights,
        t=options.t,
        density=options.density,
        scale=options.scale,
        seed=options.seed,
    )
    report = merge_models(options.models, Path(options.output_dir), settings, options.base)
    print(f"{report['method']} of {len(report['models'])} models: {', '.join(report['models'])}")
    print(f"done: {report['out']}, {report['tensors']} tensors, {report['changed']} of them changed")
    return 0
