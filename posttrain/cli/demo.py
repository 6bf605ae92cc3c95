"""`posttrain demo`: trains a toy model on two-digit sums and shows what each stage changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posttrain.config.tools import ToolArgs, read_tool
from posttrain.config.verbs import TOOLS
from posttrain.core.imports import importing_libraries


@dataclass(kw_only=True)
class DemoArgs(ToolArgs):
    """Options of `posttrain demo`."""

    verb: ClassVar[str] = "demo"
    about: ClassVar[str] = TOOLS["demo"]
    example: ClassVar[str] = "posttrain demo --output_dir runs/demo"

    output_dir: str = ""
    """Run directory; empty: the next free runs/demo-NNN."""
    seed: int = 0
    """Seed of all random numbers: the same seed gives the same result."""


ARGS = (DemoArgs,)


def run(args: list[str]) -> int:
    options = read_tool(DemoArgs(), args)
    with importing_libraries():
        from posttrain.cli.demo_stages import run_demo

    return run_demo(options.output_dir, options.seed)
