"""Whatever an environment does, it costs its own episode, and the others go on as if nothing had happened."""

import os
import signal
import textwrap

import pytest

from posttrain.core.errors import RewardError, UsageError
from posttrain.rollout.environments import Environments, Episode

FAULTY = textwrap.dedent(
    """
    import ctypes, os, weakref

    class Echo:
        alive = weakref.WeakSet()
        poisoned = False

        def start(self, example):
            self.alive.add(self)
            self.steps = 0
            if example["do"] == "count":
                return say(str(len(self.alive)))
            if example["do"] == "pid":
                return say(str(os.getpid()))
            return act(example["do"]) or say("hello")

        def step(self, reply):
            self.steps += 1
            if Echo.poisoned:
                os._exit(5)
            if reply == "poison":
                Echo.poisoned = True
            if reply == "enough":
                return None, 10
            return act(reply) or (say(f"{self.steps}: {reply}"), self.steps)

    held = []

    def say(text):
        return [{"role": "user", "content": text}]

    def act(what):
        if what == "raise": raise ValueError("over my head")
        if what == "exit": raise SystemExit(0)
        if what == "die": os._exit(3)
        if what == "crash": ctypes.string_at(0)
        if what == "hang": print("so tired", flush=True); exec("while True: pass")
        if what == "eat": return bytearray(3 * 2**30)
        if what == "hoard": held.append(bytearray(3 * 2**29)); bytearray(2**30)
        if what == "need": bytearray(2**30)
        if what == "number": return 5
        if what == "nan": return say("x"), float("nan")
        if what == "role": return [{"role": "assistant", "content": "I say"}], 0.0
        if what == "empty": return [], 0.0
        if what == "text": return [{"role": "user", "content": 7}], 0.0
        if what == "half": return [{"role": "user", "content": "\\ud800"}], 0.0

    class NoStep:
        def start(self, example): return []

    class WantsMore:
        def __init__(self, size): pass
        def start(self, example): return []
        def step(self, reply): return None, 0

    thing = 3
    """
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "faulty.py"
    path.write_text(FAULTY)
    return path


@pytest.fixture(params=[60.0])
def environments(file, request):
    """`request.param`: seconds it waits; few only where something hangs, as a busy machine is slow."""
    with Environments(f"{file}:Echo", workers=1, timeout_seconds=request.param) as found:
        found.check()
        yield found


def episodes(*doing):
    return [Episode({"do": what}) for what in doing]


def say(environments, going, *replies):
    for episode, reply in zip(going, replies, strict=True):
        episode.replies.append(reply)
    environments.advance(going)


def contents(episode):
    return [result.messages[0]["content"] if result.messages else None for result in episode.results]


def test_an_episode(environments):
    going = episodes("", "")
    environments.advance(going)
    say(environments, going, "a", "b")
    say(environments, going, "c", "enough")
    assert [contents(episode) for episode in going] == [["hello", "1: a", "2: c"], ["hello", "1: b", None]]
    assert [[result.reward for result in episode.results] for episode in going] == [[0, 1, 2], [0, 1, 10]]
    assert not any(episode.failure for episode in going)


FAULTS = {
    "raise": 'raise ValueError("over my head")',
    "exit": "SystemExit",
    "die": "exit code 3",
    "crash": "SIGSEGV",
    "hang": "no result within 5 s (timeout_seconds); the end of its output:\nso tired",
    "eat": "MemoryError",
    "number": "not (messages, reward)",
    "nan": "must be a finite number",
    "role": "'assistant'",
    "empty": "None ends the episode",
    "text": "must be text",
    "half": "surrogates not allowed",
}


@pytest.mark.parametrize("environments", [5.0], indirect=True)
def test_a_fault_costs_its_own_episode(environments):
    doing = [name for fault in FAULTS for name in ("", fault)]
    going = episodes(*[""] * len(doing))
    environments.advance(going)
    say(environments, going, *["first"] * len(going))
    say(environments, going, *[what or "second" for what in doing])
    for what, episode in zip(doing, going, strict=True):
        if what:
            assert FAULTS[what] in episode.failure, (what, episode.failure)
            assert contents(episode) == ["hello", "1: first"]
        else:
            assert not episode.failure and contents(episode) == ["hello", "1: first", "2: second"]
    assert "faulty.py" in going[1].failure and "environment_child" not in going[1].failure  # the user's frames alone
    left = [episode for episode in going if not episode.failure]
    say(environments, left, *["third"] * len(left))
    assert {contents(episode)[-1] for episode in left} == {"3: third"}


def test_a_fault_at_the_start(environments):
    going = episodes("", "raise", "die", "number", "")
    environments.advance(going)
    assert [bool(episode.failure) for episode in going] == [False, True, True, True, False]
    assert "expected a list of messages" in going[3].failure


def test_what_another_left_behind_is_not_held_against_it(environments):
    going = episodes("", "", "")
    environments.advance(going)
    say(environments, going, "poison", "a", "b")  # the next step of anybody in that process ends it
    assert not any(episode.failure for episode in going)
    assert [contents(episode)[-1] for episode in going] == ["1: poison", "1: a", "1: b"]


def test_a_process_that_is_killed_costs_no_episode(environments):
    going = episodes("")
    environments.advance(going)
    for process in environments.processes:
        if process.supervisor.process is not None:
            os.kill(process.supervisor.process.process.pid, signal.SIGKILL)  # the reaper, and the child with it
    say(environments, going, "a")
    assert contents(going[0]) == ["hello", "1: a"], going[0].failure


def test_memory_that_one_holds_is_there_for_the_others(environments):
    going = episodes("", "", "")
    environments.advance(going)
    say(environments, going, "a", "hoard", "need")
    assert [bool(episode.failure) for episode in going] == [False, True, False]
    assert "MemoryError" in going[1].failure and contents(going[2])[-1] == "1: need"


def test_one_that_goes_otherwise_the_second_time_is_lost(environments):
    going = episodes("pid", "")
    environments.advance(going)
    say(environments, going, "a", "die")
    say(environments, going[:1], "b")
    assert "depend on its example and the replies alone" in going[0].failure
    assert "exit code 3" in going[1].failure


def test_what_is_over_is_let_go(environments):
    first = episodes("", "", "")
    environments.advance(first)
    environments.end(first)
    [next_one] = second = episodes("count")
    environments.advance(second)
    assert contents(next_one) == ["1"]


def test_several_processes_share_the_work(file):
    with Environments(f"{file}:Echo", workers=2) as environments:
        going = episodes("pid", "pid", "pid", "pid")
        environments.advance(going)
        say(environments, going, *"abcd")
        assert [contents(episode)[1] for episode in going] == ["1: a", "1: b", "1: c", "1: d"]
        assert len({contents(episode)[0] for episode in going}) == 2


def test_too_many_failures_stop_the_run(environments):
    going = episodes("", *["raise"] * 2)
    environments.advance(going)
    with pytest.raises(RewardError, match=r"(?s)failed in 2 of 3 episodes.*2 times:.*over my head"):
        environments.check_failures(going)
    environments.max_failure_rate = 0.7
    environments.check_failures(going)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("{}:Eco", "no class 'Eco'; it has Echo, NoStep, WantsMore"),
        ("{}:thing", "thing is a int, not a class"),
        ("{}:NoStep", r"no step\(reply\)"),
        ("{}:WantsMore", r"called without arguments.*size"),
        ("{}x.py:Echo", "there is no file"),
        ("{}", "expected FILE.py:CLASS"),
        ("no.such.module:Echo", "there is no module 'no.such.module'"),
        ("a b:Echo", "neither a file that ends in .py nor a module"),
    ],
)
def test_wrong_use(file, spec, complaint):
    with pytest.raises(UsageError, match=complaint), Environments(spec.format(file)) as environments:
        environments.check()


def test_a_file_that_does_not_load_is_shown(tmp_path):
    (tmp_path / "broken.py").write_text("import os\n1 / 0\n")
    with (
        pytest.raises(UsageError, match=r"(?s)rollout.environment .*broken.py:X: Traceback.*line 2.*ZeroDivisionError"),
        Environments(f"{tmp_path / 'broken.py'}:X") as environments,
    ):
        environments.check()
