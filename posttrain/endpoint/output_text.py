"""From tokens to a response: text that ends before a stop text, and log-probabilities of the tokens in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from posttrain.endpoint.protocol import TokenLogprob, TokenText
from posttrain.endpoint.text_stream import TextStream
from posttrain.engines.sampling import TopLogprobs

BYTE = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece writes a byte


class TokenTexts:
    """Text and bytes of single tokens, computed once per token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[int, TokenText] = {}  # at most the vocabulary
        self.byte_of = byte_level_alphabet() if "ByteLevel" in decoder_name(tokenizer) else {}
        self.special = set(tokenizer.all_special_tokens)

    def of(self, token: int) -> TokenText:
        if token not in self.cache:
            special = self.tokenizer.convert_ids_to_tokens(token) in self.special
            self.cache[token] = TokenText(str(self.tokenizer.decode([token])), self.raw(token), special)
        return self.cache[token]

    def raw(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and piece not in self.special:
            if found := BYTE.fullmatch(piece):
                return bytes([int(found[1], 16)])
            if self.byte_of and all(letter in self.byte_of for letter in piece):
                return bytes(self.byte_of[letter] for letter in piece)
        return str(self.tokenizer.decode([token])).encode()


def decoder_name(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.decoder) if backend is not None else ""


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each letter of a byte-level tokenizer stands for; printable bytes stand for themselves."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + place): byte for place, byte in enumerate(others)}


class OutputText:
    """The text of one completion as its tokens arrive, in pieces of any size with the same result.

    A token goes through three stages: it has no text yet (part of a character), its text is held back (it may be the
    beginning of a stop text), its text has been returned.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_texts: Sequence[str],
        stop_ids: Sequence[int],
        token_texts: TokenTexts | None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`token_texts`: for log-probabilities, without it there are none; `shown`: special tokens in the text."""
        self.stream, self.stop_texts, self.token_texts = TextStream(tokenizer, shown), stop_texts, token_texts
        self.shown = {str(tokenizer.decode([token])) for token in shown}
        self.stop_ids = frozenset(stop_ids)
        self.held = ""  # text that may be the beginning of a stop text
        self.decoded = 0  # characters that came out of tokens
        self.returned = 0  # of those, characters that were returned
        self.without_text: list[TokenLogprob] = []
        self.with_held_text: list[TokenLogprob] = []
        self.stopped = False  # a stop text is complete

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], top_logprobs: Sequence[TopLogprobs]
    ) -> tuple[str, list[TokenLogprob]]:
        """Return the text that is certain now, and its tokens."""
        visible = [token for token in tokens if token not in self.stop_ids]
        if self.token_texts is None:
            if not visible:
                return "", []
            self.stream.tokens += visible[:-1]
            return self.release(self.stream.add(visible[-1])), []
        text = ""
        for place, token in enumerate(visible):
            pairs = top_logprobs[place] if top_logprobs else []
            others = [(self.token_texts.of(other), logprob) for other, logprob in pairs]
            self.without_text.append(TokenLogprob(self.token_texts.of(token), logprobs[place], others, self.decoded))
            text += self.place_tokens(self.stream.add(token))
        return self.release(text), self.released_tokens()

    def place_tokens(self, text: str) -> str:
        """Find where the text of each token in `without_text` begins, now that they decode to `text`; return `text`."""
        self.decoded += len(text)
        if text:
            end = len(text)
            for token in reversed(self.without_text):
                own = "" if token.text.special and token.text.text not in self.shown else token.text.text
                if not text[:end].endswith(own):  # a character of several tokens begins with the first
                    break
                end -= len(own)
                token.start = self.decoded - len(text) + end
            self.with_held_text += self.without_text
            self.without_text = []
        return text

    def finish(self) -> tuple[str, list[TokenLogprob]]:
        """Return the rest of the text and its tokens."""
        text = self.release(self.place_tokens(self.stream.finish()))
        if not self.stopped:
            text, self.held = text + self.held, ""
        rest = self.with_held_text + self.without_text
        tokens = [token for token in rest if not self.stopped or token.start < self.returned]
        self.with_held_text, self.without_text = [], []
        return text, tokens

    def release(self, more: str) -> str:
        """Return the text up to where a stop text begins, or may begin."""
        if self.stopped:
            return ""
        text = self.held + more
        found = [(place + len(stop), place) for stop in self.stop_texts if (place := text.find(stop)) >= 0]
        if found:  # the stop text that is complete first ends the completion: the same for pieces of any size
            end = min(found)[1]
            self.stopped = True
        else:
            end = len(text) - longest_beginning(text, self.stop_texts)
        self.held = text[end:]
        self.returned += end
        return text[:end]

    def released_tokens(self) -> list[TokenLogprob]:
        """Return the tokens whose text has begun to be returned, and forget them."""
        ready = [token for token in self.with_held_text if token.start < self.returned]
        self.with_held_text = self.with_held_text[len(ready) :]
        return ready


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Count the characters at the end of the text that could be the beginning of a stop text."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )
