r"""Verifiers of the format of a completion.

`strict_structure` is also half of `base_acc`. It counts `\boxed{...}` up to the first closing brace, so that
`\boxed{\frac{1}{2}}` counts once.
"""

from __future__ import annotations

import re

from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import verifier

# One pattern with .*? between the tags would take quadratic time where they are repeated.
THINK_TO_ANSWER = re.compile(r"</think>\s*<answer>")
ANSWER_END = re.compile(r"</answer>$", re.MULTILINE)
BOXED = "\\boxed{"
STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
FULL_STEPS = 3


@verifier("format")
def score_format(completion: Completion) -> tuple[float, str]:
    """1 if the completion is <think>...</think><answer>...</answer>, each tag once and nothing around, else 0."""
    text = completion.text
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        if text.count(tag) != 1:
            return 0.0, f"{tag} occurs {text.count(tag)} times, not once"
    if not text.startswith("<think>") or not text.rstrip().endswith("</answer>"):
        return 0.0, "text before <think> or after </answer>"
    found = THINK_TO_ANSWER.search(text) is not None
    return float(found), "" if found else "not <think>...</think> <answer>...</answer>"


@verifier("format_reward")
def score_format_reward(completion: Completion) -> tuple[float, str]:
    """1 if the completion begins as <think>...</think><answer>...</answer> at the end of a line, else 0 (MindRLHF)."""
    text = completion.text
    middle = THINK_TO_ANSWER.search(text, len("<think>")) if text.startswith("<think>") else None
    found = middle is not None and ANSWER_END.search(text, middle.end()) is not None
    return float(found), "" if found else "not <think>...</think> <answer>...</answer>"


@verifier("strict_format")
def score_strict_format(completion: Completion) -> tuple[float, str]:
    r"""1 if each tag and \boxed{} occurs once, in order, with nothing before and after; else -0.5."""
    problem = strict_structure(completion.text)
    return (-0.5, problem) if problem else (1.0, "")


@verifier("step")
def score_step(completion: Completion) -> tuple[float, str]:
    """Step markers ("Step 1:", "1." at the beginning, bullets, First, Second, Next, Finally) / 3, at most 1."""
    count = len(STEP.findall(completion.text))
    return min(1.0, count / FULL_STEPS), f"{count} step markers"


def strict_structure(text: str) -> str:
    r"""Describe what is wrong with <think> </think> <answer> \boxed{} </answer>; "" if nothing is."""
    boxes = boxed_positions(text)
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        if text.count(tag) != 1:
            return f"{tag} occurs {text.count(tag)} times, not once"
    if len(boxes) != 1:
        return rf"\boxed{{}} occurs {len(boxes)} times, not once"
    order = [
        text.find("<think>"),
        text.find("</think>"),
        text.find("<answer>"),
        boxes[0],
        text.find("</answer>"),
    ]
    if order != sorted(order):
        return r"not in the order <think> </think> <answer> \boxed{} </answer>"
    if not text.startswith("<think>"):
        return "does not start with <think>"
    return "" if text.endswith("</answer>") else "does not end with </answer>"


def boxed_positions(text: str) -> list[int]:
    r"""Return where each \boxed{...} begins that is closed on its line; takes linear time."""
    found: list[int] = []
    end = len(text)
    start, close, newline = text.find(BOXED), -1, -1
    while start >= 0:
        if close < start:
            close = text.find("}", start)
            if close < 0:
                break
        if newline < start:
            newline = text.find("\n", start)
            newline = end if newline < 0 else newline
        if close < newline:
            found.append(start)
        start = text.find(BOXED, (close if close < newline else start) + 1)
    return found
