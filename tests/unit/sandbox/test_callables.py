"""Functions that no file contains: how they are named, sent and explained."""

import functools
import linecache
import threading

import pytest

from posttrain.core.errors import UsageError
from posttrain.rewards.base import Completion, Rewards
from posttrain.rewards.specs import parse_spec, reward_texts
from posttrain.sandbox import callables

COMPLETIONS = [Completion(prompt="?", messages=[], text="abc", finish="stop", tokens=1, columns={})]


def module_function(text):
    return float(len(text))


def define(code, name="<cell 1>"):
    """Run code as a notebook does: in the module __main__, with its text where tracebacks find it."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    cell = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), cell)
    return cell


def values(specs, **options):
    with Rewards(specs, workers=1, max_failure_rate=1, timeout_seconds=30, **options) as rewards:
        rewards.check()
        return rewards.names, [verdict.value for verdict in rewards.score(COMPLETIONS)[0]]


def test_a_function_of_a_module_is_named_by_its_file():
    assert reward_texts([module_function, "gsm8k"]) == [f"{__file__}:module_function", "gsm8k"]


def test_other_functions_are_sent_with_what_they_refer_to():
    cell = define(
        "import math\n"
        "BONUS = 2\n"
        "def helper(text): return math.sqrt(len(text)) ** 2\n"
        "def score(text): return round(helper(text) + BONUS)\n"
        "class Scorer:\n"
        "    def __init__(self, value): self.value = value\n"
        "    def __call__(self, text): return self.value\n"
        "    def method(self, completions): return [self.value + 1 for _ in completions]\n"
    )
    factor = 7
    scorer = cell["Scorer"](11)
    rewards = [
        cell["score"],
        lambda text: factor,
        functools.partial(lambda text, more: more, more=13),
        scorer,
        scorer.method,
    ]
    names, found = values(rewards)
    assert names == ["score", "lambda", "lambda_2", "Scorer", "method"]
    assert found == [5, 7, 13, 11, 12]


def test_it_is_what_it_was_when_it_was_given():
    cell = define("value = 1\ndef score(text): return value\n")
    with Rewards([cell["score"]], workers=1) as rewards:
        cell["value"] = 2
        assert rewards.score(COMPLETIONS)[0][0].value == 1
    assert values([cell["score"]])[1] == [2]


def test_tracebacks_show_the_cell():
    cell = define("def score(text):\n    return 1 / len(text[3:])\n")
    with Rewards([cell["score"]], workers=1) as rewards:
        reason = rewards.score(COMPLETIONS)[0][0].reason
    assert '"<cell 1>", line 2' in reason and "return 1 / len(text[3:])" in reason and "callables" not in reason


def test_the_form_and_the_columns_are_checked():
    with Rewards([lambda x: 1.0]) as rewards, pytest.raises(UsageError, match="none of the known forms"):
        rewards.check()
    with (
        Rewards([lambda text, level: 1.0]) as rewards,
        pytest.raises(UsageError, match="not columns of the data: level"),
    ):
        rewards.check(["question"])


def test_what_cannot_be_sent_is_refused(monkeypatch):
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"lambda runs in a process of its own and cannot be sent there: .*lock"):
        reward_texts([lambda text: lock is None])
    monkeypatch.setattr(callables, "SIZE_LIMIT", 2**20)
    data = bytes(2**21)
    with pytest.raises(UsageError, match="refers to 2 MiB of data"):
        reward_texts([lambda text: len(data)])


def test_another_process_says_what_to_do():
    with pytest.raises(UsageError, match="Resume from Python and pass the function again"):
        parse_spec("in-memory:of_another_process")
