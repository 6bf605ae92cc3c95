"""A stop signal while a reward function, environment or agent hangs: the run saves and ends; a resume goes on there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.commands import PATIENCE, command, rows_of

STEPS = 4
REWARD = """
import os, time
def score(text, question):
    if question == "question 2" and os.path.exists({hang!r}):
        open({arrived!r}, "w").close()
        time.sleep(1000)
    return float(len(text))

class Game:
    def start(self, example):
        self.question = example["question"]
        return [{{"role": "user", "content": self.question}}]

    def step(self, reply):
        return None, score(reply, self.question)

def agent(example, base_url, api_key):
    import json, urllib.request
    body = json.dumps({{"model": "policy", "messages": example["messages"]}}).encode()
    headers = {{"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as response:
        return score(json.load(response)["choices"][0]["message"]["content"], example["question"])
"""
# All must end at once although a function may take much longer than the test waits.
LIMITS = ("--reward.timeout_seconds", "600", "--reward.workers", "2", "--reward.max_failure_rate", "1")
CASES = {
    "repeated": (["--reward", "{}/reward.py:score"], True),
    "batches ahead, scored on resume": (["--reward", "{}/reward.py:score", "--rollout.ahead", "1"], True),
    "agent": (["--rollout.agent", "{}/reward.py:agent", "--rollout.agent_workers", "2"], True),
    # The weights that generated the first turns are gone: the batch is made again with later ones.
    "environment, batches ahead": (["--rollout.environment", "{}/reward.py:Game", "--rollout.ahead", "1"], False),
}


def arguments(place, name, options):
    return [
        *("grpo", "--model", "pico", "--data", str(place / "prompts.jsonl"), "--data.no_shuffle"),
        *LIMITS,
        *(option.format(place) for option in options),
        *("--rollout.samples_per_prompt", "8", "--rollout.max_tokens", "4", "--train.learning_rate", "1e-2"),
        *("--train.batch_size", "1", "--train.max_steps", str(STEPS), "--quiet"),
        *("--output_dir", str(place / name)),
    ]


def compared(folder):
    rollouts = [(row["step"], row["group"], row["tokens"], row["reward"]) for row in rows_of(folder / "rollouts.jsonl")]
    times = ("time/", "seconds", "tokens_per_second", "memory_gib")
    metrics = [
        {name: value for name, value in row.items() if not any(word in name for word in times)}
        for row in rows_of(folder / "metrics.jsonl")
    ]
    return rollouts, metrics


@pytest.mark.parametrize(("options", "equal"), CASES.values(), ids=CASES)
def test_a_stop_signal_waits_for_no_reward_function(tmp_path, options, equal):
    hang, arrived = tmp_path / "hang", tmp_path / "arrived"
    (tmp_path / "reward.py").write_text(REWARD.format(hang=str(hang), arrived=str(arrived)))
    rows = [{"prompt": f"{n}+1=", "question": f"question {n}"} for n in range(STEPS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hang.touch()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain", *arguments(tmp_path, "run", options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until = time.monotonic() + PATIENCE
        while not arrived.exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=PATIENCE)[0]
    finally:
        process.kill()
    assert process.returncode == 143 and "saved. Resume:" in printed, printed
    hang.unlink()
    assert command(*arguments(tmp_path, "run", options), "--resume") == 0
    rollouts, metrics = compared(tmp_path / "run")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert [group for _, group, _, _ in rollouts] == [n for n in range(STEPS) for _ in range(8)]
    if equal:
        assert command(*arguments(tmp_path, "whole", options)) == 0
        assert (rollouts, metrics) == compared(tmp_path / "whole")
