"""Drafts for speculative decoding without a draft model: tokens that followed the same n-gram earlier.

Drafts come from a sequence itself, from other completions of its prompt in the same batch, and from completions of
the prompt that are finished, those of earlier epochs included. A draft only says which tokens are worth computing in
one step; what is sampled does not depend on it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from posttrain.core.types import Ints
from posttrain.engines.base import GenerationRequest

NGRAM_SIZES = (4, 3, 2)  # tokens that a draft continues; the longest n-gram that occurred before is used
COMPLETIONS_PER_PROMPT = 16  # finished ones that are kept
KEPT_TOKENS = 2**24  # of all finished completions that are kept: 64 MiB
MAX_PAUSE = 32  # tokens

PromptKey = tuple[str, bytes]
"""Adapter, and a hash of the tokens of a prompt."""


class NgramIndex:
    """Where each n-gram of a prompt and of its completions occurred last, and so what followed it."""

    def __init__(self, prompt: Sequence[int], finished: Sequence[Sequence[int]] = ()) -> None:
        """`finished`: earlier completions."""
        self.sequences: list[Sequence[int]] = []  # the prompt, then completions
        self.indexed: list[int] = []  # tokens of each sequence
        self.following: dict[tuple[int, ...], tuple[int, int]] = {}  # n-gram -> sequence, index of the next token
        for tokens in (prompt, *finished):
            self.update(self.add(tokens))

    def add(self, tokens: Sequence[int]) -> int:
        """Add a sequence, which may grow; returns its number."""
        self.sequences.append(tokens)
        self.indexed.append(0)
        return len(self.sequences) - 1

    def update(self, number: int) -> None:
        """Index the new tokens of a sequence."""
        length = len(self.sequences[number])
        for end in range(self.indexed[number], length):
            before = self.tokens_before(number, end)
            for size in NGRAM_SIZES:
                if size <= len(before):
                    self.following[tuple(before[-size:])] = (number, end)
        self.indexed[number] = length

    def tokens_before(self, number: int, end: int) -> list[int]:
        """Return the last tokens before index `end` of a sequence, as many as the longest n-gram has."""
        own = list(self.sequences[number][max(0, end - NGRAM_SIZES[0]) : end])
        missing = NGRAM_SIZES[0] - len(own)
        return [*self.sequences[0][-missing:], *own] if missing and number else own

    def draft(self, number: int, count: int) -> list[int]:
        """Return at most `count` tokens that may continue a sequence; none, if its end has not occurred before."""
        before = self.tokens_before(number, len(self.sequences[number]))
        for size in NGRAM_SIZES:
            if size <= len(before) and (found := self.following.get(tuple(before[-size:]))) is not None:
                source, begin = found
                draft = list(self.sequences[source][begin : begin + count])
                if source == number:  # goes on repeating what it has repeated
                    draft += [draft[i % len(draft)] for i in range(len(draft), count)]
                return draft
        return []


@dataclass(slots=True)
class SequenceDrafts:
    """Drafts of one active sequence. After a draft of which nothing was accepted it pauses for a few tokens."""

    ngrams: NgramIndex
    number: int  # in the index
    proposed: list[int] = field(default_factory=list)  # in the last step
    drafted: int = 0  # tokens so far
    accepted: int = 0  # of them
    pause: int = 0  # tokens without drafts after the last refused draft
    resume_length: int = 0  # tokens of the completion from which on there are drafts again

    def propose(self, count: int) -> list[int]:
        """Return the next draft, of at most `count` tokens."""
        self.ngrams.update(self.number)
        paused = len(self.ngrams.sequences[self.number]) < self.resume_length
        return [] if paused or count <= 0 else self.ngrams.draft(self.number, count)

    def report(self, sampled: Sequence[int]) -> None:
        """Compare the last draft with the tokens that were sampled, before they are appended to the sequence."""
        if not self.proposed:
            return
        accepted = 0
        while accepted < min(len(sampled), len(self.proposed)) and sampled[accepted] == self.proposed[accepted]:
            accepted += 1
        self.drafted += len(self.proposed)
        self.accepted += accepted
        self.pause = 0 if accepted else min(max(1, 2 * self.pause), MAX_PAUSE)
        self.resume_length = len(self.ngrams.sequences[self.number]) + len(sampled) + self.pause
        self.proposed = []


class Drafter:
    """Makes drafts of at most `tokens` tokens, for batches of at most `max_sequences` sequences."""

    def __init__(self, tokens: int, max_sequences: int) -> None:
        self.tokens, self.max_sequences = tokens, max_sequences
        self.active: WeakValueDictionary[PromptKey, NgramIndex] = WeakValueDictionary()  # while a sequence uses it
        self.finished: OrderedDict[PromptKey, deque[Ints]] = OrderedDict()  # the most recently used prompts last
        self.kept_tokens = 0

    def open(self, request: GenerationRequest, completion: Sequence[int]) -> SequenceDrafts:
        """Begin to draft for a sequence; `completion` grows with it. Sequences of one prompt share an index."""
        key = prompt_key(request)
        ngrams = self.active.get(key)
        if ngrams is None:
            finished = [tokens.tolist() for tokens in self.finished.get(key, ())]
            ngrams = self.active[key] = NgramIndex(request.prompt.tolist(), finished)
        return SequenceDrafts(ngrams, ngrams.add(completion))

    def keep(self, request: GenerationRequest, completion: Ints, *, indexed: bool) -> None:
        """Keep a finished completion for other sequences of its prompt; `indexed`: it had drafts itself."""
        key = prompt_key(request)
        if not indexed and (ngrams := self.active.get(key)) is not None:
            ngrams.update(ngrams.add(completion.tolist()))
        kept = self.finished.setdefault(key, deque())
        self.finished.move_to_end(key)
        kept.append(completion)
        self.kept_tokens += len(completion)
        if len(kept) > COMPLETIONS_PER_PROMPT:
            self.kept_tokens -= len(kept.popleft())
        while self.kept_tokens > KEPT_TOKENS:
            _, oldest = self.finished.popitem(last=False)
            self.kept_tokens -= sum(map(len, oldest))

    def forget(self) -> None:
        """Drop all finished completions."""
        self.finished.clear()
        self.kept_tokens = 0


def prompt_key(request: GenerationRequest) -> PromptKey:
    return request.adapter, hashlib.blake2b(request.prompt.tobytes(), digest_size=16).digest()
