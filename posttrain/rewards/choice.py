"""The verifier `choice`: which option of a multiple-choice question a completion chooses."""

from __future__ import annotations

import re

from posttrain.data.ground_truth import TRUTH_SOURCES, ground_truth_of, last_boxed
from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import verifier

LETTER = r"\(?([A-J])\)?(?![A-Za-z0-9'])"
# Phrases that state the choice, the most reliable first; of several matches the last counts.
STATEMENTS = (
    re.compile(rf"(?i:answer|choice|option)(?i:\s+is)?\W{{0,4}}(?:(?i:option)\s+)?{LETTER}"),
    re.compile(rf"(?:答案|选项|选择|应选|故选|选)\s*(?:是|为|应为|应该是)?\W{{0,4}}{LETTER}"),
    re.compile(rf"^\W{{0,3}}{LETTER}(?=\W{{0,3}}(?:\n|$)|[.:：、)])", re.MULTILINE),
)


@verifier("choice", columns=TRUTH_SOURCES)
def score_choice(completion: Completion) -> tuple[float, str]:
    """1 if the letter of the option that the completion chooses is the ground truth, else 0."""
    label = ground_truth_of(completion.columns)
    if label is None:
        raise LookupError(f"the example has no ground truth; its columns are {', '.join(completion.columns) or 'none'}")
    expected = str(label).strip().upper()
    if not re.fullmatch("[A-J]", expected):
        raise ValueError(f"the ground truth {label!r} is not the letter of an option")
    found = chosen_letter(completion.text)
    return float(found == expected), f"{found or 'no letter'}, expected {expected}"


def chosen_letter(text: str) -> str:
    r"""Find the letter in the last \boxed{}, after "the answer is", or at the start of a line; "" if there is none."""
    boxed = re.fullmatch(r"\W*(?:\\text\{)?\W*([A-J])\W*", last_boxed(text) or "")
    if boxed:
        return boxed[1]
    for pattern in STATEMENTS:
        if letters := pattern.findall(text):
            return letters[-1]
    return ""
