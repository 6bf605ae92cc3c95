"""The command: help, precedence, what it prints, what it leaves behind, and how it stops."""

import importlib.metadata
import json
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml

import posttrain
from posttrain.algorithms import ALGORITHMS
from posttrain.checkpoints.checkpoint import newest_valid, step_of
from posttrain.config.parsing import option_keys
from posttrain.config.sections import with_algorithm
from posttrain.config.verbs import TOOLS
from tests.e2e.commands import PATIENCE, command, rows_of, start, wait_until
from tests.e2e.rows import write_rows
from tests.e2e.test_resume import bytes_of, metrics_of


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows("chat", tmp_path)


def sft(*more):
    small = ("--train.batch_size", 3, "--train.learning_rate", 1e-3)
    return "sft", "--model.path", "pico", "--data.train", "chat.jsonl", *small, *more


# Help


def test_the_overview_names_every_verb(capsys):
    for argv in ((), ("--help",), ("-h",), ("help",)):
        assert command(*argv) == 0
        said = capsys.readouterr()
        assert all(f"\n  {verb} " in said.out for verb in (*ALGORITHMS, *TOOLS)) and not said.err


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_help_of_a_trainer_names_every_option(verb, capsys):
    assert command(verb, "--help-all") == 0
    said = capsys.readouterr().out
    for key in option_keys(with_algorithm(ALGORITHMS[verb])):
        assert f"--{key}" in said, key
    assert "CONFIG.yaml" in said and ALGORITHMS[verb].help[1:40] in " ".join(said.split())
    assert command(verb, "--help") == 0
    assert len(capsys.readouterr().out.splitlines()) < len(said.splitlines())


@pytest.mark.parametrize("verb", TOOLS)
def test_help_of_a_tool(verb, capsys):
    assert command(verb, "--help") == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: posttrain {verb}") and len(said.out.splitlines()) > 2 and not said.err


def test_the_version(capsys):
    for argv in ("--version", "-V", "version"):
        assert command(argv) == 0
        assert capsys.readouterr().out == f"posttrain {posttrain.__version__}\n"
    assert importlib.metadata.version("posttrain") == posttrain.__version__


def test_python_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "posttrain", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"posttrain {posttrain.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "posttrain", "sftt"], capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean sft?" in done.stderr
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="posttrain")
    assert script.load() is sys.modules["posttrain.cli.main"].run_process


# Configuration


def resolved(run):
    return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))


def test_typed_beats_file_beats_algorithm_beats_default(tmp_path):
    write_rows("pair", tmp_path)
    (tmp_path / "c.yaml").write_text("verb: dpo\nsteps: 5\nseed: 7\nalgo: {beta: 0.5}\ndata:\n  train: pair.jsonl\n")
    typed = ("--train.max_steps", 1, "--model.path", "pico", "--output_dir", "run", "--quiet")
    assert command("dpo", "c.yaml", *typed) == 0
    found = resolved(tmp_path / "run")
    assert found["verb"] == "dpo" and found["train"]["max_steps"] == 1 and found["seed"] == 7
    assert found["algo"]["beta"] == 0.5 and found["algo"]["loss_type"] == "sigmoid"
    assert found["train"]["learning_rate"] == 5e-7 and found["train"]["batch_size"] == 32
    assert len(rows_of(tmp_path / "run/metrics.jsonl")) == 1


def test_the_resolved_configuration_repeats_the_run(tmp_path):
    options = (
        "--train.max_steps",
        4,
        "--seed",
        3,
        "--data.eval",
        "chat.jsonl",
        "--eval.every_steps",
        2,
        "--train.ema_decay",
        0.9,
    )
    assert (
        command(*sft("--output_dir", "first", "--quiet", "--model.lora_rank", 2, "--model.lora_dropout", 0.2, *options))
        == 0
    )
    assert command("sft", "first/config.yaml", "--output_dir", "second") == 0
    assert metrics_of(tmp_path / "first") == metrics_of(tmp_path / "second")
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second")
    assert command("sft", "first/config.yaml", "--output_dir", "third", "--seed", 4) == 0
    assert metrics_of(tmp_path / "first") != metrics_of(tmp_path / "third")


def test_resume_alone_takes_the_configuration_of_the_run(tmp_path):
    assert command(*sft("--train.max_steps", 2, "--seed", 5, "--quiet")) == 0
    run = tmp_path / "runs/sft-001"
    assert command("sft", "--resume") == 0  # all done already
    assert [row["step"] for row in metrics_of(run)] == [1, 2]
    assert command("sft", "--resume", "--train.max_steps", 4) == 0
    assert [row["step"] for row in metrics_of(run)] == [1, 2, 3, 4]
    found = resolved(run)
    assert found["seed"] == 5 and found["train"]["batch_size"] == 3 and found["model"]["path"] == "pico"
    # A run that was lengthened and then killed must not believe that it is done.
    assert found["train"]["max_steps"] == 4 and found["resume"] is False
    assert not (tmp_path / "runs/sft-002").exists()


def test_resume_asks_for_the_right_verb(tmp_path, capsys):
    assert command(*sft("--train.max_steps", 1, "--output_dir", "run", "--quiet")) == 0
    assert command("dpo", "--resume", "--output_dir", "run") == 2
    assert "is for `posttrain sft`" in capsys.readouterr().err
    argv = ("--model.path", "pico", "--data.train", "chat.jsonl", "--algo.teacher", "pico")
    (tmp_path / "c.yaml").write_text("steps: 2\n")
    assert command("distill", "c.yaml", *argv, "--resume", "--output_dir", "run") == 1
    assert "the verb changed" in capsys.readouterr().err
    assert resolved(tmp_path / "run")["verb"] == "sft"


# What it says and writes


def test_quiet_prints_the_last_lines_alone(tmp_path, capfd):
    options = (
        "--train.max_steps",
        3,
        "--output_dir",
        "run",
        "--quiet",
        "--data.eval",
        "chat.jsonl",
        "--eval.every_steps",
        1,
    )
    for resume in ((), ("--resume", "--train.max_steps", 5)):
        assert command(*sft(*options, *resume)) == 0
        said = capfd.readouterr()
        first, second = said.out.splitlines()
        assert re.fullmatch(r"done: [35] steps; loss \S+, eval/loss \S+\. Run directory: run", first)
        assert "posttrain export run OUT" in second and "posttrain sft --output_dir run --resume" in second
        assert not said.err


def test_without_a_terminal_there_are_no_control_characters(tmp_path, capfd):
    options = ("--data.eval", "chat.jsonl", "--eval.every_steps", 1)
    assert command(*sft("--train.max_steps", 3, "--output_dir", "run", *options)) == 0
    said = capfd.readouterr()
    assert not re.search(r"[^\n\x20-\U0010ffff]", said.out + said.err)
    assert "data: 7 examples, 7 samples" in said.out and "steps: 3 of 3 examples" in said.out and "run: run" in said.out
    last = next(line for line in said.out.splitlines() if line.startswith("step 3/3"))
    assert re.search(r"eta 0:00  loss \d+\.\d+ .*tokens/s .* GiB", last)
    assert "eval/loss" in said.out and not said.err


def test_the_run_folder(tmp_path):
    assert command(*sft("--train.max_steps", 3, "--output_dir", "run", "--quiet")) == 0
    run = tmp_path / "run"
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2, 3] and all(isinstance(row["loss"], float) for row in found)
    assert {"learning_rate", "grad_norm", "tokens", "epoch", "tokens_per_second", "memory_gib"} <= found[0].keys()
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "lock",
        "logs",
        "metrics.jsonl",
        "samples",
    ]
    shown = rows_of(run / "samples/step-00000000.jsonl")
    assert [row["origin"] for row in shown] == ["chat.jsonl:1", "chat.jsonl:2", "chat.jsonl:3"]
    assert shown[1]["text"] == "<s><|user|>1+1=<|end|><|assistant|>2<|end|>" and shown[1]["counts"] == "2<|end|>"
    assert shown[1]["spans"] == [["<s><|user|>1+1=<|end|><|assistant|>", False], ["2<|end|>", True]]


def test_the_last_line_names_the_command_that_goes_on(tmp_path, capsys):
    assert command(*sft("--train.max_steps", 2, "--output_dir", "my run", "--quiet")) == 0
    said = capsys.readouterr().out
    program, *argv = shlex.split(re.search(r"train more: (.*)", said)[1].replace("N", "3"))
    assert program == "posttrain" and command(*argv) == 0
    assert [row["step"] for row in rows_of(tmp_path / "my run/metrics.jsonl")] == [1, 2, 3]
    program, *argv = shlex.split(re.search(r"export: (.*?)    ", said)[1])
    assert program == "posttrain" and command(*argv) == 0
    assert (tmp_path / "OUT/config.json").is_file()


def test_python_is_the_same_as_the_command(tmp_path):
    assert command(*sft("--train.max_steps", 3, "--output_dir", "command", "--quiet", "--data.eval", "chat.jsonl")) == 0
    result = posttrain.sft(
        model={"path": "pico"},
        data={"train": ["chat.jsonl"], "eval": "chat.jsonl"},
        train={"batch_size": 3, "learning_rate": 1e-3, "max_steps": 3},
        output_dir="python",
        quiet=True,
    )
    assert metrics_of(tmp_path / "python") == metrics_of(tmp_path / "command")
    assert bytes_of(tmp_path / "python") == bytes_of(tmp_path / "command")
    last = metrics_of(tmp_path / "python")[-1]
    assert str(result.output_dir) == "python" == str(result.folder) and result.steps == 3
    assert result.metrics["loss"] == last["loss"] and result.metrics["eval/loss"] == last["eval/loss"]
    with pytest.raises(AttributeError, match="no attribute 'sftt'"):
        posttrain.sftt  # noqa: B018


# Two at once, and stopping


HOLDER = """
import sys
from posttrain.train.run_directory import RunDirectory
folder = RunDirectory.open("run", "sft", resume=True)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_in_the_folder_is_refused(tmp_path, capsys):
    assert command(*sft("--train.max_steps", 1, "--output_dir", "run", "--quiet")) == 0
    before = bytes_of(tmp_path / "run")
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER], **options) as holder:
        assert holder.stdout.readline() == "open\n"
        for argv in (sft("--output_dir", "run"), ("sft", "--output_dir", "run", "--resume", "--train.max_steps", 2)):
            assert command(*argv) == 2
            said = capsys.readouterr().err
            assert f"run: in use by process {holder.pid}" in said and "--output_dir" in said
        assert bytes_of(tmp_path / "run") == before
        holder.kill()
    assert command("sft", "--output_dir", "run", "--resume", "--train.max_steps", 2) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops_and_the_run_goes_on(number, code, tmp_path):
    argv = sft("--save.every_steps", 0, "--train.lr_scheduler", "constant")
    run = tmp_path / "run"
    process = start(*argv, "--output_dir", "run", "--train.max_steps", 10**6)
    wait_until(lambda: len(rows_of(run / "metrics.jsonl")) >= 3, process)
    process.send_signal(number)
    out, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, said
    stopped = step_of(newest_valid(run / "checkpoints"))
    assert stopped >= 3 and [row["step"] for row in rows_of(run / "metrics.jsonl")] == list(range(1, stopped + 1))
    assert f"stopped by {number.name} after step {stopped}; saved" in said and "Traceback" not in said
    assert "posttrain sft --output_dir run --resume" in said and "done:" not in out
    assert command("sft", "--output_dir", "run", "--resume", "--quiet", "--train.max_steps", stopped + 2) == 0
    assert command(*argv, "--output_dir", "whole", "--quiet", "--train.max_steps", stopped + 2) == 0
    assert metrics_of(run) == metrics_of(tmp_path / "whole")
    files, whole = bytes_of(run)[0], bytes_of(tmp_path / "whole")[0]
    assert files == whole
