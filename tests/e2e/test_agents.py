"""Training of agents: the same after a resume, with batches ahead and in evaluation; forks and failures are counted."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from posttrain.core.metrics_sinks import is_wall_clock
from posttrain.rollout import records
from tests.e2e.commands import PATIENCE, command, rows_of, start, wait_until

CODE = """
import json, os, time, urllib.request
from pathlib import Path

def ask(messages, base_url, api_key, **options):
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]

def pair(example, base_url, api_key):
    messages = [{"role": "system", "content": "Say two words."}, *example["messages"]]
    first = ask(messages, base_url, api_key, max_tokens=6)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    second = ask(messages, base_url, api_key, max_tokens=6)
    if example["answer"] == "3":  # a summary, which continues nothing
        ask([{"role": "user", "content": "So far: " + str(len(first))}], base_url, api_key, max_tokens=3)
    return float(len(set(first + second)))

def waits(example, base_url, api_key):
    Path("WHERE", f"{os.getpid()}").touch()
    if example["answer"] == "2":
        while not Path("WHERE", "go").exists():
            time.sleep(0.01)
    return pair(example, base_url, api_key)
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "waiting").mkdir()
    Path("agent.py").write_text(CODE.replace("WHERE", str(tmp_path / "waiting")))
    with Path("rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(4))
    given = {
        "model.path": "pico",
        "data.train": "rows.jsonl",
        "rollout.agent": "agent.py:pair",
        "rollout.agent_workers": 2,
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 48,
        "train.batch_size": 2,
        "train.learning_rate": 1e-3,
        "steps": 4,
        "save.every_steps": 2,
        "seed": 3,
    }
    return [*(word for name, value in given.items() for word in (f"--{name}", value)), "--quiet"]


def numbers(run):
    return [
        {key: value for key, value in row.items() if not is_wall_clock(key)} for row in rows_of(run / "metrics.jsonl")
    ]


def conversations(run):
    rows = rows_of(run / records.FILE)
    assert all(len(row["turn_seconds"]) == row["turns"] for row in rows)
    return [{**row, "seconds": 0, "turn_seconds": 0, "branch": row.get("branch", 0)} for row in rows]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resumed_run_is_the_uninterrupted_one(options, ahead, capsys):
    options += ["--rollout.ahead", ahead]
    assert command("grpo", *options, "--out", "whole") == 0
    shutil.copytree("whole", "resumed")
    shutil.rmtree("resumed/checkpoints/step-00000004")  # as if killed before it was saved
    assert command("grpo", *options, "--out", "resumed", "--resume") == 0
    assert numbers(Path("resumed")) == numbers(Path("whole"))
    assert conversations(Path("resumed")) == conversations(Path("whole"))
    metrics = rows_of(Path("whole/metrics.jsonl"))
    assert all(row.get("sampler_kl", 0) < 1e-4 for row in metrics)  # sampler and trainer agree at equal weights
    rows = conversations(Path("whole"))
    forked = [row for row in rows if row["branch"]]
    assert sum(row.get("forks", 0) for row in metrics) == len(forked) > 0
    assert {row["turns"] for row in rows} == {1, 2} and not any(row["failure"] for row in rows)
    assert len(rows) - len(forked) == 4 * 2 * 2
    if ahead:
        return
    capsys.readouterr()
    assert command("samples", "whole", "--full", "--step", 1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("user: and?") == 4 and shown.count("assistant [") == 8
    assert command("samples", "whole", "--json", "--step", 1) == 0
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        assert sum(row["turn_tokens"]) == row["length"] and len(row["turn_seconds"]) == row["turns"]


def test_evaluation_is_played_too(options):
    evaluation = ["--data.eval", "rows.jsonl", "--eval.every_steps", 2, "--rollout.ahead", 1, "--steps", 2]
    assert command("grpo", *options, *evaluation, "--out", "run") == 0
    [row] = [row for row in rows_of(Path("run/metrics.jsonl")) if "eval/reward" in row]
    assert row["eval/reward"] >= 1 and row["eval/failures"] == 0


def test_kill_9_of_an_agent_costs_no_more_than_its_conversation(options, tmp_path):
    """The conversation begins again in another process; the run ends as if nothing had happened."""
    assert command("grpo", *options, "--out", "whole") == 0
    process = start("grpo", *options, "--rollout.agent", "agent.py:waits", "--out", "killed", cwd=tmp_path)
    waiting = tmp_path / "waiting"
    try:
        wait_until(lambda: any(waiting.iterdir()), process)
        for file in waiting.iterdir():
            os.kill(int(file.name), signal.SIGKILL)
            break
        (waiting / "go").touch()
        printed = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    assert "a process died, and its conversation began again" in printed[1]
    assert conversations(Path("killed")) == conversations(Path("whole"))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--rollout.agent", "agent.py:pear"], "has no function 'pear'"),
        (["--rollout.agent", "no-such-program"], "there is no command no-such-program"),
        (["--rollout.environment", "agent.py:Pair"], "rollout.environment is agent.py:Pair and rollout.agent is"),
        (["--rollout.agent_workers", 0], "rollout.agent_workers is 0; it must be at least 1"),
    ],
)
def test_wrong_use_is_found_before_anything_is_loaded(options, capsys, more, complaint):
    assert command("grpo", *options, *more, "--out", "run") == 2
    assert complaint in capsys.readouterr().err
    assert not Path("run").exists()
