"""The text of each token, from the tokenizer.json of a run: plain JSON, no library that could run code of strangers."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from posttrain.board.runs import BoardRun

TOKENIZER_BYTES = 64 * 2**20
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
WORD_START = "\u2581"  # how SentencePiece writes a space


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter that byte-level tokenizers write instead of it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_LETTERS = byte_letters()


class TokenPieces:
    """Turns token ids into texts, one per token."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        model = tokenizer.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        self.tokens: dict[int, str] = {}
        if isinstance(vocabulary, dict):
            self.tokens = {number: token for token, number in vocabulary.items() if isinstance(number, int)}
        elif isinstance(vocabulary, list):  # Unigram: [token, score] by id
            self.tokens = {
                number: entry[0]
                for number, entry in enumerate(vocabulary)
                if isinstance(entry, list) and entry and isinstance(entry[0], str)
            }
        added = tokenizer.get("added_tokens")
        self.special = {
            entry["id"]: entry["content"]
            for entry in (added if isinstance(added, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str)
        }
        self.byte_level = '"ByteLevel"' in json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])

    def bytes_of(self, number: int) -> bytes | None:
        """Return what a token stands for; None for one that is not in the vocabulary."""
        if number in self.special:
            return self.special[number].encode("utf-8", "replace")
        token = self.tokens.get(number)
        if token is None:
            return None
        if self.byte_level:
            if all(letter in BYTE_LETTERS for letter in token):
                return bytes(BYTE_LETTERS[letter] for letter in token)
        elif found := BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        else:
            token = token.replace(WORD_START, " ")
        return token.encode("utf-8", "replace")

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """Return one text per token; a letter that several tokens make up belongs to the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found: list[str] = []
        for number in numbers:
            piece = self.bytes_of(number)
            found.append(f"<{number}>" if piece is None else decoder.decode(piece))
        return found


def token_texts(run: BoardRun) -> TokenPieces | None:
    """Read the tokenizer of the newest checkpoint; None if the run has saved none yet."""
    for names in run.tokenizer_files():
        found = run.folder.stat(*names)
        if found is None or found.st_size > TOKENIZER_BYTES:
            continue
        try:
            value = json.loads(run.folder.read(*names, limit=TOKENIZER_BYTES))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return TokenPieces(value)
    return None
