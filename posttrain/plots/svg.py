"""Draws charts as SVG, without any library. Colours are CSS variables, so that a page can have a dark variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from posttrain.plots.chart import Axis, Histogram, Panel, tick_label

COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
DARK_COLORS = ("#60a5fa", "#fbbf24", "#34d399", "#f87171", "#a78bfa", "#22d3ee", "#f472b6", "#a3e635")
LIGHT = {"background": "#ffffff", "text": "#1f2937", "muted": "#6b7280", "grid": "#e5e7eb"}
DARK = {"background": "#111827", "text": "#e5e7eb", "muted": "#9ca3af", "grid": "#374151"}
WIDTH, HEIGHT = 760, 230  # of the area of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 30, 40
LEGEND_LINE, LETTER = 18, 6.6  # height of a line of the legend, and width of a letter, in pixels
FULL_WIDTH = LEFT + WIDTH + RIGHT

STYLE = """
.chart{font-family:system-ui,sans-serif;font-size:12px}
.chart text{fill:var(--text)} .chart .muted{fill:var(--muted)} .chart .title{font-size:14px;font-weight:600}
.chart .grid{stroke:var(--grid);fill:none} .chart .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.chart .raw{fill:none;stroke-width:1;opacity:.3}
"""


def variables(colors: Sequence[str], others: dict[str, str]) -> str:
    """Return the colours as CSS variables."""
    numbered = {f"c{number}": color for number, color in enumerate(colors)}
    return "".join(f"--{name}:{color};" for name, color in (numbered | others).items())


def svg(charts: Sequence[Panel | Histogram], title: str = "") -> str:
    """Return an SVG file with the charts below each other."""
    top = 34.0 if title else 8.0
    parts: list[str] = []
    for chart in charts:
        drawn, height = draw_chart(chart)
        parts.append(f'<g transform="translate(0 {top:g})">{drawn}</g>')
        top += height
    heading = f'<text class="title" x="{LEFT}" y="24">{escape(title)}</text>' if title else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{FULL_WIDTH}" height="{top:g}" '
        f'viewBox="0 0 {FULL_WIDTH} {top:g}"><style>svg{{{variables(COLORS, LIGHT)}}}{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="var(--background)"/>{heading}{"".join(parts)}</svg>\n'
    )


def draw_chart(chart: Panel | Histogram) -> tuple[str, float]:
    """Return the elements of one chart, and its height."""
    if isinstance(chart, Histogram):
        return "".join(draw_histogram(chart)), TOP + HEIGHT + BOTTOM
    legend, lines = legend_of(chart)
    top = TOP + LEGEND_LINE * lines
    return "".join((legend, *draw_curves(chart, top))), top + HEIGHT + BOTTOM


def legend_of(panel: Panel) -> tuple[str, int]:
    """Return title and legend, and the lines that the legend takes."""
    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>']
    across, line = float(LEFT), 1
    for curve in panel.curves:
        width = 34 + LETTER * len(curve.label)
        if across > LEFT and across + width > LEFT + WIDTH:
            across, line = float(LEFT), line + 1
        y = TOP + LEGEND_LINE * line - 12
        parts.append(f'<path class="line" d="M{across:g} {y}h18" {stroke(curve.color, curve.dashed)}/>')
        parts.append(f'<text x="{across + 23:g}" y="{y + 4}">{escape(curve.label)}</text>')
        across += width
    return "".join(parts), line


def draw_curves(panel: Panel, top: float) -> Iterator[str]:
    x_axis, y_axis = panel.x_axis, panel.y_axis
    yield from frame(x_axis, y_axis, top, panel.x_label)
    for curve in panel.curves:
        if curve.raw:
            points = path(curve.x, curve.raw, x_axis, y_axis, top)
            yield f'<path class="raw" d="{points}" {stroke(curve.color, False)}/>'
    for curve in panel.curves:
        points = path(curve.x, curve.y, x_axis, y_axis, top)
        yield f'<path class="line" d="{points}" {stroke(curve.color, curve.dashed)}/>'
        if len(curve.x) == 1:
            across, down = point(curve.x[0], curve.y[0], x_axis, y_axis, top)
            yield f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{color(curve.color)}"/>'


def frame(x_axis: Axis, y_axis: Axis, top: float, x_label: str, whole: bool = False) -> Iterator[str]:
    """Yield grid, ticks and the name of the horizontal axis; `whole`: the vertical axis counts something."""
    for tick in y_axis.ticks():
        if whole and not float(tick).is_integer():
            continue
        down = top + HEIGHT * (1 - y_axis.fraction(tick))
        yield f'<path class="grid" d="M{LEFT} {down:.1f}h{WIDTH}"/>'
        yield f'<text class="muted" x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{tick_label(tick)}</text>'
    for tick in x_axis.ticks(8):
        across = LEFT + WIDTH * x_axis.fraction(tick)
        yield f'<path class="grid" d="M{across:.1f} {top + HEIGHT:g}v5"/>'
        yield (
            f'<text class="muted" x="{across:.1f}" y="{top + HEIGHT + 18:g}" text-anchor="middle">'
            f"{tick_label(tick)}</text>"
        )
    yield (
        f'<text class="muted" x="{LEFT + WIDTH}" y="{top + HEIGHT + 34:g}" text-anchor="end">{escape(x_label)}</text>'
        f'<path class="grid" d="M{LEFT} {top + HEIGHT:g}h{WIDTH}"/>'
    )


def draw_histogram(chart: Histogram) -> Iterator[str]:
    bins = chart.bins
    x_axis = Axis(bins[0][0], bins[-1][1])
    y_axis = Axis(0, max(count for _, _, count in bins) * 1.05)
    mean = sum(chart.values) / len(chart.values)
    numbers = f"{len(chart.values):,} sequences, {mean:,.0f} on average, {max(chart.values):,} at most"
    yield f'<text class="title" x="{LEFT}" y="18">{escape(chart.title)}</text>'
    yield f'<text class="muted" x="{LEFT + WIDTH}" y="18" text-anchor="end">{numbers}</text>'
    yield from frame(x_axis, y_axis, TOP, "tokens", whole=True)
    for low, high, count in bins:
        left, right = (LEFT + WIDTH * x_axis.fraction(edge) for edge in (low, high))
        tall = HEIGHT * y_axis.fraction(count)
        yield (
            f'<rect x="{left + 0.5:.1f}" y="{TOP + HEIGHT - tall:.1f}" width="{max(right - left - 1, 0.5):.1f}" '
            f'height="{tall:.1f}" fill="{color(0)}"/>'
        )


def path(x: Sequence[float], y: Sequence[float], x_axis: Axis, y_axis: Axis, top: float) -> str:
    points = (point(a, b, x_axis, y_axis, top) for a, b in zip(x, y, strict=True))
    return "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in points)


def point(x: float, y: float, x_axis: Axis, y_axis: Axis, top: float) -> tuple[float, float]:
    return LEFT + WIDTH * x_axis.fraction(x), top + HEIGHT * (1 - y_axis.fraction(y))


def color(number: int) -> str:
    return f"var(--c{number % len(COLORS)})"


def stroke(number: int, dashed: bool) -> str:
    dots = ' stroke-dasharray="6 4"' if dashed else ' stroke-dasharray="2 3"' if number >= len(COLORS) else ""
    return f'stroke="{color(number)}"{dots}'
