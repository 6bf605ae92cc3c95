"""Tokens -> what a client is told: text that ends before a stop text, and log-probabilities of the tokens in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from posttrain.engines.scheduler import TopLogprobs
from posttrain.inference.text_stream import TextStream
from posttrain.server.protocol import Entry, Spelled

BYTE = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece spells a byte


class Speller:
    """What single tokens stand for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, Spelled] = {}  # at most the vocabulary
        self.byte_of = bytes_of_letters() if "ByteLevel" in backend_of(tokenizer) else {}
        self.special = set(tokenizer.all_special_tokens)

    def spell(self, token: int) -> Spelled:
        if token not in self.known:
            special = self.tokenizer.convert_ids_to_tokens(token) in self.special
            self.known[token] = Spelled(str(self.tokenizer.decode([token])), self.raw(token), special)
        return self.known[token]

    def raw(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and piece not in self.special:
            if found := BYTE.fullmatch(piece):
                return bytes([int(found[1], 16)])
            if self.byte_of and all(letter in self.byte_of for letter in piece):
                return bytes(self.byte_of[letter] for letter in piece)
        return str(self.tokenizer.decode([token])).encode()


def backend_of(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.decoder) if backend is not None else ""


def bytes_of_letters() -> dict[str, int]:
    """The letters with which byte-level tokenizers write bytes: printable ones stand for themselves."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Wording:
    """One answer as it grows."""

    def __init__(
        self, tokenizer: Any, stop_texts: Sequence[str], stop_ids: Sequence[int], speller: Speller | None
    ) -> None:
        """With a speller there are entries for the log-probabilities."""
        self.stream, self.stop_texts, self.speller = TextStream(tokenizer), stop_texts, speller
        self.stop_ids = frozenset(stop_ids)
        self.held = ""  # text that may be the beginning of a stop text
        self.written = 0  # characters that were handed out
        self.heard = 0  # characters that came out of tokens
        self.silent: list[Entry] = []  # of tokens that have no text yet
        self.entries: list[Entry] = []  # of tokens whose text is held
        self.stopped = False  # a stop text is complete

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], likeliest: Sequence[TopLogprobs]
    ) -> tuple[str, list[Entry]]:
        """What can be told now."""
        said = [token for token in tokens if token not in self.stop_ids]
        if self.speller is None:
            if not said:
                return "", []
            self.stream.tokens += said[:-1]
            return self.release(self.stream.add(said[-1])), []
        text = ""
        for place, token in enumerate(said):
            pairs = likeliest[place] if likeliest else []
            others = [(self.speller.spell(other), chance) for other, chance in pairs]
            self.silent.append(Entry(self.speller.spell(token), logprobs[place], others, self.heard))
            text += self.hear(self.stream.add(token))
        return self.release(text), self.told_entries()

    def hear(self, text: str) -> str:
        """Text has come out of the tokens that were silent; where does each one's begin?"""
        self.heard += len(text)
        if text:
            end = len(text)
            for entry in reversed(self.silent):
                own = "" if entry.token.special else entry.token.text
                if not text[:end].endswith(own):  # a character of several tokens begins with the first
                    break
                end -= len(own)
                entry.start = self.heard - len(text) + end
            self.entries += self.silent
            self.silent = []
        return text

    def finish(self) -> tuple[str, list[Entry]]:
        """The rest."""
        text = self.release(self.hear(self.stream.finish()))
        if not self.stopped:
            text, self.held = text + self.held, ""
        entries = [entry for entry in self.entries + self.silent if not self.stopped or entry.start < self.written]
        self.entries, self.silent = [], []
        return text, entries

    def release(self, more: str) -> str:
        """The text up to where a stop text begins, or may begin."""
        if self.stopped:
            return ""
        text = self.held + more
        found = [(place + len(stop), place) for stop in self.stop_texts if (place := text.find(stop)) >= 0]
        if found:  # what is complete first ends the answer: in pieces of any size the same
            end = min(found)[1]
            self.stopped = True
        else:
            end = len(text) - longest_beginning(text, self.stop_texts)
        self.held = text[end:]
        self.written += end
        return text[:end]

    def told_entries(self) -> list[Entry]:
        """Those of tokens whose text has begun to be handed out."""
        ready = [entry for entry in self.entries if entry.start < self.written]
        self.entries = self.entries[len(ready) :]
        return ready


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text could be the beginning of a stop text."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )
