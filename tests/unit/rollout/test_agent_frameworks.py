"""Unmodified programs of agent frameworks, where they are installed: every sampled token is trained, tool calls too.

pip install openai-agents langgraph langchain-openai smolagents, or `make test-agents`.
"""

from dataclasses import replace

import pytest

from posttrain.data.encoding.templates import apply_template
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.agents import AgentRunner, Agents
from tests.unit.rollout.made import SAMPLING, FakeGenerator, online, prompt
from tests.unit.server.serving import pico

CODE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def openai_agents(example, base_url, api_key):
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from openai import AsyncOpenAI

    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="A", instructions="Be brief.", model=model, tools=[function_tool(add)])
    first = await Runner.run(agent, "2 + 3?")
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
    return float(second.final_output)

async def openai_responses(example):
    from agents import Agent, Runner, function_tool

    agent = Agent(name="A", instructions="Be brief.", model="policy", tools=[function_tool(add)])
    first = await Runner.run(agent, "2 + 3?")  # the SDK's own model: the Responses API, from the environment
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
    return float(second.final_output)

def langgraph(example):
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    llm = ChatOpenAI(model="policy").bind_tools([add])  # the endpoint comes from the environment
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    program = graph.compile()
    found = program.invoke({"messages": [("user", "2 + 3?")]})["messages"]
    return float(program.invoke({"messages": [*found, ("user", "Sure?")]})["messages"][-1].content)

def smolagents(example, base_url, api_key):
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[tool(add)], model=model, max_steps=4, verbosity_level=0)
    return float(agent.run("2 + 3?"))

def openai(example, client):
    messages = [{"role": "user", "content": "2 + 3?"}]
    for question in ("Sure?", "Really?"):
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [reply, {"role": "user", "content": question}]
    return len(messages)

def requests(example, base_url, api_key):
    import requests
    messages = [{"role": "user", "content": "2 + 3?"}]
    for question in ("Sure?", "Really?"):
        asked = {"model": "policy", "messages": messages}
        headers = {"Authorization": f"Bearer {api_key}"}
        reply = requests.post(f"{base_url}/chat/completions", json=asked, headers=headers, timeout=60)
        text = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    return len(messages)
'''

# As the programs above, but they take whatever a random model replies, in two turns, and return a number.
ANY_REPLY = (
    CODE.replace("float(second.final_output)", "5")
    .replace(
        'float(program.invoke({"messages": [*found, ("user", "Sure?")]})["messages"][-1].content)',
        'len(program.invoke({"messages": [*found, ("user", "Sure?")]})["messages"])',
    )
    .replace('return float(agent.run("2 + 3?"))', 'agent.run("2 + 3?")\n    return 5')
)


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|end|>'


SAID = [call("add", '{"b":3 , "a": 2}'), "5<|end|>", call("add", '{"a":2,"b":3}'), "5.0<|end|>"]
# smolagents ends by a tool, and writes the calls of earlier replies into its history as text: a branch for each step.
FRAMEWORKS = {
    "openai_agents": ("agents", SAID, 1),
    "openai_responses": ("agents", SAID, 1),
    "langgraph": ("langgraph", SAID, 1),
    "smolagents": ("smolagents", [SAID[0], call("final_answer", '{"answer": 5}')], 2),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_program_is_trained_as_it_is(name, tmp_path):
    module, said, branches = FRAMEWORKS[name]
    pytest.importorskip(module)
    (tmp_path / "program.py").write_text(CODE)
    tokenizer = build_tokenizer()
    apply_template(tokenizer, "qwen")
    replies = iter(said)
    generator = FakeGenerator(lambda _: next(replies))
    config = online(data__max_length=20_000)
    with Agents(f"{tmp_path}/program.py:{name}", workers=1, timeout_seconds=120.0, memory_gib=8.0) as agents:
        runner = AgentRunner(agents, generator, config, replace(SAMPLING, max_tokens=8192), tokenizer)
        rollouts = runner.play([(3, prompt("2 + 3?"))], [1])
    assert len(generator.requests) == len(said) and len(rollouts) == branches
    assert all((rollout.rewards, rollout.failure) == ({"agent": 5.0}, "") for rollout in rollouts)
    trained = [tokenizer.decode(rollout.sample.tokens[rollout.sample.mask]) for rollout in rollouts]
    assert sorted("".join(trained)) == sorted("".join(said))
    if branches == 1:
        assert trained == ["".join(said)]
        results = [message["content"] for message in rollouts[0].messages if message["role"] == "tool"]
        assert results == ["5", "5"]


class RecordingGenerator:
    """Generates with pico, and keeps every sample."""

    def __init__(self):
        self.model = pico()
        apply_template(self.model.tokenizer, "qwen")
        self.samples = []

    def generate(self, requests, sampling, *, on_completion=None):
        found = self.model.generate(requests, sampling)
        self.samples += found
        return found


def counted(sample):
    """Tokens that count, with their log-probabilities."""
    return list(zip(sample.tokens[sample.mask].tolist(), sample.logprobs[sample.mask].tolist(), strict=True))


@pytest.mark.parametrize("name", ["openai", "requests", *FRAMEWORKS])
def test_whatever_pico_samples_is_trained(name, tmp_path):
    """Tokens and log-probabilities of all replies, each once: nothing is encoded again or left out."""
    pytest.importorskip(FRAMEWORKS[name][0] if name in FRAMEWORKS else name)
    (tmp_path / "program.py").write_text(ANY_REPLY)
    generator = RecordingGenerator()
    config = online(data__max_length=20_000)
    sampling = replace(SAMPLING, max_tokens=30_000, stop_texts=("e", "a"))  # a random model seldom ends its turn
    with Agents(f"{tmp_path}/program.py:{name}", workers=1, timeout_seconds=120.0, memory_gib=8.0) as agents:
        runner = AgentRunner(agents, generator, config, sampling, generator.model.tokenizer)
        rollouts = runner.play([(3, prompt("2 + 3?"))], [1])
    assert not any(rollout.failure for rollout in rollouts) and len(generator.samples) >= 2
    sampled = [pair for sample in generator.samples for pair in counted(sample)]
    trained = [pair for rollout in rollouts for pair in counted(rollout.sample)]
    assert sorted(trained) == sorted(sampled)
    if name != "smolagents":  # which writes what went wrong into its history: branches
        assert len(rollouts) == 1 and trained == sampled
