"""A curve for people who have only a terminal, and the same as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 8


def draw_curve(console: Console, values: Sequence[float], picture: Path, title: str = "reward, step by step") -> None:
    """Bars in the terminal, and an SVG file that any browser opens."""
    low, high = bounds(values)
    console.rule(title)
    for row in reversed(range(ROWS)):
        label = f"{low + (high - low) * (row + 1) / ROWS:6.2f} " if row in (ROWS - 1, ROWS // 2) else " " * 7
        console.print(label + "".join(block(value, low, high, row) * 2 for value in values), highlight=False)
    console.print(f"{low:6.2f} " + "‾" * (2 * len(values)), highlight=False)
    picture.write_text(svg(values, title), encoding="utf-8")
    console.print(f"picture: {picture}", highlight=False, markup=False)


def bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.floor(min(values) * 20) / 20, math.ceil(max(values) * 20) / 20
    return (low, high) if high > low else (low, low + 0.05)


def block(value: float, low: float, high: float, row: int) -> str:
    """The part of a bar that falls into a row of characters, counted from below."""
    eighths = round((value - low) / (high - low) * ROWS * 8) - 8 * row
    return BLOCKS[max(0, min(8, eighths))]


def svg(values: Sequence[float], title: str) -> str:
    low, high = bounds(values)
    width, height, left, top = 640, 240, 48, 32

    def down(value: float) -> float:
        return top + height * (1 - (value - low) / (high - low))

    across = [left + width * step / max(1, len(values) - 1) for step in range(len(values))]
    line = " ".join(f"{x:.1f},{down(value):.1f}" for x, value in zip(across, values, strict=True))
    grid = "".join(
        f'<path d="M{left} {down(tick):.1f}h{width}" stroke="#ccc"/>'
        f'<text x="{left - 6}" y="{down(tick) + 4:.1f}" text-anchor="end">{tick:.2f}</text>'
        for tick in (low + (high - low) * part / 4 for part in range(5))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 16}" height="{top + height + 32}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="18" font-size="14">{title}</text>{grid}'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/>'
        f'<text x="{left}" y="{top + height + 20}">step 1</text>'
        f'<text x="{left + width}" y="{top + height + 20}" text-anchor="end">step {len(values)}</text></svg>\n'
    )
