"""Mixtures, bad rows and large data in whole runs."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.checkpoints.checkpoint import newest_valid
from posttrain.core.errors import DataError, UsageError
from posttrain.core.files import read_json
from posttrain.train.launch import train
from tests.e2e.commands import rows_of
from tests.e2e.test_resume import bytes_of, metrics_of, stop_after


def chat(text):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def options(tmp_path):
    one = write(tmp_path / "one.jsonl", [chat(f"one {n}") for n in range(6)])
    two = write(tmp_path / "two.jsonl", [chat(f"two {n}") for n in range(9)])
    return {
        "model": {"path": "pico"},
        "data": {"train": [f"{one}:0.5", f"{two}:0.5"]},
        "update": {"rows_per_step": 4, "learning_rate": 1e-3},
        "save": {"every": 1, "keep": 9},
        "out": str(tmp_path / "run"),
        "quiet": True,
    }


def test_an_epoch_of_a_mixture(options, tmp_path):
    train("sft", **options)
    assert [row["epoch"] for row in metrics_of(tmp_path / "run")] == [4 / 12, 8 / 12, 1.0]
    repeated = options["data"] | {"repeat": True}
    train("sft", **(options | {"data": repeated, "out": str(tmp_path / "again")}))
    assert read_json(newest_valid(tmp_path / "again/checkpoints") / "state.json")["position"] == 18


def test_a_mixture_resumes_bit_for_bit(options, tmp_path, monkeypatch):
    train("sft", **options, steps=5)  # into the second epoch
    for step in (2, 3, 4):
        again = options | {"out": str(tmp_path / f"stopped-{step}"), "steps": 5}
        with monkeypatch.context() as patch, pytest.raises(Exception, match="--resume"):
            stop_after(patch, step)
            train("sft", **again)
        train("sft", **again, resume=True)
        assert metrics_of(tmp_path / f"stopped-{step}") == metrics_of(tmp_path / "run")
        assert bytes_of(tmp_path / f"stopped-{step}")[0] == bytes_of(tmp_path / "run")[0]


def test_other_weights_are_other_data(options, tmp_path):
    train("sft", **options)
    weights = [name.replace(":0.5", ":0.6") for name in options["data"]["train"][:1]] + options["data"]["train"][1:]
    with pytest.raises(Exception, match="data changed"):
        train("sft", **(options | {"data": {"train": weights}}), steps=9, resume=True)


def test_weights_make_no_sense_for_evaluation(options):
    data = options["data"] | {"eval": options["data"]["train"]}
    with pytest.raises(UsageError, match="no such file or folder"):
        train("sft", **(options | {"data": data}))


def test_bad_rows_stop_the_run_or_are_set_aside(options, tmp_path, capsys):
    file = write(tmp_path / "bad.jsonl", [chat("one"), "{broken\n", chat("two"), {"messages": []}, chat("three")])
    data = {"train": [file], "eval": [file]}
    with pytest.raises(DataError, match=r"bad.jsonl:\d"):
        train("sft", **(options | {"data": data}))
    chosen = options | {"data": data | {"on_bad_row": "quarantine"}, "quiet": False}
    train("sft", **chosen)
    aside = rows_of(tmp_path / "run/quarantine.jsonl")
    assert [row["origin"] for row in aside] == [f"{file}:2", f"{file}:4"] * 2  # of training and of evaluation
    said = capsys.readouterr().out
    assert "3 examples, 3 samples" in said and "(2 quarantined)" in said and "quarantine.jsonl" in said
    train("sft", **chosen, steps=3, resume=True)  # loads the data again, and writes the file anew
    assert rows_of(tmp_path / "run/quarantine.jsonl") == aside


@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_rows_on_disk_train_as_rows_in_memory(verb, options, tmp_path, monkeypatch):
    pairs = [{"prompt": f"q {n}", "chosen": f"good {n}", "rejected": "bad"} for n in range(9)]
    file = write(tmp_path / "rows.jsonl", pairs if verb == "dpo" else [chat(f"q {n}") for n in range(9)])
    algo = {"algo": {"precompute_reference": True}} if verb == "dpo" else {}
    chosen = options | {"data": {"train": [file], "eval": 0.2}, "steps": 5, "eval": {"every": 2}} | algo
    train(verb, **chosen)
    monkeypatch.setattr("posttrain.data.store.ExampleStoreBuilder.__init__.__defaults__", (None, 0))
    train(verb, **(chosen | {"out": str(tmp_path / "disk")}))
    assert metrics_of(tmp_path / "disk") == metrics_of(tmp_path / "run")


@pytest.mark.parametrize("verb", ["check", "mix", "split"])
def test_the_remaining_time_of_reading_is_visible_at_80_columns(verb, tmp_path, monkeypatch):
    """On a terminal of 80 columns; the files are large enough that progress is shown."""
    rows = [json.dumps({"prompt": f"{n} and {n}?", "completion": f"It is {n + n}."}) for n in range(4000)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    options = {"check": [], "mix": ["--output_file", "m.jsonl"], "split": ["--eval_examples", "5", "--output_dir", "s"]}
    controller, terminal = pty.openpty()
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "posttrain", "data", verb, "a.jsonl", *options[verb]]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is closed when the process ends
            while block := os.read(controller, 65536):
                shown += block
    os.close(controller)
    assert process.returncode == 0, shown
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()))
    timed = [line for line in lines if re.search(r"eta \d+:\d\d", line)]
    assert timed and all(len(line) <= 80 for line in timed), lines
