"""`posttrain data check`: what is printed, and the exit code."""

import json
import sys

import pytest

from posttrain.cli.main import main

CHAT = {"messages": [{"role": "user", "content": "7+8="}, {"role": "assistant", "content": "15"}]}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, *rows):
    with open(name, "w") as file:  # noqa: PTH123
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_good_file(capsys):
    write("rows.jsonl", CHAT, CHAT)
    assert main(["data", "check", "rows.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "rows.jsonl: chat: messages\n  for sft, distill\n" in said
    assert "2 rows; 1 repeat an earlier one exactly" in said and "counted by pico" in said
    assert "<s><|user|>7+8=<|end|><|assistant|>[[15<|end|>]]" in said
    assert "\x1b" not in said and "problem" not in said


def test_problems_and_the_exit_code(capsys):
    write("rows.jsonl", CHAT, {"messages": [{"role": "user", "content": "7+8="}, {"role": "gpt"}]}, {})
    write("more.jsonl", CHAT)
    assert main(["data", "check", "more.jsonl", "rows.jsonl"]) == 1
    said = capsys.readouterr().out
    assert "3 rows, 2 of them bad" in said and "2 problems:" in said
    assert "rows.jsonl:2: messages[1]: the message has no 'content'" in said and "rows.jsonl:3: " in said


def test_for_a_verb_and_a_model(capsys):
    write("rows.jsonl", {"prompt": "7+8=", "chosen": "15" * 40, "rejected": "16"})
    assert main(["data", "check", "rows.jsonl", "--verb", "dpo", "--model.path", "pico", "--max_tokens", "40"]) == 0
    said = capsys.readouterr().out
    assert "data.max_length is 40" in said and "over the limit" in said and "1 rows are longer" in said
    assert "counted by pico" not in said
    assert main(["data", "check", "rows.jsonl", "--verb", "sft"]) == 1
    assert "rows.jsonl:1: the format is preference" in capsys.readouterr().out


def test_without_a_model_any_role_will_do(capsys):
    turns = [*CHAT["messages"], {"role": "tool", "content": "ok"}, {"role": "assistant", "content": "fine"}]
    write("rows.jsonl", {"messages": turns})
    assert main(["data", "check", "rows.jsonl"]) == 0
    assert "<|tool|>ok<|end|>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["check", "gone.jsonl"], "gone.jsonl: no such file"),
        (["check", "rows.jsonl:1", "rows.jsonl"], "has no weight"),
        (["check", "rows.jsonl", "--verb", "sfd"], "no such verb"),
        (["chek"], "there are check, preprocess"),
    ],
)
def test_wrong_use(argv, words, capsys):
    write("rows.jsonl", CHAT)
    assert main(["data", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    write("rows.jsonl", *[CHAT] * 600)
    assert main(["data", "check", "rows.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "600 rows" in said and "\x1b[32m15<|end|>" in said and "[[" not in said and "━" in said
