r"""Verifiers of mathematical answers: they find the answer in a completion and compare it with the ground truth.

math-verify does the symbolic comparison. It may never end on some formulas; its own timeouts are off, because they need
signals, and the deadline of the reward process ends it.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from decimal import Decimal
from functools import cache
from typing import Any

from posttrain.data.ground_truth import TRUTH_SOURCES, ground_truth_of, last_boxed, last_boxes
from posttrain.rewards.format import strict_structure
from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import verifier

STOP_WORDS = ("</s>", "<|im_end|>", "<|endoftext|>")
ASSISTANT = "<|im_start|>assistant"
# A minus directly after a digit, a letter or a bracket is subtraction.
NUMBER = re.compile(
    r"(?<![a-zA-Z0-9_.])(?:(?<![a-zA-Z0-9_)\]}])[-+−])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![a-zA-Z0-9_.])\.\d+"
)
A12_NUMBER = re.compile(r"[-+]?\d+\.?\d*")
A12_BOXED = re.compile(r"boxed\{([-+]?\d*\.?\d+)\}")
DIGIT_GROUP = re.compile(r"(\d),(?=\d)")
# What may stand after a number that is the whole answer: not another number, nor a part of a date, a time, an ordinal.
ONE_ANSWER = re.compile(
    rf"""[\s*$=(]*(?:[A-Za-z]\w*\s*=\s*)?\$?\s*
    (?P<number>{NUMBER.pattern}|[-+−]?\d{{1,3}}(?:[ \u00a0\u202f]\d{{3}})+(?![\d.]))
    (?:[eE](?P<exponent>[-+]?\d{{1,2}})(?!\w)|\s*/\s*(?P<denominator>\d{{1,15}})(?![\w/.]\w))?
    (?:\s*(?P<scale>dozen|hundred|thousand|million|billion|trillion)\b|(?P<thousands>k)\b)?
    (?!st\b|nd\b|rd\b|th\b|[\d:/^]|\.\d|\s*(?:[,;:/&–—-]|\b(?:or|and|to|oder|und)\b|或|和)?\s*\$?[-+−]?\.?\d
    |[xyzn]\b|\s*(?:[*×·÷+x]|\b(?:plus|minus|times|divided\sby|multiplied\sby)\b)\s*\$?[\d(]
    |[^\n]*\b(?:or|oder)\b[^\n\d]*\d)""",
    re.VERBOSE,
)
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
# Words between answers of which only one may be meant; they must not be taken for a unit.
HEDGES = re.compile(r"\b(?:not|any|either|maybe)\b|\\neq?\b|≠")
GAVE_UP = re.compile(
    r"(?i)\b(?:can(?:'t|not)|could(?:n't| not)|unable to) (?:answer|decide|determine|find|solve|tell)\b|"
    r"\bI (?:do not|don't) know\b|\bI(?: am|'m) not sure\b"
)
ALTERNATIVES = re.compile(r"\b(?:or|and)\b|;")
# What separates the parts of a list, beside a comma.
SEPARATORS = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|;"
)
SPACING = re.compile(r"\\(?:q?quad|[,;:! ])|~")
# What is a formula as a whole, or several joined by words: `$1$ and $2$`.
FORMULA = re.compile(r"\$+[^$]*\$+|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
DELIMITERS = re.compile(r"\$+|\\[()\[\]]")
STATED = re.compile(r"(?i)\banswer is:?\s*(.+?)(?:\.\s|\.?$)")
# What a completion without a box says is its answer, to the end of the line or the sentence.
SAID = re.compile(
    r"(?i:\banswers?\s*(?:is|are|:|=)+|答案(?:是|为|：|:))[:\s*]*([^\n]+?)\**\s*(?:[.!](?=\s|$)|。|$)", re.MULTILINE
)
QUESTION = re.compile(r"[^.!?\n]*\?")
BETWEEN_FORMULAS = re.compile(r"(?:[\s,;.]|\b(?:and|or)\b)*")
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3}(?!\d))")
TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox|textbf|mathbf)\{([^{}]*)\}")
EXPONENT = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,2})")
REPEATING = re.compile(r"([-+]?\d+\.)(\d*)\\(?:overline|bar)\{?(\d+)\}?")
BASE = re.compile(r"[0-9A-Za-z]+_\{?(\d+)\}?")
SIZES = re.compile(r"\\(?:left|right)\s*(?=[\[\]()|]|\\[{}|])")  # of brackets
SPACED_NUMBER = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d ])")  # 1 234 567
FREE_SPACE = re.compile(r"(?<!\d) +| +(?!\d)")  # one between digits divides two numbers
EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
MONOMIAL = re.compile(r"\s*(?:[A-Za-z]\s*\^\s*(?:\d|\{[^{}]*\})|\d+\s*[A-Za-z])\s*")
ARITHMETIC = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|pi|pm|text|quad)(?![A-Za-z])")
DENIED_BOX = re.compile(r"(?i)\bnot\s+\$*\\boxed")
# Numbers that no computer writes out, and powers of sums with too many terms: comparing them would never end.
ENDLESS = re.compile(
    r"""\d{4,}\s*\)?\s*!|!\s*\)?\s*!|\d{4,}\s*\)?\s*\}?\^[\s{]*\d{6,}
    |\^\s*\{\s*\d+\s*\^[\s{]*(?:\d{2,}|\d+\s*\^)|\^\s*\{?\s*\d{7,}
    |\d\s*\^[\s{]*\d+\s*\}?\s*\)\s*!|\\[dt]?binom\{?\s*\d+(?:\d{4,}|\s*\^)
    |\([^()\\]*[A-Za-z][^()\\]*\)\s*\^[\s{]*\d{3,}""",
    re.VERBOSE,
)
PERCENT = re.compile(r"([-+]?\d*\.?\d+)\s*(?:\\?%|\\,\\%)")
DENIED = re.compile(r"(?i)\b(?:is|was|are)(?:n't|\s+not)\s+\S+")
UNITS = re.compile(
    r"(?i)\s+(?:square |cubic )?(?:dollars?|cents?|euros?|pounds?|yuan|rupees?|mm|cm|m|km|inch(?:es)?|in|f(?:oo|ee)t|"
    r"ft|yards?|miles?|(?:centi|milli|kilo)?met(?:er|re)s?|mg|g|kg|grams?|kilograms?|ounces?|lit(?:er|re)s?|gallons?|hours?|minutes?|seconds?|"
    r"days?|weeks?|months?|years?|degrees?|percent|units?|people|students|ways|usd|eur|mph|km/h|m/s)(?:\s*\^\s*\{?[23]\}?)?\.?$"
)
NUMBER_LIMIT = 100  # characters; anything longer is not taken for a number
LATEX_MARKS = ("$", "boxed", r"\(", r"\[")  # a ground truth with one of these marks its own formula
FORMULA_LIMIT = 2000  # characters


@verifier("gsm8k", columns=TRUTH_SOURCES)
def score_gsm8k(completion: Completion) -> tuple[float, str]:
    r"""1 if the number after the last ####, else in the last \boxed{}, else the last number, is correct; else 0."""
    expected = last_number(after_hashes(str(_label(completion))))
    if expected is None:
        raise ValueError(f"the ground truth {_label(completion)!r} has no number")
    found = gsm8k_answer(completion.text)
    if found is None:
        return 0.0, "no number"
    return float(found == expected), f"{found:f}, expected {expected:f}"


@verifier("math", needs="math_verify", extra="math", columns=TRUTH_SOURCES)
def score_math(completion: Completion) -> tuple[float, str]:
    """1 if math-verify finds an answer equal to the ground truth, else 0."""
    text, label = DENIED_BOX.sub("not ", completion.text.replace(r"\fbox", r"\boxed")), _label(completion)
    found = last_boxes(text)
    if not found and "####" in text:
        found = [after_hashes(text).strip()]
    if not found:
        return _score_unmarked(text, label)
    together = ", ".join(found)
    equal = all(math_equal(one, label) for one in found) or (len(found) > 1 and math_equal(together, label))
    return float(equal), f"{together}, expected {label}"


@verifier("acc", needs="math_verify", extra="math", columns=TRUTH_SOURCES)
def score_acc(completion: Completion) -> tuple[float, str]:
    r"""1 if the answer in the last \boxed{} is correct, -0.5 if it is wrong, -1 if there is none."""
    found = last_boxed(assistant_part(completion.text))
    if found is None:
        return -1.0, r"no \boxed{}"
    equal = math_equal(found, _label(completion))
    return (1.0 if equal else -0.5), f"{found}, expected {_label(completion)}"


@verifier("base_acc", needs="math_verify", extra="math", columns=TRUTH_SOURCES)
def score_base_acc(completion: Completion) -> tuple[float, str]:
    r"""1 if the answer in \boxed{} is correct and the format is that of strict_format, else 0."""
    problem = strict_structure(completion.text)
    if problem:
        return 0.0, problem
    found = last_boxed(completion.text)
    if found is None:
        return 0.0, r"no \boxed{} that is closed"
    return float(math_equal(found, _label(completion))), f"{found}, expected {_label(completion)}"


@verifier("accuracy_reward", columns=TRUTH_SOURCES)
def score_accuracy_reward(completion: Completion) -> tuple[float, str]:
    """1 if the last number of the completion equals the first of the solution, else 0 (MindRLHF)."""
    return _a12(completion, A12_NUMBER.findall(DIGIT_GROUP.sub(r"\1", completion.text)))


@verifier("qwen_accuracy_reward", columns=TRUTH_SOURCES)
def score_qwen_accuracy_reward(completion: Completion) -> tuple[float, str]:
    r"""1 if the last number in a \boxed{} equals the first of the solution, else 0 (MindRLHF)."""
    return _a12(completion, A12_BOXED.findall(DIGIT_GROUP.sub(r"\1", completion.text)))


@verifier("accuracy_reward_2", needs="math_verify", extra="math", columns=TRUTH_SOURCES)
def score_accuracy_reward_2(completion: Completion) -> tuple[float, str]:
    """1 if math-verify finds LaTeX in the completion that equals the solution, else 0 (MindRLHF)."""
    gold = _gold(_label(completion))
    parsed = _parse(completion.text, latex_only=True)
    return float(bool(parsed) and _verify(gold, parsed)), f"{_shown(parsed)}, expected {_label(completion)}"


# Finding answers


def assistant_part(text: str) -> str:
    """Return the text from the assistant's marker, if there is one, to the first stop word."""
    text = text[max(0, text.find(ASSISTANT)) :]
    for word in STOP_WORDS:
        text = text.split(word, 1)[0]
    return text


def after_hashes(text: str) -> str:
    """Return what follows the last ####, which GSM8K writes before an answer; the whole text if it has none."""
    return text.rpartition("####")[2]


def gsm8k_answer(text: str) -> Decimal | None:
    r"""Return the number after ####, else in \boxed{}, else the last number."""
    text = THOUSANDS.sub(",", ascii_digits(text))
    if "####" in text:
        answer = after_hashes(text)
        return one_number(last_boxed(answer) or next(iter(answer.strip().splitlines()), ""))
    boxes = last_boxes(text)
    if len(boxes) > 1 and len({one_number(box) for box in boxes}) > 1:
        return None
    if boxes and (number := one_number(boxes[-1])) is not None:
        return number
    return last_number(boxes[-1] if boxes and NUMBER.search(boxes[-1]) else text)


def one_number(text: str) -> Decimal | None:
    """Return the number with which an answer begins; None if another one follows as its alternative."""
    found = ONE_ANSWER.match(text)
    if found is None:
        return None
    number = to_number(re.sub(r"[ \u00a0\u202f]", "", found["number"]))
    if number is None:
        return None
    if found["denominator"]:
        below = Decimal(found["denominator"])
        return number / below if below else None
    scale = SCALES["thousand"] if found["thousands"] else SCALES.get(found["scale"], 1)
    return number * scale * Decimal(10) ** int(found["exponent"] or 0)


def ascii_digits(text: str) -> str:
    """Replace the decimal digits of other scripts, also full-width ones, by those of ASCII."""
    if text.isascii():
        return text
    return "".join(
        str(unicodedata.decimal(letter)) if not letter.isascii() and letter.isdecimal() else letter for letter in text
    )


def last_number(text: str) -> Decimal | None:
    found = None
    for found in NUMBER.finditer(text):  # noqa: B007  only the last counts
        pass
    return to_number(found.group()) if found else None


def to_number(text: str) -> Decimal | None:
    """Read 1,234.50 or $5; None if the text is not a number."""
    text = text.replace("$", "").replace("−", "-").strip().rstrip(".")
    text = text.replace(",", "") if GROUPED.fullmatch(text) else text
    if len(text) > NUMBER_LIMIT or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", text, re.ASCII):
        return None
    return Decimal(text)


# Comparing


def math_equal(found: str, expected: Any) -> bool:
    """Whether two answers are the same text or number, the same list in any order, or equal to math-verify."""
    found, text = bare_answer(found), bare_answer(truth_answer(str(expected)))
    if without_markup(found) == without_markup(text):
        return True
    if HEDGES.search(found) and not HEDGES.search(text):
        return False
    right = to_number(expanded(text))
    number = to_number(expanded(UNITS.sub("", found) if right is not None else found))
    if right is not None and number is not None:
        return number == right
    percent = PERCENT.fullmatch(text)
    if percent and (plain := to_number(found)) is not None:
        return plain in (Decimal(percent[1]), Decimal(percent[1]) / 100)
    parts, wanted = list_parts(found), list_parts(text)
    if len(parts) > 1 or len(wanted) > 1:
        return same_parts(parts, wanted)
    if ALTERNATIVES.search(found) and not ALTERNATIVES.search(text):
        return False
    if ENDLESS.search(found) and not ENDLESS.search(text):
        return False
    base, wanted_base = BASE.fullmatch(found), BASE.fullmatch(text)
    if base and wanted_base and base[1] != wanted_base[1]:
        return False
    if EQUALS.search(found) and not EQUALS.search(text):
        return sides_agree(found, text)
    return _verify(_gold(text), _parse(f"${found}$"))


def sides_agree(found: str, expected: str) -> bool:
    """Whether an equation, such as `x = 5` or `3 + 5 = 8`, ends in the expected answer, and no side contradicts it."""
    *left, last = EQUALS.split(found)
    for side in left:
        if MONOMIAL.fullmatch(side):  # x^2 = 5 or 2x = 5 does not say that x is 5
            return False
        known = side.strip() and not re.search(r"[A-Za-z]|\\", ARITHMETIC.sub("", side))
        if known and not math_equal(side, expected):
            return False
    return math_equal(last, expected)


def truth_answer(text: str) -> str:
    r"""Return the answer in a ground truth: what is in its boxes, or its formulas without $, if it has nothing else."""
    text = after_hashes(text).strip()
    if boxes := last_boxes(text.replace(r"\fbox", r"\boxed")):
        return ", ".join(boxes)
    if stated := STATED.findall(text):
        text = stated[-1].strip()
    if FORMULA.search(text) and BETWEEN_FORMULAS.fullmatch(FORMULA.sub(" ", text)):
        return DELIMITERS.sub(" ", text).strip().rstrip(".")
    return text


def bare_answer(text: str) -> str:
    r"""Return an answer with digits of ASCII and without marks that mean nothing: spaces of LaTeX, 1{,}000, \$."""
    text = re.sub("^\\s*[£€¥₹]", "", text)
    text = ascii_digits(text.replace(r"\varnothing", r"\emptyset").replace(r"\$", "$").replace("°", r"^\circ"))
    text = THOUSANDS.sub(",", REPEATING.sub(repeating_decimal, SIZES.sub("", text)))
    return re.sub(r"^\s*(?:\\approx(?![A-Za-z])|≈)", "", text).strip().removesuffix(".").strip()


def repeating_decimal(found: re.Match[str]) -> str:
    r"""Return 0.1\overline{6} as a fraction."""
    whole, once, again = found.groups()
    places = 10 ** len(once)
    above = int(whole[:-1] + once + again) - int(whole[:-1] + once)
    sign = "-" if whole.startswith("-") else ""
    return rf"{sign}\frac{{{abs(above)}}}{{{places * (10 ** len(again) - 1)}}}"


def expanded(text: str) -> str:
    """Return a number in scientific notation, 1.2e2, written out; any other text as it is."""
    found = EXPONENT.fullmatch(text.strip())
    return f"{Decimal(found[1]).scaleb(int(found[2])):f}" if found else text


def without_markup(text: str) -> str:
    r"""Return a text without \text{} and spaces, to compare answers that are words."""
    text = " ".join(TEXT.sub(r"\1", SPACING.sub(" ", text)).split())
    return FREE_SPACE.sub("", SPACED_NUMBER.sub(lambda number: number.group().replace(" ", ""), text))


def list_parts(text: str) -> list[str]:
    r"""Divide an answer such as `1, 2`, `1 and 2` or `\{1, 2\}` into its parts; a number, a tuple, a matrix is one."""
    text = SPACING.sub(" ", text).strip().strip("$").strip()
    if to_number(text.replace("{,}", ",")) is not None:
        return [text]
    text = SEPARATORS.sub(",", text)
    if text.startswith(r"\{") and text.endswith(r"\}") and ("," in text or r"\pm" in text):
        text = text[2:-2]
    elif re.fullmatch(r"\{[^{}]*,[^{}]*\}", text):  # {1, 2}, braces that group in LaTeX
        text = text[1:-1]
    parts, depth, start = list[str](), 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    stripped = [part.strip().strip("$").strip() for part in (*parts, text[start:])]
    stripped = [signed for part in stripped for signed in ([part] if r"\pm" not in part else both_signs(part))]
    return [part for part in stripped if part] if len(stripped) > 1 else stripped


def both_signs(text: str) -> list[str]:
    r"""Return an answer with \pm as two."""
    return [text.replace(r"\pm", sign) for sign in "+-"]


def same_parts(found: list[str], expected: list[str]) -> bool:
    """Whether two lists have equal parts in any order; a part of `found` that is repeated counts once."""
    if len(found) > len(expected):
        found = [part for index, part in enumerate(found) if not any(math_equal(part, x) for x in found[:index])]
    if len(found) != len(expected) or not all(found):
        return False
    left = list(expected)
    for part in found:
        match = next((other for other in left if math_equal(part, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _score_unmarked(text: str, label: Any) -> tuple[float, str]:
    """Score a completion without a box: by what it says is its answer, else by the last one that math-verify finds."""
    text = QUESTION.sub(" ", text[-FORMULA_LIMIT:])
    for said in SAID.findall(text)[-1:]:
        answer = DELIMITERS.sub(" ", said) if BETWEEN_FORMULAS.fullmatch(FORMULA.sub(" ", said)) else said
        if math_equal(answer, label):
            return 1.0, f"{said}, expected {label}"
        if HEDGES.search(answer) or ALTERNATIVES.search(answer):
            return 0.0, f"{said}, expected {label}"
        if parsed := _parse(said):
            return float(_verify(_gold(label), parsed)), f"{_shown(parsed)}, expected {label}"
    parsed = [] if GAVE_UP.search(text) else _parse(DENIED.sub(" ", text))
    if not parsed:
        return 0.0, "no answer"
    return float(_verify(_gold(label), parsed)), f"{_shown(parsed)}, expected {label}"


def _label(completion: Completion) -> Any:
    label = ground_truth_of(completion.columns)
    if label is None:
        raise LookupError(f"the example has no ground truth; its columns are {', '.join(completion.columns) or 'none'}")
    return label


def _a12(completion: Completion, numbers: list[str]) -> tuple[float, str]:
    expected = A12_NUMBER.search(DIGIT_GROUP.sub(r"\1", after_hashes(str(_label(completion)))))
    if expected is None:
        raise ValueError(f"the solution {_label(completion)!r} has no number")
    if not numbers:
        return 0.0, "no number"
    found = to_number(numbers[-1])
    equal = found is not None and found == to_number(expected.group())
    return float(equal), f"{numbers[-1]}, expected {expected.group()}"


@cache
def _math_verify() -> Any:
    """Import math-verify, once and only in a child process, and silence its warning about disabled timeouts."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _parse(text: str, latex_only: bool = False) -> list[Any]:
    library = _math_verify()
    text = text[-FORMULA_LIMIT:]
    latex = library.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not latex_only)
    configs = [latex] if latex_only else [latex, library.ExprExtractionConfig()]
    return library.parse(text, configs, extraction_mode="first_match", parsing_timeout=None)


def by_library(text: str, ground_truth: str, latex_only: bool = False) -> float:
    """Return 1 if math-verify alone finds the ground truth in a completion, else 0; for comparison with `math`."""
    if latex_only:
        return float(_verify(_gold(ground_truth), _parse(text, latex_only=True)))
    library = _math_verify()
    gold = library.parse(f"${ground_truth}$", parsing_timeout=None)
    return float(_verify(gold, library.parse(text, parsing_timeout=None)))


def _gold(label: Any) -> list[Any]:
    text = after_hashes(str(label)).strip()
    marked = any(mark in text for mark in LATEX_MARKS)
    parsed = _parse(text) if marked else _parse(f"${text}$") or _parse(text)
    if not parsed:
        raise ValueError(f"math-verify cannot read the ground truth {label!r}")
    return parsed


def _verify(gold: list[Any], found: list[Any]) -> bool:
    return bool(_math_verify().verify(gold, found, timeout_seconds=None))


def _shown(parsed: list[Any]) -> str:
    return str(parsed[-1]) if parsed else "no answer"
