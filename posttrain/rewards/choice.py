"""Which option of a multiple-choice question an answer chooses."""

from __future__ import annotations

import re

from posttrain.rewards.math import last_boxed
from posttrain.rewards.verdict import Completion, label_of
from posttrain.rewards.verifier import verifier

LETTER = r"\(?([A-J])\)?(?![A-Za-z0-9'])"
# Where an answer says what it chooses, the surest first; of several the last counts.
SAID = (
    re.compile(rf"(?i:answer|choice|option)(?i:\s+is)?\W{{0,4}}(?:(?i:option)\s+)?{LETTER}"),
    re.compile(rf"(?:答案|选项|选择|应选|故选|选)\s*(?:是|为|应为|应该是)?\W{{0,4}}{LETTER}"),
    re.compile(rf"^\W{{0,3}}{LETTER}(?=\W{{0,3}}(?:\n|$)|[.:：、)])", re.MULTILINE),
)


@verifier("choice")
def judge_choice(completion: Completion) -> tuple[float, str]:
    """1 if the letter of the option that the answer chooses is the ground truth, else 0."""
    label = label_of(completion.columns)
    if label is None:
        raise LookupError(f"the row has no ground truth; its columns are {', '.join(completion.columns) or 'none'}")
    wanted = str(label).strip().upper()
    if not re.fullmatch("[A-J]", wanted):
        raise ValueError(f"the ground truth {label!r} is not the letter of an option")
    found = chosen(completion.text)
    return float(found == wanted), f"{found or 'no letter'}, wanted {wanted}"


def chosen(text: str) -> str:
    r"""The letter in the last \boxed{}, behind "the answer is", or at the beginning of a line; "" if there is none."""
    boxed = re.fullmatch(r"\W*(?:\\text\{)?\W*([A-J])\W*", last_boxed(text) or "")
    if boxed:
        return boxed[1]
    for pattern in SAID:
        if letters := pattern.findall(text):
            return letters[-1]
    return ""
