"""The example environments: what a good player gets, what a bad one gets, and a game between two policies."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from posttrain.rollout import records
from tests.e2e.commands import command, rows_of
from tests.unit.server.serving import pico, serving

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


games = load("games")


def play(name, seed, reply):
    """Rewards of an episode; `reply` gets the environment and the last message."""
    game = getattr(games, name)()
    messages, rewards = game.start({"seed": seed}), []
    while messages:
        messages, reward = game.step(reply(game, messages[-1]["content"]))
        rewards.append(reward)
    return rewards


def test_wordle():
    assert play("Wordle", 3, lambda game, _: f"I think <guess>{game.word}</guess>") == [1.0]
    second = iter(["<guess>zzzzz</guess>", None])
    assert play("Wordle", 3, lambda game, _: next(second) or f"<guess>{game.word}</guess>") == [0.0, 1 - 1 / 12]
    lost = play("Wordle", 3, lambda *_: "no")
    assert lost == [0.0] * 6
    assert games.feedback("eerie", "eagle") == "G---G" and games.feedback("allay", "lemon") == "-Y---"


def test_alphabet_sort():
    rewards = play("AlphabetSort", 5, lambda game, _: f"<sorted>{', '.join(sorted(game.names))}</sorted>")
    assert rewards == pytest.approx([1 / 3] * 3)
    assert play("AlphabetSort", 5, lambda game, _: f"<sorted>{', '.join(sorted(game.names)[::-1])}</sorted>")[1] < 0.1


def test_countdown_computes_and_checks():
    def tries_all(game, shown):
        numbers = game.numbers
        for a in range(4):
            for b in range(4):
                for c in range(4):
                    if len({a, b, c}) == 3 and numbers[a] * numbers[b] + numbers[c] == game.target:
                        text = f"{numbers[a]} * {numbers[b]} + {numbers[c]}"
                        return f"<answer>{text}</answer>" if shown == f"= {game.target}" else f"<try>{text}</try>"
        raise AssertionError("there is a way")

    assert [play("Countdown", seed, tries_all) for seed in range(5)] == [[0.0, 1.0]] * 5
    assert play("Countdown", 1, lambda *_: "hm") == [0.0] * 4
    for cheat in ("{t}", "{n} * {n} * {n}", "__import__('os')", "9**9**9", "("):
        answer = play(
            "Countdown", 1, lambda game, _, c=cheat: f"<answer>{c.format(t=game.target, n=game.numbers[0])}</answer>"
        )
        assert answer == [0.0]


def test_adventure():
    def walk(game, shown):
        if "key" in shown:
            return "take key"
        if "chest" in shown and game.has_key:
            return "Open chest."
        wanted = game.chest if game.has_key else game.key
        return "east" if wanted > game.at else "west"

    for seed in range(5):
        assert sum(play("Adventure", seed, walk)) == 1.0
    assert sum(play("Adventure", 0, lambda *_: "open chest")) == 0.0


@pytest.mark.parametrize("name", ["Wordle", "Countdown"])
def test_a_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(["--rollout.environment", f"{EXAMPLES}/games.py:{name}"])
    assert all(re.search("system", json.dumps(row)) for row in rows_of(tmp_path / "out" / records.FILE))


def run(options):
    Path("seeds.jsonl").write_text("".join(json.dumps({"prompt": "go", "seed": seed}) + "\n" for seed in range(4)))
    given = ["--model.path", "pico", "--data.train", "seeds.jsonl", "--train.batch_size", 2, "--train.max_steps", 1]
    given += ["--rollout.samples_per_prompt", 2, "--rollout.max_tokens", 400, "--output_dir", "out", "--quiet"]
    assert command("grpo", *given, "--rollout.stop", *"aeiou", *options) == 0


def test_self_play_trains_the_learner_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(pico()) as server:
        monkeypatch.setenv("OPPONENT_URL", f"http://127.0.0.1:{server.port}/v1")
        agent = ["--rollout.agent", f"{EXAMPLES}/self_play.py:nim", "--reward.env", "OPPONENT_URL"]
        run([*agent, "--rollout.agent_workers", 2])
    rows = rows_of(tmp_path / "out" / records.FILE)
    assert rows and not any(row["failure"] for row in rows)
    assert {name for row in rows for name in row["rewards"]} == {"agent/win", "agent/invalid"}
