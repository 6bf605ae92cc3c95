"""Check examples for near-duplicates and for overlap with evaluation sets, while they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from posttrain.core.errors import DataError
from posttrain.data.curation.decontamination import EvaluationSets, Overlap
from posttrain.data.curation.near_duplicates import NearDuplicates
from posttrain.data.curation.row_spool import RowSpool
from posttrain.data.curation.words import Text, texts_of
from posttrain.data.reading.examples import Example
from posttrain.data.reading.records import Record

MAX_LISTED = 20  # findings of each kind in the report


@dataclass(slots=True)
class CurationReport:
    """What the checks found."""

    examples: int = 0
    near_duplicates: int = 0  # examples that are near-duplicates of an earlier one
    duplicates_listed: list[tuple[str, str]] = field(default_factory=list)  # example, the first of its group
    largest_group: int = 1
    overlapping: int = 0
    overlaps_listed: list[Overlap] = field(default_factory=list)
    overlaps_by_source: Counter[str] = field(default_factory=Counter)  # file of the evaluation set -> examples
    written: int = 0


class CurationChecks:
    """Collects examples of one or several sources; `finish` reports, and writes the examples that passed."""

    def __init__(
        self, similarity: float | None, evaluation: EvaluationSets | None = None, output: Path | None = None
    ) -> None:
        """`similarity`: of near-duplicates; None: these are not searched for. `output`: file for what passed."""
        self.duplicates = None if similarity is None else NearDuplicates(similarity)
        self.evaluation = evaluation
        self.output = output
        self.rows = None if output is None else RowSpool(output)
        self.origins: list[str] = []
        self.report = CurationReport()
        self.overlapping: list[int] = []

    def __enter__(self) -> CurationChecks:
        return self

    def __exit__(self, *_: object) -> None:
        if self.rows is not None:
            self.rows.close()

    def add(self, parsed: Sequence[tuple[Record, list[Example]]]) -> None:
        """Take the records that were read, with their examples."""
        checked: list[tuple[str, list[Text]]] = []
        for record, examples in parsed:
            texts = list(dict.fromkeys(text for example in examples for text in texts_of(example)))
            checked.append((record.origin, texts))
            if self.duplicates is not None:
                self.duplicates.add("\n".join(text.content for text in texts))
            if self.rows is not None:
                self.rows.add(record.values)
        if self.evaluation is not None:
            for index, overlap in enumerate(self.evaluation.overlaps(checked)):
                if overlap is not None:
                    self._add_overlap(len(self.origins) + index, overlap)
        self.origins += [origin for origin, _ in checked]

    def _add_overlap(self, index: int, overlap: Overlap) -> None:
        self.overlapping.append(index)
        self.report.overlaps_by_source[overlap.evaluation.rpartition(":")[0]] += 1
        if len(self.report.overlaps_listed) < MAX_LISTED:
            self.report.overlaps_listed.append(overlap)

    def finish(self, write: bool = True) -> CurationReport:
        """Return what was found; `write`: write the examples that passed, if there is an output file."""
        report = self.report
        kept = np.ones(len(self.origins), dtype=np.bool_)
        report.examples, report.overlapping = len(kept), len(self.overlapping)
        kept[np.array(self.overlapping, dtype=np.int64)] = False
        if self.duplicates is not None and len(kept):
            first = self.duplicates.groups().roots()
            later = np.flatnonzero(first != np.arange(len(first)))
            report.near_duplicates = len(later)
            report.largest_group = int(np.bincount(first).max())
            listed = later[:MAX_LISTED].tolist()
            report.duplicates_listed = [(self.origins[index], self.origins[first[index]]) for index in listed]
            kept[later] = False
        if write and self.rows is not None and self.output is not None:
            report.written = int(kept.sum())
            if not report.written:
                raise DataError(f"{self.output}: not written, because no example is left")
            self.rows.write(self.output, np.flatnonzero(kept).tolist())
        return report
