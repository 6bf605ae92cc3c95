r"""Verifiers that look at the form of an answer alone.

`strict_structure` is also half of `base_acc`. It counts `\boxed{...}` up to the first closing brace, so that
`\boxed{\frac{1}{2}}` counts once.
"""

from __future__ import annotations

import re

from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import verifier

THINK_ANSWER = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL | re.MULTILINE)
BOXED = re.compile(r"\\boxed\{.*?\}")
STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
STEPS_WANTED = 3


@verifier("format")
def judge_format(completion: Completion) -> tuple[float, str]:
    """1 if the answer is <think>...</think><answer>...</answer>, else 0."""
    found = THINK_ANSWER.match(completion.text) is not None
    return float(found), "" if found else "not <think>...</think> <answer>...</answer>"


@verifier("format_reward")
def judge_format_reward(completion: Completion) -> tuple[float, str]:
    """1 if the answer is <think>...</think><answer>...</answer>, else 0 (MindRLHF's name for `format`)."""
    return judge_format(completion)


@verifier("strict_format")
def judge_strict_format(completion: Completion) -> tuple[float, str]:
    r"""1 if each tag and \boxed{} stands there once, in order, with nothing around; else -0.5."""
    fault = strict_structure(completion.text)
    return (-0.5, fault) if fault else (1.0, "")


@verifier("step")
def judge_steps(completion: Completion) -> tuple[float, str]:
    """Marks of steps ("Step 1:", "1." at the beginning, bullets, First, Second, Next, Finally) / 3, at most 1."""
    count = len(STEP.findall(completion.text))
    return min(1.0, count / STEPS_WANTED), f"{count} marks of steps"


def strict_structure(text: str) -> str:
    r"""What is wrong with <think> </think> <answer> \boxed{} </answer>; "" if nothing is."""
    boxes = list(BOXED.finditer(text))
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        if text.count(tag) != 1:
            return f"{text.count(tag)} times {tag}, not once"
    if len(boxes) != 1:
        return rf"{len(boxes)} times \boxed{{}}, not once"
    order = [
        text.find("<think>"),
        text.find("</think>"),
        text.find("<answer>"),
        boxes[0].start(),
        text.find("</answer>"),
    ]
    if order != sorted(order):
        return r"not in the order <think> </think> <answer> \boxed{} </answer>"
    if not text.startswith("<think>"):
        return "does not start with <think>"
    return "" if text.endswith("</answer>") else "does not end with </answer>"
