"""`--profile N`: a trace per chosen rank and a page; training is not changed by it."""

import json

import pytest

from posttrain.train.profiler import meaning, page_text
from tests.e2e.commands import command, rows_of
from tests.e2e.rows import write_rows


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows("chat", tmp_path)


def train(out, *more, steps=4):
    given = ("--model.path", "pico", "--data.train", "chat.jsonl", "--out", out, "--quiet", "--steps", steps)
    return command("sft", *given, *more)


def test_two_steps_are_profiled_and_nothing_else_changes(tmp_path):
    assert train("plain") == 0
    assert train("profiled", "--profile", 2) == 0
    losses = [[row["loss"] for row in rows_of(tmp_path / name / "metrics.jsonl")] for name in ("plain", "profiled")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    page = (tmp_path / "profiled/profile/profile.md").read_text(encoding="utf-8")
    assert page.startswith("# Profile of steps 2 to 3\n") and "## Rank 0: " in page and "| matrix product |" in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) == 10
    times = [float(row.split("|")[4].strip().removesuffix(" ms").replace(",", "")) for row in rows]
    assert times == sorted(times, reverse=True) and times[0] > 0
    trace = json.loads((tmp_path / "profiled/profile/rank-0.json").read_text(encoding="utf-8"))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    assert not (tmp_path / "plain/profile").exists()


def test_more_steps_than_there_are_and_a_rank_that_is_not_there(tmp_path, capsys):
    assert train("short", "--profile", 9, steps=1) == 0
    assert "# Profile of steps 1 to 1\n" in (tmp_path / "short/profile/profile.md").read_text(encoding="utf-8")
    assert train("wrong", "--profile", 1, "--train.profile_ranks", 3) == 2
    assert "train.profile_ranks is (3,)" in capsys.readouterr().err


def test_chosen_ranks_of_two(tmp_path):
    assert train("two", "--profile", 1, "--train.profile_ranks", 1, "--cluster.devices", 2, steps=2) == 0
    assert [file.name for file in sorted((tmp_path / "two/profile").iterdir())] == ["profile.md", "rank-1.json"]
    assert "## Rank 1: " in (tmp_path / "two/profile/profile.md").read_text(encoding="utf-8")


def test_a_step_that_is_profiled_is_not_measured_for_communication(tmp_path):
    more = ("--cluster.devices", 2, "--log.communication_every_steps", 1)
    assert train("both", "--profile", 1, *more, steps=3) == 0
    assert (tmp_path / "both/profile/rank-0.json").exists()
    rows = rows_of(tmp_path / "both/metrics.jsonl")
    assert [row["step"] for row in rows if "communication_seconds" in row] == [1, 3], "step 2 is profiled"


def test_words():
    assert meaning("aten::mm") == "matrix product" and meaning("aten::copy_") == "copying or converting tensors"
    assert meaning("ncclDevKernel_AllReduce") == "communication between ranks"
    assert meaning("SoftmaxBackward0") == "softmax and losses, backward"
    assert meaning("aten::cat") == meaning("aten::copy_") != meaning("aten::scatter_add_")
    rows = [{"name": "k", "cpu_ms": 5.0, "device_ms": 2.0, "calls": 3}]
    assert "2 ms of device time" in page_text({0: rows}, 1, 1)


def test_the_page_says_in_one_sentence_what_the_time_went_to():
    times = {"aten::mm": 60.0, "MmBackward0": 15.0, "aten::copy_": 24.5, "aten::item": 0.5}
    rows = [{"name": name, "cpu_ms": time, "device_ms": 0.0, "calls": 1} for name, time in times.items()]
    page = page_text({0: rows}, 1, 1)
    assert "Of it: matrix product 75%; copying or converting tensors 24%; everything else 1%." in page
