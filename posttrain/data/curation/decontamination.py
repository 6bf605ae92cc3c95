"""Find training examples that overlap with evaluation sets, by n-grams of words.

An example overlaps if one of its messages shares an n-gram with a text of an evaluation example, or if one of its
prompts equals an evaluation prompt that is too short for n-grams. All texts of an evaluation example count: question,
options, solution. N-grams that many evaluation examples share are instructions, and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.core.errors import UsageError
from posttrain.data.curation.words import Hashes, NgramHasher, Text, normalised_text, words_of
from posttrain.data.reading.sources import read_records

PROMPT_COLUMNS = frozenset({"prompt", "question", "problem", "instruction", "input", "query"})
SHARED_BY = 10  # evaluation examples of one source, or half of them: an n-gram in more is an instruction
RECORDS_AT_ONCE = 256
TABLE_BITS = 24


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training example and the evaluation example with which it overlaps."""

    origin: str
    evaluation: str  # file:line of the evaluation example
    words: str  # what they share


class EvaluationSets:
    """The n-grams and short prompts of evaluation sets."""

    def __init__(self, sources: Sequence[str], ngram_words: int) -> None:
        if ngram_words < 4:
            raise UsageError(f"ngram_words is {ngram_words}; it must be at least 4: shorter ones are everywhere")
        self.size = ngram_words
        self.hasher = NgramHasher(ngram_words)
        self.origins: list[str] = []
        self.short: dict[str, int] = {}  # prompt -> evaluation example
        self.ignored = 0  # n-grams
        grams: list[Hashes] = []
        owners: list[npt.NDArray[np.int64]] = []
        for source in sources:
            for found in self._read(source):
                grams.append(found[0])
                owners.append(found[1])
        self.grams, first = np.unique(np.concatenate(grams or [np.empty(0, np.uint64)]), return_index=True)
        self.owners = np.concatenate(owners or [np.empty(0, np.int64)])[first]
        if not len(self.grams) and not self.short:
            raise UsageError(
                f"decontaminate: {', '.join(sources)}: no text of {ngram_words} words and no prompt to compare with"
            )
        self.table = np.zeros(2**TABLE_BITS, dtype=np.bool_)  # a quick test that excludes most n-grams
        self.table[self.grams >> np.uint64(64 - TABLE_BITS)] = True

    def _read(self, source: str) -> Iterator[tuple[Hashes, npt.NDArray[np.int64]]]:
        """Yield the n-grams of a source and the number of the example of each; remember its short prompts."""
        before = len(self.origins)
        texts: list[list[str]] = []
        owners: list[int] = []
        grams: list[Hashes] = []
        examples: list[npt.NDArray[np.int64]] = []

        def hash_texts() -> None:
            hashes, starts = self.hasher.hash(texts)
            counts = np.diff(np.append(starts, len(hashes)))
            grams.append(hashes)
            examples.append(np.repeat(np.array(owners), counts))
            texts.clear()
            owners.clear()

        for record in read_records(source):
            number = len(self.origins)
            self.origins.append(record.origin)
            for text in texts_of_record(record.values):
                words = words_of(text.content)
                if len(words) >= self.size:
                    texts.append(words)
                    owners.append(number)
                elif text.is_prompt and text.content.strip():
                    self.short.setdefault(normalised_text(text.content), number)
            if len(texts) >= RECORDS_AT_ONCE:
                hash_texts()
        if texts:
            hash_texts()
        if not grams:
            return
        hashes, numbers = np.concatenate(grams), np.concatenate(examples)
        order = np.lexsort((numbers, hashes))
        hashes, numbers = hashes[order], numbers[order]
        repeated = (hashes[1:] == hashes[:-1]) & (numbers[1:] == numbers[:-1])  # within one example
        once = np.concatenate(([True], ~repeated))
        unique, first, count = np.unique(hashes[once], return_index=True, return_counts=True)
        kept = count <= min(SHARED_BY, max(2, (len(self.origins) - before) // 2))
        self.ignored += int((~kept).sum())
        yield unique[kept], numbers[once][first[kept]]

    def overlaps(self, examples: Sequence[tuple[str, Sequence[Text]]]) -> list[Overlap | None]:
        """Return for each training example (origin, texts) the first overlap, or None."""
        found: list[Overlap | None] = [None] * len(examples)
        texts: list[list[str]] = []
        owners: list[int] = []
        for place, (origin, parts) in enumerate(examples):
            for text in parts:
                words = words_of(text.content)
                if len(words) >= self.size:
                    texts.append(words)
                    owners.append(place)
                elif text.is_prompt and found[place] is None:
                    evaluation = self.short.get(normalised_text(text.content))
                    if evaluation is not None:
                        found[place] = Overlap(origin, self.origins[evaluation], normalised_text(text.content))
        if texts and len(self.grams):
            hashes, starts = self.hasher.hash(texts)
            places = np.flatnonzero(self.table[hashes >> np.uint64(64 - TABLE_BITS)])
            rows = np.minimum(np.searchsorted(self.grams, hashes[places]), len(self.grams) - 1)
            equal = self.grams[rows] == hashes[places]
            numbers = np.searchsorted(starts, places[equal], side="right") - 1  # of the texts
            for row, place, number in zip(rows[equal].tolist(), places[equal].tolist(), numbers.tolist(), strict=True):
                if found[owners[number]] is None:
                    first = place - int(starts[number])
                    shared = " ".join(texts[number][first : first + self.size])
                    origin = examples[owners[number]][0]
                    found[owners[number]] = Overlap(origin, self.origins[self.owners[row]], shared)
        return found


def texts_of_record(value: Any, column: str = "") -> Iterator[Text]:
    """Yield all texts of a record of an evaluation set, whatever its columns, without system prompts."""
    if isinstance(value, str):
        yield Text(value, column.lower() in PROMPT_COLUMNS)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of_record(item)
    elif isinstance(value, dict):
        role = value.get("role", value.get("from"))
        for name, cell in value.items():
            if role != "system":
                yield from texts_of_record(cell, "prompt" if role in ("user", "human") else str(name))
