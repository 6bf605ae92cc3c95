"""Draws charts with characters: curves in braille dots with colours, or in letters where there are none."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from posttrain.plots.chart import Curve, Panel, tick_label

STYLES = ("blue", "yellow", "green", "red", "magenta", "cyan", "bright_red", "bright_green")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROWS, LABEL, MAX_COLUMNS = 12, 9, 110
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


def draw_panel(console: Console, panel: Panel) -> None:
    """Print the curves of a panel."""
    columns = max(20, min(console.width - LABEL - 2, MAX_COLUMNS))
    colours = console.is_terminal and not console.no_color
    letters = len(panel.curves) > 1 and not colours
    marks = [LETTERS[number % len(LETTERS)] if letters else "" for number in range(len(panel.curves))]
    console.print(Text(panel.title, style="bold" if colours else ""))
    if len(panel.curves) > 1:
        for curve, mark in zip(panel.curves, marks, strict=True):
            console.print(Text(f"{'':{LABEL}} {mark or '━━'} {curve.label}", style=style(curve) if colours else ""))
    grid = [[(0, "", "")] * columns for _ in range(ROWS)]  # dots, letter and style of each character
    for curve, mark in zip(panel.curves, marks, strict=True):
        for column, row in dots(curve, panel, 2 * columns, 4 * ROWS):
            before = grid[row // 4][column // 2][0]
            shown = before | DOTS[row % 4][column % 2]
            grid[row // 4][column // 2] = (shown, mark, style(curve) if colours else "")
    labels = row_labels(panel)
    for number, cells in enumerate(grid):
        line = Text(f"{labels.get(number, ''):>{LABEL}} │")
        for shown, mark, colour in cells:
            line.append((mark or chr(0x2800 + shown)) if shown else " ", style=colour)
        console.print(line, no_wrap=True, overflow="crop")
    low, high = (tick_label(value) for value in x_range(panel))
    space = " " * (LABEL + 1)
    console.print(Text(f"{space}└{'─' * columns}"), no_wrap=True, overflow="crop")
    console.print(
        Text(f"{space} {low}{f'{panel.x_label} {high}':>{columns - len(low)}}\n"), no_wrap=True, overflow="crop"
    )


def dots(curve: Curve, panel: Panel, width: int, height: int) -> list[tuple[int, int]]:
    """Return the dots of a curve, as columns and rows from the top; neighbouring points are connected."""
    x_axis, y_axis = panel.x_axis, panel.y_axis
    places = [
        (x_axis.fraction(x) * (width - 1), (1 - y_axis.fraction(y)) * (height - 1))
        for x, y in zip(curve.x, curve.y, strict=True)
    ]
    found: dict[tuple[int, int], None] = {}
    for number, (x, y) in enumerate(places):
        x_to, y_to = places[min(number + 1, len(places) - 1)]
        steps = max(1, round(max(abs(x_to - x), abs(y_to - y))))
        for step in range(steps + 1):
            part = step / steps
            column, row = round(x + (x_to - x) * part), round(y + (y_to - y) * part)
            found[min(max(column, 0), width - 1), min(max(row, 0), height - 1)] = None
    return list(found)


def row_labels(panel: Panel) -> dict[int, str]:
    """Return the numbers at the left, by row of characters."""
    axis = panel.y_axis
    return {min(ROWS - 1, max(0, int((1 - axis.fraction(tick)) * ROWS))): tick_label(tick) for tick in axis.ticks(5)}


def x_range(panel: Panel) -> tuple[float, float]:
    values = [value for curve in panel.curves for value in curve.x]
    return min(values), max(values)


def style(curve: Curve) -> str:
    return STYLES[curve.color % len(STYLES)] + (" dim" if curve.dashed else "")
