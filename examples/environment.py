"""Custom environments: a class in any file; each episode has its own object.

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
    """Asks the same question up to three times: 1 for a correct first reply, then 1/2, then 1/3."""

    def start(self, example: dict[str, Any]) -> Messages:
        self.answer = str(example["completion"])
        self.tries = 0
        return example["messages"]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        self.tries += 1
        if self.answer in reply:
            return None, 1 / self.tries
        if self.tries == 3:
            return None, 0.0
        return [{"role": "user", "content": "That is not it. Try again."}], 0.0


class Calculator:
    """A tool: whenever the model writes calc(12 + 30), it gets the result; the last reply is scored."""

    def start(self, example: dict[str, Any]) -> Messages:
        self.answer = str(example["completion"])
        system = {"role": "system", "content": "You may write calc(12 + 30) and wait for the result."}
        return [system, *example["messages"]]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        if call := CALL.search(reply):
            left, sign, right = call.groups()
            result = OPERATORS[sign](int(left), int(right))
            return [{"role": "user", "content": f"result: {result}"}], 0.0
        return None, float(self.answer in reply)
