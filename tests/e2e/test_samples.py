"""`posttrain samples`, and training from what a run recorded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from posttrain.cli.samples import run as samples
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.metrics_sinks import is_wall_clock
from posttrain.rollout import records
from tests.e2e.commands import command, rows_of

CODE = """
def letters(text): return float(sum(letter.isalpha() for letter in text))
def digits(text): return float(sum(letter.isdigit() for letter in text))
def picky(text):
    if len(text) % 3 == 0:
        raise ValueError("\\x1b[31mthree\\x07")
    return 1.0
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    (folder / "rewards.py").write_text(CODE)
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(4))
    return folder


def options(workplace, reward, **more):
    given = {
        "model.path": "pico",
        "data.train": workplace / "rows.jsonl",
        "reward": f"{workplace}/rewards.py:{reward}",
        "rollout.samples_per_prompt": 3,
        "rollout.max_tokens": 12,
        "train.batch_size": 2,
        "train.learning_rate": 1e-3,
        "steps": 4,
    }
    given |= {name.replace("__", "."): value for name, value in more.items()}
    return [*(word for name, value in given.items() for word in (f"--{name}", value)), "--quiet"]


@pytest.fixture(scope="module")
def run(workplace):
    folder = workplace / "run"
    assert command("grpo", *options(workplace, "letters"), "--out", folder) == 0
    return folder


@pytest.fixture(scope="module")
def failing(workplace):
    folder = workplace / "failing"
    limits = ("--rewards.limits", 10, 2, 1)
    assert command("grpo", *options(workplace, "picky", steps=2), *limits, "--out", folder) == 0
    return folder


def shown(capsys, *args):
    assert samples([str(argument) for argument in args]) == 0
    return capsys.readouterr().out


def as_rows(text):
    return [json.loads(line) for line in text.splitlines()]


def test_best_and_worst_of_the_newest_step(run, capsys):
    recorded = [row for row in rows_of(run / records.FILE) if row["step"] == 4]
    rewards = sorted((row["reward"] for row in recorded), reverse=True)
    found = as_rows(shown(capsys, run, "--json", "--best", 2, "--worst", 1))
    assert [row["reward"] for row in found] == [*rewards[:2], rewards[-1]]
    assert {row["step"] for row in found} == {4} and "tokens" not in found[0]
    assert found[0]["length"] == next(r for r in recorded if r["text"] == found[0]["text"])["mask"].count("1")
    text = shown(capsys, run)
    assert text.startswith("step 4: 6 completions, mean reward") and "best:" in text and "worst:" in text
    assert len(re.findall(r"^ +4 ", text, re.MULTILINE)) == 6  # none is shown twice
    assert "worst:" not in shown(capsys, run, "--best", 1)
    assert shown(capsys, run, "--step", 2).startswith("step 2: ")


def test_one_prompt_over_the_steps(run, workplace, capsys):
    origin = f"{workplace}/rows.jsonl:3"
    expected = [row["text"] for row in rows_of(run / records.FILE) if row["origin"] == origin]
    found = as_rows(shown(capsys, run, "--prompt", origin, "--json"))
    assert [row["text"] for row in found] == expected and len(expected) == 6  # two epochs of three answers
    assert found == as_rows(shown(capsys, run, "--prompt", "rows.jsonl:3", "--json"))
    assert found == as_rows(shown(capsys, run, "--prompt", found[-1]["group"], "--json"))
    text = shown(capsys, run, "--prompt", origin)
    assert text.startswith(f"{origin}: 2+1=") and text.count("(step ") == 2


def test_failures_and_why(run, failing, capsys):
    assert "no completion failed" in shown(capsys, run, "--failed")
    recorded = [row for row in rows_of(failing / records.FILE) if row["failure"]]
    assert recorded and all(len(row["text"]) % 3 == 0 for row in recorded)
    text = shown(capsys, failing, "--failed")
    assert f"{len(recorded)} time" in text and "ValueError: \\x1b[31mthree\\x07" in text
    assert [row["text"] for row in as_rows(shown(capsys, failing, "--failed", "--json"))] == [
        row["text"] for row in recorded
    ]
    assert "failed (--failed)" in shown(capsys, failing)


@pytest.mark.parametrize("how", [[], ["--full"], ["--prompt", "0"], ["--failed"], ["--json"]])
def test_nothing_that_a_terminal_obeys_is_printed(run, failing, capsys, tmp_path, how):
    nasty = "\x1b]0;owned\x07 \x9b31m \u202e [red]x[/red] \r\b\x00 \u2028 界"
    rows = [
        {**row, "text": nasty, "prompt": [{"role": "user", "content": nasty}]}
        for row in rows_of(failing / records.FILE)
    ]
    (tmp_path / records.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = shown(capsys, tmp_path, *how)
    assert not [letter for letter in text if not letter.isprintable() and letter != "\n"]
    if "--json" not in how and "--failed" not in how:
        assert r"\x1b]0;owned\x07" in text and r"\u202e" in text and "[red]x[/red]" in text


def test_a_pipe_gets_plain_lines_that_fit(run):
    code = "import sys; from posttrain.cli.samples import run; sys.exit(run(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, env=environment, check=True
    )
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 160
    assert done.stderr == ""


def test_wrong_use(run, tmp_path):
    (tmp_path / records.FILE).touch()
    for args, complaint in (
        ([tmp_path / "none"], "no recorded rollouts"),
        ([tmp_path], "nothing is recorded there yet"),
        ([run, "--step", 9], "there is no step 9; the newest is 4"),
        ([run, "--prompt", "rows.jsonl:99"], "no completion of a prompt 'rows.jsonl:99'. Give its file:line, as"),
        ([run, "--prompt", "999"], "no completion of a prompt '999'"),
    ):
        with pytest.raises(UsageError, match=re.escape(complaint)):
            samples([str(argument) for argument in args])


def test_a_torn_line_is_passed_over(run, tmp_path, capsys):
    whole = (run / records.FILE).read_bytes()
    (tmp_path / records.FILE).write_bytes(whole[:-30])
    assert shown(capsys, tmp_path).startswith("step 4: 5 completions")


# Training from the record


def weights(folder):
    [newest] = sorted((folder / "checkpoints").glob("*/model/model.safetensors"))[-1:]
    return load_file(newest)


def numbers(folder):
    rows = rows_of(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not is_wall_clock(key)} for row in rows]


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("grpo", {}),
        ("grpo", {"algo__kl": 0.1, "algo__mini_batch_size": 2, "algo__epochs_per_batch": 2}),
        ("reinforce", {}),
    ],
)
def test_a_replay_with_the_same_rewards_is_the_same_run(workplace, tmp_path, verb, more):
    given = options(workplace, "letters", **more)
    assert command(verb, *given, "--out", tmp_path / "one") == 0
    assert command(verb, *given, "--rollout.replay", tmp_path / "one", "--out", tmp_path / "two") == 0
    assert numbers(tmp_path / "one") == numbers(tmp_path / "two")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    replayed = [{**row, "seconds": 0} for row in rows_of(tmp_path / "two" / records.FILE)]
    assert replayed == [{**row, "seconds": 0} for row in rows_of(tmp_path / "one" / records.FILE)]
    assert not any("time/generate" in row for row in rows_of(tmp_path / "two" / "metrics.jsonl"))


def test_a_replay_with_other_rewards_scores_again(workplace, run, tmp_path):
    given = options(workplace, "digits", steps=3)
    assert command("grpo", *given, "--rollout.replay", run, "--out", tmp_path / "run") == 0
    rows, recorded = rows_of(tmp_path / "run" / records.FILE), rows_of(run / records.FILE)
    for row, old in zip(rows, recorded, strict=False):
        assert (row["tokens"], row["logprobs"], row["step"]) == (old["tokens"], old["logprobs"], old["step"])
        assert row["rewards"] == {"rewards.digits": sum(letter.isdigit() for letter in row["text"])}
        assert row["reward"] == row["rewards"]["rewards.digits"]
    assert len(rows) == 3 * 6
    assert numbers(tmp_path / "run") != numbers(run)[:3]


def test_a_replay_mends_what_failed(workplace, failing, tmp_path):
    given = options(workplace, "letters", steps=2)
    assert command("grpo", *given, "--rollout.replay", failing, "--out", tmp_path / "run") == 0
    assert not any(row["failure"] for row in rows_of(tmp_path / "run" / records.FILE))


def test_a_replay_needs_a_record_that_is_long_enough(workplace, run, tmp_path, capsys):
    given = options(workplace, "letters", steps=5)
    assert command("grpo", *given, "--rollout.replay", run, "--out", tmp_path / "run") == 1
    assert "fewer recorded batches than steps" in capsys.readouterr().err
    assert command("grpo", *given, "--rollout.replay", tmp_path / "none", "--out", tmp_path / "other") == 2
    assert "no recorded rollouts there" in capsys.readouterr().err and not (tmp_path / "other").exists()
    assert issubclass(UsageError, PosttrainError)
