"""Rewards of one's own: a function for each, in a plain file. Parameters say what it wants to know.

posttrain rewards check examples/data/answers.jsonl --reward examples/reward.py:short gsm8k --weights 0.2 1
"""

from __future__ import annotations

import re
from typing import Any

WANTED_WORDS = 20


def short(text: str) -> float:
    """1 for up to 20 words, then falling to 0 at 40."""
    words = len(text.split())
    return max(0.0, min(1.0, 2 - words / WANTED_WORDS))


def letters(text: str) -> float:
    """Share of what a reader can read: letters, digits, spaces."""
    return sum(letter.isascii() and (letter.isalnum() or letter.isspace()) for letter in text) / max(1, len(text))


def states_the_answer(text: str, ground_truth: str, **columns: Any) -> tuple[float, str]:
    """1 if the answer stands in the text as a word of its own; the second value is shown as the reason."""
    found = re.search(rf"(?<!\w){re.escape(str(ground_truth))}(?!\w)", text) is not None
    return float(found), "" if found else f"{ground_truth} is not in it"


def gated(rewards: dict[str, float], text: str) -> float:
    """Of what others said, behind `combine:`: right answers count only where they are short."""
    return rewards["gsm8k"] if rewards["reward.short"] > 0.5 else 0.0


def polite(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
    """The same as TRL takes it: all completions of a batch at once."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float("please" in text.lower()) for text in texts]
