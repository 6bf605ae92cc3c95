"""`posttrain rewards check` and `list`."""

import json
import re
from pathlib import Path

import pytest

from posttrain.cli.rewards import completion_for_scoring, run
from posttrain.core.errors import DataError, UsageError
from posttrain.rewards.builtin import verifiers

ROOT = Path(__file__).parents[3]


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    texts = ["#### 4", "5", "boom"]
    file.write_text("".join(json.dumps({"question": "2+2?", "answer": "4", "text": text}) + "\n" for text in texts))
    return file


def test_a_table_a_summary_and_the_exit_code(rows, tmp_path, capsys):
    reward = tmp_path / "my.py"
    reward.write_text("def score(text):\n    return 1.0 if text != 'boom' else 1 / 0\n", encoding="utf-8")
    assert run(["check", str(rows), "--reward", "gsm8k", f"{reward}:score", "--weights", "1", "0.5"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"rows.jsonl:1\s+gsm8k\s+1\s+\d+\.\d+ ms\s+4, expected 4", out)
    assert re.search(r"rows.jsonl:3\s+my.score\s+error\s.*ZeroDivisionError", out)
    assert "gsm8k: mean 0.3333; 3 ok, 0 error, 0 timeout; slowest" in out
    assert "my.score: mean 1.0000; 2 ok, 1 error, 0 timeout" in out
    assert "reward: mean 1.0000 over 2 of 3 completions" in out
    assert run(["check", str(rows), "--reward", f"{reward}:score", "--max_rows", "2"]) == 0
    assert "over 2 of 2 completions" in capsys.readouterr().out


def test_other_columns(rows, capsys):
    options = ["--map_keys", '{"text": "question", "ground_truth": "answer"}', "--reward", "gsm8k"]
    assert run(["check", str(rows), *options]) == 0
    assert "2, expected 4" in capsys.readouterr().out


def test_the_example(capsys):
    functions = [f"{ROOT}/examples/reward.py:{name}" for name in ("short", "states_the_answer", "polite")]
    assert run(["check", f"{ROOT}/examples/data/answers.jsonl", "--reward", "gsm8k", *functions]) == 0
    assert "gsm8k: mean 0.5000; 4 ok" in capsys.readouterr().out


def test_records_and_rows_of_other_libraries():
    record = {"text": "a", "prompt": "p", "columns": {"label": 1}, "tokens": [1, 2], "finish": "stop", "reward": 1}
    found = completion_for_scoring(record, "f:1")
    assert (found.text, found.prompt, found.columns, found.tokens, found.finish) == ("a", "p", {"label": 1}, 2, "stop")
    talk = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    found = completion_for_scoring(talk, "f:1")
    assert found.text == "a" and found.messages == talk["prompt"] and found.columns == {"prompt": talk["prompt"]}
    for row, message in (({"question": "q"}, "f:1: no completion"), ({"text": 3}, "f:1: text: expected text")):
        with pytest.raises(DataError, match=message):
            completion_for_scoring(row, "f:1")


def test_wrong_use(rows):
    for args, message in (
        (["chek"], "there are check, list"),
        (["check", str(rows), "--reward", "gsm9k"], "Did you mean gsm8k"),
        (["check", str(rows), "--reward", "model:x"], "use posttrain score for reward models"),
        (["check", "nothing.jsonl", "--reward", "gsm8k"], "no such file"),
        (["check", str(rows), "--reward", "gsm8k", "--map_keys", "[1]"], "must be a mapping"),
        (["check", str(rows), "--reward", "gsm8k", "--map_keys", '{"text": ["a"]}'], "must have names of columns"),
        (["check", str(rows), "--reward", "gsm8k", "--max_rows", "-1"], "max_examples is -1; it must be at least 0"),
    ):
        with pytest.raises(UsageError, match=message):
            run(args)


def test_list_names_all(capsys):
    assert run(["list"]) == 0 and run([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in verifiers()) and "check" in out
