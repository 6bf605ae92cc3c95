"""`posttrain export SOURCE OUTPUT_DIR`: writes the model of a run as a plain Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.config.tools import ToolArgs, positional, read_tool
from posttrain.config.verbs import TOOLS


@dataclass(kw_only=True)
class ExportArgs(ToolArgs):
    """Options of `posttrain export`."""

    verb: ClassVar[str] = "export"
    about: ClassVar[str] = TOOLS["export"]
    example: ClassVar[str] = "posttrain export runs/sft my-model"

    source: str = positional()
    """Run directory, or one of its checkpoints."""
    output_dir: str = positional()
    """Directory to write; it must be new or empty."""
    ema: bool = False
    """Export the moving average of the weights (train.ema_decay)."""
    merge: bool = True
    """Merge LoRA adapters into the weights."""


ARGS = (ExportArgs,)


def run(args: list[str]) -> int:
    """Export, and print what was written."""
    options = read_tool(ExportArgs(), args)
    from posttrain.core.logging import quiet_libraries
    from posttrain.models.export import export

    quiet_libraries()
    report = export(options.source, Path(options.output_dir), merge=options.merge, use_ema=options.ema)
    merged = ", adapters merged" * report["merged"] + ", moving average of the weights" * report["averaged"]
    print(f"from: {report['source']}{merged}")
    print(f"{report['architecture']}, {report['parameters']:,} parameters in {report['dtype']}")
    if report["rounding"] > 1e-5:  # of half precision; smaller differences come from another order of sums
        print(f"rounding merged weights to {report['dtype']} changes outputs by {report['rounding']:.2g} of their size")
    print(f"done: {options.output_dir} was read back and computes the same as {options.source}")
    return 0
