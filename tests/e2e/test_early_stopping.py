"""eval.early_stopping_patience and eval.metric_for_best_model, with the built-in evaluation."""

import json

import pytest
import torch
from safetensors.torch import load_file

from posttrain.config.sections import Config, EvalConfig
from posttrain.train.run import best_metric
from tests.e2e.commands import command, rows_of


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1), "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model", "pico", "--data", "data.jsonl", "--data.eval", "data.jsonl", "--train.batch_size", 4, "--quiet"]


def test_a_run_that_does_not_improve_ends(options, tmp_path, capsys):
    """With a learning rate of 0 the second evaluation is the first without improvement, the third the second."""
    still = ["--train.learning_rate", 0, "--eval.every_steps", 2, "--eval.early_stopping_patience", 2]
    few = ["--train.max_steps", 20, "--save.max_checkpoints", 1, "--output_dir", "run"]
    assert command("sft", *options, *still, *few) == 0
    assert [row["step"] for row in rows_of(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().out
    assert "stopped early after 6 of 20 steps: eval/loss has not improved" in said and "at step 2" in said
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"step-00000002", "step-00000006"}
    # Resumed, it does what it would have done without the interruption: nothing.
    assert command("sft", "--output_dir", "run", "--resume") == 0
    assert len(rows_of(tmp_path / "run/metrics.jsonl")) == 6
    said = capsys.readouterr().out
    assert "stopped early after 6 of 20" in said
    more = said.rpartition("train more: posttrain ")[2].split()
    assert command(*["8" if word == "N" else word for word in more]) == 0
    assert len(rows_of(tmp_path / "run/metrics.jsonl")) == 8


@pytest.mark.parametrize("mode", ["max", "auto"])
def test_the_metric_decides_which_checkpoint_is_the_best(mode, options, tmp_path, capsys):
    """The loss falls: its largest value is the first, and a resumed run goes on comparing with it."""
    chosen = ["--eval.metric_for_best_model", "loss", "--eval.metric_mode", mode, "--eval.every_steps", 1]
    train = ["--train.learning_rate", "3e-3", "--save.max_checkpoints", 1, "--output_dir", "run"]
    assert command("sft", *options, *train, *chosen, "--train.max_steps", 2) == 0
    assert command("sft", "--output_dir", "run", "--resume", "--train.max_steps", 4) == 0
    losses = {row["step"]: row["eval/loss"] for row in rows_of(tmp_path / "run/metrics.jsonl")}
    best = (max if mode == "max" else min)(losses, key=losses.get)
    assert best == (1 if mode == "max" else 4)
    kept = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run/checkpoints").iterdir()}
    assert kept == {best, 4} and f"best eval/loss {losses[best]:.4g} at step {best}" in capsys.readouterr().out


def test_a_metric_that_is_not_measured_is_named(options, capsys):
    wrong = ["--eval.metric_for_best_model", "f1", "--output_dir", "wrong"]
    train = [
        "sft",
        *options,
        "--train.max_steps",
        2,
        "--train.optimizer",
        "schedule_free",
        "--train.lr_scheduler",
        "constant",
    ]
    assert command(*train, *wrong) == 2
    assert "eval.metric_for_best_model is f1" in (said := capsys.readouterr().err) and "loss" in said
    # The steps before are not lost, and the weights are the trained ones again.
    assert "Step 2 is saved" in said
    assert command(*train, "--output_dir", "good") == 0
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        left, right = (load_file(f"{run}/checkpoints/step-00000002/{name}") for run in ("wrong", "good"))
        assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
    corrected = ["--eval.metric_for_best_model", "loss", "--train.max_steps", 3]
    assert command("sft", "--output_dir", "wrong", "--resume", *corrected) == 0


def test_a_metric_that_is_compared_in_the_other_direction_starts_anew(options, tmp_path):
    """The loss falls: the smallest value of the first steps must not be taken for the largest one."""
    chosen = ["--eval.metric_for_best_model", "loss", "--eval.every_steps", 1]
    train = ["--train.learning_rate", "3e-3", "--train.max_steps", 2, "--output_dir", "run"]
    assert command("sft", *options, *train, *chosen) == 0
    assert command("sft", "--output_dir", "run", "--resume", "--train.max_steps", 4, "--eval.metric_mode", "max") == 0
    state = json.loads((tmp_path / "run/checkpoints/step-00000004/state.json").read_text())
    assert state["progress"]["best_step"] == 3


def test_a_resumed_run_forgets_later_evaluations(options, tmp_path):
    assert command("sft", *options, "--train.max_steps", 2, "--output_dir", "run") == 0
    for step in (2, 3):
        (tmp_path / f"run/evals/step-{step:08}").mkdir(parents=True)
    assert command("sft", "--output_dir", "run", "--resume", "--train.max_steps", 3) == 0
    assert [path.name for path in (tmp_path / "run/evals").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"),
        ("gsm8k/exact_match", "max"),
        ("wikitext/word_perplexity", "min"),
        ("mmlu/brier_score", "min"),
        ("wmt16/ter", "min"),
        ("after/letters", "max"),
        ("asr/WER", "min"),
        ("kl", "min"),
    ],
)
def test_the_direction_follows_from_the_name(name, mode):
    config = Config(eval=EvalConfig(metric_for_best_model=name))
    assert best_metric(config) == (f"eval/{name}", mode)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--eval.early_stopping_patience", 2], "eval.every_steps is 0"),
        (["--eval.early_stopping_threshold", 0.1], "no effect without eval.early_stopping_patience"),
        (["--eval.harness", "lm-eval"], "eval.tasks is not set"),
        (["--eval.tasks", "gsm8k"], "eval.tasks has no effect without eval.harness"),
        (
            ["--eval.harness", "inspect-ai", "--eval.tasks", "x", "--eval.num_fewshot", 2],
            "eval.num_fewshot has no effect",
        ),
    ],
)
def test_options_without_effect_are_refused(options, capsys, words, complaint):
    assert command("sft", *options, *words, "--output_dir", "run") == 2
    assert complaint in capsys.readouterr().err


def test_a_metric_without_evaluation_is_refused(options, capsys):
    without = [word for word in options if word != "--data.eval"]
    del without[4]
    assert command("sft", *without, "--eval.metric_for_best_model", "loss", "--output_dir", "run") == 2
    assert "nothing is evaluated" in capsys.readouterr().err
