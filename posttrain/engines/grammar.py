"""Constrains generation to a grammar, by llguidance: which tokens may come next, given those so far."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from posttrain.core.errors import UsageError
from posttrain.core.types import Ints

MAX_GRAMMAR_CHARACTERS = 2**18
MAX_CACHED = 64  # compiled grammars
MAX_MESSAGE = 300  # characters of an error that are shown; the rest is a dump of the parser's state
# llguidance's own limits, which bound the time and memory of compiling a grammar and of one step.
LIMITS: dict[str, Any] = {
    "max_grammar_size": 500_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 250_000,
    "verbose_errors": False,
}


class GrammarConstraint:
    """The state of one completion in its grammar. Where the grammar is complete, only the end of turn is allowed."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self.matcher, self.vocabulary = matcher, vocabulary

    def fill_mask(self, words: Ints) -> None:
        """Set the bits of the tokens that may come next: bit t % 32 of word t // 32 is token t's; others are 0."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.int32)
        size = min(len(bits), len(words))
        words[:size], words[size:] = bits[:size], 0

    def advance(self, token: int) -> None:
        """Take a sampled token."""
        self.matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Why the constraint could not be kept; empty if it was. After an error only the end of turn is allowed."""
        return short(self.matcher.get_error())

    def copy(self) -> GrammarConstraint:
        return GrammarConstraint(self.matcher.deep_copy(), self.vocabulary)


class GrammarCompiler:
    """Compiles grammars for one tokenizer; may be called from several threads."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
        """`vocabulary`: the model's, which may be larger than the tokenizer's; `stop_ids`: tokens that end a turn."""
        self.tokenizer, self.vocabulary, self.stop_ids = tokenizer, vocabulary, stop_ids
        self.lock = threading.Lock()
        self.wrapped: Any = None  # the tokenizer as llguidance reads it: takes a second, so made on first use
        self.compiled: OrderedDict[str, GrammarConstraint] = OrderedDict()

    def compile(self, grammar: str) -> GrammarConstraint:
        """Compile a grammar in llguidance's Lark syntax; UsageError if it is wrong or too large."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            raise UsageError(f"the grammar has {len(grammar):,} characters; at most {MAX_GRAMMAR_CHARACTERS:,} may be")
        with self.lock:
            if grammar in self.compiled:
                self.compiled.move_to_end(grammar)
                return self.compiled[grammar].copy()
            if self.wrapped is None:
                self.wrapped = self.wrap_tokenizer()
        found = self.build(grammar)
        with self.lock:
            self.compiled[grammar] = found
            if len(self.compiled) > MAX_CACHED:
                self.compiled.popitem(last=False)
        return found.copy()

    def build(self, grammar: str) -> GrammarConstraint:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(self.wrapped, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(short(matcher.get_error()))
        return GrammarConstraint(matcher, self.vocabulary)

    def wrap_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not getattr(self.tokenizer, "is_fast", False):
            raise UsageError("constrained generation needs a tokenizer with a tokenizer.json; this model has none")
        stop_ids = [token for token in self.stop_ids if token < self.vocabulary]
        return from_tokenizer(copy.deepcopy(self.tokenizer), n_vocab=self.vocabulary, eos_token=stop_ids)


def short(error: str) -> str:
    """Return the first lines of an error, without llguidance's dump of its state."""
    text = error.partition("\n<state>")[0].strip()
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
