"""`posttrain eval`: figures of the answers that it wrote, its failures, two models, and going on."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.e2e.commands import command, rows_of

N, PROMPTS = 4, 6


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    rows = ({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(PROMPTS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = "def readable(text):\n    return sum(letter.isascii() for letter in text) / max(1, len(text))\n"
    (folder / "reward.py").write_text(code)
    settings = f"verb: eval\nmodel: pico\ndata: prompts.jsonl\nreward: reward.py:readable\nn: {N}\ntemperature: 1\n"
    (folder / "eval.yaml").write_text(settings + "max_tokens: 6\n")
    return folder


def test_figures_failures_and_going_on(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert command("eval", "eval.yaml", "--out", "first", "--shown", 2) == 0
    said = capsys.readouterr().out
    rows = rows_of(Path("first/a/scored.jsonl"))
    rewards = np.array([row["reward"] for row in rows]).reshape(PROMPTS, N)
    report = json.loads(Path("first/report.json").read_text())
    (figures,) = report["figures"]
    assert report["prompts"] * N == report["answers"] == len(rows) == PROMPTS * N
    assert figures[f"reward (mean@{N})"]["value"] == pytest.approx(rewards.mean())
    assert figures[f"accuracy (mean@{N})"]["value"] == pytest.approx((rewards > 0.5).mean())
    assert figures[f"pass@{N}"]["value"] == pytest.approx((rewards > 0.5).any(axis=1).mean())
    failures = rows_of(Path("first/failures.jsonl"))
    assert len(failures) == sum(not all(row) for row in rewards > 0.5) and "6" in {row["expected"] for row in failures}
    assert "pass@4" in said and f"{len(failures)} prompts with wrong completions" in said
    assert said.count("prompts.jsonl:") == min(2, len(failures))

    answers, before = Path("first/a/answers.jsonl"), Path("first/report.json").read_bytes()
    Path("first/a/scored.jsonl.done.json").unlink()  # as if killed there
    Path("first/a/scored.jsonl").unlink()
    written = answers.stat().st_mtime_ns
    assert command("eval", "eval.yaml", "--out", "first") == 0
    assert answers.stat().st_mtime_ns == written and Path("first/report.json").read_bytes() == before
    assert command("eval", "eval.yaml", "--out", "first", "--n", 2) == 2
    assert "samples_per_prompt was 4, is 2" in capsys.readouterr().err


def test_an_evaluation_of_the_previous_version_goes_on(workplace, monkeypatch, capsys):
    """Its config.yaml has previous names, and its settings are those of the same command now."""
    monkeypatch.chdir(workplace)
    options = ("--map_keys", '{"ground_truth": "answer"}', "--num_beams", 4, "--temperature", 0, "--quiet")
    assert command("eval", "eval.yaml", "--out", "old", *options) == 0
    new = yaml.safe_load(Path("old/config.yaml").read_text())
    names = {"output_dir": "out", "samples_per_prompt": "n", "batch_size": "batch", "reward_weights": "weights"}
    names |= {"chat_template": "template", "max_prompt_length": "max_prompt_tokens", "max_examples": "max_rows"}
    names |= {"on_overlong": "on_long", "on_bad_example": "on_bad_row", "pass_threshold": "right"}
    old = {names.get(name, name): value for name, value in new.items() if name not in ("num_beams", "vllm_options")}
    old |= {"engine": ["local", "beams=4"], "max_rows": None, "greedy": True, "temperature": 0.5, "shown": 10}
    assert set(names.values()) <= set(old)
    for change, code in (({}, 0), ({"n": 3}, 2), ({"engine": ["local", "beams=5"]}, 2), ({"map_keys": ""}, 2)):
        Path("old/config.yaml").write_text(yaml.safe_dump(old | change, sort_keys=False))
        assert command("eval", "eval.yaml", "--out", "old", *options) == code
    assert "was started with other settings" in capsys.readouterr().err


def test_two_models(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    options = ["--model.path", "pico", "--data.train", "prompts.jsonl", "--data.map_keys", '{"completion": "answer"}']
    update = ["--train.learning_rate", "3e-3", "--train.batch_size", "6"]
    assert command("sft", *options, *update, "--steps", 15, "--quiet", "--out", "taught") == 0
    assert command("eval", "eval.yaml", "taught", "prompts.jsonl", "--against", "pico", "--quiet") == 0
    report = json.loads(Path("runs/eval-001/report.json").read_text())
    found = report["comparison"]["reward"]
    means = [rows["reward (mean@4)"]["value"] for rows in report["figures"]]
    assert found["difference"]["value"] == pytest.approx(means[0] - means[1]) and means[0] > means[1]
    assert found["better"] + found["worse"] + found["same"] == PROMPTS and found["better"] >= 5 and found["p"] < 0.1
    assert "reward: taught - pico = +" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["pico", "nothing.jsonl", "--reward", "format"], "nothing.jsonl"),
        (["pico", "prompts.jsonl", "--reward", "fromat"], "format"),
        (["pico", "prompts.jsonl", "--reward", "format", "--n", "3"], "the same one"),
        (["no/such/model/at/all", "prompts.jsonl", "--reward", "format"], "no/such/model"),
    ],
)
def test_mistakes_are_named(argv, words, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    assert command("eval", *argv, "--out", "wrong") in (1, 2)
    assert words in capsys.readouterr().err and not Path("wrong/report.json").exists()
