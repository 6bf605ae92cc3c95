"""Turns tokens into text as they arrive: whole characters only."""

from __future__ import annotations

from typing import Any

BROKEN = "\ufffd"  # stands for bytes that are not a character, or not yet
LONGEST_CHARACTER = 4  # bytes, and so tokens
MAX_HELD = 16  # tokens that are held back; more than any character has, so the bytes are not valid UTF-8


class TextStream:
    """Returns text once later tokens cannot change it any more."""

    def __init__(self, tokenizer: Any, shown: frozenset[int] = frozenset()) -> None:
        """`shown`: special tokens that are part of the text; the others are left out."""
        self.tokenizer = tokenizer
        self.hidden = frozenset(tokenizer.all_special_ids) - shown if shown else None
        self.tokens: list[int] = []
        self.begin = 0  # of the tokens that are decoded again, since a token's text may depend on the one before
        self.returned = 0  # tokens whose text was returned

    def add(self, token: int) -> str:
        """Return the text that is final now; it is empty while a character is incomplete."""
        self.tokens.append(token)
        end = len(self.tokens)
        if not self.pending(end).endswith(BROKEN):
            return self.take(end)
        return self.take(self.seam()) if end - self.returned > MAX_HELD else ""

    def finish(self) -> str:
        """Return the rest, even if a character is incomplete."""
        return self.take(len(self.tokens))

    def pending(self, end: int) -> str:
        before = self.decode(self.begin, self.returned)
        return self.decode(self.begin, end)[len(before) :]

    def take(self, end: int) -> str:
        text = self.pending(end)
        if text:
            self.begin, self.returned = self.returned, end
        return text

    def seam(self) -> int:
        """Find a position in output that is not valid UTF-8 that no character spans."""
        end = len(self.tokens)
        whole = self.decode(self.returned, end)
        places = range(end - LONGEST_CHARACTER, self.returned, -1)
        return next(
            (at for at in places if self.decode(self.returned, at) + self.decode(at, end) == whole), self.returned
        )

    def decode(self, begin: int, end: int) -> str:
        tokens = self.tokens[begin:end]
        if self.hidden is None:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""
        tokens = [token for token in tokens if token not in self.hidden]
        return str(self.tokenizer.decode(tokens)) if tokens else ""
