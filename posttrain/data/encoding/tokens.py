"""Encode text segment by segment: no token crosses the end of a prompt, and quoted control tokens stay text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from posttrain.core.errors import UsageError, tokenizer_errors
from posttrain.core.lazy import PreTrainedTokenizerBase
from posttrain.data.encoding.word_cache import WordCache

PROBES = ("a", "1", "(")
ANCHORS = ("\n", ":", "a")


class TextPart(NamedTuple):
    """A text and its source: control tokens are recognised only in text of the template."""

    text: str
    from_template: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Text that is encoded separately, so that no token crosses its ends."""

    parts: tuple[TextPart, ...]
    trained: bool = False
    end: bool = False  # append the EOS token, which is not in the text

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts])


class TokenEncoder:
    """Encodes consecutive segments, each as a continuation of the text before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.control = any_of(whole_tokens(tokenizer, control_only=True))
        self.whole = whole_tokens(tokenizer)
        self.words = WordCache.of(tokenizer)
        with_specials = tokenizer("a")["input_ids"]
        self.adds_bos = tokenizer.bos_token_id is not None and with_specials[:1] == [tokenizer.bos_token_id]
        # Some tokenizers put a space before every text. Inside a sequence that would be wrong: there a text is encoded
        # after an anchor, and the anchor's ids are removed.
        self.needs_anchor = any(self._ids([text])[0] != self._after_anchor(text) for text in PROBES)

    @cached_property
    def eos_id(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise UsageError("the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json")
        return self.tokenizer.eos_token_id

    def quotes_control(self, segment: Segment) -> bool:
        """Whether the segment quotes a control token in text that is not from the template."""
        return any(self.control.search(part.text) for part in segment.parts if not part.from_template)

    def encode(self, sequences: Sequence[Sequence[Segment]]) -> list[list[list[int]]]:
        """Return the ids of each segment of each sequence; a sequence begins with BOS if the tokenizer adds one."""
        # Equal texts are encoded once: the sides of a pair share a prompt.
        ids_of: dict[tuple[str, bool], list[int]] = {}
        for segments in sequences:
            ids_of.update(((segment.text, index == 0), []) for index, segment in enumerate(segments))
        for first in (True, False):
            texts = [text for text, is_first in ids_of if is_first == first and text]
            ids_of.update(
                ((text, first), ids) for text, ids in zip(texts, self._encode_texts(texts, first), strict=True)
            )
        return [
            self._finish(
                segments,
                [
                    self._encode_quoting(segment, index == 0)
                    if self.quotes_control(segment)
                    else ids_of[segment.text, index == 0]
                    for index, segment in enumerate(segments)
                ],
            )
            for segments in sequences
        ]

    def _finish(self, segments: Sequence[Segment], encoded: list[list[int]]) -> list[list[int]]:
        bos = self.tokenizer.bos_token_id
        if self.adds_bos and bos is not None and next((ids[0] for ids in encoded if ids), None) != bos:
            encoded = [[bos, *encoded[0]], *encoded[1:]]
        return [[*ids, self.eos_id] if segment.end else ids for segment, ids in zip(segments, encoded, strict=True)]

    def _ids(self, texts: Sequence[str], control_as_text: bool = False) -> list[list[int]]:
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            options = {"add_special_tokens": False, "split_special_tokens": control_as_text, "verbose": False}
            return self.tokenizer(list(texts), **options)["input_ids"]
        backend = self.tokenizer.backend_tokenizer  # calling it directly, without offsets, is a third faster
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = control_as_text
        with tokenizer_errors(f"a text that begins with {texts[0][:40]!r}, or one after it"):
            if self.words is not None and not control_as_text:
                return self.words.encode(texts)
            return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _encode_texts(self, texts: Sequence[str], first: bool, control_as_text: bool = False) -> list[list[int]]:
        if first or not self.needs_anchor:
            return self._ids(texts, control_as_text)
        anchor = ANCHORS[0]
        anchor_ids = self._ids([anchor])[0]
        encoded = self._ids([anchor + text for text in texts], control_as_text)
        return [
            ids[len(anchor_ids) :]
            if ids[: len(anchor_ids)] == anchor_ids
            else self._after_anchor(text, control_as_text)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _after_anchor(self, text: str, control_as_text: bool = False) -> list[int]:
        for anchor in ANCHORS:
            anchor_ids, ids = self._ids([anchor, anchor + text], control_as_text)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        raise UsageError(f"this tokenizer cannot encode {text[:40]!r} in the middle of a sequence")

    def _encode_quoting(self, segment: Segment, first: bool) -> list[int]:
        """Encode control tokens of the template as ids and everything between them as plain text."""
        ids: list[int] = []
        pending = ""
        for text, from_template in segment.parts:
            if not from_template:
                pending += text
                continue
            at = 0
            for token in self.control.finditer(text):
                ids += self._encode_plain(pending + text[at : token.start()], first and not ids)
                ids.append(self.tokenizer.convert_tokens_to_ids(token.group()))
                pending, at = "", token.end()
            pending += text[at:]
        return ids + self._encode_plain(pending, first and not ids)

    def _encode_plain(self, text: str, first: bool) -> list[int]:
        return self._encode_texts([text], first, control_as_text=True)[0] if text else []


def whole_tokens(tokenizer: PreTrainedTokenizerBase, control_only: bool = False) -> set[str]:
    """Return the texts that are always one token: control tokens and other added tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return {t.content for t in added if t.special or not control_only} | set(tokenizer.all_special_tokens)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, the longest first; it never matches if there are none."""
    ordered = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
