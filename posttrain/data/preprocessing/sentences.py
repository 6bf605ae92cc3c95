"""Split texts into sentences by rules: at stops followed by a space and a capital, but not after abbreviations."""

from __future__ import annotations

import re

STOP = re.compile(
    r"""(?<![.!?])(?P<stop>[.!?]+)[\"'”’»)\]]*(?=\s)"""  # a run of stops, closing quotes, then a space
    r"""|[。！？]+[\"'”’」』）】]*"""  # Chinese and Japanese: no space follows
    r"""|\n\s*\n"""  # a blank line, as after headings
)
BETWEEN_WORDS = re.compile(r"""[\s\"'“‘«(\[]""")
NEXT = re.compile(r"""[\s\"'“‘«(\[]*(.?)""", re.DOTALL)
DOTTED = re.compile(r"[A-Za-z](\.[A-Za-z])+|[A-Z]")  # e.g, U.S, a.m and initials
LONGEST_WORD = 16  # characters before a stop that are compared with the lists below
NEVER_LAST = {
    "mr", "mrs", "ms", "dr", "prof", "rev", "gen", "col", "capt", "cmdr", "lt", "sgt", "hon", "gov", "sen",
    "st", "mt", "messrs", "mme", "mlle", "hr", "fr", "cf", "vs", "viz", "approx", "bzw",
}  # fmt: skip
BEFORE_NUMBERS = {
    "no", "nos", "nr", "fig", "figs", "eq", "eqs", "vol", "p", "pp", "sec", "sect", "ch", "art", "par", "jan",
    "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec",
}  # fmt: skip


def sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, without the white space around them; nothing else is removed."""
    found, start = [], 0
    for end in STOP.finditer(text):
        if end["stop"] and continues_after(text, start, end):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def continues_after(text: str, start: int, end: re.Match[str]) -> bool:
    """Whether the sentence that began at `start` continues after this stop."""
    following = NEXT.match(text, end.end())
    assert following is not None
    if following[1].islower():
        return True
    if end["stop"] != ".":
        return False
    at = end.start()
    word = BETWEEN_WORDS.split(text[max(start, at - LONGEST_WORD) : at])[-1]
    if word.isdigit() and not text[start : at - len(word)].strip():  # the number of a list entry
        return True
    if DOTTED.fullmatch(word) or word.lower() in NEVER_LAST:
        return True
    return word.lower() in BEFORE_NUMBERS and following[1].isdigit()
