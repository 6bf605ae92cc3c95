"""`posttrain generate`, `score` and `select`, and training on what they write; killed in the middle, too."""

import json
import os
import signal

import pytest

from tests.e2e.commands import command, rows_of, start, wait_until

PROMPTS, N = 12, 4


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    with (folder / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(PROMPTS))
    (folder / "rewards.py").write_text("def letters(text): return float(sum(letter.isalpha() for letter in text))\n")
    return folder


@pytest.fixture(scope="module")
def answers(workplace):
    out = workplace / "answers.jsonl"
    assert command("generate", "pico", workplace / "prompts.jsonl", "--out", out, "--n", N, "--max_tokens", 16) == 0
    return out


@pytest.fixture(scope="module")
def scored(workplace, answers):
    out = workplace / "scored.jsonl"
    reward = f"{workplace}/rewards.py:letters"
    assert command("score", answers, "--reward", reward, "--normalize", "--out", out) == 0
    return out


def test_the_numbers_add_up_from_prompts_to_rows(answers, scored, workplace, capsys):
    assert len(rows_of(answers)) == len(rows_of(scored)) == PROMPTS * N
    for method in ("best-of-n", "pairs", "condition"):
        out = workplace / f"{method}.jsonl"
        assert command("select", method, scored, "--out", out) == 0
        said = capsys.readouterr().out.rpartition("completions: ")[2]
        counts = {name: int(number) for number, name in (part.split(" ", 1) for part in said.strip().split(", "))}
        assert counts.pop("read") == PROMPTS * N == sum(counts.values())
        assert counts["used"] == len(rows_of(out)) * (2 if method == "pairs" else 1)


@pytest.mark.parametrize(("method", "verb"), [("best-of-n", "sft"), ("condition", "sft"), ("pairs", "dpo")])
def test_trainers_read_what_is_selected(method, verb, scored, tmp_path):
    rows = tmp_path / "rows.jsonl"
    assert command("select", method, scored, "--out", rows) == 0
    options = ["--model.path", "pico", "--data.train", rows, "--steps", 1, "--quiet", "--out", tmp_path / "run"]
    assert command(verb, *options) == 0


def test_the_best_of_n_is_better(scored, tmp_path):
    assert command("select", "best-of-n", scored, "--out", tmp_path / "best.jsonl") == 0
    best = [row["reward"] for row in rows_of(tmp_path / "best.jsonl")]
    every = [row["reward"] for row in rows_of(scored)]
    assert sum(best) / len(best) > 0.5 and abs(sum(every) / len(every)) < 1e-6  # normalised: 0 on average


def test_stopped_and_killed_it_goes_on_to_the_same_file(workplace, tmp_path):
    options = ["generate", "pico", workplace / "prompts.jsonl", "--n", N, "--max_tokens", 64, "--batch", 4]
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert command(*options, "--out", whole, "--quiet") == 0

    process = start(*options, "--out", killed)
    wait_until(lambda: killed.exists() and killed.stat().st_size, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130 and "--resume" in said and "Traceback" not in said

    reached = killed.stat().st_size
    process = start(*options, "--out", killed, "--resume", "--quiet")
    wait_until(lambda: killed.stat().st_size > reached, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(rows_of(killed)) < PROMPTS * N
    with killed.open("ab") as file:  # and what a kill inside a write leaves
        file.write(b'{"index": 5, "sam')
    assert command(*options, "--out", killed, "--resume", "--quiet") == 0
    assert killed.read_bytes() == whole.read_bytes()


def test_other_settings_and_existing_files_are_refused(workplace, answers, scored, capsys):
    prompts = workplace / "prompts.jsonl"
    assert command("generate", "pico", prompts, "--out", answers) == 2
    assert "--resume" in capsys.readouterr().err
    assert command("generate", "pico", prompts, "--out", answers, "--n", N, "--max_tokens", 17, "--resume") == 2
    assert "max_tokens was 16, is 17" in capsys.readouterr().err
    assert command("score", answers, "--reward", "format", "--out", scored) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert len(rows_of(answers)) == len(rows_of(scored)) == PROMPTS * N


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "pico", "prompts.jsonl", "--out", "x.jsonl", "--window", "3"], "use window_index and"),
        (["generate", "pico", "prompts.jsonl", "--out", "x.jsonl", "--n", "2", "--greedy"], "the same one"),
        (["generate", "pico", "nothing.jsonl", "--out", "x.jsonl"], "nothing.jsonl"),
        (["generate", "no/such/model/at/all", "prompts.jsonl", "--out", "x.jsonl"], "no/such/model"),
        (["generate", "pico", "prompts.jsonl", "--out", "x.txt"], "ends in .jsonl"),
        (["select", "threshold", "scored.jsonl", "--out", "x.jsonl"], "--min_reward"),
        (["select", "pairs", "scored.jsonl", "--fraction", "0.5", "--out", "x.jsonl"], "for select top-fraction"),
        (["select", "threshold", "scored.jsonl", "--min_reward", "99", "--out", "x.jsonl"], "no row is left"),
        (["select", "pairs", "answers.jsonl", "--out", "x.jsonl"], "posttrain score"),
        (["score", "answers.jsonl", "--reward", "model:pico", "--out", "x.jsonl"], "no score head"),
        (["score", "answers.jsonl", "--reward", "gsm9k", "--out", "x.jsonl"], "gsm8k"),
        (["score", "prompts.jsonl", "--reward", "format", "--out", "x.jsonl"], "prompts.jsonl:1"),
    ],
)
def test_mistakes_are_named(argv, words, workplace, scored, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert command(*argv) in (1, 2)
    assert words in capsys.readouterr().err
    assert not (workplace / "x.jsonl").exists()


def test_existing_rows_are_scored_and_say_what_they_are_worth(workplace, tmp_path):
    """Conditional SFT: rows of any format that sft reads, scored, and the prompt tells the score."""
    rows = [{"question": f"{n}+1=", "answer": f"{n + 1} " + "x" * n} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = f"{workplace}/rewards.py:letters"
    options = ["--reward", reward, "--normalize", "--out", tmp_path / "scored.jsonl"]
    assert command("score", tmp_path / "rows.jsonl", *options) == 0
    assert command("select", "condition", tmp_path / "scored.jsonl", "--out", tmp_path / "out.jsonl") == 0
    said = [row["prompt"][0]["content"] for row in rows_of(tmp_path / "out.jsonl")]
    assert said == [f"{n}+1= <rm_score>: {(n - 1.5) / 1.25**0.5:.2f} " for n in range(4)]
