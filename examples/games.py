"""Environments to learn from: wordle, sorting names over turns, countdown with a scratchpad, a text adventure.

Each depends on its example alone: the column `seed` decides the secret word, the names, the numbers, the map.

    seq 0 999 | sed 's/.*/{"prompt": "go", "seed": &}/' > seeds.jsonl
    posttrain grpo configs/grpo.yaml --data.train seeds.jsonl --rollout.environment examples/games.py:Wordle
"""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Any

Messages = list[dict[str, str]]
Result = tuple[Messages | None, float]


WORDS = ("apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house", "jelly", "knife", "lemon", "mouse")
NAMES = ("Ada", "Bela", "Carl", "Dora", "Emil", "Finn", "Gita", "Hugo", "Ines", "Jana", "Kofi", "Lena", "Mila", "Noor")
OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def system(text: str) -> Messages:
    return [{"role": "system", "content": text}]


def tagged(reply: str, tag: str) -> str:
    """Return what is in the last <tag>...</tag> of a reply; empty if there is none."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", reply, re.DOTALL)
    return found[-1].strip() if found else ""


class Wordle:
    """Find a word of five letters in six guesses: G is a letter in its place, Y one of the word elsewhere, - neither.

    Reward: 1 for the first guess, less for later ones, and a little for letters of the best guess if none is right.
    """

    GUESSES = 6

    def start(self, example: dict[str, Any]) -> Messages:
        self.word = random.Random(example["seed"]).choice(WORDS)
        self.guesses, self.best = 0, 0.0
        rules = "Guess a word of five letters: <guess>word</guess>. G: right place, Y: other place, -: not in the word."
        return [*system(rules), *user("First guess?")]

    def step(self, reply: str) -> Result:
        guess = tagged(reply, "guess").lower()
        self.guesses += 1
        if guess == self.word:
            return None, 1 - (self.guesses - 1) / (2 * self.GUESSES)
        if len(guess) != len(self.word) or not guess.isalpha():
            shown = "Reply with <guess>word</guess>, a word of five letters."
        else:
            shown = feedback(guess, self.word)
            self.best = max(self.best, (shown.count("G") + shown.count("Y") / 2) / len(self.word))
        return (None, 0.2 * self.best) if self.guesses == self.GUESSES else (user(shown), 0.0)


def feedback(guess: str, word: str) -> str:
    """Return a mark for each letter of the guess; a letter that the word has once is marked once."""
    marks = ["G" if a == b else "-" for a, b in zip(guess, word, strict=True)]
    left = [b for a, b in zip(guess, word, strict=True) if a != b]
    for place, letter in enumerate(guess):
        if marks[place] == "-" and letter in left:
            marks[place] = "Y"
            left.remove(letter)
    return "".join(marks)


class AlphabetSort:
    """Sort names, then insert more names in each turn; the reward of a turn is the share of names in their places."""

    TURNS = 3

    def start(self, example: dict[str, Any]) -> Messages:
        self.random = random.Random(example["seed"])
        self.names: list[str] = []
        self.turn = 0
        rules = "Sort all names so far by the alphabet. Reply with <sorted>names, separated by commas</sorted>."
        return [*system(rules), *self.more_names()]

    def more_names(self) -> Messages:
        new = self.random.sample([name for name in NAMES if name not in self.names], 3)
        self.names += new
        return user(f"Names: {', '.join(new)}")

    def step(self, reply: str) -> Result:
        told = [name.strip() for name in tagged(reply, "sorted").split(",")]
        wanted = sorted(self.names)
        right = sum(a == b for a, b in zip(told, wanted, strict=False)) if len(told) == len(wanted) else 0
        self.turn += 1
        reward = right / len(wanted) / self.TURNS
        return (None, reward) if self.turn == self.TURNS else (self.more_names(), reward)


class Countdown:
    """Reach a number with some of the given ones and + - *, with a scratchpad that computes in between.

    <try>EXPRESSION</try> is answered with its value; <answer>EXPRESSION</answer> ends the episode.
    """

    TRIES = 4

    def start(self, example: dict[str, Any]) -> Messages:
        rng = random.Random(example["seed"])
        self.numbers = [rng.randint(1, 20) for _ in range(4)]
        a, b, c = rng.sample(self.numbers, 3)
        self.target = a * b + c
        self.tries = 0
        rules = (
            "Use each number at most once, and + - *. Test with <try>3 * 4</try>; end with <answer>3 * 4 + 1</answer>."
        )
        return [*system(rules), *user(f"Numbers: {self.numbers}. Target: {self.target}.")]

    def step(self, reply: str) -> Result:
        if answer := tagged(reply, "answer"):
            return None, float(self.value(answer) == self.target)
        self.tries += 1
        if self.tries == self.TRIES:
            return None, 0.0
        value = self.value(tagged(reply, "try"))
        return user("not possible with these numbers" if value is None else f"= {value}"), 0.0

    def value(self, text: str) -> int | None:
        """Return the value of an expression of the given numbers; None if it is anything else."""
        left = list(self.numbers)

        def compute(node: ast.AST) -> int:
            if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](compute(node.left), compute(node.right))
            if isinstance(node, ast.Constant) and type(node.value) is int:
                left.remove(node.value)  # ValueError if it is not there, or used already
                return node.value
            raise ValueError("not an expression of numbers")

        try:
            return compute(ast.parse(text[:200], mode="eval").body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None


class Adventure:
    """A text game: walk through rooms, take the key, open the chest. 0.5 for the key, 0.5 for the chest."""

    ROOMS = ("hall", "kitchen", "cellar", "garden", "library")
    TURNS = 10

    def start(self, example: dict[str, Any]) -> Messages:
        rng = random.Random(example["seed"])
        self.rooms = rng.sample(self.ROOMS, len(self.ROOMS))  # in a row: east is the next one
        self.at, self.turns, self.has_key = 0, 0, False
        self.key, self.chest = rng.sample(range(1, len(self.rooms)), 2)
        return [*system("Reply with one of: west, east, take key, open chest."), *user(self.look())]

    def look(self) -> str:
        things = [name for name, place in (("key", self.key), ("chest", self.chest)) if place == self.at]
        seen = f" There is a {' and a '.join(things)}." if things else ""
        return f"You are in the {self.rooms[self.at]}.{seen}"

    def step(self, reply: str) -> Result:
        self.turns += 1
        text, reward = reply.strip().lower().rstrip("."), 0.0
        if text in ("east", "west"):
            self.at = min(max(self.at + (1 if text == "east" else -1), 0), len(self.rooms) - 1)
        elif text == "take key" and self.at == self.key:
            self.has_key, self.key, reward = True, -1, 0.5
        elif text == "open chest" and self.at == self.chest and self.has_key:
            return None, 0.5
        return (None, reward) if self.turns == self.TURNS else (user(self.look()), reward)
