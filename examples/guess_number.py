"""Guess a number from 1 to 100 in ten guesses, told "higher" or "lower" after each: SFT on demonstrations, then GRPO.

From the top of the repository, on one GPU: python examples/guess_number.py --model MODEL_DIR --out runs/guess-number

Of such games, a player who guesses at random within what is known wins 87%, one who ignores the answers 10%. In the
demonstrations one of four guesses ignores them (68%); GRPO finds out that it pays to listen always.
"""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

LARGEST, GUESSES = 100, 10
IGNORED = 0.25  # share of guesses in demonstrations that ignore the answers
TASK = "I think of a number from 1 to {largest}. Guess it in {guesses} guesses. Reply with the number only."
NUMBER = re.compile(r"\s*(\d{1,9})\s*")


class GuessNumber:
    """Says whether the number is higher or lower than a guess.

    A guess is rewarded by how far it narrows the possible numbers down, in all 0.4; the right one by what is left to 1,
    less a little for each guess before it. So every guess is told at once whether it was a good one (algo.credit turn).
    """

    def start(self, example: dict[str, Any]) -> Messages:
        self.secret = int(example["secret"])
        self.largest, self.most = int(example.get("largest", LARGEST)), int(example.get("guesses", GUESSES))
        self.low, self.high, self.guesses, self.earned = 1, self.largest, 0, 0.0
        return example["messages"]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        self.guesses += 1
        found = NUMBER.fullmatch(reply)
        if found is None:
            return None, 0.0
        guess = int(found[1])
        if guess == self.secret:
            return None, 1 - 0.3 * (self.guesses - 1) / self.most - self.earned
        before = self.high - self.low + 1
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        reward = 0.4 * math.log(before / (self.high - self.low + 1)) / math.log(self.largest)
        self.earned += reward
        return (None if self.guesses == self.most else answer(guess, self.secret)), reward


def answer(guess: int, secret: int) -> Messages:
    """Return what is said to a wrong guess; it repeats the guess, so that each bound stands in one place."""
    return [{"role": "user", "content": f"{'higher' if guess < secret else 'lower'} than {guess}"}]


def demonstration(rng: random.Random, largest: int = LARGEST, guesses: int = GUESSES) -> dict[str, Any]:
    """Return a game of a careless player, as messages."""
    secret, low, high = rng.randint(1, largest), 1, largest
    messages = game(secret, largest, guesses)["prompt"]
    for number in range(guesses):
        guess = rng.randint(1, largest) if rng.random() < IGNORED else rng.randint(low, high)
        messages = [*messages, {"role": "assistant", "content": str(guess)}]
        if guess == secret or number == guesses - 1:
            break
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        messages += answer(guess, secret)
    return {"messages": messages}


def game(secret: int, largest: int, guesses: int) -> dict[str, Any]:
    task = TASK.format(largest=largest, guesses=guesses)
    return {"prompt": [{"role": "user", "content": task}], "secret": secret, "largest": largest, "guesses": guesses}


def main() -> None:
    from two_stages import options, train

    parser = options(__doc__ or "")
    parser.add_argument("--largest", type=int, default=LARGEST, help="the numbers are from 1 to this one")
    parser.add_argument("--guesses", type=int, default=GUESSES, help="most guesses of a game")
    parser.set_defaults(demonstrations=16_000, credit="turn")
    chosen = parser.parse_args()
    rules, rng = (chosen.largest, chosen.guesses), random.Random(0)
    train(
        chosen,
        f"{Path(__file__).resolve()}:{GuessNumber.__name__}",
        [demonstration(rng, *rules) for _ in range(chosen.demonstrations)],
        [game(rng.randint(1, chosen.largest), *rules) for _ in range(2000)],
        [game(1 + number % chosen.largest, *rules) for number in range(chosen.held_out)],
    )


if __name__ == "__main__":
    main()
