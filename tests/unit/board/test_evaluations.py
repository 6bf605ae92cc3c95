"""Evaluations on the board: figures of steps and of `posttrain eval`, pairs of examples, and files that are damaged."""

import json

import pytest

from posttrain.board.evaluations import compared, evaluations_of, evaluations_page
from posttrain.endpoint.errors import ApiError
from tests.unit.board.made import make_run, run_of

HOSTILE = "<img src=x onerror=alert(1)>"


def figure(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def evaluated(path, scores, figures=None):
    """The files of one evaluation: an example per score."""
    path.mkdir(parents=True)
    rows = [
        {"task": "sums", "index": n, "key": f"key-{n}", "scores": {"acc": s}, "target": "4", "replies": [HOSTILE]}
        for n, s in enumerate(scores)
    ]
    (path / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "figures.json").write_text(json.dumps(figures or {"sums/acc": figure(sum(scores) / len(scores))}))


@pytest.fixture
def runs(tmp_path):
    """A run that was evaluated at two steps, an evaluation of it afterwards, and one of another model."""
    trained = make_run(tmp_path / "trained")
    evaluated(trained / "evals/step-00000002", [0, 0, 1, 1])
    evaluated(trained / "evals/step-00000004", [1, 1, 1, 0])
    for name, model in (("eval-001", trained / "checkpoints/step-00000004"), ("eval-002", "other/model")):
        evaluated(tmp_path / name / "a", [1, 1, 1, 1])
        report = {"models": [str(name)], "model_paths": [str(model)], "figures": [{"sums/acc": figure(1.0)}]}
        (tmp_path / name / "report.json").write_text(json.dumps(report))
        (tmp_path / name / "config.yaml").write_text(f"verb: eval\nmodel: {model}\n")
    return {name: run_of(tmp_path / name) for name in ("trained", "eval-001", "eval-002")}


def test_evaluations_belong_to_the_run_that_was_evaluated(runs):
    found = evaluations_page(runs["trained"], runs.values())
    assert [each["label"] for each in found["evaluations"]] == ["step 2", "step 4", "eval-001: eval-001"]
    assert [each["label"] for each in found["others"]] == ["eval-002: eval-002"]
    assert found["evaluations"][1]["figures"] == {"sums/acc": figure(0.75)}
    assert runs["eval-001"].state() == ("finished", "")  # though it has no log
    assert [each["label"] for each in evaluations_page(runs["eval-002"], runs.values())["evaluations"]] == ["eval-002"]


def test_two_evaluations_are_compared_on_the_same_examples(runs):
    before, after = evaluations_of(runs["trained"])
    found = compared(after, before)
    assert found["examples"] == 4 and found["differing"] == 3
    compared_scores = found["comparison"]["sums/acc"]
    assert compared_scores["difference"]["value"] == pytest.approx(0.25)
    assert (compared_scores["better"], compared_scores["worse"], compared_scores["same"]) == (2, 1, 1)
    assert found["shown"][0]["scores"] == [{"acc": 1.0}, {"acc": 0.0}] and found["shown"][0]["replies"][0] == HOSTILE


def test_damaged_and_hostile_files_do_no_harm(tmp_path):
    run = make_run(tmp_path / "run")
    evaluated(run / "evals/step-00000001", [1.0], {HOSTILE: figure(1), "bad": {"value": "x"}, "worse": 3})
    evaluated(run / "evals/../evals/step-2", [0.0])
    (run / "evals/step-2/figures.json").write_text("[1")
    (run / "evals/step-00000001/examples.jsonl").write_text('{"key": 1}\n[\n{"key": "a", "scores": {"acc": null}}\n')
    secret = tmp_path / "secret"
    evaluated(secret, [1.0])
    (run / "evals/step-00000003").symlink_to(secret)
    first, second = evaluations_of(run_of(run))
    assert list(first.figures) == [HOSTILE] and second.figures == {}
    with pytest.raises(ApiError, match="no example in common"):
        compared(first, second)
    (run / "evals/step-00000001/examples.jsonl").unlink()
    (run / "evals/step-00000001/examples.jsonl").symlink_to(secret / "examples.jsonl")
    assert first.rows() == []
