"""Texts of random words, and files of them."""

import json
import random


def sentence(rng, words):
    return " ".join(f"w{rng.randrange(20_000)}" for _ in range(words))


def changed(rng, text, edits):
    """The text with some words replaced."""
    words = text.split()
    for place in rng.sample(range(len(words)), edits):
        words[place] = f"x{rng.randrange(20_000)}"
    return " ".join(words)


def chat(prompt, completion, **more):
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], **more}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def seeded(number):
    return random.Random(number)
