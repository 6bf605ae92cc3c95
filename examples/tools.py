"""Tools that a model may call in training: functions with type hints and a docstring.

posttrain grpo configs/grpo.yaml --rollout.tools examples/tools.py:calculate --reward examples/tools.py:right_number
"""

from __future__ import annotations

import operator
from typing import Any, Literal

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculate(left: int, sign: Literal["+", "-", "*"], right: int) -> int:
    """Compute a sum, difference or product.

    Args:
        left: the first number
        sign: what to do with them
        right: the second number
    """
    return OPERATORS[sign](left, right)


def right_number(text: str, ground_truth: str, messages: list[dict[str, Any]]) -> float:
    """Return 1 if the last reply has the number of the example, 0.1 if it does not but the tool was used, else 0."""
    used = any(message["role"] == "tool" for message in messages)
    return 1.0 if ground_truth in text.split() else 0.1 * used
