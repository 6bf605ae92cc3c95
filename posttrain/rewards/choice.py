"""The verifier `choice`: which option of a multiple-choice question a completion chooses."""

from __future__ import annotations

import re

from posttrain.data.ground_truth import TRUTH_SOURCES, ground_truth_of, last_boxes
from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import verifier

# A small letter counts in brackets or at the end of a line: "a" is also an article.
LETTER = r"\(?([A-J]|[a-j](?=\W*$)|(?<=\()[a-j](?=\)))\)?(?![A-Za-z0-9'])"
ANSWER_WORDS = "answer|choice|option|respuesta|opción|resposta|risposta|réponse|Antwort|ответ|jawaban"
IS_WORDS = "is|es|é|è|est|ist|adalah"
# Phrases that state the choice, the most reliable first; of several matches the last counts.
STATEMENTS = (
    re.compile(rf"(?i:{ANSWER_WORDS})(?i:\s+(?:{IS_WORDS}))?\W{{0,4}}(?:(?i:option)\s+)?{LETTER}", re.MULTILINE),
    re.compile(
        rf"(?:答案|选项|选择|应选|故选|选|答え|정답|답)\s*(?:是|为|应为|应该是|は|은|는)?\W{{0,4}}{LETTER}",
        re.MULTILINE,
    ),
    re.compile(rf"(?i:choose|pick|select)\s+(?:(?i:option)\s+)?{LETTER}", re.MULTILINE),
    re.compile(rf"^\W{{0,3}}{LETTER}(?=\W{{0,3}}(?:\n|$)|[.:：、)])", re.MULTILINE),
)


# What follows a letter if it is only one of several.
ALTERNATIVE = re.compile(r"\W{0,3}(?:/|,|&|(?:or|and|oder|und|ou|et|o|y)\b|或|和|、)\s*\W{0,3}[A-J](?![A-Za-z0-9'])")


@verifier("choice", columns=TRUTH_SOURCES)
def score_choice(completion: Completion) -> tuple[float, str]:
    """1 if the letter of the option that the completion chooses is the ground truth, else 0."""
    label = ground_truth_of(completion.columns)
    if label is None:
        raise LookupError(f"the example has no ground truth; its columns are {', '.join(completion.columns) or 'none'}")
    expected = str(label).strip().upper()
    if not re.fullmatch("[A-J]", expected):
        raise ValueError(f"the ground truth {label!r} is not the letter of an option")
    found = chosen_letter(completion.text)
    return float(found == expected), f"{found or 'no letter'}, expected {expected}"


def chosen_letter(text: str) -> str:
    r"""Find the letter in the last \boxed{}, after "the answer is", or at the start of a line; "" if there is none.

    Reasoning before </think> does not count.
    """
    text = text.rpartition("</think>")[2]
    if len(boxes := last_boxes(text)) > 1:  # several, joined by "or"
        return ""
    inside = re.sub(r"\\(?:text|mathrm|mathbf)\w{0,2}\{", "{", boxes[0] if boxes else "")
    if boxed := re.fullmatch(r"\W*([A-Ja-j])(?:\W+[^A-Za-z]*)?", inside):
        return boxed[1].upper()
    for pattern in STATEMENTS:
        if found := list(pattern.finditer(text)):
            return "" if ALTERNATIVE.match(text, found[-1].end()) else found[-1][1].upper()
    return ""
