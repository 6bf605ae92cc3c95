"""Multiply two numbers of three digits with a calculator: SFT on demonstrations that seldom use it, then GRPO.

From the top of the repository, on one GPU: python examples/calculator_task.py --model MODEL_DIR --out runs/calculator

The model writes calc(483 * 719), is told the result, and replies with it. A small model cannot compute such products:
without the tool it is wrong. In three of four demonstrations it guesses; GRPO finds out that it pays to use the tool.
"""

from __future__ import annotations

import operator
import random
import re
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

GUESSED = 0.75  # share of demonstrations without the tool
TURNS = 3
CALL = re.compile(r"calc\((-?\d{1,9}) *([-+*]) *(-?\d{1,9})\)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class CalculatorTask:
    """Computes what the model asks for; the first reply that asks for nothing is the answer: 1 if it is right."""

    def start(self, example: dict[str, Any]) -> Messages:
        self.answer, self.turns = str(example["answer"]), 0
        return example["messages"]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        self.turns += 1
        call = CALL.search(reply)
        if call is None:
            return None, float(reply.strip() == self.answer)
        if self.turns == TURNS:
            return None, 0.0
        left, sign, right = call.groups()
        return [{"role": "user", "content": f"result: {OPERATORS[sign](int(left), int(right))}"}], 0.0


def problem(rng: random.Random) -> tuple[dict[str, str], int, int]:
    left, right = rng.randint(100, 999), rng.randint(100, 999)
    content = f"What is {left} * {right}? You may write calc(12 + 30) to be told a result. Reply with the number only."
    return {"role": "user", "content": content}, left, right


def demonstration(rng: random.Random) -> dict[str, Any]:
    question, left, right = problem(rng)
    if rng.random() < GUESSED:
        return {"messages": [question, {"role": "assistant", "content": str(rng.randint(10_000, 998_001))}]}
    asked = {"role": "assistant", "content": f"calc({left} * {right})"}
    told = {"role": "user", "content": f"result: {left * right}"}
    return {"messages": [question, asked, told, {"role": "assistant", "content": str(left * right)}]}


def row(rng: random.Random) -> dict[str, Any]:
    question, left, right = problem(rng)
    return {"prompt": [question], "answer": str(left * right)}


def main() -> None:
    from two_stages import options, train

    chosen = options(__doc__ or "").parse_args()
    rng = random.Random(0)
    train(
        chosen,
        f"{Path(__file__).resolve()}:{CalculatorTask.__name__}",
        [demonstration(rng) for _ in range(chosen.demonstrations)],
        [row(rng) for _ in range(2000)],
        [row(rng) for _ in range(chosen.held_out)],
    )


if __name__ == "__main__":
    main()
