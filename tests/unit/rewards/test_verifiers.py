"""The built-in verifiers: exact values, and extractors that no text can upset."""

import re
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.data.ground_truth import last_boxed, last_boxes
from posttrain.rewards.base import Rewards
from posttrain.rewards.builtin import verifiers
from posttrain.rewards.choice import chosen_letter
from posttrain.rewards.code import find_tests, program_of
from posttrain.rewards.countdown import evaluate_expression
from posttrain.rewards.format import boxed_positions, strict_structure
from posttrain.rewards.math import assistant_part, gsm8k_answer, last_number, math_equal, one_number
from posttrain.rewards.verdict import Completion

GOOD = r"<think>First, add.</think> <answer>\boxed{\frac{1}{2}}</answer>"


def score(name, text, **columns):
    completion = Completion(prompt="", messages=[], text=text, finish="stop", tokens=1, columns=columns)
    return verifiers()[name].score(completion)[0]


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        (r"so \boxed{34}", "34", 1.0),
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{x+1}", "1+x", 1.0),
        (r"first \boxed{3}, no: \boxed{34}", "34", 1.0),
        (r"so \boxed{35}", "34", -0.5),
        (r"so \boxed{34}, or \boxed{35}", "34", -0.5),
        ("so 34", "34", -1.0),
        (r"so \boxed{34", "34", -1.0),
        (r"<|im_start|>user \boxed{1}<|im_start|>assistant \boxed{34}<|im_end|>\boxed{35}", "34", 1.0),
        (r"so 34</s>\boxed{34}", "34", -1.0),
    ],
)
def test_acc(text, label, value):
    assert score("acc", text, ground_truth=label) == value


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        (r"\boxed{1 2}", "12", 0),  # a space divides two numbers, unless it divides thousands
        (r"\boxed{1\,234\,567}", "1234567", 1),
        (r"\boxed{9=8}", "8", 0),
        (r"\boxed{3+5=8}", "8", 1),
        (r"\boxed{A = \pi r^2 = 25\pi}", r"25\pi", 1),
        (r"\boxed{x^2 = 5}", "5", 0),
        (r"\boxed{2x = 5}", "5", 0),
        (r"\boxed{1011_3}", "1011_2", 0),
        ("The answer is 42 or 43.", "42", 0),
        ("The answer is 42 (or 43).", "42", 0),
        ("Is the answer 42? No, it is 24.", "42", 0),
        ("I cannot decide. There are 42 cows.", "42", 0),
        ("So there are 42 cows.", "42", 1),
        ("**Answer: 42**", "42", 1),
        ("答案是123。", "123", 1),
        (r"\boxed{16}, not \boxed{15}", "15", 0),
        (r"\boxed{1 \pm \sqrt{2}}", r"1+\sqrt{2}, 1-\sqrt{2}", 1),
        (r"\boxed{8 \pm 1}", "8", 0),
        (r"\boxed{0.1\overline{6}}", r"\frac{1}{6}", 1),
        (r"\boxed{12.5}", r"12.5\%", 1),
        (r"\boxed{1.2e2}", "120", 1),
        (r"\boxed{((5!)!)!}", "7", 0),
        (r"\boxed{9^{9^{9^9}}}", "7", 0),
        (r"\boxed{9^{9^{9^9}}}", r"9^{9^{9^9}}", 1),
    ],
)
def test_math_decides(text, label, value):
    """Among these are numbers that no computer writes out, so that a comparison by algebra would not end."""
    assert score("math", text, ground_truth=label) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a\nb</think>\n\n<answer>\nb\n</answer>", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        (" <think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a</think><answer>b</answer> yes", 0),
        ("", 0),
    ],
)
def test_format(text, value):
    assert score("format", text) == score("format_reward", text) == value


def test_format_wants_each_tag_once_where_mindrlhf_does_not():
    for text in ("<think>a</think><answer>b</answer>\nmore", "<think>a</think><answer>b</answer><answer>c</answer>"):
        assert score("format", text) == 0 and score("format_reward", text) == 1


def test_answers_joined_by_or():
    assert score("math", r"\boxed{41} or \boxed{42}", ground_truth="42") == 0
    assert score("math", r"\boxed{42}, no, \boxed{41}, no, \boxed{42}", ground_truth="42") == 1
    assert score("math", r"\boxed{1} and \boxed{2}", ground_truth="2, 1") == 1
    assert score("gsm8k", r"\boxed{18} or \boxed{19}", ground_truth="19") == 0
    assert score("choice", r"\boxed{A} or \boxed{B}", ground_truth="B") == 0
    assert last_boxes(r"\boxed{1}, $\boxed{2}$ and \boxed{\frac{1}{2}}") == ["1", "2", r"\frac{1}{2}"]
    assert len(last_boxes(r"\boxed{1}, " * 100_000 + r"\boxed{1}")) == 20  # and no quadratic time


@pytest.mark.parametrize(
    ("text", "number"),
    [("18 dollars", 18), ("36/2", 18), ("1/0", None), ("3 million", 3_000_000), ("1.8e1", 18), ("18 or 19", None)],
)
def test_one_number(text, number):
    assert one_number(text) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (GOOD, 1),
        (GOOD + "\n", -0.5),
        ("So " + GOOD, -0.5),
        (GOOD.replace("</think>", "</think></think>"), -0.5),
        (GOOD.replace(r"\boxed", r"\boxed{2} \boxed"), -0.5),
        (r"<think>a</think>\boxed{1}<answer></answer>", -0.5),
        (r"<answer>\boxed{1}</answer><think>a</think>", -0.5),
        ("<think>a</think><answer>1</answer>", -0.5),
    ],
)
def test_strict_format(text, value):
    assert score("strict_format", text) == value


def test_base_acc_needs_form_and_value():
    assert score("base_acc", GOOD, ground_truth="0.5") == 1
    assert score("base_acc", GOOD, ground_truth="0.6") == 0
    assert score("base_acc", GOOD + " ", ground_truth="0.5") == 0
    assert score("base_acc", r"\boxed{0.5}", ground_truth="0.5") == 0


def test_step():
    assert score("step", "no marks") == 0
    assert score("step", "Step 1: add") == pytest.approx(1 / 3)
    assert score("step", "1. a\n2. b\n- c") == pytest.approx(2 / 3)  # only a number at the very beginning counts
    assert score("step", "First, a. Second, b. Next, c. Finally, d.") == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("it is 1,234", 1),
        ("it is 1234.", 1),
        ("1234 or 5", 0),
        ("none", 0),
        (r"\boxed{1234} is more than 5", 0),
    ],
)
def test_accuracy_reward(text, value):
    assert score("accuracy_reward", text, solution="1,234 pens") == value


def test_the_other_accuracy_rewards():
    assert score("qwen_accuracy_reward", r"\boxed{1234} is more than 5", solution="1,234") == 1
    assert score("qwen_accuracy_reward", "1234", solution="1,234") == 0
    assert score("accuracy_reward_2", r"so \boxed{\frac{2}{4}}", solution=r"$\frac{1}{2}$") == 1
    assert score("accuracy_reward_2", r"so $\frac{3}{4}$", solution=r"$\frac{1}{2}$") == 0
    assert score("accuracy_reward_2", "so one half", solution=r"$\frac{1}{2}$") == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16 - 3 - 4 = 9, times 2 is 18", 1),
        ("#### 18", 1),
        ("#### $18.00", 1),
        ("#### 18\nThat took 3 steps.", 1),
        (r"\boxed{18} since 2 * 9", 1),
        (r"\boxed{\$18}", 1),
        ("The answer is 18.", 1),
        ("The answer is -18", 0),
        ("18 or 17", 0),
        ("#### 17, not 18", 0),
        ("nothing", 0),
        ("", 0),
    ],
)
def test_gsm8k(text, value):
    assert score("gsm8k", text, ground_truth="18") == value
    assert score("gsm8k", text, answer="9 * 2 = <<9*2=18>>18\n#### 18") == value


def test_numbers():
    assert last_number("it costs $1,234.50.") == Decimal("1234.5")
    assert last_number("from 5-4") == 4 and last_number("is -4") == -4 and last_number("x = −4") == -4
    assert gsm8k_answer("####") is None and last_number("9" * 5000) is None


def test_math():
    assert score("math", r"the set \boxed{\{1, 2\}}", ground_truth=r"\{2, 1\}") == 1
    assert score("math", r"hence $x = \frac{3}{6}$.", ground_truth="1/2") == 1
    assert score("math", r"\boxed{2}", ground_truth="3") == 0
    assert score("math", "no idea", ground_truth="3") == 0
    assert math_equal("2x", "x") is False and math_equal("x=2", "2")
    assert score("math", "It costs $5 and $6.\n#### 11", ground_truth="11") == 1


def test_a_row_without_a_right_answer_is_an_error_not_a_zero():
    for name in ("gsm8k", "math", "acc", "accuracy_reward", "countdown", "code"):
        with pytest.raises(LookupError, match="its columns are question"):
            score(name, r"\boxed{1} <answer>1</answer>", question="?")
    with pytest.raises(ValueError, match="no number"):
        score("gsm8k", "1", ground_truth="many")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a}{b}", "a"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$ yes", "5"),
        (r"\boxed{a} \boxed{b", None),
        ("boxes", None),
        (r"\boxed{}", ""),
    ],
)
def test_last_boxed_balances_braces(text, found):
    assert last_boxed(text) == found


PARTS = ["\\boxed", "{", "}", "<think>", "</think>", "<answer>", "</answer>", "1,0", "-", ".", "$", "####", "٣"]
PIECES = st.lists(st.sampled_from(PARTS) | st.text(max_size=4)).map("".join)


@given(PIECES)
def test_extractors_never_fail(text):
    for extract in (last_boxed, gsm8k_answer, last_number, assistant_part, strict_structure, program_of):
        extract(text)
    for name in ("format", "strict_format", "step", "gsm8k", "accuracy_reward", "qwen_accuracy_reward"):
        assert -1 <= score(name, text, ground_truth="1") <= 1


@given(st.text(alphabet="ab{}\\ ", max_size=20).filter(lambda t: t.count("{") == t.count("}")))
def test_what_is_boxed_comes_out(inner):
    depth = 0
    for letter in inner:
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return
    assert last_boxed(f"so \\boxed{{{inner}}} done") == inner.strip()


# Countdown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer> 44 + (19 + 35) </answer>", 1),
        ("<answer>19 + 35 + 44</answer>", 1),
        ("<answer>1</answer> no: <answer>44 + 19 + 35</answer>", 1),
        ("44 + 19 + 35", 0),
        ("<answer>44 + 19</answer>", 0),
        ("<answer>44 + 19 + 35 + 0</answer>", 0),
        ("<answer>44 + 44 + 19 + 35 - 44</answer>", 0),
        ("<answer>98</answer>", 0),
        ("<answer>44 + 19 + 35 = 98</answer>", 0),
        ("<answer>__import__('os')</answer>", 0),
        ("<answer></answer>", 0),
    ],
)
def test_countdown(text, value):
    assert score("countdown", text, ground_truth={"numbers": [44, 19, 35], "target": 98}) == value
    assert score("countdown", text, nums=[44, 19, 35], target=98) == value


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (B).", "B"),
        ("B. 15", "B"),
        ("B: because it is", "B"),
        (r"A or B? So \boxed{B}.", "B"),
        (r"\boxed{\text{B}}", "B"),
        ("A is wrong. The answer is (B).", "B"),
        ("The correct answer is: **B**", "B"),
        ("Answer: A\nNo. Answer: B", "B"),
        ("I choose option B", "B"),
        ("因此，答案是B。", "B"),
        ("综上，故选：B", "B"),
        ("Let me think.\nB", "B"),
        ("A dog is an animal.", ""),
        ("The answer is A dog.", "A"),
        ("Because of vitamin C it is healthy", ""),
        ("", ""),
    ],
)
def test_choices(text, letter):
    assert chosen_letter(text) == letter
    assert score("choice", text, ground_truth="b", answer=1) == float(letter == "B")


@given(st.text())
def test_no_text_upsets_the_search_for_a_choice(text):
    assert chosen_letter(text) in ("", *"ABCDEFGHIJ")


def test_choices_without_a_letter_to_compare_with():
    for columns in ({}, {"ground_truth": "15"}):
        with pytest.raises((LookupError, ValueError)):
            score("choice", "B", **columns)


def test_countdown_computes_exactly():
    assert evaluate_expression("(1 + 2) / 3") == (1, [1, 2, 3])
    assert evaluate_expression("1/3*3 - 1") == (0, [1, 3, 3, 1])
    assert evaluate_expression("-(2 - 5) × 4 ÷ 6") == (2, [2, 5, 4, 6])
    assert (
        evaluate_expression("8 - 4 - 2")[0] == 2
        and evaluate_expression("8 / 4 / 2")[0] == 1
        and evaluate_expression("2 + 3 * 4")[0] == 14
    )


@pytest.mark.parametrize(
    "text",
    [
        *("9**9**9", "1/0", "1/(2-2)", "(", ")", "1 2", "1,000", "abs(1)", "a", "1.5", "1e9", "0x1", ""),
        *("(" * 200 + "1", "-" * 250, "9" * 50, "1+" * 5000 + "1"),
    ],
)
def test_countdown_refuses(text):
    with pytest.raises(ArithmeticError):
        evaluate_expression(text)


@given(st.text(alphabet="0123456789+-*/() ._a'", max_size=60) | st.text(max_size=30))
def test_countdown_parser_only_computes_or_refuses(text):
    try:
        value, used = evaluate_expression(text)
    except ArithmeticError:
        return
    assert isinstance(value, Fraction) and used
    assert not any(letter.isalpha() or letter in "._'" for letter in text)


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda part: st.tuples(part, st.sampled_from("+-*"), part).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_countdown_parser_agrees_with_python(text):
    assert evaluate_expression(text)[0] == eval(text)


# Code


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("def add(a, b):\n    return a + b", 1),
        ("def add(a, b):\n    return a - b", 0),
        ("def add(a, b:", 0),
        ("import sys\nsys.exit(0)", 0),
        ("import os\nos._exit(0)", 0),
        ("def add(a, b):\n    return len(bytearray(2**31))", 0),
        ("", 0),
    ],
)
def test_code_with_asserts(program, value):
    text = f"Here it is:\n```python\n{program}\n```\nDone."
    assert score("code", text, tests=["assert add(1, 2) == 3", "assert add(0, 0) == 0"]) == value
    assert score("code", text, test="def check(f):\n    assert f(1, 2) == 3", entry_point="add") == value


def test_code_with_inputs_and_outputs():
    columns = {"ground_truth": '{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7"]}'}
    assert score("code", "```py\nprint(sum(map(int, input().split())))\n```", **columns) == 1
    assert score("code", "```\nprint(3)\n```", **columns) == 0
    assert score("code", "print(sum(map(int, input().split())))  ", **columns) == 1  # no fence: all of it


def test_a_program_that_hangs_is_wrong_not_failed(monkeypatch):
    monkeypatch.setattr("posttrain.rewards.verifier.settings.seconds", 2.0)
    before = time.monotonic()
    assert score("code", "while True: pass", inputs=[""], outputs=[""]) == 0
    assert score("code", "import os\nos.fork()\nwhile True: print('x' * 1000)", inputs=[""], outputs=[""]) == 0
    assert time.monotonic() - before < 60  # it ended at all


def test_tests_are_found_as_data_sets_keep_them():
    assert find_tests({"test_list": ["assert f() == 1"], "test_setup_code": "import math"}).statements == (
        "import math",
        "assert f() == 1",
    )
    assert find_tests({"input_output": {"inputs": [["1", "2"]], "outputs": [["3"]]}}).pairs == (("1\n2", "3"),)
    with pytest.raises(LookupError, match="no tests"):
        find_tests({"tests": []})


def test_programs_that_cannot_be_isolated_are_refused(monkeypatch):
    monkeypatch.setattr("posttrain.rewards.code.isolation", lambda: ("unprotected", "unshare: Operation not permitted"))
    with pytest.raises(UsageError, match=r"Operation not permitted.*reward.allow_unprotected_code"):
        verifiers()["code"].prepare()
    monkeypatch.setattr("posttrain.rewards.verifier.settings.allow_unprotected_code", True)
    verifiers()["code"].prepare()


@pytest.mark.parametrize("name", ["gsm8k", "math", "choice", "countdown", "code"])
def test_a_verifier_without_its_ground_truth_is_refused_before_anything_is_generated(name):
    with Rewards([name]) as rewards, pytest.raises(UsageError, match=f"reward {name} compares .* found level, prompt"):
        rewards.check(["level", "prompt"])


@pytest.mark.parametrize("name", ["strict_format", "format"])
@pytest.mark.parametrize("text", [r"\boxed{", "\\boxed{\n", "<think>", "</think><answer>", "</answer> ", "</think> "])
def test_formats_of_long_texts(name, text):
    """Takes minutes, not milliseconds, where the time grows with the square of the length."""
    assert score(name, "<think>" + text * (4_000_000 // len(text))) == (-0.5 if name == "strict_format" else 0.0)


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        (r"\boxed{1} \boxed{2}", [0, 10]),
        (r"\boxed{\boxed{2}}", [0]),
        ("\\boxed{1\n2} \\boxed{3}", [12]),
        ("\\boxed{\\boxed{\n} \\boxed{}\\boxed{x", [17]),
        ("}\\boxed{\\boxed{1\\boxed{}", [1]),
    ],
)
def test_boxes_are_those_of_the_pattern(text, starts):
    assert boxed_positions(text) == [match.start() for match in re.finditer(r"\\boxed\{.*?\}", text)] == starts


def test_any_of_several_ground_truths_is_right():
    truths = {"answer": ["15", "fifteen", "30/2"]}
    assert [score("math", text, **truths) for text in (r"\boxed{15}", r"\boxed{fifteen}", r"\boxed{16}")] == [1, 1, 0]
    assert score("gsm8k", "#### 15", **truths) == 1 and score("gsm8k", "#### 3", **truths) == 0
    assert score("choice", "The answer is B", ground_truth=["A", "B"]) == 1
    for name, unreadable in (("gsm8k", ["fifteen"]), ("gsm8k", []), ("choice", ["x"])):
        with pytest.raises((ValueError, LookupError)):
            score(name, "#### 15", ground_truth=unreadable)
