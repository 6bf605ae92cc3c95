"""Which directories are runs, their states, and what is read from them."""

import fcntl
import json
import os
import socket

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.board.runs import RunList, raised
from posttrain.config.sections import as_yaml, with_algorithm
from posttrain.core.errors import UsageError
from posttrain.train.run_directory import RunDirectory
from tests.unit.board.made import TIME, make_run, run_of

STOPPED = f"""{TIME} info: run: x
{TIME} error: Traceback (most recent call last):
  File "x.py", line 1, in f
    raise
posttrain.core.errors.Stopped: stopped by SIGTERM after step 2; saved. Resume: posttrain sft
"""
FAILED = f"""{TIME} info: run: x
{TIME} error: Traceback (most recent call last):
  File "x.py", line 1, in f
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 1, in f
    raise
posttrain.core.errors.RewardError: 8 of 8 failed:
Traceback (most recent call last):
  File "reward.py", line 1
ValueError: no
"""


@pytest.mark.parametrize(
    ("log", "state", "reason"),
    [
        (f"{TIME} info: done: 3 steps; loss 1. Run directory: x\nexport: y\n", "finished", "done: 3 steps"),
        (f"{TIME} info: stopped early after 2 of 3 steps: enough; loss 1\n", "stopped", "stopped early after 2"),
        (STOPPED, "stopped", "stopped by SIGTERM after step 2; saved"),
        (FAILED, "failed", "8 of 8 failed:\nTraceback"),
        (f"{TIME} info: run: x\n{TIME} warning: slow\n", "killed", "its process is gone"),
        (f"{TIME} info: done: 3 steps\n{TIME} info: resuming from step 3 (x)\n", "killed", "its process is gone"),
        (f"{STOPPED}{TIME} info: resuming from step 2 (x)\n{TIME} info: done: 3 steps\n", "finished", "done: 3 steps"),
    ],
)
def test_the_state_is_what_the_directory_shows(tmp_path, log, state, reason):
    run = run_of(make_run(tmp_path / "run", log=log))
    found, why = run.state()
    assert found == state and why.startswith(reason)
    with (tmp_path / "run/lock").open("w") as lock:
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.state() == ("running", "")
    assert run.state()[0] == state


def test_an_evaluation_without_result_keeps_no_log_that_says_why(tmp_path):
    run = run_of(make_run(tmp_path / "run"))
    (tmp_path / "run/logs/run.log").unlink()
    for verb in ("eval", "[1]"):
        (tmp_path / "run/config.yaml").write_text(f"verb: {verb}\n")
        assert run.state()[0] == "unknown" and "keeps no log" in run.state()[1]
    (tmp_path / "run/report.json").write_text("{}")
    assert run.state() == ("finished", "")


def test_looking_does_not_disturb_the_lock(tmp_path):
    """A run that starts while the board looks must get its lock, and is seen as running from then on."""
    with RunDirectory.open(str(tmp_path / "run"), "sft", resume=False) as directory:
        directory.write_config(as_yaml("sft", with_algorithm(ALGORITHMS["sft"])))
        run = run_of(tmp_path / "run")
        assert run.state()[0] == "running" and run.owner() == (os.getpid(), socket.gethostname())
        with pytest.raises(UsageError, match="in use by"):
            RunDirectory.open(str(tmp_path / "run"), "sft", resume=True)
    assert run.state()[0] == "killed"


def test_a_process_on_another_machine_is_not_called_killed(tmp_path):
    run = run_of(make_run(tmp_path / "run", log=f"{TIME} info: run: x\n"))
    (tmp_path / "run/lock").write_text("process 1 on elsewhere\n")
    assert run.state() == ("unknown", "its process is on elsewhere, which cannot be asked from here")


def test_the_error_is_the_last_one_of_a_chain():
    assert raised(FAILED[FAILED.index("Traceback") :])[0] == "posttrain.core.errors.RewardError"
    assert raised("Traceback (most recent call last):\n  File\nKeyError: 'a'\n") == ("KeyError", "KeyError: 'a'")


def test_summary(tmp_path):
    run = run_of(make_run(tmp_path / "run", steps=4))
    found = run.summary()
    assert (found["verb"], found["model"], found["step"], found["total_steps"]) == ("grpo", "pico", 4, 4)
    assert found["seconds_per_step"] == 3 and found["eta_seconds"] is None
    assert found["main_metric"] == "reward" and found["spark"] == [0.25, 0.5, 0.75, 1.0]
    phases = {phase["name"]: phase["seconds"] for phase in run.phases()["phases"]}
    assert phases == {"train": 8.0, "generate": 4.0}


def test_steps_come_from_the_log_if_epochs_decide(tmp_path):
    log = f"{TIME} info: steps: 1,234 of 8 examples = 2.00 epochs; x\n"
    run = run_of(make_run(tmp_path / "run", steps=0, metrics=[{"step": 1}], log=log))
    assert run.summary()["total_steps"] == 1234


def test_metrics_grow_and_are_cut_off_by_a_resume(tmp_path):
    run = run_of(make_run(tmp_path / "run", steps=3))
    file = tmp_path / "run/metrics.jsonl"
    earlier = run.metrics.update()
    with file.open("a") as stream:
        stream.write('{"step": 4, "loss": 0.1}\n{"step": 5, "lo')
    assert [row["step"] for row in run.metrics.update()] == [1, 2, 3, 4] and len(earlier) == 3
    with file.open("a") as stream:
        stream.write('ss": 7}\n')
    assert run.metrics.update()[-1] == {"step": 5, "loss": 7}
    kept = file.read_text().splitlines()[:2]
    file.write_text(
        "\n".join([*kept, '{"step": 3, "loss": 0.5}', '{"step": 4, "loss": 0.25}', '{"step": 5, "loss": 8}', ""])
    )
    assert [row["loss"] for row in run.metrics.update()] == [1, 0.5, 0.5, 0.25, 8]


def test_lines_that_are_no_metrics_are_counted(tmp_path):
    odd = ["[1]", "{}", '{"step": "x"}', "{", '{"step": ' + "9" * 400 + "}", "[" * 100_000, "\ud83d"]
    run = run_of(make_run(tmp_path / "run"))
    file = tmp_path / "run/metrics.jsonl"
    file.write_text(
        "\n".join([*odd[:-1], '{"step": 1, "loss": NaN, "name": "x", "a": 1e999, "not_finite": ["b"]}', ""])
    )
    assert run.metrics.update() == [{"step": 1, "loss": None, "name": None, "a": None}]
    assert run.metrics.bad_lines == 6
    json.dumps(run.summary(), allow_nan=False)


@pytest.mark.parametrize(
    "text",
    [
        "verb: [",
        "- a",
        "a: &x [1]\nb: *x",
        "!!python/object/apply:os.system [id]",
        "{" * 5000,
        "when: 2026-01-01\nx: .nan",
    ],
)
def test_a_configuration_that_is_none_does_no_harm(tmp_path, text):
    make_run(tmp_path / "run")
    (tmp_path / "run/config.yaml").write_text(text)
    assert isinstance(run_of(tmp_path / "run").summary()["verb"], str)


def test_runs_are_found_below_directories_without_following_links(tmp_path):
    make_run(tmp_path / "runs/a")
    make_run(tmp_path / "runs/demo/b")
    make_run(tmp_path / "runs/a/checkpoints/step-1")  # part of a run, not a run
    make_run(tmp_path / "outside")
    (tmp_path / "runs/link").symlink_to(tmp_path / "outside")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    runs = RunList([str(tmp_path / "runs")])
    assert {run.name for run in runs.find()} == {"a", "demo/b"}
    first = runs.find()[0]
    make_run(tmp_path / "runs/c")
    assert len(runs.find()) == 3 and runs.get(first.id) is first
    named = RunList([str(tmp_path / "runs/link"), str(tmp_path / "runs/a")])  # a link that the user names is meant
    assert {run.name for run in named.find()} == {"outside", "a"}


def test_equal_names_are_told_apart(tmp_path):
    for name in ("x", "y"):
        make_run(tmp_path / name / "run")
    found = RunList([str(tmp_path / "x"), str(tmp_path / "y")]).find()
    assert {run.name for run in found} == {str(tmp_path / "x/run"), str(tmp_path / "y/run")}


def test_a_missing_directory_is_an_error():
    with pytest.raises(UsageError, match="no such directory"):
        RunList(["not-there"])


def test_examples_and_logs(tmp_path):
    run = run_of(make_run(tmp_path / "run"))
    (tmp_path / "run/samples").mkdir()
    (tmp_path / "run/samples/step-00000000.jsonl").write_text('{"text": "<b>"}\nnot JSON\n')
    (tmp_path / "run/samples/other.jsonl").write_text('{"text": "other"}\n')
    (tmp_path / "run/logs/worker-0.log").write_text("hello")
    (tmp_path / "run/logs/secret.log").symlink_to("/etc/passwd")
    assert run.examples() == [{"step": 0, "row": {"text": "<b>"}}]
    assert run.log_files() == ["run.log", "worker-0.log"]
    assert run.log_text("worker-0.log") == ("hello", 5)
    assert run.log_text("../config.yaml") == run.log_text("secret.log") == ("", 0)
