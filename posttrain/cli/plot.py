"""`posttrain plot RUN ...`: curves of one or several runs, in the terminal, as a picture or as a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from posttrain.config.tools import ToolArgs, positional, read_tool
from posttrain.config.verbs import TOOLS
from posttrain.plots.runs import open_runs, panels_of


@dataclass(kw_only=True)
class PlotArgs(ToolArgs):
    """Options of `posttrain plot`."""

    verb: ClassVar[str] = "plot"
    about: ClassVar[str] = TOOLS["plot"]
    example: ClassVar[str] = "posttrain plot runs/sft-001 runs/sft-002 --metrics loss lr --output_file curves.html"

    runs: tuple[str, ...] = positional(())
    """Run directories, or their metrics.jsonl."""
    metrics: tuple[str, ...] = ()
    """Metrics by name or pattern, such as 'eval/*'; empty: the reward of an online run, the loss of others."""
    x_axis: Literal["step", "tokens", "time"] = "step"
    """Horizontal axis: steps, tokens trained on, or minutes."""
    smoothing: float = 0.0
    """Weight of the moving average, from 0 (none) to below 1; the values themselves are drawn faintly."""
    log_scale: bool = False
    """Draw a logarithmic vertical axis."""
    output_file: str = ""
    """File to write instead of the terminal: .html (a page with values under the pointer), .svg or .png."""
    overwrite: bool = False
    """Replace the output file if it exists."""


ARGS = (PlotArgs,)


def run(args: list[str]) -> int:
    """Draw the curves; 0 if there are some."""
    options = read_tool(PlotArgs(), args)
    from posttrain.plots.files import new_chart_file, write_charts

    output = new_chart_file(options.output_file, options.overwrite) if options.output_file else None
    runs = open_runs(options.runs)
    panels = panels_of(runs, options.metrics, options.x_axis, options.smoothing, options.log_scale)
    if output is not None:
        write_charts(panels, output, ", ".join(one.name for one in runs))
        print(f"done: {len(panels)} plot{'s' * (len(panels) > 1)} in {output}")
        return 0
    from rich.console import Console

    from posttrain.plots.terminal import draw_panel

    for panel in panels:
        draw_panel(Console(highlight=False), panel)
    return 0
