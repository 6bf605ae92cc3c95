"""`posttrain eval --harness`: figures with intervals, compared in pairs with an earlier evaluation."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from tests.e2e.commands import command, rows_of

INSTALLED = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = [{"question": f"{n}+{n}=", "choices": [str(2 * n), str(2 * n + 1)], "label": 0} for n in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    Path("sums.yaml").write_text(yaml.safe_dump(settings))
    return "sums.yaml"


@pytest.mark.skipif(not INSTALLED, reason="lm-eval is not installed: make test-harness")
def test_figures_and_a_paired_comparison(task, capsys):
    with Path("sums.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}+{n}=", "completion": str(2 * n)}) + "\n" for n in range(9))
    options = ["--model.path", "pico", "--data.train", "sums.jsonl", "--train.learning_rate", "3e-3", "--quiet"]
    assert command("sft", *options, "--train.max_steps", 12, "--train.batch_size", 9, "--output_dir", "taught") == 0
    assert command("eval", "pico", task, "--harness", "lm-eval", "--output_dir", "first") == 0
    (figures,) = json.loads(Path("first/report.json").read_text())["figures"]
    rows = rows_of(Path("first/a/examples.jsonl"))
    before = [row["scores"]["acc"] for row in rows]
    found = figures["sums/acc"]
    assert len(rows) == 9 and found["value"] == pytest.approx(sum(before) / 9) and found["low"] < found["high"]
    written = Path("first/a/examples.jsonl").stat().st_mtime_ns
    assert command("eval", "pico", task, "--harness", "lm-eval", "--output_dir", "first") == 0  # nothing is left to do
    assert Path("first/a/examples.jsonl").stat().st_mtime_ns == written

    capsys.readouterr()
    assert command("eval", "taught", task, "--harness", "lm-eval", "--against", "first", "--output_dir", "second") == 0
    said = capsys.readouterr().out
    report = json.loads(Path("second/report.json").read_text())
    after = [row["scores"]["acc"] for row in rows_of(Path("second/a/examples.jsonl"))]
    compared = report["comparison"]["sums/acc"]
    assert compared["difference"]["value"] == pytest.approx((sum(after) - sum(before)) / 9)
    assert compared["better"] + compared["worse"] + compared["same"] == 9
    assert "sums/acc: taught - first = " in said and not Path("second/b").exists()


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_a_harness_that_is_not_installed_is_named(task, capsys):
    assert command("eval", "pico", task, "--harness", "lm-eval", "--output_dir", "out") == 2
    assert "pip install lm-eval" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--temperature", "1"], "temperature has no effect with harness lm-eval"),
        (["--reward", "format"], "reward has no effect"),
        (["--num_fewshot", "-2"], "num_fewshot is -2"),
    ],
)
def test_options_without_effect_are_refused(task, capsys, words, complaint):
    assert command("eval", "pico", task, "--harness", "lm-eval", "--output_dir", "out", *words) == 2
    assert complaint in capsys.readouterr().err
    assert command("eval", "pico", "rows.jsonl", "--output_dir", "out") == 2
    assert "--reward is not set" in capsys.readouterr().err
    assert command("eval", "pico", "x.jsonl", "--reward", "gsm8k", "--num_fewshot", "5", "--output_dir", "out") == 2
    assert "num_fewshot has no effect without --harness lm-eval" in capsys.readouterr().err
