"""Unmodified programs of agent frameworks, where they are installed: every sampled token is trained, tool calls too.

pip install openai-agents langgraph langchain-openai smolagents
"""

from dataclasses import replace

import pytest

from posttrain.data.encoding.templates import apply_template
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.agents import AgentRunner, Agents
from tests.unit.rollout.made import SAMPLING, FakeGenerator, online, prompt

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
'''


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|end|>'


SAID = [call("add", '{"b":3 , "a": 2}'), "5<|end|>", call("add", '{"a":2,"b":3}'), "5.0<|end|>"]
# smolagents ends by a tool, and writes the calls of earlier replies into its history as text: a branch for each step.
FRAMEWORKS = {
    "openai_agents": ("agents", SAID, 1),
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
