"""A terminal that is closed during a run: the run saves and stops, and can be resumed; under nohup it goes on."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.e2e.commands import PATIENCE, command, rows_of, wait_until
from tests.e2e.rows import write_rows

CONTROLLING_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.parametrize("ignored", [False, True], ids=["", "nohup"])
def test_a_closed_terminal_saves_and_stops_a_run(ignored, tmp_path):
    run = tmp_path / "run"
    steps = 8 if ignored else 100_000
    arguments = ["sft", "--model", "pico", "--data", write_rows("chat", tmp_path), "--output_dir", str(run)]
    arguments += ["--train.max_steps", str(steps), "--train.batch_size", "1"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLING_TERMINAL, sys.executable, "-m", "posttrain", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # Also if the tests themselves run under nohup.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    try:
        os.close(theirs)
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, process)
        os.close(ours)
        assert process.wait(PATIENCE) == (0 if ignored else 128 + signal.SIGHUP)
    finally:
        process.kill()
        process.wait()
    done = rows_of(metrics)[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()][-1:] == [f"step-{done:08d}"]
    assert command(*arguments, "--resume", "--quiet", "--train.max_steps", done + 1) == 0
    assert len(rows_of(metrics)) == done + 1
