"""data.map_keys: renamed before recognised; what is wrong with it is said, with its place."""

import json

import pytest

from posttrain.core.errors import DataError, UsageError
from posttrain.data.reading.columns import KeyMap
from posttrain.data.reading.records import Record
from tests.unit.data.reading.test_formats import bot, read, system, user


def test_nothing_changes_without():
    row = Record({"a": 1}, "f:1")
    assert KeyMap.parse("").apply(row) is row


@pytest.mark.parametrize(
    ("keys", "row", "verdict", "messages"),
    [
        (  # of GRPO data: R1 on Orz math
            {"prompt": "problem", "query": "", "response": "answer", "system": ""},
            {"problem": "q", "answer": "a", "system": "not wanted"},
            "prompt and response: prompt, response",
            [user("q"), bot("a")],
        ),
        (
            {"prompt": "instruction", "query": "input", "response": "output"},
            {"instruction": "i", "output": "a"},  # a row may be without the second
            "prompt and response: prompt, response",
            [user("i"), bot("a")],
        ),
        (
            {"prompt": "notice", "query": "question", "response": "answer", "system": "sys", "history": "histories"},
            {"notice": "n", "question": "q", "answer": "a", "sys": "s", "histories": [["h", "g"]]},
            "prompt and response: prompt, query, response, system, history",
            [system("s"), user("h"), bot("g"), user("n\nq"), bot("a")],
        ),
        (
            {"history": "histories"},
            {"instruction": "i", "input": "j", "output": "a", "histories": [["h", "g"]]},
            "Alpaca: history, instruction, input, output",
            [user("h"), bot("g"), user("i\nj"), bot("a")],
        ),
        (
            {"prompt": "in.text", "completion": "out.best.text"},
            {"in": {"text": "q"}, "out": {"best": {"text": "a"}}, "prompt": "the old one is gone"},
            "prompt and completion: prompt, completion",
            [user("q"), bot("a")],
        ),
        (
            {"prompt": "a.b", "completion": "c"},  # a name with a dot goes before a path
            {"a.b": "q", "a": {"b": "no"}, "c": "a"},
            "prompt and completion: prompt, completion",
            [user("q"), bot("a")],
        ),
        (
            {"messages": "talk", "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me"}},
            {"talk": [{"who": "system", "what": "s"}, {"who": "me", "what": "q"}, {"who": "assistant", "what": "a"}]},
            "chat: messages",
            [system("s"), user("q"), bot("a")],
        ),
        (
            {"conversations": "talk", "user_tag": "U", "assistant_tag": "A", "observation_tag": "T"},
            {"talk": [{"from": f, "value": v} for f, v in (("U", "q"), ("A", "f"), ("T", "1"), ("A", "a"))]},
            "ShareGPT: conversations",
            [user("q"), bot("f"), {"role": "tool", "content": "1"}, bot("a")],
        ),
    ],
)
def test_columns_under_other_names(keys, row, verdict, messages):
    found, [example] = read("chat", row, map_keys=json.dumps(keys))
    assert found == verdict and example.messages == messages


def test_other_columns_flow_on():
    keys = json.dumps({"prompt": "problem", "ground_truth": "reward_model.ground_truth"})
    row = {"problem": "q", "reward_model": {"ground_truth": "4"}, "level": 3}
    _, [example] = read("prompt", {**row, "reward_model": [row["reward_model"]]}, map_keys='{"prompt": "problem"}')
    assert example.columns["level"] == 3
    _, [example] = read("prompt", row, map_keys=keys)
    assert example.columns == {"prompt": "q", "ground_truth": "4", "reward_model": {"ground_truth": "4"}, "level": 3}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("{", "not valid JSON .*: {"),
        ("[1]", "expected {.our column"),
        ('{"prompt": 3}', "prompt: expected a column name, found 3"),
        ('{"tags": {"rol_tag": "x"}}', "unknown tag 'rol_tag'; known are role_tag, content_tag"),
        ('{"tags": 3}', "unknown tag 'tags'"),
    ],
)
def test_wrong_maps(keys, message):
    with pytest.raises(UsageError, match=f"^data.map_keys: {message}"):
        KeyMap.parse(keys)


@pytest.mark.parametrize("their", ["problem", "reward_model.truth", "a.b.c"])
def test_a_missing_column_is_named(their):
    keys = json.dumps({"prompt": their})
    columns = "q, reward_model, a"
    message = (
        f'f.jsonl:1: {their}: no such column, but data.map_keys has "prompt": "{their}"; the columns are {columns}'
    )
    with pytest.raises(DataError) as caught:
        read("prompt", {"q": 1, "reward_model": {"ground_truth": 3}, "a": {"b": 2}}, map_keys=keys)
    assert str(caught.value) == message
