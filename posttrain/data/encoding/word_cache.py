"""Cache the ids of words for byte-level BPE tokenizers: the same ids, several times faster.

Such a tokenizer splits a text by a pattern and encodes each piece separately. With the patterns listed here, a space
between two visible characters is never in one piece with the character before it, and a line break between two visible
characters never with the character after it. So a text can be split there, and the concatenated ids of its words are
the ids of the text. Words repeat often, and the tokenizer encodes each only once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain, filterfalse
from typing import Any

from posttrain.core.lazy import PreTrainedTokenizerBase

# The character to find comes first in a pattern, as searching for a single character is fast.
SPACE = re.compile(r" (?<=[!-~] )(?=[!-~])")
LINE_BREAK = re.compile(r"\n(?<=[!-~]\n)(?=[!-~])")
FIRST = "\n"  # prefix of the first word of a line; no other word begins with it
MAX_WORDS = 2**18  # about 80 MB; then the cache is emptied

_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END: "cl100k, Llama 3",
    _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END: "Qwen 2 and 3",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?"
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _END: "o200k",
}


class WordCache:
    """Encodes texts word by word with a cache."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> WordCache | None:
        """Return a cache for the tokenizer; None if words cannot be encoded separately."""
        if not tokenizer.is_fast or not encodes_words_separately(tokenizer.backend_tokenizer):
            return None
        return cls(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens around it."""
        words = [split_into_words(text) for text in texts]
        if len(self.ids) > MAX_WORDS:
            self.ids = {}
        new = sorted(set(filterfalse(self.ids.__contains__, chain.from_iterable(words))))
        written = [word[1:] if word[0] == FIRST else f" {word}" for word in new]
        encoded = self.backend.encode_batch_fast(written, add_special_tokens=False)
        self.ids.update(zip(new, (tuple(encoding.ids) for encoding in encoded), strict=True))
        return [list(chain.from_iterable(map(self.ids.__getitem__, of_text))) for of_text in words]


def split_into_words(text: str) -> list[str]:
    """Split a text into words without the space before them; the first word of a line is marked."""
    words: list[str] = []
    lines = LINE_BREAK.split(text)
    last = len(lines) - 1
    for number, line in enumerate(lines):
        of_line = SPACE.split(FIRST + line if number == last else f"{FIRST}{line}\n")
        words += of_line
    return words


def encodes_words_separately(backend: Any) -> bool:
    """Whether the ids of a text are certain to be the concatenated ids of its words."""
    from tokenizers import models, normalizers

    if not isinstance(backend.model, models.BPE) or backend.model.dropout is not None:
        return False
    if backend.normalizer is not None and not isinstance(backend.normalizer, normalizers.NFC):
        return False
    added = backend.get_added_tokens_decoder().values()
    if any(" " in token.content or token.lstrip or token.rstrip or token.single_word for token in added):
        return False
    return backend.pre_tokenizer is not None and _splits_at_spaces(json.loads(backend.pre_tokenizer.__getstate__()))


def _splits_at_spaces(step: dict[str, Any]) -> bool:
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    splits = False
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False}:
                splits = splits or step["use_regex"]
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                if pattern not in PATTERNS:
                    return False
                splits = True
            case {"type": "Digits"}:
                pass
            case _:
                return False
    return splits and steps[-1]["type"] == "ByteLevel"
