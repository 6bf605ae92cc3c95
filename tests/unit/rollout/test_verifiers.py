"""Environments of verifiers, unchanged, as agents: what is sampled is trained, and the reward is that of the rubric.

The classic API (0.1) needs `make test-agents`, the v1 API (0.4) an environment of its own, which that makes too.
"""

import importlib.util
import os
from dataclasses import replace

import pytest

from posttrain.core.errors import RewardError, UsageError
from posttrain.data.encoding.templates import apply_template
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.agents import AgentRunner, Agents
from posttrain.rollout.environments import Environments
from tests.unit.rollout.made import SAMPLING, FakeGenerator, online, prompt

CLASSIC = '''
from datasets import Dataset
import verifiers as vf

ROWS = Dataset.from_list([{"question": f"{a} + 3?", "answer": str(a + 3)} for a in range(5)])


def right(completion, answer) -> float:
    return float(completion[-1].content == answer)


def short(completion) -> float:
    return float(len(completion[-1].content) < 3)


def rubric():
    return vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])


async def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Sure?"}]


class Notes(vf.StatefulToolEnv):
    """The tool gets what the model does not see: the notes of the episode."""

    def __init__(self, **given):
        super().__init__(**given)
        self.add_tool(self.note, args_to_skip=["notes"])

    async def setup_state(self, state, **kwargs):
        state["notes"] = []

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "notes": state["notes"]}

    async def note(self, text: str, notes: list) -> str:
        """Keeps a text and returns all.

        Args:
            text: to keep
        """
        notes.append(text)
        return " ".join(notes)


def compares(completions, **kwargs) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(kind="single", **given):
    held_out = ROWS.select([4])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=ROWS, eval_dataset=held_out, system_prompt="Add.", rubric=rubric(), **given)
    if kind == "multi":
        return Again(dataset=ROWS, rubric=rubric(), max_turns=2, **given)
    if kind == "tool":
        return vf.ToolEnv(tools=[add], dataset=ROWS, rubric=rubric(), **given)
    if kind == "group":
        return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[compares]))
    return Notes(dataset=ROWS, rubric=rubric(), **given)
'''


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|end|>'


# options -> what the model says, and the reward; the JSON of calls is spaced as no template spaces it
EPISODES = {
    "single": (["5<|end|>"], 1.5),
    "multi": (["<think>no</think>1<|end|>", "five<|end|>"], 0.0),
    "tool": ([call("add", '{"b":3 , "a": 2}'), "5<|end|>"], 1.5),
    "stateful": ([call("note", '{"text":"x"}'), call("note", '{ "text":"y" }'), "nothing<|end|>"], 0.0),
}


@pytest.fixture
def classic(tmp_path, monkeypatch):
    if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.envs") is None:
        pytest.skip("the classic API of verifiers is not installed: make test-agents")
    return install(tmp_path, monkeypatch, CLASSIC)


def install(folder, monkeypatch, code):
    (folder / "adding.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return "verifiers:someone/adding"


def play(spec, said, prompts, **options):
    """Play with a model that says these texts, one conversation after the other."""
    tokenizer = build_tokenizer()
    apply_template(tokenizer, "qwen")
    replies = iter(said)
    generator = FakeGenerator(lambda _: next(replies))
    with Agents(spec, workers=1, timeout_seconds=120.0, memory_gib=8.0, **options) as agents:
        agents.check()
        config = online(data__max_length=20_000)
        runner = AgentRunner(agents, generator, config, replace(SAMPLING, max_tokens=8192), tokenizer)
        rollouts = runner.play([(number, each) for number, each in enumerate(prompts)], list(range(len(prompts))))
    return rollouts, tokenizer


def trained(rollout, tokenizer):
    return tokenizer.decode(rollout.sample.tokens[rollout.sample.mask])


def test_each_kind_of_environment_is_trained_as_sampled(classic):
    """One process plays them all: options make environments, which are kept; a rubric's weights make the reward."""
    prompts = [prompt("unused", seed=2, options={"kind": kind}) for kind in EPISODES]
    rollouts, tokenizer = play(classic, [text for said, _ in EPISODES.values() for text in said], prompts)
    assert [rollout.failure for rollout in rollouts] == [""] * len(EPISODES)  # one sample per conversation
    for rollout, (said, reward) in zip(rollouts, EPISODES.values(), strict=True):
        assert trained(rollout, tokenizer) == "".join(said)
        assert rollout.rewards == {"agent": reward if "five" not in said[-1] else 0.0}
    single, _, tool, stateful = rollouts
    assert [message["content"] for message in single.messages[:2]] == ["Add.", "2 + 3?"]
    assert [m["content"] for m in tool.messages if m["role"] == "tool"] == ["5"]
    assert [m["content"] for m in stateful.messages if m["role"] == "tool"] == ["x", "x y"]


def test_rows_of_evaluation_and_rows_that_are_not_there(classic):
    rows = [prompt("unused", seed=0, split="eval"), prompt("unused", seed=5), prompt("unused", seed=0, split="test")]
    rollouts, _ = play(classic, ["7<|end|>"] * 3, rows, max_failure_rate=1.0)
    assert rollouts[0].rewards == {"agent": 1.5}
    assert "has 5 rows (train)" in rollouts[1].failure and "split of the example is 'test'" in rollouts[2].failure


def test_a_conversation_without_room_is_truncated(classic):
    """verifiers stops at the refused request; what was sampled before it is trained, with the reward 0."""
    long = "x" * 9000 + "<|end|>"
    (rollout,), tokenizer = play(classic, [long], [prompt("unused", seed=1, options={"kind": "multi"})])
    assert (rollout.sample.finish, rollout.failure, rollout.rewards) == ("length", "", {"agent": 0.0})
    assert set(trained(rollout, tokenizer)) == {"x"}


@pytest.mark.parametrize(
    ("spec", "options", "complaint"),
    [
        ("verifiers:no-such-thing", {}, "no module no_such_thing"),
        ("verifiers:adding", {"kind": "group"}, "compare the episodes of a group"),
    ],
)
def test_environments_that_cannot_be_trained(spec, options, complaint, classic):
    with pytest.raises((UsageError, RewardError), match=complaint):
        play(spec, ["5<|end|>"], [prompt("unused", seed=0, options=options)], max_failure_rate=0.0)


def test_it_is_an_agent_not_an_environment():
    with pytest.raises(UsageError, match=r"set rollout\.agent verifiers:adding"):
        Environments("verifiers:adding")


V1 = '''
import sys
import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request
base, key, model, question = sys.argv[1:]
messages = [{"role": "user", "content": question}]
for further in ("Sure?", None):
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)) as response:
        reply = json.load(response)["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": further}]
"""


class AddData(vf.TaskData):
    answer: str = ""


class AddTask(vf.Task[AddData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Adding(vf.Taskset[AddTask]):
    def load(self):
        for a in range(5):
            yield AddTask(AddData(prompt=f"{a} + 3?", answer=str(a + 3)), self.config.task)


class Ask(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        command = [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, str(data.prompt)]
        return await runtime.run_program(command, {})


__all__ = ["Adding", "Ask"]
'''


def test_a_taskset_of_the_v1_api(tmp_path, monkeypatch):
    if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1.configs") is None:
        pytest.skip("the v1 API of verifiers is not installed: make test-agents")
    spec = install(tmp_path, monkeypatch, V1)
    said = ["<think>4</think>4<|end|>", "5<|end|>", "3<|end|>", "4<|end|>"]
    rollouts, tokenizer = play(spec, said, [prompt("unused", seed=2), prompt("unused", seed=0)])
    assert [rollout.failure for rollout in rollouts] == ["", ""]
    assert [trained(rollout, tokenizer) for rollout in rollouts] == ["".join(said[:2]), "".join(said[2:])]
    assert [rollout.rewards for rollout in rollouts] == [{"agent": 2.0}, {"agent": 0.0}]
    (beyond,), _ = play(spec, [], [prompt("unused", seed=5)], max_failure_rate=1.0)
    assert "has fewer tasks" in beyond.failure
