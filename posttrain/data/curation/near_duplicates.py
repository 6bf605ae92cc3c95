"""Find near-duplicates: texts that share most of their n-grams of words, by MinHash and locality-sensitive hashing.

The similarity of two texts is the Jaccard index of their sets of n-grams. A signature has the minima of PERMUTATIONS
hash functions over the n-grams; the share of equal minima estimates the similarity. Signatures are divided into bands,
and only texts with an equal band are compared. A text takes 0.7 KB of memory, regardless of its length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import UsageError
from posttrain.data.curation.words import FACTOR, Hashes, NgramHasher, mix_bits, words_of

NGRAM_WORDS = 5
PERMUTATIONS = 128
RECALL = 0.99  # of pairs at the threshold that are compared
TEXTS_AT_ONCE = 512
PAIRS_AT_ONCE = 2**16

Indices = npt.NDArray[np.int64]


class NearDuplicates:
    """Collects texts; `groups` returns which of them are near-duplicates of each other."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: the lowest similarity of near-duplicates, from 0 to 1."""
        check_threshold(threshold)
        self.threshold = threshold
        self.rows = rows_per_band(threshold)
        self.hasher = NgramHasher(NGRAM_WORDS)
        rng = np.random.default_rng(0x3156A5)  # always the same functions
        self.factors = rng.integers(2**32, size=PERMUTATIONS, dtype=np.uint32) | np.uint32(1)
        self.shifts = rng.integers(2**32, size=PERMUTATIONS, dtype=np.uint32)
        self.waiting: list[str] = []
        self.signatures: list[npt.NDArray[np.uint32]] = []
        self.bands: list[Hashes] = []

    def add(self, text: str) -> None:
        self.waiting.append(text)
        if len(self.waiting) == TEXTS_AT_ONCE:
            self._sign()

    def _sign(self) -> None:
        grams, starts = self.hasher.hash([words_of(text) for text in self.waiting])
        values = (grams >> np.uint64(32)).astype(np.uint32)
        signatures = np.empty((len(self.waiting), PERMUTATIONS), dtype=np.uint32)
        for index, (factor, shift) in enumerate(zip(self.factors, self.shifts, strict=True)):
            signatures[:, index] = np.minimum.reduceat(values * factor + shift, starts)
        self.signatures.append(signatures)
        self.bands.append(self._bands(signatures))
        self.waiting = []

    def _bands(self, signatures: npt.NDArray[np.uint32]) -> Hashes:
        """Return a hash of each band, and first one of the whole signature."""
        bands = PERMUTATIONS // self.rows
        parts = [signatures, *np.split(signatures[:, : bands * self.rows], bands, axis=1)]
        found = np.zeros((len(signatures), len(parts)), dtype=np.uint64)
        for index, part in enumerate(parts):
            for column in part.T:
                found[:, index] = mix_bits(found[:, index] * FACTOR + column)
        return found

    def groups(self) -> Groups:
        """Return the groups of texts that are connected by pairs of near-duplicates."""
        if self.waiting:
            self._sign()
        signatures = np.concatenate(self.signatures) if self.signatures else np.empty((0, PERMUTATIONS), np.uint32)
        self.signatures = []
        groups = Groups(len(signatures))
        if not len(signatures):
            return groups
        whole = np.concatenate([part[:, 0] for part in self.bands])
        _, first, same = np.unique(whole, return_index=True, return_inverse=True)
        groups.first = first[same].astype(np.int64)  # texts with equal n-grams need no comparison
        distinct = np.sort(first).astype(np.int64)
        for band in range(1, self.bands[0].shape[1]):
            keys = np.concatenate([part[:, band] for part in self.bands])[distinct]
            self._compare(distinct, keys, signatures, groups)
        return groups

    def _compare(self, texts: Indices, keys: Hashes, signatures: npt.NDArray[np.uint32], groups: Groups) -> None:
        """Compare all texts with equal keys, except those that are in one group already."""
        order = np.argsort(keys, kind="stable")
        texts, keys = texts[order], keys[order]
        edges = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1], [True])))
        lengths = np.diff(edges)
        ends = np.repeat(edges[1:], lengths)
        places = np.flatnonzero(np.repeat(lengths > 1, lengths))
        distance = 1
        while len(places):
            if distance & (distance - 1) == 0:  # now and then leave out sets that are one group or were compared
                starts = np.flatnonzero(np.concatenate(([True], ends[places][1:] != ends[places][:-1])))
                sizes = np.diff(np.append(starts, len(places)))
                roots = groups.roots(texts[places])
                several = np.minimum.reduceat(roots, starts) != np.maximum.reduceat(roots, starts)
                places = places[np.repeat(several & (sizes > distance), sizes)]
            left = places[places + distance < ends[places]]
            one, other = texts[left], texts[left + distance]
            differ = np.flatnonzero(groups.roots(one) != groups.roots(other))
            for part in np.split(differ, range(PAIRS_AT_ONCE, len(differ), PAIRS_AT_ONCE)):
                near = (signatures[one[part]] == signatures[other[part]]).mean(axis=1) >= self.threshold
                for a, b in zip(one[part][near].tolist(), other[part][near].tolist(), strict=True):
                    groups.join(a, b)
            distance += 1


class Groups:
    """Disjoint groups of the numbers below `size`; each is named by its smallest member."""

    def __init__(self, size: int) -> None:
        self.first: Indices = np.arange(size)  # a smaller member of the same group, or the number itself

    def roots(self, members: Indices | None = None) -> Indices:
        """Return the smallest member of the groups of these numbers, or of all."""
        found = self.first if members is None else self.first[members]
        while True:
            further = self.first[found]
            if np.array_equal(further, found):
                return found
            found = further

    def join(self, one: int, other: int) -> None:
        """Make the groups of two numbers one."""
        a, b = self._root(one), self._root(other)
        self.first[max(a, b)] = min(a, b)

    def _root(self, member: int) -> int:
        root = member
        while self.first[root] != root:
            root = int(self.first[root])
        while self.first[member] != root:  # shorten the way for the next time
            self.first[member], member = root, int(self.first[member])
        return root


def check_threshold(threshold: float) -> None:
    """Raise UsageError unless it is a similarity that can be searched for."""
    if not 0.3 <= threshold <= 1:
        raise UsageError(f"similarity is {threshold}; it must be at least 0.3 and at most 1")


def rows_per_band(threshold: float) -> int:
    """Return the most rows per band with which pairs at the threshold have an equal band with probability RECALL."""
    fitting = [rows for rows in range(1, PERMUTATIONS + 1) if equal_band(threshold, rows) >= RECALL]
    return max(fitting, default=1)


def equal_band(similarity: float, rows: int) -> float:
    """Return the probability that two texts of this similarity have at least one equal band."""
    return 1 - (1 - similarity**rows) ** (PERMUTATIONS // rows)
