"""Writes charts to files; the extension chooses the format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posttrain.core.errors import UsageError
from posttrain.core.files import atomic_write_bytes
from posttrain.plots.chart import Histogram, Panel
from posttrain.plots.figure import png
from posttrain.plots.page import page
from posttrain.plots.svg import svg

FORMATS = {
    ".svg": lambda charts, title: svg(charts, title).encode(),
    ".png": png,
    ".html": lambda charts, title: page(charts, title).encode(),
}


def new_chart_file(name: str, overwrite: bool, option: str = "output_file") -> Path:
    """Return the file to write; UsageError for another format, or if it exists and may not be replaced."""
    path = Path(name).expanduser()
    if path.suffix.lower() not in FORMATS or path.is_dir():
        raise UsageError(f"{option} is {name!r}; name a file to write that ends in {', '.join(FORMATS)}")
    if path.exists() and not overwrite:
        raise UsageError(f"{option} {name} already exists. Add --overwrite to replace it, or name another file.")
    return path


def write_charts(charts: Sequence[Panel | Histogram], path: Path, title: str = "") -> None:
    """Write charts as .svg, .png or .html, all or nothing."""
    drawn = FORMATS[path.suffix.lower()](charts, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, [drawn])
