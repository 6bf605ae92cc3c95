"""Environments of other packages, unchanged, in the child processes of episodes: rewards are those of the package."""

import contextlib
import json
import os
import threading

import pytest

from posttrain.core.errors import UsageError
from posttrain.rollout.environments import Environments, Episode

PATIENCE = 120  # seconds


def example(seed, **columns):
    return {"messages": [{"role": "user", "content": "Play."}], "seed": seed, **columns}


def play(spec, examples, reply, turns=50, **options):
    """Play one episode per example; `reply` gets the last message of the environment and the number of the turn."""
    with Environments(spec, workers=1, timeout_seconds=PATIENCE, memory_gib=8.0, **options) as environments:
        environments.check()
        episodes = [Episode(each) for each in examples]
        environments.advance(episodes)
        for turn in range(turns):
            going = [each for each in episodes if not each.failure and each.results[-1].messages]
            for each in going:
                each.replies.append(reply(each.results[-1].messages[-1]["content"], turn))
            environments.advance(going)
        return episodes


def rewards(episode):
    assert not episode.failure, episode.failure
    return [result.reward for result in episode.results[1:]]


def test_reasoning_gym_asks_and_scores():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    entries = [reasoning_gym.create_dataset("chain_sum", seed=s, size=1, **options)[0] for s in range(4)]
    known = {f"Play.\n\n{entry['question']}": entry["answer"] for entry in entries}
    assert len(known) == 4
    written = iter([" {}\n", "Is it 1? <answer>{}</answer>", "no idea"] * 4)
    examples = [example(seed, options=options) for seed in range(4) for _ in range(3)]
    episodes = play("reasoning_gym:chain_sum", examples, lambda question, _: next(written).format(known[question]))
    found = [reward for each in episodes for reward in rewards(each)]
    assert found[0::3] == found[1::3] == [1.0] * 4 and len(found) == 12 and max(found[2::3]) < 0.1


def test_gymnasium_is_played_to_its_end():
    gymnasium = pytest.importorskip("gymnasium")
    actions = [2, 2, 1, 1, 1, 2]  # the way over the frozen lake, with the map 4x4
    options = {"is_slippery": False}

    def reply(shown, turn):
        assert "FFF" in shown or "Reply with a number from 0 to 3" in shown
        return "no way, 9" if turn == 2 else f"I go {actions[turn - (turn > 2)]}"  # one reply is not an action

    (won,) = play("gymnasium:FrozenLake-v1", [example(3, options=options)], reply)
    assert rewards(won) == [0.0] * 6 + [1.0]
    assert won.results[3].messages == [{"role": "user", "content": "Reply with a number from 0 to 3."}]
    game = gymnasium.make("FrozenLake-v1", render_mode="ansi", **options)
    game.reset(seed=3)
    first = game.render()
    game.step(2)
    assert won.results[0].messages[0]["content"] == f"Play.\n\n{first}"
    assert won.results[1].messages[0]["content"] == game.render()


PARROT = """
import gymnasium as gym

class Parrot(gym.Env):
    observation_space = action_space = gym.spaces.Text(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(1000))
        return f"Say {self.word}", {}

    def step(self, action):
        return f"not {action}, {self.word}", float(action == self.word), action == "end", False, {}

gym.register("Parrot-v0", Parrot)
"""


def test_a_text_game_of_a_module(tmp_path, monkeypatch):
    """Observations and actions are text; MODULE:ID imports the module that registers the game."""
    pytest.importorskip("gymnasium")
    (tmp_path / "parrot_game.py").write_text(PARROT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    said = {0: "what?", 2: "end"}
    spec = "gymnasium:parrot_game:Parrot-v0"
    episodes = play(spec, [example(1), example(2)], lambda shown, turn: said.get(turn) or shown.split()[-1])
    assert [rewards(each) for each in episodes] == [[0.0, 1.0, 0.0]] * 2
    words = [each.results[0].messages[0]["content"] for each in episodes]
    assert words[0] != words[1] and all(word.startswith("Play.\n\nSay ") for word in words)
    assert episodes[0].results[1].messages[0]["content"].startswith("not what?, ")


@contextlib.contextmanager
def openenv_server():
    """Serve a counting game by OpenEnv's protocol; yield its address and the sessions that were opened."""
    server = pytest.importorskip("websockets.sync.server")
    sessions = []

    def session(socket):
        if socket.request.path != "/ws":
            return
        count = None
        socket.ended = threading.Event()
        sessions.append(socket)
        for text in socket:
            request = json.loads(text)
            if request["type"] == "reset":
                count, found = request["data"]["seed"], {"reward": None, "done": False}
            elif request["data"].get("message") == "fail":
                socket.send(json.dumps({"type": "error", "data": {"message": "no such move", "code": "X"}}))
                continue
            else:
                done = request["data"]["message"] == str(count)
                found = {"reward": 2.5 if done else -0.5, "done": done}
                count += 1
            socket.send(json.dumps({"type": "observation", "data": {"observation": {"text": f"at {count}"}, **found}}))
        socket.ended.set()

    with server.serve(session, "127.0.0.1", 0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.socket.getsockname()[1]}", sessions
        serving.shutdown()
        thread.join(PATIENCE)


def test_openenv_has_a_session_for_each_episode():
    with openenv_server() as (address, sessions):
        examples = [example(seed, observation_field="text") for seed in (5, 7)]
        episodes = play(f"openenv:{address}/", examples, lambda shown, turn: shown.split()[-1] if turn else "x")
        assert [rewards(each) for each in episodes] == [[-0.5, 2.5]] * 2
        assert [each.results[0].messages[0]["content"] for each in episodes] == ["Play.\n\nat 5", "Play.\n\nat 7"]
        assert len(sessions) == 3  # one of the check
        (whole,) = play(f"openenv:{address}", [example(1)], lambda *_: "1")
        assert whole.results[0].messages[0]["content"] == 'Play.\n\n{"text": "at 1"}'
        (failed,) = play(f"openenv:{address}", [example(1)], lambda *_: "fail")
        assert "no such move" in failed.failure
        (without,) = play(f"openenv:{address}", [example(1, observation_field="words")], lambda *_: "1")
        assert "no field 'words'" in without.failure and "text" in without.failure


def test_an_openenv_session_is_closed_when_its_episode_is_cut_off():
    with (
        openenv_server() as (address, sessions),
        Environments(f"openenv:{address}", workers=1, timeout_seconds=PATIENCE, memory_gib=8.0) as environments,
    ):
        first, second = Episode(example(5)), Episode(example(6))
        environments.advance([first])
        environments.end([first])
        environments.advance([second])  # what has ended is freed with the next request
        assert not first.failure and not second.failure
        _, cut_off, going = sessions  # the first is of the check
        assert cut_off.ended.wait(PATIENCE) and not going.ended.is_set()


@pytest.mark.parametrize(
    ("package", "spec", "complaint"),
    [
        ("reasoning_gym", "reasoning_gym:chain_sums", "chain_sum"),
        ("gymnasium", "gymnasium:FrozenLik-v1", "FrozenLik"),
        ("gymnasium", "gymnasium:no_such_module:Game-v0", "no_such_module"),
        ("gymnasium", "gymnasium:Pendulum-v1", "actions of the kind Box"),
        ("websockets", "openenv:http://127.0.0.1:1", "there is no OpenEnv server"),
        ("websockets", "openenv:localhost", "expected the address"),
    ],
)
def test_what_a_package_does_not_have_is_found_at_the_start(package, spec, complaint):
    pytest.importorskip(package)
    environments = Environments(spec, workers=1, timeout_seconds=PATIENCE, memory_gib=8.0)
    with environments, pytest.raises(UsageError, match=complaint):
        environments.check()


@pytest.mark.parametrize("seed", [None, "3", -1, True])
def test_an_episode_needs_a_seed(seed):
    pytest.importorskip("gymnasium")
    (episode,) = play("gymnasium:FrozenLake-v1", [example(seed)], lambda *_: "0", turns=0)
    assert "the column seed" in episode.failure
