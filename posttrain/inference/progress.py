"""How far a long command is, in a line: answers, tokens a second, the time that is left."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """How far it is; `tokens` and `seconds` are of this process alone."""

    done: int
    total: int
    resumed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    left_out: dict[str, int] = field(default_factory=dict)  # rows of the data that are no prompts here, by reason

    def __str__(self) -> str:
        made = self.done - self.resumed
        speed = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.seconds and made else ""
        left = self.seconds * (self.total - self.done) / made if made else 0.0
        eta = f", {duration(left)} left" if made and self.done < self.total else ""
        return f"{self.done:,} of {self.total:,} answers{speed}{eta}"


def duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class ProgressLine:
    """Shows progress on standard error: one line that changes in a terminal, else a line now and then."""

    every = 10.0  # seconds, where there is no terminal

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.last = -self.every

    def __call__(self, progress: Progress) -> None:
        over = progress.done == progress.total
        if not over and not self.terminal and not progress.seconds:
            return
        if self.terminal:
            # The cursor goes back, so that a warning does not begin behind it.
            print(f"\r\x1b[K{progress}", end="\n" if over else "\r", file=sys.stderr, flush=True)
        elif over or progress.seconds - self.last >= self.every:
            self.last = progress.seconds
            print(progress, file=sys.stderr, flush=True)
