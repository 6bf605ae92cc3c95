"""Draws a line of progress with a bar at the bottom of a terminal, with rich."""

from __future__ import annotations

import sys
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 20  # columns
ETA_WIDTH = 14  # of `eta 100:00:00`


class RichLine:
    """Redraws one line in place; other output appears above it."""

    def __init__(self, stream: object, *, transient: bool) -> None:
        """`transient`: the line disappears when it is stopped."""
        self.live = Live(
            console=Console(file=cast(IO[str], stream), highlight=False),
            auto_refresh=False,  # no thread: it is drawn when something changes
            transient=transient,
            redirect_stdout=sys.stdout.isatty(),  # what others print appears above the line
            redirect_stderr=sys.stderr.isatty(),
        )
        self.live.start()
        self.live.console.show_cursor(True)  # rich hides it, and a killed process would leave it hidden

    def update(self, position: str, eta: str, details: str, done: float, total: float | None) -> None:
        """Draw the line; on a narrow terminal the details lose their end, then the position."""
        line = Table.grid(padding=(0, 1))
        position_width = max(self.live.console.width - BAR_WIDTH - ETA_WIDTH - 4, 1)
        line.add_column(no_wrap=True, overflow="ellipsis", max_width=position_width)
        line.add_column(width=BAR_WIDTH)
        line.add_column()
        line.add_row(
            Text(position),
            ProgressBar(total=total, completed=done),
            Text("  ".join(part for part in (eta, details) if part), no_wrap=True, overflow="ellipsis"),
        )
        self.live.update(line, refresh=True)

    def print(self, text: str) -> None:
        """Print a text above the line."""
        self.live.console.print(Text.from_ansi(text), soft_wrap=True)

    def stop(self) -> None:
        self.live.stop()
