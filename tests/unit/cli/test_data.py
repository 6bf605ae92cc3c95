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
    assert "2 examples; 1 exact duplicate\n" in said and "counted with pico" in said
    assert "<s><|user|>7+8=<|end|><|assistant|>[[15<|end|>]]" in said
    assert "\x1b" not in said and "problem" not in said


def test_problems_and_the_exit_code(capsys):
    write("rows.jsonl", CHAT, {"messages": [{"role": "user", "content": "7+8="}, {"role": "gpt"}]}, {})
    write("more.jsonl", CHAT)
    assert main(["data", "check", "more.jsonl", "rows.jsonl"]) == 1
    said = capsys.readouterr().out
    assert "3 examples, 2 of them unusable" in said and "2 problems:" in said
    assert "rows.jsonl:2: messages[1]: the message has no 'content'" in said and "rows.jsonl:3: " in said


def test_for_a_verb_and_a_model(capsys):
    write("rows.jsonl", {"prompt": "7+8=", "chosen": "15" * 40, "rejected": "16"})
    assert main(["data", "check", "rows.jsonl", "--verb", "dpo", "--model.path", "pico", "--max_tokens", "40"]) == 0
    said = capsys.readouterr().out
    assert (
        "max_length is 40" in said
        and "over the limit" in said
        and "1 example longer than that will be truncated" in said
    )
    assert "counted with pico" not in said
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
        (["check", "rows.jsonl", "--verb", "sfd"], "no such trainer"),
        (["chek"], "the commands are check, mix, split, preprocess"),
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
    assert "600 examples" in said and "\x1b[32m15<|end|>" in said and "[[" not in said and "━" in said


LONG = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def long_chat(prompt, completion="She sold 72 clips in all."):
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]}


def test_near_duplicates_are_listed_and_left_out(capsys):
    other = "A train leaves the station at noon with 120 people, and 35 of them leave it at the next stop."
    write("rows.jsonl", long_chat(LONG), long_chat(other), long_chat(LONG.upper()), long_chat(LONG))
    assert main(["data", "check", "rows.jsonl", "--near_duplicates", "--output_file", "unique.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "2 near-duplicates of an earlier example, of 4 (similarity from 0.8); the largest group has 3\n" in said
    assert "  rows.jsonl:3 is a near-duplicate of rows.jsonl:1\n" in said
    assert "done: 2 examples in unique.jsonl; 2 examples left out\n" in said
    with open("unique.jsonl") as file:  # noqa: PTH123
        assert [json.loads(line) for line in file] == [long_chat(LONG), long_chat(other)]
    write("more.jsonl", long_chat(LONG))
    assert main(["data", "check", "rows.jsonl", "more.jsonl", "--near_duplicates"]) == 0
    assert "  more.jsonl:1 is a near-duplicate of rows.jsonl:1\n" in capsys.readouterr().out


def test_overlap_with_evaluation_sets_fails_until_it_is_left_out(capsys):
    write("rows.jsonl", CHAT, long_chat(f"Please solve: {LONG}"), long_chat("Hello there."))
    write("test.jsonl", {"question": LONG, "answer": "72"}, {"question": "7+8=", "answer": "15"})
    arguments = ["data", "check", "rows.jsonl", "--decontaminate", "test.jsonl"]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "2 examples of 3 overlap with the evaluation sets; 2 with test.jsonl\n" in said
    assert "  rows.jsonl:1 shares with test.jsonl:2: 7+8=\n" in said
    shared = "natalia sold clips to 48 of her friends in april and then she"
    assert f"  rows.jsonl:2 shares with test.jsonl:1: {shared}\n" in said
    assert main([*arguments, "--output_file", "clean.jsonl"]) == 0
    with open("clean.jsonl") as file:  # noqa: PTH123
        assert [json.loads(line) for line in file] == [long_chat("Hello there.")]
    assert main([*arguments, "--ngram_words", "30"]) == 1  # the short prompt
    assert "1 example of 3 overlaps" in capsys.readouterr().out


def test_nothing_is_written_if_an_example_is_bad_or_none_is_left(capsys):
    write("rows.jsonl", CHAT, {"messages": []})
    assert main(["data", "check", "rows.jsonl", "--near_duplicates", "--output_file", "out.jsonl"]) == 1
    assert "out.jsonl is not written, because of the problems above" in capsys.readouterr().out
    write("rows.jsonl", CHAT)
    assert main(["data", "check", "rows.jsonl", "--decontaminate", "rows.jsonl", "--output_file", "out.jsonl"]) == 1
    assert "no example is left" in capsys.readouterr().err


def test_lengths_of_prompts_and_completions_as_bars_and_picture(capsys):
    write("rows.jsonl", CHAT, long_chat(LONG))
    assert main(["data", "check", "rows.jsonl", "--picture", "lengths.svg"]) == 0
    said = capsys.readouterr().out
    prompts = [len("7+8=") + 4, len(LONG) + 4]  # <s>, two roles and the end of a turn
    assert f"  tokens per prompt: {sum(prompts) / 2:.0f} on average, {max(prompts)} at most\n" in said
    assert "  tokens per completion: 14 on average, 26 at most\n" in said
    assert said.endswith("picture: lengths.svg\n")
    with open("lengths.svg") as file:  # noqa: PTH123
        drawn = file.read()
    assert "rows.jsonl: prompt" in drawn and "2 sequences, 14 on average, 26 at most" in drawn


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["check", "rows.jsonl", "--output_file", "o.jsonl"], "needs --near_duplicates or --decontaminate"),
        (["check", "rows.jsonl", "rows.jsonl", "--near_duplicates", "--output_file", "o.jsonl"], "data mix"),
        (["check", "rows.jsonl", "--near_duplicates", "--similarity", "2"], "similarity is 2.0"),
        (["check", "rows.jsonl", "--near_duplicates", "--output_file", "rows.jsonl"], "is also the input"),
        (["check", "rows.jsonl", "--picture", "rows.pdf"], "ends in .svg, .png, .html"),
        (["mix", "rows.jsonl"], "--output_file is not set"),
        (["mix", "rows.jsonl", "--output_file", "there.jsonl"], "already exists"),
        (["mix", "rows.jsonl", "--output_file", "o.jsonl", "--trainer", "sfd"], "no such trainer"),
        (["split", "rows.jsonl", "--output_dir", "split"], "nothing is held out"),
    ],
)
def test_wrong_use_of_tools(argv, words, capsys):
    write("rows.jsonl", CHAT)
    write("there.jsonl", CHAT)
    assert main(["data", *argv]) == 2
    assert words in capsys.readouterr().err


def test_mix_and_split(capsys):
    write("a.jsonl", *(long_chat(f"{number}+1=", f"{number + 1}") for number in range(8)))
    write("b.jsonl", *({"question": f"{number}-1=", "answer": f"{number - 1}"} for number in range(4)))
    assert main(["data", "mix", "a.jsonl", "b.jsonl", "--output_file", "mixed.jsonl"]) == 2
    assert "Add --normalize" in capsys.readouterr().err
    mixture = ["data", "mix", "a.jsonl", "b.jsonl", "--normalize", "--output_file", "mixed.jsonl"]
    assert main([*mixture, "--weights", "0.75", "0.25"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.jsonl: 8 of 8 examples, 72.7% of the mixture",
        "b.jsonl: 3 of 4 examples, 27.3% of the mixture",
        "done: 11 examples in mixed.jsonl",
    ]
    assert main(["data", "split", "mixed.jsonl", "--output_dir", "split", "--eval_examples", "3"]) == 0
    said = capsys.readouterr().out
    assert "split/train.jsonl: 8 examples, 72.7%\nsplit/eval.jsonl: 3 examples, 27.3%\n" in said
    assert "examples of one prompt and near-duplicates (similarity from 0.8) are in one file: 11 groups" in said
    assert main(["data", "check", "split:train", "split:eval"]) == 0
