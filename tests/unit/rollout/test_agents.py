"""Agents in child processes, with pico: what was sampled is trained; a bad agent costs its own conversation."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.cluster.local import LocalPool
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError, RewardError, UsageError
from posttrain.endpoint.engine_thread import EngineThread
from posttrain.rollout.agents import AgentRunner, Agents
from posttrain.sandbox.supervisor import RunStoppedError
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup
from tests.unit.rollout.made import SAMPLING, TOKENIZER, FakeGenerator, online, prompt

PLAIN = """
import json, os, signal, threading, time, urllib.request
from pathlib import Path

def ask(messages, base_url, api_key, **options):
    body = json.dumps({"model": "policy", "messages": messages, **options}).encode()
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"]

def turns(example, base_url, api_key):
    messages = list(example["messages"])
    for _ in range(example.get("turns", 3)):
        text = ask(messages, base_url, api_key, max_tokens=6)[0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    return 1.5

def by_turn(example, base_url, api_key):
    turns({**example, "turns": 2}, base_url, api_key)
    return {"turns": example["rewards"], "short": 0.5}

def fork(example, base_url, api_key):
    first = ask(example["messages"], base_url, api_key, n=2, max_tokens=4)
    for choice in first:
        answer = {"role": "assistant", "content": choice["message"]["content"]}
        ask([*example["messages"], answer, {"role": "user", "content": "b"}], base_url, api_key, max_tokens=4)
    ask([{"role": "user", "content": "a summary"}], base_url, api_key, max_tokens=4)
    return {"good": 1, "short": 0.25}

def bad(example, base_url, api_key):
    kind = example["kind"]
    if kind == "silent":
        return 1.0
    ask(example["messages"], base_url, api_key, max_tokens=3)
    if kind == "raises":
        raise ValueError("no such tool")
    if kind == "exits":
        os._exit(3)
    if kind == "hangs":
        Path(example["file"]).touch()
        time.sleep(1000)
    if kind == "text":
        return "good"
    if kind == "none":
        return None
    if kind == "killed once":
        with open(example["file"], "a+") as file:
            file.write("x")
            if file.tell() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def full(example, base_url, api_key):
    messages = list(example["messages"])
    while True:
        text = ask(messages, base_url, api_key, max_tokens=8)[0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]

def meets(example, base_url, api_key):
    # Each waits, as a slow tool does, until all others are in the middle of their conversations as well.
    ask(example["messages"], base_url, api_key, max_tokens=4)
    folder = Path(example["folder"])
    (folder / str(example["number"])).touch()
    while len(list(folder.iterdir())) < example["count"]:
        time.sleep(0.01)
    ask([{"role": "user", "content": "on"}], base_url, api_key, max_tokens=4)
    return 1.0

async def with_client(example, client):
    import asyncio
    async def one(text):
        messages = [{"role": "user", "content": text}]
        return await client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=4, temperature=0)
    replies = await asyncio.gather(one("a"), one("b"), one("a"))
    return float(len(replies))

def no_example(client):
    pass

def too_much(example, base_url, tool):
    pass

def defaults(example, *, model, tool=None):
    pass
"""
MODULE_CLIENT = """
import threading, time
import openai
client = openai.OpenAI()  # at import, from the environment
def agent(example):
    if example.get("leaves"):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    reply = client.chat.completions.create(model="gpt-4o", messages=example["messages"], max_tokens=4)
    return len(reply.choices)
"""
COMMAND = """
import json, os, sys
import requests
example = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = {"model": os.environ["OPENAI_MODEL"], "messages": example["messages"], "max_tokens": 5}
found = requests.post(url + "/chat/completions", json=body, headers={"Authorization": "Bearer " + key}).json()
print("thinking aloud")
if example.get("fails"):
    sys.exit("it failed")
print(json.dumps({"found": len(found["choices"]), "secret": float("SECRET" in os.environ)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("agents")
    (place / "plain.py").write_text(textwrap.dedent(PLAIN))
    (place / "module_client.py").write_text(MODULE_CLIENT)
    (place / "command.py").write_text(COMMAND)
    return place


@pytest.fixture(scope="module")
def policy():
    learner = LocalPool().start("actor", Learner, ModelConfig(path="pico"), TrainConfig(), trainable=True)
    return LearnerGroup(learner)


@pytest.fixture
def sampled(monkeypatch):
    """All that the engine samples: tokens and log-probabilities of each completion."""
    found = []
    original = EngineThread.add_ended

    def add_ended(self, ended):
        for sample in ended.values():
            found.extend(zip(sample.tokens[sample.mask].tolist(), sample.logprobs[sample.mask].tolist(), strict=True))
        original(self, ended)

    monkeypatch.setattr(EngineThread, "add_ended", add_ended)
    return found


def agents_of(spec, *, workers=2, **options):
    return Agents(spec, workers=workers, timeout_seconds=options.pop("timeout", 120.0), **options)


def runner(agents, generator, **sampling):
    return AgentRunner(agents, generator, online(data__max_length=100), replace(SAMPLING, **sampling), TOKENIZER)


def trained(rollouts):
    samples = [rollout.sample for rollout in rollouts]
    return [pair for s in samples for pair in zip(s.tokens[s.mask].tolist(), s.logprobs[s.mask].tolist(), strict=True)]


def test_what_the_engine_sampled_is_what_is_trained(folder, policy, sampled):
    asked = [(4 + n // 2, prompt(f"{n // 2}+1=")) for n in range(6)]
    with agents_of(f"{folder}/plain.py:turns", workers=3) as agents:
        rollouts = runner(agents, policy).play(asked, [1, 2, 3, 4, 5, 6])
    assert [rollout.sample.group for rollout in rollouts] == [4, 4, 5, 5, 6, 6]
    assert sorted(trained(rollouts)) == sorted(sampled)
    logprobs = policy.logprobs([rollout.sample for rollout in rollouts])
    for rollout, own in zip(rollouts, logprobs, strict=True):
        sample = rollout.sample
        assert (rollout.turns, rollout.rewards, rollout.failure) == (3, {"agent": 1.5}, "")
        assert sample.logprobs[sample.mask].tolist() == pytest.approx(own[sample.mask].tolist(), abs=1e-5)
        assert [message["role"] for message in rollout.messages] == ["user", "assistant"] * 3
        assert rollout.prompt.tokens.tolist() == sample.tokens[: len(rollout.prompt.tokens)].tolist()
    assert len({tuple(rollout.sample.tokens) for rollout in rollouts}) == 6
    assert next(policy.local_engine().runner.model.parameters()).requires_grad
    assert policy.local_engine().runner.model.training, "the learner goes on training"


def test_conversations_do_not_depend_on_company_or_timing(folder, policy):
    def played(order, workers):
        asked = [(n, prompt(f"{n}+1=", turns=1 + n)) for n in order]
        with agents_of(f"{folder}/plain.py:turns", workers=workers) as agents:
            rollouts = runner(agents, policy).play(asked, [10 + n for n in order])
        return {rollout.sample.group: rollout.sample.tokens.tolist() for rollout in rollouts}

    assert played([0, 1, 2, 3], 4) == played([3, 1, 2, 0], 1)


def test_forks_are_samples_of_one_group(folder, policy, sampled):
    with agents_of(f"{folder}/plain.py:fork") as agents:
        rollouts = runner(agents, policy).play([(3, prompt("a")), (3, prompt("a"))], [1, 2])
        greedy = runner(agents, policy).play([(3, prompt("a"))], [0], greedy=True)
    assert sorted(trained(rollouts)) == sorted(sampled[: len(trained(rollouts))])
    assert [rollout.branch for rollout in rollouts] == [0, 1, 2] * 2
    assert {rollout.sample.group for rollout in rollouts} == {3}
    assert all(rollout.rewards == {"agent/good": 1.0, "agent/short": 0.25} for rollout in rollouts)
    assert sorted(rollout.turns for rollout in rollouts[:3]) == [1, 2, 2]
    assert len(greedy) == 1  # a baseline per prompt


def test_a_bad_agent_costs_its_conversation(folder, policy, tmp_path, caplog):
    expected = {
        "good": "",
        "raises": "agent: Traceback (most recent call last):*ValueError: no such tool",
        "silent": "agent: the agent made no request that the model replied to",
        "exits": "agent: the process ended with exit code 3",
        "text": "agent: the agent returned 'good'; expected a finite number, a dictionary of them, or None",
        "none": "agent: the agent returned no reward, and reward.functions is not set",
        "killed once": "",
    }
    asked = [(n, prompt("q", kind=kind, file=str(tmp_path / "count"))) for n, kind in enumerate(expected)]
    with agents_of(f"{folder}/plain.py:bad", max_failure_rate=1.0) as agents:
        rollouts = runner(agents, policy).play(asked, range(len(asked)))
    for rollout, failure in zip(rollouts, expected.values(), strict=True):
        begin, _, end = failure.partition("*")
        assert (
            rollout.failure.startswith(begin)
            and rollout.failure.endswith(end)
            and bool(rollout.failure) == bool(failure)
        )
        assert (rollout.sample.finish == "error") == bool(failure)
    assert (tmp_path / "count").read_text() == "xx"  # killed, and begun again
    assert "a process died, and its conversation began again" in caplog.text
    with (
        agents_of(f"{folder}/plain.py:bad") as agents,
        pytest.raises(RewardError, match=r"(?s)failed in 2 of 2 conversations; .*2 times:\n.*no such tool"),
    ):
        runner(agents, policy).play([(0, prompt("q", kind="raises"))] * 2, [1, 2])


def test_a_hanging_agent_is_ended(folder, policy, tmp_path):
    with agents_of(f"{folder}/plain.py:bad", timeout=0.5, max_failure_rate=1.0) as agents:
        [bad] = runner(agents, policy).play([(0, prompt("q", kind="hangs", file=str(tmp_path / "x")))], [1])
        assert agents.processes[0].supervisor.process is None
    assert bad.failure == "agent: the agent did not end within 0.5 s (rollout.agent_timeout_seconds)"


def test_a_stop_of_the_run_waits_for_no_agent(folder, policy, tmp_path):
    with agents_of(f"{folder}/plain.py:bad") as agents:
        playing = runner(agents, policy)
        arrived = tmp_path / "arrived"
        agents.stop_when(arrived.exists)
        with pytest.raises(RunStoppedError):
            playing.play([(0, prompt("q", kind="hangs", file=str(arrived)))], [1])
        assert agents.processes[0].supervisor.process is None  # killed
        agents.stop_when(lambda: False)
        [rollout] = playing.play([(0, prompt("q", kind="good"))], [1])
        assert not rollout.failure


def test_a_conversation_without_room_is_truncated(folder, policy):
    with agents_of(f"{folder}/plain.py:full") as agents:
        [rollout] = runner(agents, policy, max_tokens=50).play([(0, prompt("q"))], [1])
    assert (rollout.failure, rollout.sample.finish, rollout.rewards) == ("", "length", {"agent": 0.0})
    assert rollout.turns > 1 and len(rollout.sample) - len(rollout.prompt.tokens) <= 50


def test_conversations_go_on_at_the_same_time(folder, policy, tmp_path):
    asked = [(n, prompt(f"{n}", folder=str(tmp_path), number=n, count=4)) for n in range(4)]
    with agents_of(f"{folder}/plain.py:meets", workers=4) as agents:
        rollouts = runner(agents, policy).play(asked, range(4))
    assert not any(rollout.failure for rollout in rollouts) and len(rollouts) == 8


def test_asynchronous_agents_with_a_client(folder, policy, sampled, caplog):
    with agents_of(f"{folder}/plain.py:with_client", workers=1) as agents:
        rollouts = runner(agents, policy).play([(0, prompt("a"))] * 2, [1, 2])
    assert len(rollouts) == 6 and all(rollout.rewards == {"agent": 3.0} for rollout in rollouts)
    assert sorted(trained(rollouts)) == sorted(sampled)
    assert "requests set temperature, which is not followed in training" in caplog.text


def test_a_client_that_is_made_at_import(folder, policy):
    with agents_of(f"{folder}/module_client.py:agent", workers=1) as agents:
        rollouts = runner(agents, policy).play([(0, prompt("a")), (0, prompt("a"))], [1, 2])
        assert [rollout.rewards for rollout in rollouts] == [{"agent": 1.0}] * 2
        process = agents.processes[0].supervisor.process
        assert process is not None
        runner(agents, policy).play([(0, prompt("a", leaves=True))], [1])
        assert agents.processes[0].supervisor.process is None  # its threads could still ask


def test_a_command(folder, policy, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SECRET", "1")
    with agents_of("python command.py", max_failure_rate=0.5) as agents:
        asked = [(0, prompt("a")), (0, prompt("a", fails=True))]
        good, bad = runner(agents, policy).play(asked, [1, 2])
    assert good.rewards == {"agent/found": 1.0, "agent/secret": 0.0} and good.completion_tokens <= 5
    assert bad.failure == "agent: the command ended with exit code 1; its output ends:\nit failed\n"


def test_generators_that_take_whole_batches(folder):
    """vLLM, rollout workers, models that run their own code: the same conversations, in batches of what waits."""
    generator = FakeGenerator(lambda request: "ab<|end|>")
    with agents_of(f"{folder}/plain.py:turns") as agents:
        rollouts = runner(agents, generator).play([(0, prompt("a")), (1, prompt("b"))], [1, 2])
    for rollout, text in zip(rollouts, "ab", strict=True):
        turn = "<|user|>and?<|end|><|assistant|>ab<|end|>"
        whole = f"<s><|user|>{text}<|end|><|assistant|>ab<|end|>{turn}{turn}"
        assert TOKENIZER.decode(rollout.sample.tokens) == whole and rollout.completion_tokens == 9


def test_an_engine_that_fails_ends_the_batch(folder):
    def fail(_):
        raise PosttrainError("out of memory")

    with agents_of(f"{folder}/plain.py:turns") as agents:
        with pytest.raises(PosttrainError, match="out of memory"):
            runner(agents, FakeGenerator(fail)).play([(0, prompt("a"))], [1])
        [rollout] = runner(agents, FakeGenerator(lambda _: "ab<|end|>")).play([(0, prompt("a"))], [1])
        assert not rollout.failure


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("plain.py:missing", "has no function 'missing'"),
        ("other.py:turns", "there is no file other.py"),
        ("plain.py:no_example", r"no_example does not take an example"),
        ("plain.py:too_much", "has the parameter tool, which nothing is known for"),
        ("no-such-command --flag", "there is no command no-such-command"),
        ("'", "No closing quotation"),
    ],
)
def test_programs_that_cannot_be_run_are_refused(folder, monkeypatch, spec, complaint):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=complaint), agents_of(spec) as agents:
        agents.check()


def test_parameters_with_defaults_are_left_alone(folder):
    with agents_of(f"{folder}/plain.py:defaults") as agents:
        agents.check()


def test_nothing_is_left_behind(folder, policy):
    with agents_of(f"{folder}/plain.py:turns") as agents:
        runner(agents, policy).play([(0, prompt("a"))], [1])
        process = agents.processes[0].supervisor.process
        assert process is not None and process.process.poll() is None
        thread = agents.endpoint.thread
    assert process.process.poll() is not None and not Path(process.folder).exists()
    assert not thread.is_alive()


def test_rewards_of_single_turns_are_kept(folder, policy):
    asked = [(0, prompt("a", rewards=[0.25, 1])), (1, prompt("b", rewards=[1]))]
    with Agents(f"{folder}/plain.py:by_turn", workers=1, max_failure_rate=0.5) as agents:
        right, wrong = runner(agents, policy).play(asked, [1, 2])
    assert right.rewards == {"agent/turns": 1.25, "agent/short": 0.5}
    assert [reward for _, _, reward, _ in right.sample.turns] == [0.25, 1.0]
    assert sum(end - first for first, end, _, _ in right.sample.turns) == right.sample.mask.sum()
    assert "returned 1 rewards of turns, but the model replied 2 times" in wrong.failure
