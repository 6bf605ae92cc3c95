"""Mixing, splitting and plotting from Python give what the commands write."""

import json
from pathlib import Path

import pytest

import posttrain


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(count, operator):
    return [{"prompt": f"{number}{operator}1=", "completion": f"{number}", "id": number} for number in range(count)]


def test_a_mixture_of_examples_in_memory_and_of_a_file():
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(3, "-")))
    mixed = posttrain.mix_data([rows(5, "+"), "b.jsonl"], output_file="mixed.jsonl")
    assert sorted(row["prompt"] for row in mixed) == sorted(row["prompt"] for row in rows(5, "+") + rows(3, "-"))
    assert [json.loads(line) for line in Path("mixed.jsonl").read_text().splitlines()] == mixed
    few = posttrain.mix_data([rows(5, "+"), "b.jsonl"], weights=[1, 1], total_examples=4, normalize=True, seed=3)
    assert len(few) == 4 and all(row.keys() == {"messages"} for row in few)
    with pytest.raises(posttrain.UsageError, match="no such trainer"):
        posttrain.mix_data("b.jsonl", trainer="sfd")


def test_a_split_of_examples_in_memory():
    data = [*rows(20, "+"), *rows(20, "+")]
    parts = posttrain.split_data(data, eval_fraction=0.1, test_examples=6)
    assert {part: len(found) for part, found in parts.items()} == {"train": 30, "eval": 4, "test": 6}
    assert not {row["id"] for row in parts["train"]} & {row["id"] for row in parts["eval"] + parts["test"]}
    assert posttrain.split_data(data, eval_fraction=0.1, test_examples=6, output_dir="split") == parts
    assert sorted(path.name for path in Path("split").iterdir()) == ["eval.jsonl", "test.jsonl", "train.jsonl"]


def test_plots_of_several_runs():
    for name in ("a", "b"):
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    (axis,) = posttrain.plot(["a", Path("b")], smoothing=0.5).axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]
    assert posttrain.plot("a", output_file="a.svg") is None and Path("a.svg").read_text().startswith("<svg")
    with pytest.raises(posttrain.UsageError, match="no run in this directory"):
        posttrain.plot("gone")
