"""What a run tells: files, console, sinks, phases."""

from __future__ import annotations

import json
import logging
import math
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from posttrain.core.errors import UsageError
from posttrain.core.host import peak_memory_gib
from posttrain.core.logging import Log, RunConsole
from posttrain.core.metrics_sinks import Trackers, is_wall_clock
from posttrain.core.phases import PhaseTimer


def new_log(folder: Path | None, **options) -> Log:
    defaults = {"total_steps": 10, "quiet": False, "config": {}}
    return Log(folder, **(defaults | options))


TENSORBOARD = Trackers(names=("tensorboard",))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_a_step_with_step_and_loss_first(tmp_path):
    with new_log(tmp_path) as log:
        log.step(1, {"grad_norm": 0.5, "loss": 0.1 + 0.2, "tokens": 100})
        assert len(read(tmp_path / "metrics.jsonl")) == 1, "flushed while the run goes on"
        log.step(2, {"loss": np.float32(1.5), "eval/loss": 2.0})
    first, second = read(tmp_path / "metrics.jsonl")
    assert list(first)[:2] == ["step", "loss"]
    assert first["loss"] == 0.1 + 0.2, "floats are written as they are"
    assert first["tokens"] == 100 and first["tokens_per_second"] > 0 and first["memory_gib"] >= 0
    assert second["step"] == 2 and second["loss"] == 1.5 and second["eval/loss"] == 2.0


def test_what_is_not_finite_becomes_null_and_is_named(tmp_path):
    with new_log(tmp_path) as log:
        log.step(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["loss"] is None and row["grad_norm"] is None and row["lr"] == 1.0
    assert row["not_finite"] == ["loss", "grad_norm"]


def test_equal_runs_differ_only_in_wall_clock_keys(tmp_path):
    rows = []
    for name in ("a", "b"):
        with new_log(tmp_path / name) as log:
            with log.phase("data"):
                pass
            log.step(1, {"loss": 1.0, "tokens": 7, "time/mine": 1.0})
        rows.append(read(tmp_path / name / "metrics.jsonl")[0])
    kept = [{key: value for key, value in row.items() if not is_wall_clock(key)} for row in rows]
    assert kept[0] == kept[1] == {"step": 1, "loss": 1.0, "tokens": 7}


def test_phases_sum_to_the_wall_time_and_inner_ones_are_not_counted_twice(monkeypatch):
    now = 0.0
    monkeypatch.setattr("posttrain.core.logging.time.perf_counter", lambda: now)
    phases = PhaseTimer()
    now = 1.0  # 1 s of nothing
    phases.enter("train")
    now = 3.0  # 2 s
    phases.enter("data")
    now = 7.0  # 4 s
    phases.leave()
    now = 15.0  # 8 s
    seconds = phases.restart()  # inside a phase: its part so far
    assert seconds == {"train": 10.0, "data": 4.0, "other": 1.0} and list(seconds)[-1] == "other"
    now = 31.0
    phases.leave()
    assert phases.restart() == {"train": 16.0, "other": 0.0}


def test_each_phase_has_the_peak_memory_of_its_parts():
    held = iter([1.0, 5.0, 9.0, 3.0, 2.0, 2.0])
    phases = PhaseTimer(lambda: next(held))
    phases.enter("train")  # other held 1
    phases.enter("data")  # train held 5
    phases.leave()  # data held 9
    phases.leave()  # train held 3
    phases.restart()  # other held 2
    assert phases.take_peaks() == {"other": 2.0, "train": 5.0, "data": 9.0}
    assert phases.take_peaks() == {}


def test_phases_reach_the_metrics_even_when_the_body_raises(tmp_path):
    with new_log(tmp_path) as log:
        with pytest.raises(ZeroDivisionError), log.phase("data"):
            raise ZeroDivisionError
        with log.phase("eval"):
            pass
        log.step(1, {"loss": 1.0})
    assert {"time/data", "time/eval", "time/other"} <= set(read(tmp_path / "metrics.jsonl")[0])


def test_speed_leaves_out_evaluation_and_saving(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("posttrain.core.logging.time.perf_counter", lambda: now)
    with new_log(tmp_path) as log:
        with log.phase("train"):
            now += 2.0
        with log.phase("eval"):
            now += 100.0
        with log.phase("save"):
            now += 1000.0
        log.step(1, {"loss": 1.0, "tokens": 50})
    assert read(tmp_path / "metrics.jsonl")[0]["tokens_per_second"] == 25.0


def test_appends_and_drops_what_is_done_again(tmp_path):
    with new_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.step(step, {"loss": float(step)})
            log.samples(step, [{"answer": "ü"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    with new_log(tmp_path) as log:
        log.step(4, {"loss": 4.0})
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    with new_log(tmp_path, start_step=2) as log:
        log.step(3, {"loss": 30.0})
        log.samples(3, [{"answer": "again"}])
    assert [row["loss"] for row in read(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 30.0]
    assert read(tmp_path / "samples" / "step-00000001.jsonl") == [{"answer": "ü"}]
    assert read(tmp_path / "samples" / "step-00000003.jsonl") == [{"answer": "again"}]


def test_without_a_terminal_plain_lines_first_and_last_and_not_too_many(tmp_path, capsys):
    with new_log(tmp_path, total_steps=500) as log:
        for step in range(1, 501):
            log.step(step, {"loss": 1.0 / step, "tokens": 10})
        log.done("saved; resume with: posttrain sft --resume")
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "\r" not in out and "\x1b" not in out and err == ""
    assert re.match(r"step 1/500  eta 0:\d\d  loss 1\.0000  ", lines[0])
    assert lines[-2].startswith("step 500/500  eta 0:00  loss 0.0020  ")
    assert all(word in lines[-2] for word in ("tokens/s", "eta", "GiB"))
    assert lines[-1] == "saved; resume with: posttrain sft --resume"
    assert len(lines) < 50, "at most about one a second"
    assert len(read(tmp_path / "metrics.jsonl")) == 500


def test_a_run_that_stops_early_still_shows_its_last_step(capsys):
    with pytest.raises(KeyboardInterrupt), new_log(None) as log:
        for step in (1, 2, 3):
            log.step(step, {"loss": 1.0})
        raise KeyboardInterrupt
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/10", "3/10"]


def test_quiet_shows_warnings_and_the_last_line_alone(tmp_path, capsys):
    with new_log(tmp_path, quiet=True) as log:
        log.message("loading")
        log.step(1, {"loss": 1.0, "eval/loss": 1.0})
        log.warn("three rows were dropped")
        log.done("done")
    out, err = capsys.readouterr()
    assert out == "done\n" and err == "warning: three rows were dropped\n"
    told = (tmp_path / "logs" / "run.log").read_text()
    assert [line.split(" ", 2)[2] for line in told.splitlines()] == [
        "info: loading",
        "warning: three rows were dropped",
        "info: done",
    ]


def read_until(end: str, controller: int) -> str:
    """What a terminal shows; it arrives in pieces."""
    seen = ""
    while end not in seen:
        assert select.select([controller], [], [], 30)[0], f"the terminal went silent after {seen!r}"
        seen += os.read(controller, 10000).decode()
    return seen


def test_terminal_rewrites_one_line_and_prints_messages_above_it(monkeypatch):
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setenv("COLUMNS", "60")
        with new_log(None, total_steps=4) as log:
            log.step(1, {"loss": 1.0, "tokens": 5})
            log.message("hello")
            log.step(4, {"loss": 0.25, "tokens": 5, "eval/accuracy": 0.5})
            log.done("the end")
        out.flush()
        seen = read_until("the end\r\n", controller)
    os.close(controller)
    screen = screen_of(seen)
    assert screen[0] == "hello"
    assert screen[1] == "step 4  eval/accuracy 0.5"
    assert screen[2].startswith(f"step 4/4 {'━' * 20} eta 0:00  loss 0.2500")
    assert screen[3:] == ["the end", ""]
    assert all(len(line) <= 60 for line in screen)


def screen_of(seen: str) -> list[str]:
    """The lines that a terminal shows in the end, where each one is rewritten from its beginning."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.replace("\r\n", "\n"))
    return [line.split("\r")[-1].rstrip() for line in plain.split("\n")]


def test_a_closed_pipe_does_not_end_the_run(tmp_path):
    program = (
        "import sys; from pathlib import Path; from posttrain.core.logging import Log\n"
        "options = dict(total_steps=3, quiet=False, config={})\n"
        "with Log(Path(sys.argv[1]), **options) as l:\n"
        "    sys.stdin.readline()\n"
        "    for step in (1, 2, 3):\n"
        "        l.message('x'); l.step(step, {'loss': 1.0})\n"
        "    l.done('done')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    process.stdin.write(b"go\n")
    process.stdin.close()
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    assert len(read(tmp_path / "metrics.jsonl")) == 3


def test_text_that_the_terminal_cannot_spell_is_still_shown(tmp_path, monkeypatch):
    path = tmp_path / "out"
    with path.open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with new_log(None) as log:
            log.message("größer")
    assert path.read_text() == "gr??er\n"


def test_metrics_that_tensorboard_cannot_write_do_not_end_the_run(tmp_path, capsys):
    class Full:
        def step(self, step, metrics):
            raise OSError(28, "No space left on device", "events")

        def close(self, failed):
            raise AssertionError("it is not used any more")

    with new_log(tmp_path) as log:
        log.sinks.append(Full())
        log.step(1, {"loss": 1.0})
        log.step(2, {"loss": 1.0})
        (tmp_path / "samples").write_text("a file where the folder should be")
        log.samples(1, [{"answer": "x"}])
    assert len(read(tmp_path / "metrics.jsonl")) == 2
    shown = capsys.readouterr().err
    assert shown.count("not written to Full any more: [Errno 28] No space left on device") == 1
    assert "The run goes on without these samples" in shown


def test_library_warnings_go_through_the_console_while_the_run_lasts(tmp_path, capsys):
    with new_log(tmp_path):
        logging.getLogger("posttrain.data").warning("row %d is long", 7)
        logging.getLogger("posttrain.data").info("not shown")
    assert capsys.readouterr().err == "warning: row 7 is long\n"
    assert not logging.getLogger("posttrain").handlers


def test_a_failure_leaves_its_traceback_in_the_run_folder(tmp_path):
    with pytest.raises(ValueError, match="boom"), new_log(tmp_path):
        raise ValueError("boom")
    told = (tmp_path / "logs" / "run.log").read_text()
    assert "Traceback" in told and told.endswith("ValueError: boom\n")


def test_what_matters_of_pairs_is_in_the_progress_line(capsys):
    RunConsole(total_steps=3, quiet=False).step(
        1, {"loss": 0.7, "accuracy": 0.75, "margin": 0.125, "memory_gib": 0.0, "time/train": 1.0}
    )
    assert "  loss 0.7000  accuracy 0.75  margin 0.125  " in capsys.readouterr().out


def test_eta_counts_from_the_first_step_on(monkeypatch, capsys):
    now = 1000.0  # the program is old when the first step ends
    monkeypatch.setattr("posttrain.core.logging.time.monotonic", lambda: now)
    console = RunConsole(total_steps=1000, quiet=False)
    console.step(1, {"loss": 1.0, "memory_gib": 0.0, "time/load": 60.0, "time/train": 3.0, "time/other": 0.5})
    now = 1010.0
    console.step(6, {"loss": 1.0, "memory_gib": 0.0, "time/train": 3.0, "time/other": 0.5})
    first, second = capsys.readouterr().out.splitlines()
    assert "eta 58:16" in first  # 999 steps of 3.5 s
    assert "eta 2:45:40" in second  # 994 steps of 10 s


def test_tensorboard_holds_every_metric_and_forgets_what_is_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with new_log(tmp_path, trackers=TENSORBOARD) as log:
        for step in (1, 2, 3):
            log.step(step, {"loss": float(step), "eval/loss": 0.5})
    with new_log(tmp_path, trackers=TENSORBOARD, start_step=1) as log:
        log.step(2, {"loss": 20.0})
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard")).Reload()
    assert {"loss", "eval/loss", "memory_gib", "time/other"} <= set(events.Tags()["scalars"])
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


WANDB = """
import json
class Error(Exception): ...
class Settings:
    def __init__(self, silent): self.silent = silent
class Run:
    def __init__(self, told): self.told, self.file = told, open(told["dir"] + "/told.jsonl", "a")
    def log(self, metrics, step): print(json.dumps([step, metrics["loss"]]), file=self.file)
    def finish(self, exit_code):
        print(json.dumps(["end", exit_code, self.told["id"]]), file=self.file)
        self.file.close()
def init(**told):
    if told["project"] == "locked": raise Error("no API key")
    assert told["resume"] == "allow" and told["config"] == {"seed": 1}
    return Run(told)
"""


def test_wandb_gets_every_step_beside_tensorboard_and_one_run_across_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    folder = tmp_path / "run"
    both = Trackers(names=("tensorboard", "wandb"), project="project")
    with new_log(folder, trackers=both, config={"seed": 1}) as log:
        log.step(1, {"loss": 1.0})
    options = {"trackers": Trackers(names=("wandb",), project="project"), "config": {"seed": 1}}
    with pytest.raises(KeyboardInterrupt), new_log(folder, start_step=1, **options) as log:
        log.step(2, {"loss": 2.0})
        raise KeyboardInterrupt
    told = read(folder / "logs" / "told.jsonl")
    assert [line[:2] for line in told] == [[1, 1.0], ["end", 0], [2, 2.0], ["end", 1]]
    assert told[1][2] == told[3][2], "the same wandb run"
    assert list((folder / "logs" / "tensorboard").iterdir())
    with pytest.raises(UsageError, match=r"no API key.*wandb login.*WANDB_MODE=offline"):
        new_log(tmp_path / "other", trackers=Trackers(names=("wandb",), project="locked"))
    sys.modules.pop("wandb")


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio", "mlflow", "swanlab"])
def test_a_missing_sink_is_a_usage_error_with_the_command_that_installs_it(tmp_path, monkeypatch, name):
    found = __import__("importlib").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None if wanted == name else found(wanted))
    with pytest.raises(UsageError, match=f"log.report_to {name} needs a package: pip install '{name}.*>="):
        new_log(tmp_path / "run", trackers=Trackers(names=(name,)))
    assert not (tmp_path / "run").exists(), "nothing was started"
    Trackers().check()


def test_log_and_its_module_import_no_heavy_library():
    program = (
        "import posttrain.core.logging, sys; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("before", [True, False])
def test_quiet_libraries(before):
    calls = [
        "import posttrain.core.logging; posttrain.core.logging.quiet_libraries()",
        "from transformers.utils import logging",
    ]
    program = "\n".join(calls if before else reversed(calls))
    program += "\nassert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRANSFORMERS", "HF_"))}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_memory_is_that_of_the_process():
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there it is the accelerator's")
    before = peak_memory_gib()
    block = np.ones(2**25)  # 256 MiB, touched
    assert 0.01 < before <= peak_memory_gib() and peak_memory_gib() >= block.nbytes / 2**30
