"""Aligns the tokens of two tokenizers over the text that both stand for.

    student    The| ca|t| sat|.|</s>       spans     The | cat| sat|.|</s>
    teacher    The| cat| s|at|.|<end>      between places where a token of both ends

The log-probability of a span is the sum over its tokens, for either side. The difference of the two sums is spread
evenly over the student's tokens of the span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.errors import UsageError
from posttrain.core.types import Floats, Sample
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.encoding.templates import template_stop_ids
from posttrain.data.reading.examples import PromptExample
from posttrain.endpoint.text_stream import BROKEN, TextStream
from posttrain.rollout.records import Rollout


@dataclass(slots=True, frozen=True)
class Aligned:
    """A completion as the teacher reads it, and which tokens of both sides belong together."""

    view: Sample
    spans: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # places in the student's sample, and in the view

    def spread(self, own: Floats, theirs: Floats) -> Floats:
        """Return log-probabilities for the student's tokens whose sum over each span is the teacher's."""
        result = own.copy()
        for places, others in self.spans:
            mine = list(places)
            gain = float(theirs[list(others)].sum(dtype=np.float64)) - float(own[mine].sum(dtype=np.float64))
            result[mine] += np.float32(gain / len(mine))
        return result


class TextAlignment:
    """Aligns completions of the student with the tokens of a teacher that has another tokenizer."""

    def __init__(self, student: Any, teacher: Any, encoder: Encoder, student_stop_ids: Sequence[int]) -> None:
        """`encoder`: renders prompts with the teacher's tokenizer and template."""
        self.student, self.teacher, self.encoder = student, teacher, encoder
        self.student_stop_ids = frozenset(student_stop_ids)
        ends = template_stop_ids(teacher)
        if not ends:
            raise UsageError("algo.teacher_tokenizer: it has no token that ends a completion")
        self.end = ends[-1]  # of a turn, if the chat template names one; else EOS

    def align(self, rollout: Rollout) -> Aligned | None:
        """Return the alignment; None if the text is not the same for both tokenizers."""
        sample, first = rollout.sample, len(rollout.prompt.tokens)
        tokens = sample.tokens[first:].tolist()
        ended = bool(tokens) and tokens[-1] in self.student_stop_ids
        own = tokens[: len(tokens) - ended]
        text, ends = token_ends(self.student, own)
        if text is None or any(token in self.student.all_special_ids for token in own):
            return None
        theirs = self.teacher(text, add_special_tokens=False)["input_ids"] if text else []
        read, their_ends = token_ends(self.teacher, theirs)
        if read != text:
            return None
        (prompt,) = self.encoder.prompts([PromptExample(prompt=rollout.prompt.messages, origin=sample.origin)])
        assert prompt is not None, "its length is not limited"
        start = len(prompt.tokens)
        spans = spans_of(ends, their_ends, first, start)
        if ended:
            spans.append(((first + len(own),), (start + len(theirs),)))
        whole = np.concatenate([prompt.tokens, np.array([*theirs, *([self.end] * ended)], dtype=np.int32)])
        view = Sample(tokens=whole, mask=np.arange(len(whole)) >= start, origin=sample.origin)
        return Aligned(view, tuple(spans))


def token_ends(tokenizer: Any, tokens: Sequence[int]) -> tuple[str | None, list[int | None]]:
    """Return the text, and after how many characters each token ends; None for one that ends within a character.

    The text is None if the tokens are not valid UTF-8.
    """
    stream, text, ends = TextStream(tokenizer), "", list[int | None]()
    for token in tokens:
        new = stream.add(token)
        text += new
        ends.append(len(text) if new else None)
    rest = stream.finish()
    if rest or BROKEN in text:
        return None, []
    return text, ends


def spans_of(
    ends: Sequence[int | None], their_ends: Sequence[int | None], first: int, start: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the places of both sides in each span between two characters where a token of both ends."""
    common = sorted({end for end in ends if end is not None} & {end for end in their_ends if end is not None})
    spans, i, j = [], 0, 0
    for end in common:
        mine, theirs = i, j
        i = last_with(ends, end) + 1
        j = last_with(their_ends, end) + 1
        spans.append((tuple(range(first + mine, first + i)), tuple(range(start + theirs, start + j))))
    return spans


def last_with(ends: Sequence[int | None], end: int) -> int:
    """Return the last token that ends at a character."""
    return len(ends) - 1 - list(reversed(ends)).index(end)
