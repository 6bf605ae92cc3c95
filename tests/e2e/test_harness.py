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


@pytest.mark.skipif(not INSTALLED, reason="lm-eval is not installed: make test-harness")
def test_tasks_during_training_decide_which_checkpoint_is_the_best(task, capsys):
    with Path("sums.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}+{n}=", "completion": str(2 * n)}) + "\n" for n in range(9))
    train = ["sft", "--model", "pico", "--data", "sums.jsonl", "--train.learning_rate", "3e-3", "--quiet"]
    train += ["--train.max_steps", 6, "--train.batch_size", 9, "--save.max_checkpoints", 1]
    tasks = ["--eval.harness", "lm-eval", "--eval.tasks", task, "--eval.every_steps", 2]
    tasks += ["--eval.metric_for_best_model", "sums/acc"]
    assert command(*train, "--output_dir", "plain") == 0
    assert command(*train, *tasks, "--output_dir", "with") == 0
    plain, rows = rows_of(Path("plain/metrics.jsonl")), rows_of(Path("with/metrics.jsonl"))
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    states = [json.loads(Path(f"{run}/checkpoints/step-00000006/state.json").read_text()) for run in ("plain", "with")]
    assert states[0]["rng"] == states[1]["rng"]  # though a harness seeds the random generators
    found = {row["step"]: row["eval/sums/acc"] for row in rows if "eval/sums/acc" in row}
    assert list(found) == [2, 4, 6]
    for step, value in found.items():
        examples = rows_of(Path(f"with/evals/step-{step:08}/examples.jsonl"))
        assert len(examples) == 9 and value == pytest.approx(sum(row["scores"]["acc"] for row in examples) / 9)
    best = max(found, key=found.get)  # the first of equal ones
    kept = sorted(int(path.name.removeprefix("step-")) for path in Path("with/checkpoints").iterdir())
    assert kept == sorted({best, 6})
    # The same scores as those of the checkpoint.
    assert command("eval", "with", task, "--harness", "lm-eval", "--output_dir", "again", "--quiet") == 0
    (figures,) = json.loads(Path("again/report.json").read_text())["figures"]
    assert figures == json.loads(Path("with/evals/step-00000006/figures.json").read_text())
    wrong = ["--eval.metric_for_best_model", "sums/f1", "--output_dir", "wrong"]
    assert command(*train, *tasks, *wrong) == 2
    assert "eval.metric_for_best_model is sums/f1" in (said := capsys.readouterr().err) and "sums/acc" in said
    assert command(*train, *tasks, "--eval.tasks", "no-such-task", "--output_dir", "none") == 2
    assert "lm-eval has no task 'no-such-task'" in capsys.readouterr().err and not Path("none").exists()


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_a_harness_that_is_not_installed_is_named(task, capsys):
    assert command("eval", "pico", task, "--harness", "lm-eval", "--output_dir", "out") == 2
    assert "pip install lm-eval" in capsys.readouterr().err
    train = ["sft", "--model", "pico", "--data", "rows.jsonl", "--output_dir", "run"]
    assert command(*train, "--eval.harness", "lm-eval", "--eval.tasks", task) == 2
    assert "pip install lm-eval" in capsys.readouterr().err and not Path("run").exists()


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
