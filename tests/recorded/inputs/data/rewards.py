"""Rewards that the completions of an untrained model already differ in."""


def digits(text):
    return sum(letter.isdigit() for letter in text) / 4


def spread(text, ground_truth):
    return sum(ord(letter) % 7 for letter in text) / 20 + (ground_truth in text)


def fragile(text):
    if sum(map(ord, text)) % 5 == 0:
        raise ValueError("this completion cannot be scored")
    return len(set(text)) / 8


def seldom(text):
    """Often equal within a group, so that dynamic sampling replaces some."""
    return float(sum(map(ord, text)) % 4 == 0)
