"""Measures how far rewards agree with known labels, and whether they follow the length or the order of completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from posttrain.rewards.verdict import Verdict

LEAST_AGREEMENT = 0.7  # a reward that agrees less often with the labels is reported
MOST_FLIPS = 0.2  # share of verdicts that may change with the order
LENGTH_GAP = 0.2  # by how much longer completions may be preferred more often than the labels prefer them
LEAST_PAIRS = 10  # from which on a share is judged


@dataclass(slots=True, frozen=True, kw_only=True)
class Agreement:
    """Shares over pairs of completions whose labels differ."""

    pairs: int
    within_prompts: bool  # pairs of completions of one prompt; else of all completions, as no prompt has two
    agreeing: float  # the better one has the higher reward; equal rewards count half
    longer_preferred: float  # among pairs of different length
    longer_is_better: float  # by the labels, among the same pairs


def measure(
    labels: Sequence[float], values: Sequence[float | None], lengths: Sequence[int], groups: Sequence[int]
) -> Agreement | None:
    """Compare rewards with labels; None if no two labels differ. Completions that could not be scored are left out."""
    scored = [index for index, value in enumerate(values) if value is not None]
    pairs = [pair for pair in combinations(scored, 2) if labels[pair[0]] != labels[pair[1]]]
    inside = [(a, b) for a, b in pairs if groups[a] == groups[b]]
    pairs, within = (inside, True) if inside else (pairs, False)
    if not pairs:
        return None
    better = [(a, b) if labels[a] > labels[b] else (b, a) for a, b in pairs]
    by_length = [(a, b) if lengths[a] > lengths[b] else (b, a) for a, b in pairs if lengths[a] != lengths[b]]
    return Agreement(
        pairs=len(pairs),
        within_prompts=within,
        agreeing=_share(values, better),
        longer_preferred=_share(values, by_length),
        longer_is_better=_share(labels, by_length),
    )


def _share(values: Sequence[float | None], pairs: Sequence[tuple[int, int]]) -> float:
    """Return how often the first of a pair has the higher value; equal values count half."""
    points = 0.0
    for a, b in pairs:
        first, second = values[a], values[b]
        assert first is not None and second is not None
        points += 0.5 + ((first > second) - (first < second)) / 2
    return points / len(pairs) if pairs else 0.5


def total_counts(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Add up what a judge needed and how its verdicts came out."""
    total: dict[str, float] = {}
    for verdict in verdicts:
        for name, number in verdict.counts.items():
            total[name] = total.get(name, 0.0) + number
    return total


def concerns(found: Agreement | None, counts: dict[str, float]) -> Iterator[str]:
    """Yield why a reward should not be trained on."""
    swapped, flipped = counts.get("swapped", 0.0), counts.get("flipped", 0.0)
    if swapped and flipped > MOST_FLIPS * swapped:
        first = counts.get("first_preferred", 0.0) / (counts.get("decided") or 1.0)
        kind = "the first" if first > 0.5 else "the last"
        yield f"{flipped / swapped:.0%} of its verdicts depend on the order: it prefers {kind} completion"
    if found is None or found.pairs < LEAST_PAIRS:
        return
    if found.longer_preferred - found.longer_is_better > LENGTH_GAP:
        yield (
            f"it prefers the longer completion in {found.longer_preferred:.0%} of the pairs; "
            f"by the labels {found.longer_is_better:.0%} of the longer ones are better"
        )
    if found.agreeing < LEAST_AGREEMENT:
        yield f"it agrees with the labels in {found.agreeing:.0%} of the pairs only"
