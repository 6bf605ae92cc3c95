"""Environments of one's own: a class in a plain file, an object for each conversation.

posttrain grpo configs/grpo.yaml --rollout.environment examples/environment.py:SecondChance
"""

from __future__ import annotations

import operator
import re
from typing import Any

Messages = list[dict[str, str]]

CALL = re.compile(r"calc\((-?\d{1,9}) *([-+*]) *(-?\d{1,9})\)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class SecondChance:
    """Asks the row's question up to three times: 1 for a right answer at once, then 1/2, then 1/3."""

    def start(self, row: dict[str, Any]) -> Messages:
        self.answer = str(row["completion"])
        self.tries = 0
        return row["messages"]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        self.tries += 1
        if self.answer in reply:
            return None, 1 / self.tries
        if self.tries == 3:
            return None, 0.0
        return [{"role": "user", "content": "That is not it. Try again."}], 0.0


class Calculator:
    """A tool: as long as the model writes calc(12 + 30), it is told the result; its last reply is judged."""

    def start(self, row: dict[str, Any]) -> Messages:
        self.answer = str(row["completion"])
        return [{"role": "system", "content": "You may write calc(12 + 30) and wait for the result."}, *row["messages"]]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        if call := CALL.search(reply):
            left, sign, right = call.groups()
            result = OPERATORS[sign](int(left), int(right))
            return [{"role": "user", "content": f"result: {result}"}], 0.0
        return None, float(self.answer in reply)
