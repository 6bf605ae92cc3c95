"""How far a command is, in one line: rewritten in place on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

REFRESH_SECONDS = 0.1  # between two updates on a terminal
BAR_WIDTH = 20  # columns


class ProgressDisplay:
    """Shows the newest update of a command; `message` prints above it. Use as a context manager, or call `close`.

    On a terminal rich draws the line, with a bar. Elsewhere the first update is printed, then one at most every
    `seconds_between_lines`, and on `close` the last one.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        seconds_between_lines: float = 5.0,
        transient: bool = False,
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        """`stream`: standard output by default. `transient`: the line disappears in the end, and without a terminal
        nothing is printed. `print_line`: receives all lines instead of the stream."""
        self.stream = TolerantStream(stream or sys.stdout)
        self.quiet, self.seconds_between_lines, self.transient = quiet, seconds_between_lines, transient
        self.print_line = print_line
        self.on_terminal = self.stream.isatty() and print_line is None and os.environ.get("TERM") != "dumb"
        self.live: Live | None = None  # once there is something to show
        self.lock = threading.RLock()  # updates may come from several threads
        self.shown_at = -math.inf
        self.pending: Callable[[], None] | None = None  # shows the newest update, if it was not shown yet

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, position: str, details: str = "", *, done: float, total: float | None, show: bool = False) -> None:
        """`position` says how far it is in words (`step 3/10`), `done` of `total` the same in numbers, for the bar.

        `show`: at once, however little time has passed since the last line.
        """
        if self.quiet or (self.transient and not self.on_terminal):
            return
        with self.lock:
            self.pending = lambda: self._show(position, details, done, total)
            now = time.monotonic()
            if show or now - self.shown_at >= (REFRESH_SECONDS if self.on_terminal else self.seconds_between_lines):
                self.shown_at = now
                self.pending()

    def message(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line above the progress, even when quiet; `stream`: instead of the display's own."""
        target = TolerantStream(stream) if stream is not None else self.stream
        if self.live is not None and target.isatty():
            from rich.text import Text

            self.live.console.print(Text.from_ansi(text), soft_wrap=True)
        elif self.print_line is not None:
            self.print_line(text)
        else:
            target.write(text + "\n")
            target.flush()

    def close(self) -> None:
        """Show the newest update if it was skipped, and leave the line."""
        if self.pending is not None:
            self.pending()
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _show(self, position: str, details: str, done: float, total: float | None) -> None:
        self.pending = None
        if not self.on_terminal:
            self.message(f"{position}  {details}".rstrip())
            return
        live = self.live or self._start()
        live.update(line_with_bar(position, details, done, total), refresh=True)

    def _start(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        self.live = Live(
            console=Console(file=self.stream, highlight=False),  # type: ignore[arg-type]
            auto_refresh=False,  # no thread: it is drawn when something changes
            transient=self.transient,
            redirect_stdout=sys.stdout.isatty(),  # what others print appears above the line
            redirect_stderr=sys.stderr.isatty(),
        )
        self.live.start()
        self.live.console.show_cursor(True)  # rich hides it, and a killed process would leave it hidden
        return self.live


def line_with_bar(position: str, details: str, done: float, total: float | None) -> Table:
    """One line for rich; on a narrow terminal the details lose their end."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(width=BAR_WIDTH)
    line.add_column()
    line.add_row(
        Text(position), ProgressBar(total=total, completed=done), Text(details, no_wrap=True, overflow="ellipsis")
    )
    return line


class TolerantStream:
    """A text stream whose writes never fail: a closed terminal or pipe (`| head`) must not end a command."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def time_left(started: float, done: float, total: float | None) -> str:
    """The remaining time as `eta 3:05`, if the rest goes on as fast; empty while nothing is known.

    `started`: when it began, by time.monotonic.
    """
    if not total or not done:
        return ""
    return f"eta {duration((time.monotonic() - started) * max(total - done, 0) / done)}"


def short_number(number: float) -> str:
    """Three significant places or so: 950, 1.2k, 3.4M."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours too: 3:05, 1:03:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
