"""Tokens -> text as they come: whole characters only, and nothing that a terminal would obey."""

from __future__ import annotations

from typing import Any

BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
LONGEST_CHARACTER = 4  # bytes, and so tokens
MOST_HELD = 16  # tokens that are held back; more than any character has, so these are none
HARMLESS = "\n\t\u200d"  # not printable, but wanted: the last one joins emoji


class TextStream:
    """Hands out text once later tokens cannot change it any more."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.begin = 0  # of the tokens that are decoded again, since a token's text may depend on the one before
        self.told = 0  # tokens whose text is out

    def add(self, token: int) -> str:
        """What can be shown now; often nothing, where a character takes several tokens."""
        self.tokens.append(token)
        end = len(self.tokens)
        if not self.pending(end).endswith(BROKEN):
            return self.take(end)
        return self.take(self.seam()) if end - self.told > MOST_HELD else ""

    def finish(self) -> str:
        """The rest, whole or not."""
        return self.take(len(self.tokens))

    def pending(self, end: int) -> str:
        before = self.decode(self.begin, self.told)
        return self.decode(self.begin, end)[len(before) :]

    def take(self, end: int) -> str:
        text = self.pending(end)
        if text:
            self.begin, self.told = self.told, end
        return text

    def seam(self) -> int:
        """Up to where a model that babbles bytes can be quoted: no character reaches across."""
        end = len(self.tokens)
        whole = self.decode(self.told, end)
        places = range(end - LONGEST_CHARACTER, self.told, -1)
        return next((at for at in places if self.decode(self.told, at) + self.decode(at, end) == whole), self.told)

    def decode(self, begin: int, end: int) -> str:
        tokens = self.tokens[begin:end]
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


def visible(text: str) -> str:
    """The text with every character written out that a terminal could obey; lines stay lines."""
    return "".join(letter if letter.isprintable() or letter in HARMLESS else repr(letter)[1:-1] for letter in text)
