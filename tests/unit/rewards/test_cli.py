"""`posttrain rewards check` and `list`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.cli.rewards import completion_for_scoring, run
from posttrain.core.errors import DataError, UsageError
from posttrain.rewards.builtin import verifiers
from tests.unit.rewards.judging import judging, write_rubric

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


def labelled(folder, count=8):
    """Pairs of completions; by the labels the longer one is better as often as the shorter one."""
    rows = []
    for number in range(count):
        good, bad = f"q9 number {number}", f"q2 number {number}"
        longer = " and more words" * 3
        good, bad = (good + longer, bad) if number % 2 else (good, bad + longer)
        for text, label in ((good, True), (bad, False)) if number % 3 else ((bad, False), (good, True)):
            rows.append({"question": f"question {number}", "text": text, "good": label})
    file = folder / "labelled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("mode", ["pointwise", "pairwise", "ranking"])
def test_a_fair_judge_passes_the_check(tmp_path, capsys, mode):
    file = labelled(tmp_path)
    with judging() as server:
        reward = write_rubric(tmp_path, server, "fair", mode, swap=False)
        assert run(["check", str(file), "--reward", reward, "--label_column", "good", "--max_examples", "16"]) == 0
    out = capsys.readouterr().out
    assert f"judge.fair_{mode}: agrees with the labels in 100.0% of 8 pairs of one prompt" in out
    assert "prefers the longer completion in 50.0%; by the labels 50.0% of them are better" in out
    assert "16 requests, 0 cached" in out  # of each completion, or of each pair in both orders
    assert ("0.0% of 8 verdicts flip" in out) == (mode != "pointwise")
    assert "do not train" not in out


@pytest.mark.parametrize(
    ("style", "mode", "caught"),
    [
        ("first", "pairwise", "100% of its verdicts depend on the order: it prefers the first completion"),
        ("first", "ranking", "100% of its verdicts depend on the order: it prefers the first completion"),
        ("longer", "pointwise", "it prefers the longer completion in 100% of the pairs"),
        ("longer", "pairwise", "it prefers the longer completion in 100% of the pairs"),
        ("longer", "ranking", "it prefers the longer completion in 100% of the pairs"),
    ],
)
def test_a_biased_judge_is_caught(tmp_path, capsys, style, mode, caught):
    file = labelled(tmp_path, 12)
    with judging() as server:
        reward = write_rubric(tmp_path, server, style, mode, scale=[1, 100], swap=False)
        assert run(["check", str(file), "--reward", reward, "--label_column", "good"]) == 1
    out = capsys.readouterr().out
    assert f"judge.{style}_{mode}: do not train with it: {caught}" in out
    assert f"judge.{style}_{mode}: do not train with it: it agrees with the labels in 50% of the pairs only" in out


def test_refusals_and_unreadable_verdicts_are_counted(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    texts = ["q9", "refuse", "garbage", "q1"]
    file.write_text("".join(json.dumps({"question": "p", "text": text, "good": 1}) + "\n" for text in texts))
    with judging() as server:
        assert run(["check", str(file), "--reward", write_rubric(tmp_path, server), "--label_column", "good"]) == 1
    out = capsys.readouterr().out
    assert "5 requests, 0 cached, 1 refused, 2 unreadable" in out  # garbage is asked twice
    assert "500 + 50 tokens of prompts and verdicts" in out
    assert "no two labels of scored completions differ" in out


def test_labels_must_be_numbers(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "p", "answer": "4", "text": "4", "good": "yes"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: good: expected a number or true or false, found 'yes'"):
        run(["check", str(file), "--reward", "gsm8k", "--label_column", "good"])


def test_the_audit_finds_no_false_positive_and_the_best_recall(capsys):
    """The labelled cases are part of the package; another library's rule must not find more of the right ones.

    Rules of another library compute some cases without end. Each of these takes the whole timeout, our own a moment.
    """
    assert run(["audit", "--verifiers", "math", "gsm8k", "choice", "format", "--timeout_seconds", "15"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    own = {row[0]: row for row in rows if row[1] == "posttrain"}
    assert set(own) == {"math", "gsm8k", "choice", "format"}
    assert all(row[-1] == "0" and float(row[3]) == 1 for row in own.values())
    others = [row for row in rows if row[1] != "posttrain"]
    assert len(others) == 6 and all(float(row[-2]) <= float(own[row[0]][4]) for row in others)
    assert any(int(row[-1]) > 0 for row in others), "the cases are hard"


def test_the_audit_of_programs(capsys):
    assert run(["audit", "--verifiers", "code", "--timeout_seconds", "60", "--full"]) == 0
    assert "1.000   1.000                0" in capsys.readouterr().out


def test_an_audit_shows_what_a_verifier_gets_wrong(monkeypatch, capsys):
    """A case with the opposite label must be reported and make the exit code 1."""
    from posttrain.rewards import audit

    wrong = [replace(case, correct=not case.correct) for case in audit.read_cases() if case.verifier == "format"]
    monkeypatch.setattr(audit, "read_cases", lambda: wrong)
    assert run(["audit", "--verifiers", "format", "--full"]) == 1
    assert "format, posttrain: accepted: '<think>a</think><answer>b</answer>'" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no cases for 'step'"):
        run(["audit", "--verifiers", "step"])


def test_an_audit_of_ones_own_cases(tmp_path, capsys):
    """Named in a file; the exit code says that a wrong answer was accepted, and errors name the line."""
    file = tmp_path / "cases.jsonl"
    rows = [
        {"completion": "\\boxed{2, 1}", "truth": "$1$ and $2$", "correct": True},
        {"completion": "#### 18", "truth": "18", "correct": False, "verifier": "gsm8k"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["audit", "--cases", str(file), "--full", "--timeout_seconds", "60"]) == 1
    out = capsys.readouterr().out
    assert "gsm8k, posttrain: accepted: '#### 18'" in out and "choice" not in out
    assert out.splitlines()[1].split()[:6] == ["math", "posttrain", "1", "1.000", "1.000", "0"]
    with pytest.raises(UsageError, match="no case is for code"):
        run(["audit", "--cases", str(file), "--verifiers", "code"])
    file.write_text('{"completion": "4", "truth": "4", "correct": true}\n{"completion": "4"}\n')
    with pytest.raises(DataError, match=r"cases.jsonl:2: not a case \(KeyError: 'correct'\)"):
        run(["audit", "--cases", str(file)])
    with pytest.raises(DataError, match="cannot be read"):
        run(["audit", "--cases", str(tmp_path / "none")])
