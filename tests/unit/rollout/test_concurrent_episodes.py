"""Concurrent episodes: the same as in lock step, whatever the timing; a slow or killed one costs only itself."""

import textwrap
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from posttrain.cluster.local import LocalPool
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError
from posttrain.endpoint.engine_thread import shared_engine
from posttrain.rollout import episodes
from posttrain.rollout.environments import Environments
from posttrain.rollout.episodes import EpisodeRunner
from posttrain.sandbox.supervisor import RunStoppedError
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup
from tests.unit.rollout.made import SAMPLING, TOKENIZER, FakeGenerator, online, prompt

CODE = textwrap.dedent(
    """
    import os, signal, time
    from pathlib import Path

    class Count:
        def start(self, example):
            self.example, self.left = example, example["turns"]
            return example["messages"]

        def step(self, reply):
            self.left -= 1
            self.act()
            return (None, 1.0) if not self.left else ([{"role": "user", "content": f"{self.left} left"}], 0.25)

        def act(self):
            pass

    class Waits(Count):
        # The first step of one episode ends when the other episode is over.
        def act(self):
            file = Path(self.example["file"])
            if self.example["question"] == "quick" and not self.left:
                file.touch()
            while self.example["question"] == "slow" and not file.exists():
                time.sleep(0.01)

    class Killed(Count):
        def act(self):
            if self.example["question"] == "always":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.example["question"] == "once":
                with open(self.example["file"], "a+") as file:
                    file.write("x")
                    if file.tell() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)

    class Peak(Count):
        # Counts the episodes that go on at the same time.
        def act(self):
            folder = Path(self.example["folder"])
            (folder / f"on-{self.example['question']}").touch()
            (folder / f"seen-{len(list(folder.glob('on-*')))}").touch()
            if not self.left:
                (folder / f"on-{self.example['question']}").unlink()
    """
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "count.py"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module")
def policy():
    learner = LocalPool().start("actor", Learner, ModelConfig(path="pico"), TrainConfig(), trainable=False)
    return LearnerGroup(learner)


def play(environments, generator, asked, seeds=None, schedule="concurrent", **options):
    given = {f"rollout__{name}": value for name, value in options.items()}
    config = online(data__max_length=100, rollout__environment_schedule=schedule, **given)
    sampling = replace(SAMPLING, max_tokens=96, stop_texts=tuple("aeiou"))  # a random model seldom ends its turn
    runner = EpisodeRunner(environments, generator, config, sampling, TOKENIZER)
    return runner.play(asked, seeds or list(range(11, 11 + len(asked))))


def trained(rollout):
    """What is trained on, to the bit."""
    sample = rollout.sample
    return (
        sample.tokens.tolist(),
        sample.mask.tolist(),
        sample.logprobs.tobytes(),
        sample.finish,
        sample.group,
        rollout.turns,
        rollout.rewards,
        rollout.messages,
        rollout.failure,
    )


def test_they_are_the_episodes_of_lock_step(file):
    asked = [(number, prompt(f"go {number}", turns=1 + number % 3)) for number in range(7)]
    with Environments(f"{file}:Count", workers=2) as environments:
        words = lambda request: f"{len(request.prompt)}{'x' * (request.seed % 3)}<|end|>"  # noqa: E731
        found = [play(environments, FakeGenerator(words), asked, schedule=how) for how in ("concurrent", "lock_step")]
    assert [trained(rollout) for rollout in found[0]] == [trained(rollout) for rollout in found[1]]
    assert [rollout.turns for rollout in found[0]] == [1, 2, 3, 1, 2, 3, 1]


def test_timing_changes_nothing_to_the_bit(file, policy):
    asked = [(number, prompt(f"go {number}", turns=1 + number % 3)) for number in range(6)]
    found = []
    for workers, most in ((3, 0), (1, 1), (2, 4)):
        with Environments(f"{file}:Count", workers=workers) as environments:
            found.append(play(environments, policy, asked, max_concurrent_episodes=most))
    assert [[trained(rollout) for rollout in batch] for batch in found[1:]] == [[trained(r) for r in found[0]]] * 2
    assert {rollout.turns for rollout in found[0]} > {1} and shared_engine(policy) is not None
    lock_step = play_once(file, policy, asked)
    for ours, theirs in zip(found[0], lock_step, strict=True):  # a batch rounds differently
        assert ours.sample.tokens.tolist() == theirs.sample.tokens.tolist()
        np.testing.assert_allclose(ours.sample.logprobs, theirs.sample.logprobs, atol=1e-4)


def play_once(file, policy, asked):
    with Environments(f"{file}:Count", workers=2) as environments:
        return play(environments, policy, asked, schedule="lock_step")


def test_a_slow_environment_delays_only_its_own_episode(file, policy, tmp_path):
    shared = f"{tmp_path}/over"
    asked = [(0, prompt("slow", turns=1, file=shared)), (1, prompt("quick", turns=3, file=shared))]
    words = FakeGenerator(lambda _: "a<|end|>")
    with Environments(f"{file}:Waits", workers=2, timeout_seconds=60) as environments:
        slow, quick = play(environments, words, asked)
    assert (slow.turns, quick.turns) == (1, 3) and not slow.failure and not quick.failure
    assert slow.turn_seconds and len(quick.turn_seconds) == 3


def test_a_killed_environment_costs_its_own_episode_only(file, tmp_path):
    texts = ("always", "once", "a", "b", "c", "d")
    asked = [(number, prompt(text, turns=3, file=f"{tmp_path}/x")) for number, text in enumerate(texts)]
    words = FakeGenerator(lambda _: "hello<|end|>")
    with Environments(f"{file}:Killed", workers=2, max_failure_rate=0.5) as environments:
        found = play(environments, words, asked)
    assert [bool(rollout.failure) for rollout in found] == [True, False, False, False, False, False]
    assert "SIGKILL" in found[0].failure and found[0].sample.finish == "error"
    assert all(rollout.turns == 3 and rollout.rewards == {"environment": 1.5} for rollout in found[1:])


@pytest.mark.parametrize("schedule", ["concurrent", "lock_step"])
def test_no_more_go_on_than_allowed(file, tmp_path, schedule):
    asked = [(number, prompt(str(number), turns=2, folder=str(tmp_path))) for number in range(6)]
    words = FakeGenerator(lambda _: "hello<|end|>")
    with Environments(f"{file}:Peak", workers=3) as environments:
        play(environments, words, asked, schedule=schedule, max_concurrent_episodes=2)
    assert {path.name for path in tmp_path.iterdir()} <= {"seen-1", "seen-2"}


@pytest.mark.parametrize("schedule", ["concurrent", "lock_step"])
def test_turns_are_limited(file, schedule):
    words = FakeGenerator(lambda _: "a<|end|>")
    with Environments(f"{file}:Count", workers=1) as environments:
        asked = [(0, prompt("go", turns=4)), (1, prompt("go", turns=2))]
        long, short = play(environments, words, asked, schedule=schedule, max_turns=2)
    assert (long.turns, long.sample.finish, long.rewards) == (2, "length", {"environment": 0.5})
    assert (short.turns, short.sample.finish, short.rewards) == (2, "stop", {"environment": 1.25})


@pytest.mark.parametrize("schedule", ["concurrent", "lock_step"])
def test_an_episode_beyond_its_time_fails(file, schedule):
    words = FakeGenerator(lambda _: "a<|end|>")
    with Environments(f"{file}:Count", workers=1, max_failure_rate=1) as environments:
        asked = [(0, prompt("go", turns=4)), (1, prompt("go", turns=1))]
        long, short = play(environments, words, asked, schedule=schedule, episode_timeout_seconds=1e-9)
    assert "rollout.episode_timeout_seconds" in long.failure and long.turns == 1
    assert not short.failure


def test_in_lock_step_the_time_of_an_episode_begins_with_its_part(file, monkeypatch):
    clock = [0.0]

    def slow(_):
        clock[0] += 10
        return "a<|end|>"

    monkeypatch.setattr(episodes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Environments(f"{file}:Count", workers=1) as environments:
        asked = [(number, prompt("go", turns=2)) for number in range(3)]
        limits = {"max_concurrent_episodes": 1, "episode_timeout_seconds": 15}
        found = play(environments, FakeGenerator(slow), asked, schedule="lock_step", **limits)
    assert [(rollout.failure, rollout.turns) for rollout in found] == [("", 2)] * 3


def test_what_no_environment_is_to_blame_for_is_raised(file):
    loop = {}
    loop["itself"] = loop  # cannot be sent to a process
    with Environments(f"{file}:Count", workers=1) as environments:
        asked = [(0, prompt("go", turns=1, loop=loop))]
        for schedule in ("lock_step", "concurrent"):
            with pytest.raises(ValueError, match="Circular reference"):
                play(environments, FakeGenerator(lambda _: "a<|end|>"), asked, schedule=schedule)
            environments.stop_flag.interrupted.clear()


def test_the_error_of_the_engine_is_raised(file):
    def broken(request):
        raise PosttrainError("the device is gone")

    with (
        Environments(f"{file}:Count", workers=1) as environments,
        pytest.raises(PosttrainError, match="the device is gone"),
    ):
        play(environments, FakeGenerator(broken), [(0, prompt("go", turns=2)), (1, prompt("go", turns=2))])


def test_a_stop_ends_it(file, tmp_path):
    asked = [(0, prompt("slow", turns=1, file=f"{tmp_path}/never")), (1, prompt("other", turns=3, file="x"))]
    with Environments(f"{file}:Waits", workers=2, timeout_seconds=60) as environments:
        stopped = iter([False] * 50)
        environments.stop_when(lambda: next(stopped, None) is None)
        with pytest.raises(RunStoppedError):
            play(environments, FakeGenerator(lambda _: "a<|end|>"), asked)


@pytest.mark.gpu
def test_on_a_gpu_episodes_are_concurrent_and_earlier_turns_stay_in_the_cache(file, policy):
    asked = [(number, prompt(f"go {number}", turns=1 + number % 4)) for number in range(32)]
    with Environments(f"{file}:Count", workers=4) as environments:
        found = play(environments, policy, asked, schedule="auto")
        lock_step = play(environments, policy, asked, schedule="lock_step")
    engine = shared_engine(policy)
    assert engine is not None and engine.device.type == "cuda"
    assert all(not rollout.failure for rollout in found) and {rollout.turns for rollout in found} > {1}
    assert any(rollout.sample.reused > 0 for rollout in found if rollout.turns > 2)
    for ours, theirs in zip(found, lock_step, strict=True):  # until a token is rounded to another one
        assert ours.sample.tokens[: len(ours.prompt.tokens)].tolist() == theirs.prompt.tokens.tolist()
        assert np.isfinite(ours.sample.logprobs).all()
