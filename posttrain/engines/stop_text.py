"""Finds stop texts in a growing completion without decoding all of it after every token."""

from __future__ import annotations

from typing import Any

MAX_TEXT_SETS = 256  # sets of stop texts that are cached
CONTEXT_TOKENS = 8  # decoded in addition to as many tokens as the longest text has characters


class StopTextMatcher:
    """Tells after each token whether a stop text is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.final_tokens: dict[tuple[str, ...], dict[int, bool]] = {}  # texts -> token -> whether it can complete one

    def matches(self, texts: tuple[str, ...], tokens: list[int]) -> bool:
        """Whether the last token completes one of the texts."""
        if not self.can_complete(texts, tokens[-1]):
            return False
        longest = max(len(text) for text in texts)
        tail = self.tokenizer.decode(tokens[-(longest + CONTEXT_TOKENS) :])  # most tokens have more than one character
        return any(text in tail for text in texts)

    def can_complete(self, texts: tuple[str, ...], token: int) -> bool:
        """Whether a token can contain the last character of a text. Most cannot, and then nothing is decoded."""
        if texts not in self.final_tokens and len(self.final_tokens) >= MAX_TEXT_SETS:
            self.final_tokens.clear()
        known = self.final_tokens.setdefault(texts, {})
        if token not in known:
            alone, last_characters = self.tokenizer.decode([token]), "".join(text[-1:] for text in texts)
            # A part of a character decodes to \ufffd, and a tokenizer may drop a space at the start of a text.
            unsure = "\ufffd" in alone + last_characters or any(last.isspace() for last in last_characters)
            known[token] = unsure or any(last in alone for last in last_characters)
        return known[token]
