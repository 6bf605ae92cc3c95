"""Describes a tokenizer as GGUF metadata; a tokenizer that llama.cpp would split differently is refused."""

from __future__ import annotations

import heapq
import json
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.core.errors import UsageError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's token types
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "▁"  # a space in vocabularies of sentencepiece

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
# Regular expressions of tokenizer.json by the name that llama.cpp has for them (src/llama-vocab.cpp).
SPLITS = {
    rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}": "llama-bpe",
    rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}": "qwen2",
    rf"{CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
# The last text has what tokenizers split in different ways.
CHECK_TEXTS = (
    "Hello world",
    " The quick  brown fox\tjumps over\n\n the lazy dog.",
    "It's 3,141.59 and 2026-11-18; don't  we'LL 12345678 naïve café 你好，世界 🙂 \n   x = foo(bar)  # ok\r\n",
)


@dataclass(slots=True)
class Vocabulary:
    """The tokenizer's part of a GGUF file."""

    model: str
    """gpt2: byte-level BPE; llama: sentencepiece."""
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special_ids: dict[str, int] = field(default_factory=dict)
    """By the name in `tokenizer.ggml.NAME_token_id`: bos, eos, unknown, padding, eot."""
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool | None = None
    """Whether a space is put before a text; None: it does not apply."""
    chat_template: str = ""


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, size: int, stops: list[int]) -> Vocabulary:
    """Return the GGUF metadata of a tokenizer for a model with `size` token ids, which may be more than it has.

    `stops`: token ids that end a completion. Raises UsageError if llama.cpp has no equal tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(
            "GGUF: the tokenizer has no tokenizer.json: save it with a fast tokenizer of transformers first"
        )
    parts = json.loads(backend.to_str())
    if parts["model"]["type"] != "BPE":
        raise refusal(f"a tokenizer of type {parts['model']['type']}")
    if len(tokenizer) > size:
        raise UsageError(f"GGUF: the tokenizer has {len(tokenizer):,} tokens, but the model only {size:,}")
    if parts["model"].get("byte_fallback"):
        found = sentencepiece_vocabulary(parts, size)
        check_sentencepiece(found, parts, tokenizer)
    else:
        found = Vocabulary("gpt2", split_name(parts), *tokens_and_types(parts, size))
        found.merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in parts["model"]["merges"]]
        # llama.cpp wants at least one; nothing is ever joined to either side of this one.
        found.merges = found.merges or ["<none> <none>"]
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    ids |= {"unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    ids["eot"] = next((stop for stop in stops if stop != tokenizer.eos_token_id), None)
    found.special_ids = {name: number for name, number in ids.items() if number is not None}
    encoded = tokenizer("a")["input_ids"]
    found.adds_bos = bool(encoded) and encoded[0] == tokenizer.bos_token_id
    found.adds_eos = bool(encoded) and encoded[-1] == tokenizer.eos_token_id
    if isinstance(tokenizer.chat_template, str):
        found.chat_template = tokenizer.chat_template
    return found


def refusal(what: str) -> UsageError:
    return UsageError(f"GGUF: llama.cpp has no equal of {what}: the file would split texts differently. Export as hf.")


def tokens_and_types(parts: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return all tokens and their types; ids that the tokenizer does not have are unused tokens."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [UNUSED] * size
    for token, number in parts["model"]["vocab"].items():
        tokens[number], types[number] = token, NORMAL
        if parts["model"].get("byte_fallback") and BYTE_TOKEN.fullmatch(token):
            types[number] = BYTE
    for added in parts["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
        if parts["model"].get("byte_fallback") and not added["special"]:  # llama.cpp prints these as they are (Gemma)
            tokens[added["id"]] = added["content"].replace(SPACE, " ")
    unknown = parts["model"].get("unk_token")
    if unknown is not None and parts["model"].get("byte_fallback"):
        types[parts["model"]["vocab"][unknown]] = UNKNOWN
    return tokens, types


def split_name(parts: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a byte-level tokenizer splits texts into words."""
    normalizers = steps_of(parts["normalizer"], "normalizers")
    if any(step["type"] != "NFC" for step in normalizers):  # it changes only texts with decomposed characters
        raise refusal(f"the normalizer {', '.join(step['type'] for step in normalizers)}")
    steps = steps_of(parts["pre_tokenizer"], "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise refusal("this pre-tokenizer: it is not byte-level, or puts a space before texts")
    before, byte_level = steps[:-1], steps[-1]
    if not byte_level.get("use_regex", True):
        if not before and not parts["model"]["merges"]:
            return "gpt-2"  # one token per byte: no way of splitting changes anything
        if len(before) == 1 and before[0]["type"] == "Split" and before[0]["behavior"] == "Isolated":
            name = SPLITS.get(before[0]["pattern"].get("Regex", ""))
            if name and not before[0].get("invert"):
                return name
    elif not before:
        return "gpt-2"
    elif len(before) == 1 and before[0] == {"type": "Digits", "individual_digits": True}:
        return "smollm"
    raise refusal("this pre-tokenizer: its regular expression is none that llama.cpp is known to have")


def steps_of(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be none, one or a sequence."""
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]


def sentencepiece_vocabulary(parts: dict[str, Any], size: int) -> Vocabulary:
    """Return the vocabulary of a BPE tokenizer with byte fallback; a token's score falls with the rank of its merge."""
    tokens, types = tokens_and_types(parts, size)
    scores = [0.0] * size
    vocabulary = parts["model"]["vocab"]
    ranks: dict[str, int] = {}
    for pair in parts["model"]["merges"]:
        left, right = pair if isinstance(pair, list) else pair.split(" ")
        ranks.setdefault(left + right, len(ranks))
    for token, number in vocabulary.items():
        scores[number] = float(-ranks.get(token, len(ranks)))
    return Vocabulary("llama", "default", tokens, types, scores=scores, adds_space=adds_space(parts))


def adds_space(parts: dict[str, Any]) -> bool:
    """Whether a space is put before a text, by the normalizer or the pre-tokenizer."""
    steps = steps_of(parts["normalizer"], "normalizers") + steps_of(parts["pre_tokenizer"], "pretokenizers")
    for step in steps:
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            return True
        if step["type"] == "Metaspace":
            return bool(step["prepend_scheme"] in ("first", "always"))
    return False


def check_sentencepiece(vocabulary: Vocabulary, parts: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UsageError if llama.cpp's algorithm gives other tokens than the tokenizer on any text of the check."""
    ids = parts["model"]["vocab"]
    for text in CHECK_TEXTS:
        spaced = SPACE * bool(vocabulary.adds_space) + text.replace(" ", SPACE)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = [
            number
            for piece in merge_by_score(spaced, ids, vocabulary.scores)
            for number in ([ids[piece]] if piece in ids else byte_ids(piece, ids))
        ]
        if found != expected:
            raise refusal(f"this tokenizer (it encodes {text[:24]!r} otherwise)")


def byte_ids(piece: str, ids: dict[str, int]) -> list[int]:
    return [ids.get(f"<0x{byte:02X}>", -1) for byte in piece.encode()]


def merge_by_score(text: str, ids: dict[str, int], scores: list[float]) -> list[str]:
    """Split a text as llama.cpp does: join the neighbours whose union has the highest score, the first of equals."""
    pieces: list[str | None] = list(text)
    follower = [*range(1, len(pieces)), -1]
    previous = [-1, *range(len(pieces) - 1)] if pieces else []
    queue: list[tuple[float, int, int, str]] = []

    def propose(left: int, right: int) -> None:
        if left >= 0 and right >= 0:
            joined = f"{pieces[left]}{pieces[right]}"
            if joined in ids:
                heapq.heappush(queue, (-scores[ids[joined]], left, right, joined))

    for number in range(len(pieces) - 1):
        propose(number, number + 1)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        if pieces[left] is None or pieces[right] is None or f"{pieces[left]}{pieces[right]}" != joined:
            continue  # one of the two was joined with another neighbour before
        pieces[left], pieces[right] = joined, None
        follower[left] = follower[right]
        if follower[right] >= 0:
            previous[follower[right]] = left
        propose(previous[left], left)
        propose(left, follower[left])
    return [piece for piece in pieces if piece is not None]
