"""Draws charts with matplotlib, for PNG files and notebooks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.plots.chart import Histogram, Panel
from posttrain.plots.svg import COLORS


def figure(charts: Sequence[Panel | Histogram], title: str = "", keep: bool = True) -> Any:
    """Return a figure of matplotlib with the charts below each other; `keep`: pyplot.show() shows it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise UsageError("PNG files and plot() need matplotlib: pip install matplotlib; SVG files do not") from error
    drawing, axes = pyplot.subplots(len(charts), 1, squeeze=False, figsize=(8, 3 * len(charts)))
    for chart, axis in zip(charts, axes[:, 0], strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        if isinstance(chart, Histogram):
            bins = chart.bins
            edges = [low for low, _, _ in bins]
            axis.bar(edges, [count for *_, count in bins], width=bins[0][1] - bins[0][0], align="edge", color=COLORS[0])
            axis.set_title(chart.title, loc="left", fontsize=11)
            axis.set_xlabel("tokens")
            continue
        axis.set_ylabel(chart.title)
        for curve in chart.curves:
            color = COLORS[curve.color % len(COLORS)]
            if curve.raw:
                axis.plot(curve.x, curve.raw, color=color, alpha=0.3, linewidth=1)
            marker = "o" if len(curve.x) == 1 else None
            line = "--" if curve.dashed else ":" if curve.color >= len(COLORS) else "-"
            axis.plot(curve.x, curve.y, label=curve.label, color=color, linestyle=line, marker=marker)
        axis.set_yscale("log" if chart.log_scale else "linear")
        axis.set_xlabel(chart.x_label)
        axis.legend(frameon=False, fontsize=9)
    if title:
        drawing.suptitle(title, x=0.01, ha="left", fontsize=12)
    drawing.tight_layout()
    if not keep or "inline" in pyplot.get_backend():  # a notebook shows what a cell returns: do not show it twice
        pyplot.close(drawing)
    return drawing


def png(charts: Sequence[Panel | Histogram], title: str = "") -> bytes:
    """Return a PNG file with the charts below each other."""
    file = io.BytesIO()
    figure(charts, title, keep=False).savefig(file, format="png", dpi=150)
    return file.getvalue()
