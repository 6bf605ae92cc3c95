"""Shows the progress of a command in one line: redrawn on a terminal, plain lines elsewhere, nothing if quiet."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

REFRESH_SECONDS = 0.1  # between two updates on a terminal


class TerminalLine(Protocol):
    """A line that is redrawn in place: terminal_line.RichLine, imported when it is shown, because rich takes 50 ms."""

    def update(self, position: str, eta: str, details: str, done: float, total: float | None) -> None: ...

    def print(self, text: str) -> None: ...

    def stop(self) -> None: ...


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
        """`stream`: standard output by default; `print_line`: receives all lines instead of the stream.

        `transient`: the line disappears at the end, and nothing is printed if the stream is not a terminal.
        """
        self.stream = TolerantStream(stream or sys.stdout)
        self.quiet, self.seconds_between_lines, self.transient = quiet, seconds_between_lines, transient
        self.print_line = print_line
        self.on_terminal = self.stream.isatty() and print_line is None and os.environ.get("TERM") != "dumb"
        self.line: TerminalLine | None = None  # once there is something to show
        self.lock = threading.RLock()  # updates may come from several threads
        self.shown_at = -math.inf
        self.pending: Callable[[], None] | None = None  # shows the newest update, if it was not shown yet

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(
        self,
        position: str,
        details: str = "",
        *,
        done: float,
        total: float | None,
        eta: str = "",
        show: bool = False,
    ) -> None:
        """Show the progress, as text (`position`, such as `step 3/10`) and for the bar (`done` of `total`).

        `eta`: the remaining time, such as `eta 3:05`, before the details because a narrow terminal truncates them.
        `show`: print it now, even if the last line was printed a moment ago.
        """
        if self.quiet or (self.transient and not self.on_terminal):
            return
        with self.lock:
            self.pending = lambda: self._show(position, eta, details, done, total)
            now = time.monotonic()
            if show or now - self.shown_at >= (REFRESH_SECONDS if self.on_terminal else self.seconds_between_lines):
                self.shown_at = now
                self.pending()

    def message(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line above the progress, even when quiet; `stream`: instead of the display's own."""
        target = TolerantStream(stream) if stream is not None else self.stream
        if self.line is not None and target.isatty():
            self.line.print(text)
        elif self.print_line is not None:
            self.print_line(text)
        else:
            target.write(text + "\n")
            target.flush()

    def close(self) -> None:
        """Show the newest update if it was skipped, and end the line."""
        if self.pending is not None:
            self.pending()
        if self.line is not None:
            self.line.stop()
            self.line = None

    def _show(self, position: str, eta: str, details: str, done: float, total: float | None) -> None:
        self.pending = None
        if not self.on_terminal:
            self.message("  ".join(part for part in (position, eta, details) if part))
            return
        if self.line is None:
            from posttrain.core.terminal_line import RichLine

            self.line = RichLine(self.stream, transient=self.transient)
        self.line.update(position, eta, details, done, total)


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
    """Return the remaining time as `eta 3:05`, at the average speed so far; empty at the start.

    `started`: the time.monotonic of the start.
    """
    if not total or not done:
        return ""
    return f"eta {duration((time.monotonic() - started) * max(total - done, 0) / done)}"


def short_number(number: float) -> str:
    """Format a number with a unit: 950, 1.2k, 3.4M."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, or with hours: 3:05, 1:03:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
