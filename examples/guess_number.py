"""Guess a number from 1 to 100 in ten guesses, told "higher" or "lower" after each: SFT on demonstrations, then GRPO.

From the top of the repository, on one GPU: python examples/guess_number.py --model MODEL_DIR --out runs/guess-number

Of such games, a player who guesses at random within what is known wins 87%, one who ignores the answers 10%. In the
demonstrations one of four guesses ignores them (68%); GRPO finds out that it pays to listen, and to halve.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

LARGEST, GUESSES = 100, 10
IGNORED = 0.25  # share of guesses in demonstrations that ignore the answers
TASK = "I think of a number from 1 to {largest}. Guess it in {guesses} guesses. Reply with the number only."
NUMBER = re.compile(r"\s*(\d{1,9})\s*")


class GuessNumber:
    """Says whether the number is higher or lower than a guess.

    The reward of a guess is how much less it is worth than the best one: 0 for the middle of what is known, -1 for a
    number that earlier answers exclude. It does not depend on luck, and each guess is judged alone (algo.credit turn,
    algo.turn_discount 0). A reply that is no number ends the game with -2.
    """

    def start(self, example: dict[str, Any]) -> Messages:
        self.secret = int(example["secret"])
        self.largest, self.most = int(example.get("largest", LARGEST)), int(example.get("guesses", GUESSES))
        self.low, self.high, self.guesses = 1, self.largest, 0
        return example["messages"]

    def step(self, reply: str) -> tuple[Messages | None, float]:
        self.guesses += 1
        guess = read_guess(reply)
        if guess is None:
            return None, -2.0
        known = self.low, self.high
        reward = worth(guess, *known) / worth(sum(known) // 2, *known) - 1
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        over = guess == self.secret or self.guesses == self.most
        return (None if over else answer(guess, self.secret)), reward


def read_guess(reply: str) -> int | None:
    found = NUMBER.fullmatch(reply)
    return int(found[1]) if found else None


def worth(guess: int, low: int, high: int) -> float:
    """Return the bits that a guess is expected to tell about a number from `low` to `high`, and its chance."""
    if not low <= guess <= high:
        return 0.0
    numbers, left = high - low + 1, (guess - low, high - guess)
    return math.log2(numbers) - sum(n * math.log2(n) for n in left if n) / numbers + 1 / numbers


def won(rollouts: Sequence[Any]) -> float:
    """Return the share of games whose last guess is the number."""
    return sum(read_guess(played.text) == played.prompt.columns["secret"] for played in rollouts) / len(rollouts)


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
    parser.set_defaults(demonstrations=16_000, sft_rate=5e-4, grpo_rate=3e-5)
    # Good guesses differ little: a division by their standard deviation would weigh them like bad ones.
    parser.set_defaults(credit="turn", turn_discount=0.0, scale_by_std=False)
    chosen = parser.parse_args()
    rules, rng = (chosen.largest, chosen.guesses), random.Random(0)
    train(
        chosen,
        f"{Path(__file__).resolve()}:{GuessNumber.__name__}",
        [demonstration(rng, *rules) for _ in range(chosen.demonstrations)],
        [game(rng.randint(1, chosen.largest), *rules) for _ in range(2000)],
        [game(1 + number % chosen.largest, *rules) for number in range(chosen.held_out)],
        won,
    )


if __name__ == "__main__":
    main()
