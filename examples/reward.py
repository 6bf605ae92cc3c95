"""Custom reward functions in any file: the names of the parameters determine what a function gets.

posttrain rewards check examples/data/answers.jsonl --reward examples/reward.py:short gsm8k --reward_weights 0.2 1
"""

from __future__ import annotations

import re
from typing import Any

FULL_SCORE_WORDS = 20


def short(text: str) -> float:
    """Return 1 for up to 20 words, then less, down to 0 at 40."""
    words = len(text.split())
    return max(0.0, min(1.0, 2 - words / FULL_SCORE_WORDS))


def letters(text: str) -> float:
    """Return the share of letters, digits and spaces."""
    return sum(letter.isascii() and (letter.isalnum() or letter.isspace()) for letter in text) / max(1, len(text))


def states_the_answer(text: str, ground_truth: str, **columns: Any) -> tuple[float, str]:
    """Return 1 if the ground truth is in the text as a separate word; the second value is shown as the reason."""
    found = re.search(rf"(?<!\w){re.escape(str(ground_truth))}(?!\w)", text) is not None
    return float(found), "" if found else f"{ground_truth} is not in the text"


def gated(rewards: dict[str, float], text: str) -> float:
    """For `combine:`: a correct completion counts only if it is short."""
    return rewards["gsm8k"] if rewards["reward.short"] > 0.5 else 0.0


def polite(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
    """A function in the form of TRL: it gets all completions of a batch."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float("please" in text.lower()) for text in texts]
