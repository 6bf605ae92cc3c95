"""Split examples into texts, texts into words, and hash n-grams of words.

Words are compared without case and punctuation. Characters of scripts that are written without spaces are words of
their own, and so are some mathematical signs: 12+34 and 12-34 differ.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.data.reading.examples import Example, Message

UNSPACED = (  # Thai, Lao, Burmese, Khmer, Japanese, Chinese
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}+=/^<>]|[^\W_{UNSPACED}]+")
CACHED_WORDS = 2**20
FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


class Text(NamedTuple):
    """A message of an example, and whether it is part of the prompt."""

    content: str
    is_prompt: bool


def texts_of(example: Example) -> Iterator[Text]:
    """Yield the texts of an example without its system prompt, which many examples share."""
    for segment, is_trained in getattr(example, "segments", ()):
        yield Text(segment, not is_trained)
    for name in ("text", "messages", "prompt", "chosen", "rejected", "completion", "steps"):
        value = getattr(example, name, None)
        if isinstance(value, str):
            yield Text(value, False)
        elif value and name == "steps":
            yield Text("\n".join(value), False)
        elif value:
            yield from chain.from_iterable(map(_texts_of_message, value))


def _texts_of_message(message: Message) -> Iterator[Text]:
    if message["role"] != "system":
        parts = (message.get("reasoning_content"), message.get("content"))
        yield Text("\n".join(part for part in parts if part), message["role"] == "user")


def first_prompt(example: Example) -> str:
    """Return the normalised prompt: what the user wrote before the first completion; of a plain text all of it."""
    texts: list[str] = []
    for text in texts_of(example):
        if not text.is_prompt and texts:
            break
        texts.append(normalised_text(text.content))
    return "\n".join(texts)


def normalised_text(text: str) -> str:
    """Return a text in lower case with single spaces."""
    return " ".join(text.lower().split())


def words_of(text: str) -> list[str]:
    """Return the words of a text; of a text without any, such as an emoji, the text itself."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return WORD.findall(plain.lower()) or [text.strip()]


class NgramHasher:
    """Hashes all n-grams of words of many texts at once, equally in every process."""

    def __init__(self, size: int) -> None:
        assert size > 0, "an n-gram has words"
        self.size = size
        self.hashes = _WordHashes()

    def hash(self, texts: Sequence[Sequence[str]]) -> tuple[Hashes, npt.NDArray[np.int64]]:
        """Return the hashes of the n-grams of all texts, and where those of each text begin.

        A text of n words or fewer has one n-gram.
        """
        if len(self.hashes) > CACHED_WORDS:
            self.hashes.clear()
        padded = [[*map(self.hashes.__getitem__, words), *[0] * (self.size - len(words))] for words in texts]
        ends = np.cumsum([len(words) for words in padded], dtype=np.int64)
        words = np.fromiter(chain.from_iterable(padded), dtype=np.uint64, count=int(ends[-1]))
        grams = np.zeros(len(words) - self.size + 1, dtype=np.uint64)
        for index in range(self.size):
            grams = grams * FACTOR + words[index : index + len(grams)]
        inside = np.ones(len(words), dtype=np.bool_)  # those that do not reach into the next text
        for index in range(1, self.size):
            inside[ends - index] = False
        starts = np.concatenate(([0], ends[:-1])) - np.arange(len(texts)) * (self.size - 1)
        return mix_bits(grams[inside[: len(grams)]]), starts


class _WordHashes(dict[str, int]):
    """Computes the hash of a word when it is first needed."""

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self[word] = value = int.from_bytes(digest, "little")
        return value


def mix_bits(values: Hashes) -> Hashes:
    """Distribute values evenly over 64 bits (the finalizer of MurmurHash3)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
