"""Training in episodes with an environment: the same twice, the same after a resume, and rewarded as it says."""

import json
import random
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.core.metrics_sinks import is_wall_clock
from posttrain.rollout import records
from tests.e2e.commands import command, rows_of

ROOT = Path(__file__).parents[2]
CODE = """
class Pair:
    def start(self, example):
        self.said = []
        return [{"role": "system", "content": "Say two words."}, *example["messages"]]

    def step(self, reply):
        self.said.append(reply)
        if len(self.said) == 2:
            return None, float(len(set("".join(self.said))))
        return [{"role": "user", "content": "and?"}], 0.5
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pair.py").write_text(CODE)
    with Path("rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(6))
    given = {
        "model.path": "pico",
        "data.train": "rows.jsonl",
        "rollout.environment": "pair.py:Pair",
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 48,
        "train.batch_size": 2,
        "train.learning_rate": 1e-3,
        "steps": 4,
        "save.every_steps": 2,
        "seed": 3,
    }
    # A random model seldom ends its turn: any vowel does.
    stops = ["--rollout.stop", *"aeiou"]
    return [*(word for name, value in given.items() for word in (f"--{name}", value)), *stops, "--quiet"]


def numbers(run):
    return [
        {key: value for key, value in row.items() if not is_wall_clock(key)} for row in rows_of(run / "metrics.jsonl")
    ]


def answers(run):
    rows = rows_of(run / records.FILE)
    assert all(len(row["turn_seconds"]) == row["turns"] for row in rows)
    return [{**row, "seconds": 0, "turn_seconds": 0} for row in rows]


@pytest.mark.parametrize(("ahead", "schedule"), [(0, "auto"), (1, "auto"), (0, "concurrent"), (1, "concurrent")])
def test_a_resumed_run_is_the_uninterrupted_one(options, tmp_path, ahead, schedule):
    options += ["--rollout.ahead", ahead, "--rollout.environment_schedule", schedule]
    assert command("grpo", *options, "--out", "whole") == 0
    shutil.copytree("whole", "resumed")
    shutil.rmtree("resumed/checkpoints/step-00000004")  # as if killed before it was saved
    assert command("grpo", *options, "--out", "resumed", "--resume") == 0
    assert numbers(Path("resumed")) == numbers(Path("whole"))
    assert answers(Path("resumed")) == answers(Path("whole"))
    rows = answers(Path("whole"))
    assert len(rows) == 4 * 2 * 2 and {row["turns"] for row in rows} == {1, 2}


def test_what_is_recorded_is_the_conversation(options):
    assert command("grpo", *options, "--out", "run") == 0
    for row in rows_of(Path("run") / records.FILE):
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert row["messages"][0]["content"] == "Say two words." and row["text"] == said[-1]
        assert len(said) == row["turns"]
        expected = 0.5 + (len(set("".join(said))) if len(said) == 2 else 0)
        assert row["reward"] == row["rewards"]["environment"] == expected
        assert row["mask"].count("1") + row["prompt_length"] <= len(row["tokens"]) <= row["prompt_length"] + 48
    last = rows_of(Path("run/metrics.jsonl"))[-1]
    assert last["sampler_kl"] < 1e-4  # sampler and trainer agree, whatever stands between the turns


def test_evaluation_is_played_too(options):
    evaluation = ["--data.eval", "rows.jsonl", "--eval.every_steps", 2, "--eval.samples_per_prompt", 2]
    assert command("grpo", *options, *evaluation, "--eval.temperature", 1, "--out", "run") == 0
    rows = rows_of(Path("run/metrics.jsonl"))
    assert [row["eval/reward"] >= 0.5 for row in rows if "eval/reward" in row] == [True, True]
    assert all(0 <= row["eval/accuracy"] <= 1 for row in rows if "eval/accuracy" in row)


def test_other_rewards_are_added(options):
    reward = ["--reward", f"{ROOT}/examples/reward.py:short", "--rewards.weights", 4]
    assert command("grpo", *options, *reward, "--steps", 1, "--out", "run") == 0
    for row in rows_of(Path("run") / records.FILE):
        assert row["reward"] == row["rewards"]["environment"] + 4 * row["rewards"]["reward.short"]


def test_an_environment_that_fails_stops_the_run(options, capsys):
    Path("pair.py").write_text(CODE.replace("self.said.append(reply)", "self.sad.append(reply)"))
    assert command("grpo", *options, "--out", "run") == 1
    said = capsys.readouterr().err
    assert "failed in 4 of 4 episodes" in said and "no attribute 'sad'" in said


@pytest.mark.parametrize(
    ("spec", "complaint"), [("pair.py:Pear", "no class 'Pear'"), ("pear.py:Pair", "there is no file pear.py")]
)
def test_wrong_use_is_found_before_anything_is_loaded(options, capsys, spec, complaint):
    assert command("grpo", *options, "--rollout.environment", spec, "--out", "run") == 2
    assert complaint in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("task", "environment"), [("guess_number", "GuessNumber"), ("calculator_task", "CalculatorTask")]
)
def test_the_tasks_of_the_examples_are_trained_in_two_stages(task, environment, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    found = runpy.run_path(str(ROOT / "examples" / f"{task}.py"))
    for seed in range(30):  # what demonstrations say is what the environment says
        messages = found["demonstration"](random.Random(seed))["messages"]
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        played = found[environment]()
        product = re.search(r"(\d+) \* (\d+)", messages[0]["content"])
        answer = int(product[1]) * int(product[2]) if product else int(said[-1])
        assert played.start({"messages": messages[:1], "secret": answer, "answer": str(answer)}) == messages[:1]
        results = [played.step(reply) for reply in said]
        if said[-1] == str(answer) and len(said) < found.get("GUESSES", 10):  # solved
            replies = [message for result, _ in results[:-1] for message in result]
            assert [message for message in messages[1:] if message["role"] == "user"] == replies
            assert results[-1][0] is None and (not product or sum(reward for _, reward in results) == 1)
    small = ["--demonstrations", "64", "--held_out", "2", "--steps", "1", "--prompts", "1", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", ["task", "--out", str(tmp_path), *small, "--workers", "1", "--max_tokens", "64"])
    found["main"]()
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("before training:", "after sft:", "after grpo, 1 steps:"))


def test_a_guess_is_judged_by_what_is_known_and_a_game_by_its_last_guess():
    found = runpy.run_path(str(ROOT / "examples" / "guess_number.py"))

    def rewards(secret, *replies):
        game = found["GuessNumber"]()
        game.start({"messages": [], "secret": secret, "largest": 16, "guesses": 5})
        results = [game.step(reply) for reply in replies]
        assert [messages is None for messages, _ in results] == [False] * (len(results) - 1) + [True]
        return [reward for _, reward in results]

    assert rewards(13, "8", "12", "14", " 13\n") == [0.0] * 4
    first, low, far = rewards(13, "1", "2", "13")
    assert -1 < first < low < far < 0  # 1 of 1 to 16, 2 of 2 to 16, 13 of 3 to 16
    assert rewards(13, "8", "8", "3", "17", "13") == [0.0, -1.0, -1.0, -1.0, 0.0]
    assert rewards(13, "8", "about 12") == [0.0, -2.0]

    def played(text):
        return SimpleNamespace(text=text, prompt=SimpleNamespace(columns={"secret": 13}))

    assert found["won"]([played("13"), played("12"), played("thirteen"), played(" 13")]) == 0.5


def test_tools_are_called_and_rewards_see_the_conversation(options, capsys):
    at = options.index("--rollout.environment")
    options = [*options[:at], *options[at + 2 :]]
    with Path("rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(6))
    given = ["--rollout.tools", f"{ROOT}/examples/tools.py:calculate", "--rollout.environment_schedule", "concurrent"]
    reward = ["--reward", f"{ROOT}/examples/tools.py:right_number"]
    assert command("grpo", *options, *given, *reward, "--steps", 2, "--out", "run") == 0, capsys.readouterr().err
    rows = rows_of(Path("run") / records.FILE)
    assert all(set(row["rewards"]) == {"tools.right_number"} and row["messages"] for row in rows)
    assert command("grpo", *options, *given, "--rollout.environment", "pair.py:Pair", *reward, "--out", "both") == 2
    assert "set one of them" in capsys.readouterr().err
    assert command("grpo", *options, *given, "--out", "none") == 2
    assert "reward.functions is not set" in capsys.readouterr().err


def test_credit_by_turn_is_recorded_and_shown(options, capsys):
    assert command("grpo", *options, "--algo.credit", "turn", "--steps", 2, "--out", "run") == 0
    rows = rows_of(Path("run") / records.FILE)
    for row in rows:
        assert len(row["turn_credits"]) == row["turns"]
        assert sum(reward for _, _, reward, _ in row["turn_credits"]) == row["reward"]
    several = [row for row in rows if row["turns"] == 2]
    assert any(len(set(row["advantages"])) > 1 for row in several)
    capsys.readouterr()
    assert command("samples", "run", "--full") == 0
    assert re.search(r"assistant \[\d+ tokens, reward 0.5, \d+\.\d\d s after \d+\.\d\d s\]", capsys.readouterr().out)
    assert command("samples", "run", "--json") == 0
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        assert sum(row["turn_tokens"]) == row["length"] and sum(row["turn_rewards"]) == row["reward"]
    assert command("grpo", *options, "--algo.credit", "turn", "--rewards.clip", 1, "--out", "no") == 2
    assert "leave out reward.clip" in capsys.readouterr().err
