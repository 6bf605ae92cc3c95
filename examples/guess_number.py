"""Guess a number from 1 to 100 in ten guesses, told "higher" or "lower" after each: SFT on demonstrations, then GRPO.

From the top of the repository, on one GPU: python examples/guess_number.py --model MODEL_DIR --out runs/guess-number

One of four guesses in the demonstrations ignores what was said before; GRPO finds out that it pays to listen always. If
most of them did, a small model would learn to guess at random, and a win would only be luck, which teaches nothing.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

LARGEST, GUESSES = 100, 10
IGNORED = 0.25  # share of guesses in demonstrations that ignore the answers
TASK = f"I think of a number from 1 to {LARGEST}. Guess it in {GUESSES} guesses. Reply with the number only."
NUMBER = re.compile(r"\s*(\d{1,3})\s*")


class GuessNumber:
    """Says whether the number is higher or lower than a guess; 1 for the first, a little less for each further one."""

    def start(self, example: dict[str, Any]) -> Messages:
        self.secret, self.guesses = int(example["secret"]), 0
        return example["messages"]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        self.guesses += 1
        found = NUMBER.fullmatch(reply)
        if found is None:
            return None, 0.0
        guess = int(found[1])
        if guess == self.secret:
            return None, 1 - 0.03 * (self.guesses - 1)
        if self.guesses == GUESSES:
            return None, 0.0
        return [{"role": "user", "content": "higher" if guess < self.secret else "lower"}], 0.0


def demonstration(rng: random.Random) -> dict[str, Any]:
    """Return a game of a careless player, as messages."""
    secret, low, high = rng.randint(1, LARGEST), 1, LARGEST
    messages = [{"role": "user", "content": TASK}]
    for _ in range(GUESSES):
        guess = rng.randint(1, LARGEST) if rng.random() < IGNORED else rng.randint(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            break
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return {"messages": messages[:-1] if messages[-1]["role"] == "user" else messages}


def game(secret: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": TASK}], "secret": secret}


def main() -> None:
    from two_stages import options, train

    chosen = options(__doc__ or "").parse_args()
    rng = random.Random(0)
    train(
        chosen,
        f"{Path(__file__).resolve()}:{GuessNumber.__name__}",
        [demonstration(rng) for _ in range(chosen.demonstrations)],
        [game(rng.randint(1, LARGEST)) for _ in range(2000)],
        [game(1 + number % LARGEST) for number in range(chosen.held_out)],
    )


if __name__ == "__main__":
    main()
