"""A training process killed with SIGKILL at any instant, and resumed, ends bit for bit as the one that was not.

Run as a script this file is the warden: it has imported everything, forks a child for each attempt (a fork costs
milliseconds, a start with torch seconds), and kills it. It never computes with torch itself.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.log import Log
from posttrain.models.checkpoint import newest_valid, step_of
from posttrain.models.pico import pico_folder
from tests.e2e.commands import PATIENCE
from tests.e2e.rows import write_rows
from tests.e2e.test_resume import bytes_of, metrics_of

STEPS = 10
VARIANTS = {
    "sft": ["--update.ema_decay", "0.9", "--save.every", "1"],
    "dpo": ["--model.lora_rank", "4", "--model.lora_dropout", "0.3", "--save.every", "3"],
}
# When a process dies: somewhere in its start; somewhere after so many steps of its own, which may be in a step, an
# evaluation or a save; or in a save, when it is about to write that file or to give the folder its name.
MOMENTS = ["start", 1, "config.json", 2, "state.json", "manifest.json", "rename"]


def options(verb, out):
    rows = "chat.jsonl" if verb == "sft" else "pair.jsonl"
    given = ["--model.path", "pico", "--data.train", rows, "--data.eval", rows, "--eval.every", "2", "--quiet"]
    small = ["--update.rows_per_step", "3", "--update.learning_rate", "1e-3", "--steps", str(STEPS)]
    return [verb, *given, *small, *VARIANTS[verb], "--out", out]


@pytest.mark.parametrize("verb", VARIANTS)
def test_killed_again_and_again_and_resumed(verb, tmp_path):
    for kind in ("chat", "pair"):
        write_rows(kind, tmp_path)
    pico_folder()  # made here, once
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    warden = [sys.executable, __file__, verb]
    done = subprocess.run(warden, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    *deaths, last = json.loads(done.stdout.splitlines()[-1])
    assert [death["moment"] for death in deaths] == MOMENTS
    checkpoints = [death["checkpoint"] for death in (*deaths, last)]
    assert checkpoints == sorted(checkpoints), "a checkpoint was lost"
    assert [death["unfinished"] for death in deaths if isinstance(death["moment"], str)] == [0, 1, 1, 1, 1]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert metrics_of(killed) == metrics_of(whole) and len(metrics_of(whole)) == STEPS
    (files, state), (expected_files, expected_state) = bytes_of(killed), bytes_of(whole)
    assert state == expected_state and state["step"] == STEPS
    assert files.keys() == expected_files.keys()
    assert not [name for name in files if files[name] != expected_files[name]]
    names = {path.name for path in (killed / "checkpoints").iterdir()}
    assert names == {path.name for path in (whole / "checkpoints").iterdir()}, "something was left behind"


def train_until(moment, argv, pipe):
    """In the child: train, tell through the pipe that the moment is there, and wait soon after if death is late."""
    steps_done = 0
    plain = Log.step

    def logged(log, step, metrics):
        nonlocal steps_done
        plain(log, step, metrics)
        steps_done += 1
        if steps_done == moment:
            os.write(pipe, b".")
        elif moment == "start" or (isinstance(moment, int) and steps_done == moment + 2):
            signal.pause()

    def watch(event, arguments):
        path = str(arguments[0]) if event in ("open", "os.rename") else ""
        saving = "/.tmp-step-" in path and path.endswith(moment if event == "open" else str(os.getpid()))
        if saving and (event == "os.rename") == (moment == "rename"):
            os.write(pipe, b".")
            signal.pause()

    Log.step = logged
    if isinstance(moment, str):
        sys.addaudithook(watch)
    return main(argv)


def attempt(moment, argv):
    """A process that trains; the end of the pipe that it speaks through."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = train_until(moment, argv, writing)
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def kill_at(moment, argv, delay):
    child, pipe = attempt(moment, argv)
    if moment != "start":
        ready, _, _ = select.select([pipe], [], [], PATIENCE / 2)
        assert ready and os.read(pipe, 1) == b".", f"it never came to {moment}"
    if not isinstance(moment, str) or moment == "start":
        time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(pipe)
    assert os.WTERMSIG(status) == signal.SIGKILL, f"ended by itself at {moment}: {status}"
    return account(moment)


def account(moment):
    newest = newest_valid(Path("killed/checkpoints"))
    unfinished = len(list(Path("killed").glob("checkpoints/.tmp-*")))
    return {"moment": moment, "checkpoint": step_of(newest) if newest else 0, "unfinished": unfinished}


def warden(verb):
    chance = random.Random(verb)
    accounts = []
    for moment in MOMENTS:
        resume = ["--resume"] if Path("killed/config.yaml").exists() else []
        accounts.append(kill_at(moment, options(verb, "killed") + resume, chance.uniform(0, 0.05)))
    for argv in ([verb, "--out", "killed", "--resume"], options(verb, "whole")):
        child, _ = attempt("", argv)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{argv}: {status}"
    print(json.dumps([*accounts, account("end")]))


if __name__ == "__main__":
    import posttrain.loops.offline  # noqa: F401  so that the children need not

    warden(sys.argv[1])
