"""The verifier `countdown`: an expression over the given numbers, each used once, that equals the target."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from posttrain.data.ground_truth import TRUTH_SOURCES, ground_truth_of
from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import verifier

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TOKEN = re.compile(r"\s*(?:(\d+)|([-+*/()]))", re.ASCII)
LENGTH_LIMIT = 300  # characters of an expression
DEPTH_LIMIT = 30  # nested brackets and signs
DIGITS_LIMIT = 9  # of a number
SIGNS = str.maketrans("×÷−", "*/-")


@verifier("countdown", columns=("numbers", "nums", *TRUTH_SOURCES))
def score_countdown(completion: Completion) -> tuple[float, str]:
    """1 if the last <answer> uses each number exactly once and equals the target, else 0."""
    numbers, target = task_of(completion.columns)
    answers = ANSWER.findall(completion.text)
    if not answers:
        return 0.0, "no <answer>...</answer>"
    try:
        value, used = evaluate_expression(answers[-1])
    except ArithmeticError as error:
        return 0.0, str(error)
    if sorted(used) != sorted(numbers):
        return 0.0, f"uses {used}, not each of {numbers} once"
    return float(value == target), f"equals {value}, expected {target}"


def task_of(columns: dict[str, Any]) -> tuple[list[int], int]:
    """Read numbers and target from `ground_truth` or from columns of their own."""
    label = ground_truth_of(columns)
    source = {**columns, **(label if isinstance(label, dict) else {})}
    numbers = source.get("numbers", source.get("nums"))
    if numbers is None or source.get("target") is None:
        raise LookupError(f"the example has no numbers and target; its columns are {', '.join(columns) or 'none'}")
    return [int(number) for number in numbers], int(source["target"])


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Compute an expression of + - * / and brackets, and list its numbers; ArithmeticError for anything else."""
    text = text.translate(SIGNS).strip()
    if len(text) > LENGTH_LIMIT:
        raise ArithmeticError(f"the expression has more than {LENGTH_LIMIT} characters")
    return _Parser(_tokens(text)).whole()


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise ArithmeticError(f"{text[at:].strip()[:20]!r} is not arithmetic")
        tokens.append(found.group().strip())
        at = found.end()
    return tokens


class _Parser:
    """sum = product {+|- product}; product = factor {*|/ factor}; factor = -factor | ( sum ) | number."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.used: list[int] = []

    def whole(self) -> tuple[Fraction, list[int]]:
        value = self.sum(0)
        if self.at < len(self.tokens):
            raise ArithmeticError(f"{self.tokens[self.at]!r} after the end of the expression")
        return value, self.used

    def take(self, *expected: str) -> str:
        """Consume and return the next token if it is one of these, else ""."""
        if self.at < len(self.tokens) and self.tokens[self.at] in expected:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while sign := self.take("+", "-"):
            other = self.product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while sign := self.take("*", "/"):
            other = self.factor(depth)
            if sign == "/" and other == 0:
                raise ArithmeticError("division by zero")
            value = value * other if sign == "*" else value / other
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > DEPTH_LIMIT:
            raise ArithmeticError(f"more than {DEPTH_LIMIT} nested brackets")
        if self.take("-"):
            return -self.factor(depth + 1)
        if self.take("("):
            value = self.sum(depth + 1)
            if not self.take(")"):
                raise ArithmeticError("a bracket is not closed")
            return value
        if self.at == len(self.tokens):
            raise ArithmeticError("the expression ends too early")
        token = self.tokens[self.at]
        if not token.isdigit() or len(token) > DIGITS_LIMIT:
            raise ArithmeticError(f"{token[:20]!r} where a number should be")
        self.at += 1
        self.used.append(int(token))
        return Fraction(int(token))
