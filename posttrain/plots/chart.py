"""What a chart shows: panels with curves, and histograms; axes with round numbers as ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

BINS = 30


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that are connected by a line."""

    label: str
    x: list[float]
    y: list[float]
    color: int = 0  # number of the colour; curves of one run have the same
    dashed: bool = False
    raw: list[float] = field(default_factory=list)  # the values before smoothing, drawn faintly


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves with common axes."""

    title: str
    curves: list[Curve]
    x_label: str = "step"
    log_scale: bool = False

    @property
    def x_axis(self) -> Axis:
        return Axis.fit([value for curve in self.curves for value in curve.x], margin=0.0)

    @property
    def y_axis(self) -> Axis:
        values = [value for curve in self.curves for value in (*curve.y, *curve.raw)]
        return Axis.fit(values, self.log_scale)


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of a number."""

    title: str
    values: list[int]

    @property
    def bins(self) -> list[tuple[float, float, int]]:
        """(from, to, count) of bins of equal width; the last one ends at the largest value."""
        low, high = min(self.values), max(self.values)
        width = max(1, math.ceil((high - low + 1) / BINS))
        counts = [0] * ((high - low) // width + 1)
        for value in self.values:
            counts[(value - low) // width] += 1
        return [(low + index * width, low + (index + 1) * width, count) for index, count in enumerate(counts)]


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    @staticmethod
    def fit(values: Sequence[float], log: bool = False, margin: float = 0.04) -> Axis:
        """Return the axis for some values, with a margin at both ends; values of a logarithmic one are above 0."""
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        if high - low <= 1e-9 * (1.0 if log else max(abs(low), abs(high))):  # the same, up to rounding
            spread = 0.1 if log else abs(high) * 0.1 or 1.0
            return Axis(low - spread, high + spread, log)
        extra = (high - low) * margin
        return Axis(low - extra, high + extra, log)

    def fraction(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        return ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)

    def ticks(self, max_ticks: int = 6) -> list[float]:
        """Return round numbers inside the range."""
        if self.log and self.high - self.low >= 1:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            factors = (1,) if len(powers) > 2 else (1, 2, 5)
            around = range(math.floor(self.low), math.ceil(self.high) + 1)
            every = -(-len(powers) // max_ticks) if len(powers) > max_ticks else 1
            found = [factor * 10.0**power for power in around if power % every == 0 for factor in factors]
            return [value for value in found if 0 <= self.fraction(value) <= 1]
        low, high = (10**self.low, 10**self.high) if self.log else (self.low, self.high)
        step = round_number((high - low) / max_ticks)
        numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        return [number * step for number in numbers]


def round_number(number: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50 ... and 0.5, 0.2, 0.1 ..."""
    scale = 10.0 ** math.floor(math.log10(number))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= number * (1 - 1e-9))


def tick_label(value: float) -> str:
    """Format a number of an axis: 0.25, 1.5k, 2M, 1e-05."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.3g}"
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if size >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"
