"""Functions as other libraries write them get what those libraries would give them."""

import json

import numpy as np
import pytest

from posttrain.core.errors import UsageError
from posttrain.rewards.signatures import adapt, finite_reward, many_results, one_result
from posttrain.rewards.verdict import Completion

TALK = [{"role": "user", "content": "2+2?"}]


def plain(text="4", **columns):
    return Completion(
        prompt="<user>2+2?", messages=TALK, text=text, finish="stop", tokens=3, columns={"question": "2+2?", **columns}
    )


def talk(text="4", **columns):
    return plain(text, prompt=TALK, **columns)


def asked(function, *completions):
    return adapt(function, "f").call(completions)


def test_our_own_form_takes_fields_and_columns():
    def score(text, prompt, messages, finish, tokens, columns, ground_truth=None, level=0, **others):
        return text, prompt, messages, finish, tokens, columns["level"], ground_truth, level, others["question"]

    expected = ("4", "<user>2+2?", TALK, "stop", 3, 5, "four", 5, "2+2?")
    assert asked(score, plain(ground_truth="four", level=5)) == expected
    assert asked(lambda tokens: tokens, plain()) == 3
    assert asked(lambda text, /, *, level: (text, level), plain(level=1)) == ("4", 1)


def test_trl_with_texts_and_with_messages():
    def trl(prompts, completions, answer, **columns):
        return prompts, completions, answer, columns

    prompts, completions, answer, columns = asked(trl, plain("a", answer="1"), plain("b", answer="2", level=3))
    assert prompts == ["<user>2+2?"] * 2 and completions == ["a", "b"] and answer == ["1", "2"]
    assert columns["level"] == [None, 3] and columns["solution"] == ["1", "2"] and "prompt" not in columns
    prompts, completions, *_ = asked(trl, talk("a", answer="1"))
    assert prompts == [TALK] and completions == [[{"role": "assistant", "content": "a"}]]
    assert asked(lambda completions: completions, plain("a", prompt="raw")) == ["a"]
    assert asked(trl, plain("a", prompt="raw", answer=1))[0] == ["raw"]


def test_verl_single_and_in_batches():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return data_source, solution_str, ground_truth, extra_info

    row = plain("a", data_source="math", reward_model={"ground_truth": "7"}, extra_info={"index": 1})
    assert asked(compute_score, row) == ("math", "a", "7", {"index": 1})
    batch = asked(lambda data_sources, solution_strs, ground_truths, extra_infos: (solution_strs, ground_truths), row)
    assert batch == (["a"], ["7"])


def test_openrlhf():
    found = asked(lambda queries, prompts, labels: (queries, prompts, labels), plain("a", label="7"))
    assert found == (["<user>2+2?a"], ["<user>2+2?"], ["7"])


def test_verifiers():
    def correct(completion, answer, **kwargs):
        return completion, answer, kwargs["info"]

    def with_state(prompt, completion, state):
        return prompt, state["answer"]

    assert asked(correct, talk("a", answer="7", info={"k": 1})) == (
        [{"role": "assistant", "content": "a"}],
        "7",
        {"k": 1},
    )
    assert asked(correct, plain("a", ground_truth="7"))[:2] == ("a", "7")
    assert asked(with_state, talk("a", answer="7")) == (TALK, "7")


def test_async_functions():
    async def score(text):
        return float(text)

    async def batch(completions):
        return [float(text) for text in completions]

    assert asked(score, plain("4")) == 4 and asked(batch, plain("4"), plain("5")) == [4, 5]


def test_unknown_forms_are_refused_with_the_known_ones():
    for function in (lambda x: 1, lambda **columns: 1, lambda: 1):
        with pytest.raises(UsageError, match="has none of the known forms") as refused:
            adapt(function, "f")
        for name in ("TRL", "verl", "OpenRLHF", "verifiers", "text"):
            assert name in str(refused.value)
    for thing in (3, type("Thing", (), {})):
        with pytest.raises(UsageError, match="not a function"):
            adapt(thing, "f")


def test_a_column_that_is_not_there_is_named():
    adapted = adapt(lambda text, level: 1, "f")
    assert adapted.missing(["question"]) == ["level"] and adapted.missing(["level"]) == []
    assert adapt(lambda completion, answer: 1, "f").missing(["solution"]) == []  # the right answer under any name
    with pytest.raises(LookupError, match=r"needs 'level'; available are .*question"):
        adapted.call([plain()])


def test_results_become_numbers():
    assert one_result(True) == (1.0, "") and one_result(np.float32(0.5)) == (0.5, "")
    assert one_result((1, "because")) == (1.0, "because")
    assert one_result({"score": 0.25, "acc": 1}) == (0.25, "") and one_result({"reward": np.array([2.0])}) == (2.0, "")
    assert many_results(np.array([1.0, 2.0]), 2) == [1, 2] and many_results({"rewards": [1, 2]}, 2) == [1, 2]
    assert many_results(([1.0, 0.0], ["42", "NO ANSWER"]), 2) == [(1.0, "42"), (0.0, "NO ANSWER")]
    for bad in (float("nan"), float("inf"), "1", [1], {}, object(), json):
        with pytest.raises((ValueError, TypeError)):
            finite_reward(bad)
    for bad, message in (
        ([1.0], "1 rewards for 2"),
        (1.0, "returned one number for 2 completions"),
        ({"x": 1}, "without any of"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            many_results(bad, 2)
