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


@pytest.mark.parametrize(
    ("keys", "row", "messages"),
    [
        ({"prompt": "turns.0", "completion": "turns.-1"}, {"turns": ["q", "x", "a"]}, [user("q"), bot("a")]),
        (  # JSON inside a text, and a number as text
            {"prompt": "meta.ask.0.text", "completion": "meta.result"},
            {"meta": '{"ask": [{"text": "q"}], "result": 36}'},
            [user("q"), bot("36")],
        ),
        (
            {"prompt": "{story}\n{info.ask} Answer in \\boxed{}.", "completion": "n"},
            {"story": "s", "info": {"ask": "q?"}, "n": 1.5},
            [user("s\nq? Answer in \\boxed{}."), bot("1.5")],
        ),
    ],
)
def test_paths_through_lists_and_json_numbers_and_joined_columns(keys, row, messages):
    _, [example] = read("chat", row, map_keys=keys)
    assert example.messages == messages


@pytest.mark.parametrize(
    ("their", "message"),
    [
        ("turns.3", 'f.jsonl:1: turns.3: no such column, but data.map_keys has "prompt": "turns.3"'),
        ("{turns}", "f.jsonl:1: turns: is list; data.map_keys puts it into a text"),
        ("{none}", "f.jsonl:1: none: is null; data.map_keys puts it into a text"),
        ("x {y}", 'f.jsonl:1: y: no such column, but data.map_keys has "prompt": "x {y}"; the columns are turns, none'),
    ],
)
def test_paths_and_texts_that_cannot_be_filled(their, message):
    with pytest.raises(DataError) as caught:
        read("prompt", {"turns": ["q"], "none": None}, map_keys={"prompt": their})
    assert str(caught.value).startswith(message)


def test_labels_stay_numbers():
    row = {"q": "q", "a": "a", "good": 1}
    _, [example] = read("labelled", row, map_keys={"prompt": "q", "completion": "a", "label": "good"})
    assert example.label == 1.0


def test_a_function_of_the_user_makes_the_columns(tmp_path):
    file = tmp_path / "convert_for_test.py"
    file.write_text(
        "def columns(record):\n    return {'prompt': record['q'], 'completion': 'yes' if record['a'] else 'no'}\n"
        "def nothing(record):\n    return None\n"
    )
    rows = {"q": "is 7+8 15?", "a": True}, {"q": "is 7+8 78?", "a": False}
    _, examples = read("chat", *rows, map_keys={"function": f"{file}:columns"})
    assert [example.messages[-1] for example in examples] == [bot("yes"), bot("no")]
    with pytest.raises(DataError, match=r"f.jsonl:2: columns\(\) of data.map_keys raised KeyError: 'q'"):
        read("chat", rows[0], {"a": 1}, map_keys={"function": f"{file}:columns"})
    with pytest.raises(DataError, match=r"f.jsonl:1: nothing\(\) of data.map_keys must return columns as a dict"):
        read("chat", rows[0], map_keys={"function": f"{file}:nothing"})
    with pytest.raises(UsageError, match=r"has no function 'other'; it has columns, nothing"):
        read("chat", rows[0], map_keys={"function": f"{file}:other"})
    with pytest.raises(UsageError, match=r"there is no file .*missing.py"):
        read("chat", rows[0], map_keys={"function": "missing.py:other"})
