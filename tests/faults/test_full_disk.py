"""A full disk: a run goes on without its logs and completes them later; commands say what, where and how much."""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import posttrain
from posttrain.cli.main import main
from posttrain.core.metrics_sinks import is_wall_clock
from tests.e2e.commands import command, rows_of
from tests.e2e.rows import write_rows

STEPS = 4
ROOT = Path(__file__).parents[2]


def score(text):
    return float(len(text) % 3)


class FullDisk(posttrain.Callback):
    """No file can grow after step 1 and before step 3."""

    def on_step(self, state):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.before = soft if state.step == 1 else self.before
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 if 1 <= state.step < 3 else self.before, hard))


def logged(folder):
    metrics = [
        {name: value for name, value in row.items() if not is_wall_clock(name) and "seconds" not in name}
        for row in rows_of(folder / "metrics.jsonl")
    ]
    rollouts = [row | {"seconds": 0} for row in rows_of(folder / "rollouts.jsonl")]
    return metrics, rollouts


def test_a_full_disk_under_the_logs_does_not_end_a_run(tmp_path, capsys):
    rows = write_rows("prompt", tmp_path)
    given = {"rollout": {"max_tokens": 4, "samples_per_prompt": 2}, "max_steps": STEPS, "batch_size": 2}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for name, callbacks in (("whole", []), ("full", [FullDisk()])):
            posttrain.grpo("pico", rows, reward=score, output_dir=tmp_path / name, callbacks=callbacks, **given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert logged(tmp_path / "full") == logged(tmp_path / "whole")
    shown = capsys.readouterr().err
    for file in ("metrics.jsonl", "rollouts.jsonl", "logs/run.log"):
        assert shown.count(f"{file}: cannot be written: File too large. The run goes on") == 1, shown
        assert f"full/{file}: can be written again; no line is lost\n" in shown
    log = (tmp_path / "full/logs/run.log").read_text()
    assert "metrics.jsonl: cannot be written" in log and log.count("done:") == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    assert command("export", "pico", str(place / "pico")) == 0
    (place / "text.jsonl").write_text(json.dumps({"text": "a" * 10_000}) + "\n")
    write_rows("prompt", place)
    scored = [{"prompt": "a", "completion": "b", "reward": 1.0}, {"prompt": "a", "completion": "c", "reward": 0.0}]
    (place / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    return place


COMMANDS = {
    "export": ("{model}/pico", "{out}/result"),
    "convert": ("{model}/pico", "{out}/result", "--target_format", "mcore"),
    "generate": (
        *("--model", "pico", "--data", "{model}/prompt.jsonl", "--output_file", "{out}/result.jsonl"),
        *("--max_tokens", "4"),
    ),
    "score": ("{model}/scored.jsonl", "--reward", "format", "--output_file", "{out}/result.jsonl"),
    "select": ("best-of-n", "{model}/scored.jsonl", "--output_file", "{out}/result.jsonl"),
    "data": (
        *("preprocess", "--input", "{model}/text.jsonl", "--output_prefix", "{out}/result"),
        *("--tokenizer", "{model}/pico", "--handler_name", "GeneralPretrainHandler"),
    ),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_on_a_full_disk_says_what_was_not_written_and_leaves_nothing(verb, model, tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = [argument.format(model=model, out=tmp_path) for argument in COMMANDS[verb]]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000 if verb == "data" else 10, before[1]))
    try:
        assert command(verb, *arguments) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shown = capsys.readouterr().err
    assert f"posttrain: {tmp_path}/result" in shown, shown
    reason = "torch.save could not write all bytes" if verb == "convert" else "File too large"
    assert f"cannot be written: {reason} (written before the error: " in shown and "; free: " in shown, shown
    assert "Free some space" in shown and "Traceback" not in shown
    assert ("; needed: about " in shown) == (verb in ("export", "convert"))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp-")]
    assert command(verb, *arguments, *(["--resume"] if verb == "generate" else [])) == 0


@pytest.mark.parametrize("redirected", [">/dev/full", "| true", ">&-"], ids=["full", "reader gone", "closed"])
def test_standard_output_that_cannot_be_written(redirected):
    """Python itself would print "Exception ignored" at its end."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = f"set -o pipefail; {shlex.quote(sys.executable)} -m posttrain rewards list {redirected}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    full = "posttrain: standard output: cannot be written: No space left on device. Free some space"
    assert done.stderr.startswith(full) and done.stderr.count("\n") == 1 if "full" in redirected else not done.stderr
    assert done.returncode == (1 if "full" in redirected else 0)


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (lambda: bytearray(1 << 60), ["out of host memory: this process held up to", "posttrain plan"]),
        (lambda: torch.empty(1 << 50), ["out of host memory: 4,194,304.0 GiB more were needed"]),
        (lambda: open("/nowhere/x"), ["/nowhere/x: No such file or directory"]),  # noqa: PTH123, SIM115
        (lambda: open("/dev/full", "w").write("x" * 10**6), ["a file could not be written: No space left"]),  # noqa: PTH123, SIM115
    ],
)
def test_errors_of_the_system_are_one_message(fail, words, monkeypatch, capsys):
    monkeypatch.setattr("posttrain.cli.main.dispatch", lambda args: fail())
    assert main(["sft"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("posttrain: ") and all(word in shown for word in words), shown
