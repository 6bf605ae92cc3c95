"""A training process killed with SIGKILL at any instant, and resumed, ends bit for bit as the one that was not.

Run as a script this file is the warden: it has imported everything, forks a child for each attempt (a fork costs
milliseconds, a start with torch seconds), and kills it. It never computes with torch itself.
"""

import contextlib
import importlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.checkpoints.checkpoint import newest_valid, step_of
from posttrain.cli.main import main
from posttrain.core.logging import Log
from posttrain.train.learner import Learner
from tests.e2e.commands import PATIENCE
from tests.e2e.rows import write_judge, write_rows
from tests.e2e.test_resume import bytes_of, metrics_of
from tests.invariance.worlds import once

STEPS = 16
VARIANTS = {
    "sft": ["--train.ema_decay", "0.9", "--save.every_steps", "1"],
    "grpo": [
        *("--reward", "../judge.py:score", "--rewards.workers", "1", "--rollout.samples_per_prompt", "2"),
        *("--rollout.max_tokens", "4", "--rollout.ahead", "1", "--save.every_steps", "2"),
    ],
    "dpo": ["--model.lora_rank", "4", "--model.lora_dropout", "0.3", "--save.every_steps", "2"],
}
# When a process dies: during its start; at some point after N steps of its own, which may be in a step, an
# evaluation or a save; or in its second save, when it is about to write that file or to rename the folder.
MOMENTS = ["start", 1, "config.json", 2, "state.json", "manifest.json", "rename"]
IN_ROLLOUT = "generate"  # and those that generate: when they have begun to do so for the third time


def moments_of(verb):
    return [*MOMENTS, IN_ROLLOUT] if verb == "grpo" else MOMENTS


def options(verb, out):
    rows = {"sft": "../chat.jsonl", "dpo": "../pair.jsonl", "grpo": "../prompt.jsonl"}[verb]
    given = ["--model.path", "pico", "--data.train", rows, "--data.eval", rows, "--eval.every_steps", "3", "--quiet"]
    small = ["--train.batch_size", "3", "--train.learning_rate", "1e-3", "--steps", str(STEPS)]
    return [verb, *given, *small, *VARIANTS[verb], "--out", out]


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory):
    """The folders in which the warden was, and what it has to say."""
    pytest.importorskip("peft")
    return once(tmp_path_factory, "killed", kill_runs)


def kill_runs(folder):
    for kind in ("chat", "pair", "prompt"):
        write_rows(kind, folder)
    write_judge(folder)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, __file__], cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {"folder": str(folder), "accounts": json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("verb", VARIANTS)
def test_killed_again_and_again_and_resumed(verb, killed_runs):
    folder = Path(killed_runs["folder"])
    *deaths, last = killed_runs["accounts"][verb]
    assert [death["moment"] for death in deaths] == moments_of(verb)
    checkpoints = [death["checkpoint"] for death in (*deaths, last)]
    assert checkpoints == sorted(checkpoints), "a checkpoint was lost"
    assert checkpoints[-2] > checkpoints[2] > 0, "they were killed too early to show anything"
    unfinished = [death["unfinished"] for death in deaths if isinstance(death["moment"], str)]
    assert unfinished == [0, 1, 1, 1, 1] + [0] * (verb == "grpo")

    whole, killed = folder / verb / "whole", folder / verb / "killed"
    assert metrics_of(killed) == metrics_of(whole) and len(metrics_of(whole)) == STEPS
    (files, state), (expected_files, expected_state) = bytes_of(killed), bytes_of(whole)
    assert state == expected_state and state["step"] == STEPS
    assert files.keys() == expected_files.keys()
    assert not [name for name in files if files[name] != expected_files[name]]
    assert recorded(killed) == recorded(whole)
    names = {path.name for path in (killed / "checkpoints").iterdir()}
    assert names == {path.name for path in (whole / "checkpoints").iterdir()}, "something was left behind"


def recorded(run):
    """Every completion that was trained on, without the time that its reward took."""
    file = run / "rollouts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) | {"seconds": 0} for line in lines]


def train_until(moment, argv, tell, leash):
    """In the child: train, tell the warden that the moment is there, and wait for death if it is late."""
    steps_done = 0
    saves = set()
    plain = Log.step

    def wait():
        os.read(leash, 1)  # nothing ever comes: it ends with the warden
        os._exit(98)

    def logged(log, step, metrics):
        nonlocal steps_done
        plain(log, step, metrics)
        steps_done += 1
        if steps_done == moment:
            os.write(tell, b".")
        elif moment == "start" or (isinstance(moment, int) and steps_done == moment + 2):
            wait()

    def watch(event, arguments):
        if event != ("os.rename" if moment == "rename" else "open"):
            return
        save = re.search(r"/\.tmp-(step-\d+)-\d+(?:/.*)?$", str(arguments[0]))
        if save and (moment == "rename" or save.group().endswith(f"/{moment}")):
            saves.add(save[1])
        if len(saves) == 2:
            os.write(tell, b".")
            wait()

    generations = 0
    generate = Learner.generate

    def generated(learner, *arguments, **options):
        nonlocal generations
        generations += 1
        if generations == 3:
            os.write(tell, b".")
            wait()
        return generate(learner, *arguments, **options)

    Log.step = logged
    if moment == IN_ROLLOUT:
        Learner.generate = generated
    elif isinstance(moment, str):
        sys.addaudithook(watch)
    return main(argv)


def attempt(moment, argv):
    """A process that trains; the end of the pipe that it tells through; the leash."""
    sys.stdout.flush()
    (hear, tell), (leash, hold) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.close(hold)
            code = train_until(moment, argv, tell, leash)
        finally:
            os._exit(code)
    os.close(tell)
    os.close(leash)
    return child, hear, hold


def kill_at(moment, argv, delay):
    child, hear, hold = attempt(moment, argv)
    if moment != "start":
        ready, _, _ = select.select([hear], [], [], PATIENCE / 2)
        assert ready and os.read(hear, 1) == b".", f"it never came to {moment}"
    if moment == "start" or isinstance(moment, int):
        time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(hear)
    os.close(hold)
    assert os.WTERMSIG(status) == signal.SIGKILL, f"ended by itself at {moment}: {status}"
    return account(moment)


def account(moment):
    newest = newest_valid(Path("killed/checkpoints"))
    unfinished = len(list(Path("killed").glob("checkpoints/.tmp-*")))
    return {"moment": moment, "checkpoint": step_of(newest) if newest else 0, "unfinished": unfinished}


def warden(verb):
    chance = random.Random(verb)
    accounts = []
    for moment in moments_of(verb):
        resume = ["--resume"] if Path("killed/config.yaml").exists() else []
        accounts.append(kill_at(moment, options(verb, "killed") + resume, chance.uniform(0, 0.05)))
    for argv in ([verb, "--out", "killed", "--resume"], options(verb, "whole")):
        child, *_ = attempt(None, argv)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{argv}: {status}"
    return [*accounts, account("end")]


if __name__ == "__main__":
    for module in (
        "posttrain.train.offline",
        "posttrain.train.online",
        "tyro",
        "peft",
        "torch._inductor",
    ):  # so that the children need not
        importlib.import_module(module)
    reports = {}
    for name in VARIANTS:
        Path(name).mkdir()
        with contextlib.chdir(name):
            reports[name] = warden(name)
    print(json.dumps(reports))
