"""The endpoint of agents: unmodified clients, all chat templates; what was sampled is recorded, token by token."""

import json
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.types import Sample
from posttrain.endpoint.engine_thread import GeneratorThread
from posttrain.endpoint.http import address_of, listen
from posttrain.engines.base import Sampling
from posttrain.rollout.agent_endpoint import HOST, AgentEndpoint
from tests.unit.rollout.test_conversations import MADE, TEMPLATES, TOOLS, call_text, one_by_one

PATIENCE = 120.0
ASKED = [{"role": "user", "content": "abc?"}]


class Script:
    """A model that says what it is given, in the shortest tokens, which no encoder would choose."""

    def __init__(self, made):
        self.made = made
        self.texts = []  # to say next; empty: "c"
        self.requests, self.samplings = [], []
        self.sampled = []  # (token, log-probability) of all replies

    def generate(self, requests, sampling, *, on_completion=None):
        self.requests += requests
        self.samplings += [sampling] * len(requests)
        return [self.sample(request, sampling) for request in requests]

    def sample(self, request, sampling):
        text = self.texts.pop(0) if self.texts else "c"
        tokens = [*one_by_one(self.made.tokenizer, text), self.made.end][: sampling.max_tokens]
        logprobs = [np.float32(-1 - len(self.sampled) - place) for place in range(len(tokens))]
        self.sampled += zip(tokens, logprobs, strict=True)
        before = len(request.prompt)
        return Sample(
            tokens=np.concatenate([request.prompt, np.int32(tokens)]),
            mask=np.arange(before + len(tokens)) >= before,
            logprobs=np.concatenate([np.zeros(before, dtype=np.float32), np.float32(logprobs)]),
            finish="stop" if tokens[-1] == self.made.end else "length",
        )


@cache
def endpoint_of(name):
    """An endpoint with a chat template; they are kept until the tests have ended."""
    sockets = listen(HOST, 0)
    endpoint = AgentEndpoint(MADE[name].tokenizer, MADE[name].ends, PATIENCE, sockets)
    endpoint.start()
    return endpoint, f"{address_of(HOST, sockets)}/v1"


@pytest.fixture(scope="module", autouse=True)
def endpoints_end():
    yield
    for name in TEMPLATES:
        endpoint_of(name)[0].close()


@cache
def connection():
    return openai.DefaultHttpxClient(timeout=PATIENCE)


@contextmanager
def serving(name="hermes", *, max_tokens=4096, max_prompt=2048, stop=()):
    made, (endpoint, url) = MADE[name], endpoint_of(name)
    script = Script(made)
    sampling = Sampling(max_tokens=max_tokens, stop_ids=tuple(made.ends), stop_texts=stop)
    with endpoint.session(GeneratorThread(script), sampling, max_prompt) as session:

        def client_of(conversation):
            return openai.OpenAI(base_url=url, api_key=conversation.key, max_retries=0, http_client=connection())

        conversation = session.open(7, "row")
        yield SimpleNamespace(
            session=session,
            conversation=conversation,
            client=client_of(conversation),
            client_of=client_of,
            script=script,
            url=url,
            made=made,
        )


def check_samples(served, branches):
    """All sampled tokens are in the samples, each once, with their log-probabilities; nothing else counts."""
    samples = [sample for _, sample in served.conversation.tree.samples()]
    assert len(samples) == branches
    assert not served.conversation.tree.refusals
    trained = [
        pair for s in samples for pair in zip(s.tokens[s.mask].tolist(), s.logprobs[s.mask].tolist(), strict=True)
    ]
    assert sorted(trained) == sorted(served.script.sampled)
    if branches == 1:
        assert trained == served.script.sampled
    for number, request in enumerate(served.script.requests):  # what the model saw is a beginning of a sample
        assert any(s.tokens[: len(request.prompt)].tolist() == request.prompt.tolist() for s in samples), number
    return samples


def rebuilt(message):
    """A reply as many programs put it together again: without thinking, JSON of calls in a spelling of their own."""
    found = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "arguments": json.dumps(json.loads(call.function.arguments), indent=1, sort_keys=True),
                    "name": call.function.name,
                },
            }
            for call in message.tool_calls
        ]
    return found


def as_dumped(message):
    return message.model_dump()


def with_parts(message):
    found = rebuilt(message)
    return {**found, "content": [{"type": "text", "text": message.content or ""}]}


@pytest.mark.parametrize("spelled", [lambda message: message, rebuilt, as_dumped, with_parts])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_tool_loop_is_one_sample_with_every_template(name, spelled):
    """OpenAI's own loop: the reply is appended, tools are called, their results appended, until there are no calls."""
    with serving(name) as served:
        format, create = served.made.format, served.client.chat.completions.create
        tools = {"tools": TOOLS} if format else {}
        thinking = "<think>\nab abc\n</think>\n\n"
        calls = call_text(format, [{"x": "ab", "a": 2.0}], (" , ", " :")) if format else "ab abc"
        served.script.texts = [thinking + calls, "a b", thinking + calls, thinking + "no"]
        messages = list(ASKED)
        for _ in range(4):
            message = create(model="gpt-4o", messages=messages, **tools).choices[0].message
            messages.append(spelled(message))
            if message.tool_calls:
                assert json.loads(message.tool_calls[0].function.arguments) == {"x": "ab", "a": 2.0}
                messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"})
            else:
                messages.append({"role": "user", "content": "and?"})
        assert len(served.script.requests) == 4
        check_samples(served, 1)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_loop_over_the_responses_api_is_one_sample_too(name):
    """All output items are sent back, without the reasoning; a reply with text and a call is one message again."""
    with serving(name) as served:
        format, tools = served.made.format, {}
        if format:
            tools = {"tools": [{"type": "function", **tool["function"]} for tool in TOOLS]}
        thinking = "<think>\nab abc\n</think>\n\n" if served.session.format.thinks else ""
        calls = call_text(format, [{"x": "ab", "a": 2.0}], (" , ", " :")) if format else "ab abc"
        served.script.texts = [thinking + calls, "a b", thinking + calls, "no"]
        items = list(ASKED)
        for turn in range(4):
            reply = served.client.responses.create(model="gpt-5", input=items, stream=False, **tools)
            items += [item.to_dict() for item in reply.output if item.type != "reasoning"]
            called = [item for item in reply.output if item.type == "function_call"]
            assert len(called) == (turn % 2 == 0 and bool(format))
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in called]
            if not called:
                items.append({"role": "user", "content": [{"type": "input_text", "text": "and?"}]})
        assert len(served.script.requests) == 4
        check_samples(served, 1)


@pytest.mark.parametrize("name", ["hermes", "qwen3", "deepseek3", "pico", "shipped chatml"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_random_conversations(name, data):
    """Any order of going on, asking again, several choices, streams, and histories that the program compacts."""
    with serving(name) as served:
        create, format = served.client.chat.completions.create, served.made.format
        tools = {"tools": TOOLS} if format and data.draw(st.booleans()) else {}
        messages, branches, last = list(ASKED), 0, None
        for number in range(data.draw(st.integers(1, 6))):
            step = data.draw(st.sampled_from(["on", "on", "on", "again", "compact", "choices"]))
            goes_on = step == "on" and last is not None
            if goes_on:
                messages = [*messages, data.draw(st.sampled_from([rebuilt, as_dumped, with_parts]))(last)]
                if last.tool_calls:
                    ids = [call.id for call in last.tool_calls]
                    messages += [{"role": "tool", "tool_call_id": id, "content": "7"} for id in ids]
                else:
                    messages.append({"role": "user", "content": data.draw(st.sampled_from(["ab", "more <s>"]))})
            elif step == "compact":
                messages = [{"role": "user", "content": f"So far: {number}"}]
            choices = 2 if step == "choices" else 1
            for _ in range(choices):
                spoken = data.draw(st.sampled_from(["", "<think>ab</think>"])) + data.draw(st.text("abc é", min_size=1))
                if tools and data.draw(st.booleans()):
                    spoken += call_text(format, [{"x": data.draw(st.integers(0, 9))}], (",", ":"))
                served.script.texts.append(f"{spoken}{number}")
            options = {"model": "m", "messages": messages, "n": choices, **tools}
            if data.draw(st.booleans()):
                with served.client.chat.completions.stream(**options) as stream:
                    reply = stream.get_final_completion()
            else:
                reply = create(**options)
            branches += choices - goes_on
            last = reply.choices[-1].message
        check_samples(served, branches)


def test_calls_that_no_client_can_send_back_are_text():
    """They would end the conversation: with an error of the server, or with the next request."""
    written = ['{"x": 1e999}', r'{"x": "\ud800"}', '{"x": ' + "[" * 600 + "]" * 600 + "}"]
    with serving() as served:
        history = list(ASKED)
        for arguments in written:
            text = call_text(served.made.format, [{"x": 1}], (", ", ": ")).replace('{"x": 1}', arguments)
            served.script.texts.append(text)
            asked = served.client.chat.completions.create(model="m", messages=history, tools=TOOLS)
            message = asked.choices[0].message
            assert message.content == text and not message.tool_calls
            history += [as_dumped(message), {"role": "user", "content": "once more"}]
        served.client.chat.completions.create(model="m", messages=history, tools=TOOLS)
        check_samples(served, 1)


def test_a_bare_loop_of_requests():
    with serving("qwen3") as served:
        served.script.texts = ["<think>ab</think>a", "b", "c"]
        headers, messages = {"Authorization": f"Bearer {served.conversation.key}"}, list(ASKED)
        for _ in range(3):
            body = {"model": "m", "messages": messages}
            reply = requests.post(f"{served.url}/chat/completions", json=body, headers=headers, timeout=PATIENCE)
            message = reply.json()["choices"][0]["message"]
            messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "and?"}]
        check_samples(served, 1)


def test_seeds_depend_on_the_conversation_and_the_request_alone():
    def seeds(order, key=7):
        with serving() as served:
            served.conversation.seed = key
            for text in order:
                asked = [{"role": "user", "content": text}]
                served.client.chat.completions.create(model="m", messages=asked, seed=3)
            return {(request.prompt.tobytes(), request.seed) for request in served.script.requests}

    first = seeds(["a", "b", "b", "c"])
    assert len(first) == 4 and first == seeds(["b", "c", "a", "b"]) and not first & seeds(["a", "b"], key=8)


def test_the_trained_distribution_is_the_sampled_one():
    """Settings of programs do not change it; their limits and stop texts count."""
    with serving(max_tokens=100) as served:
        create = served.client.chat.completions.create
        create(model="m", messages=ASKED)
        assert not served.session.overridden
        create(model="m", messages=ASKED, temperature=0.2, top_p=1, max_tokens=5, stop=["x"])
        assert served.session.overridden == {"temperature"}
        first, second = served.script.samplings
        assert (first.temperature, first.max_tokens) == (1.0, 100)
        assert (second.temperature, second.max_tokens, second.stop_texts) == (1.0, 5, ("x",))
        create(model="m", messages=ASKED, tools=TOOLS, tool_choice="required")
        create(model="m", messages=ASKED, response_format={"type": "json_object"})
        assert served.session.overridden == {"temperature", "tool_choice", "response_format"}
        assert all(request.constraint is None for request in served.script.requests)
        with pytest.raises(openai.BadRequestError, match="ignore_eos"):
            create(model="m", messages=ASKED, extra_body={"ignore_eos": True})
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            create(model="m", messages=ASKED, logprobs=True, top_logprobs=2)


def test_a_branch_that_is_full_is_refused():
    with serving(max_tokens=30, max_prompt=60) as served:
        create = served.client.chat.completions.create
        served.script.texts = ["abc" * 5, "abc" * 5]
        reply = create(model="m", messages=ASKED).choices[0]
        assert reply.finish_reason == "stop" and not served.conversation.too_long
        messages = [*ASKED, reply.message, {"role": "user", "content": "a" * 20}]
        with pytest.raises(openai.BadRequestError, match=r"rollout.max_tokens is 30") as refused:
            create(model="m", messages=messages)
        assert refused.value.code == "context_length_exceeded" and "rollout.max_tokens" in served.conversation.too_long
        with pytest.raises(openai.BadRequestError, match=r"data.max_length is 60"):
            create(model="m", messages=[{"role": "user", "content": "a" * 80}])
        check_samples(served, 1)


def test_keys_are_of_conversations_that_go_on():
    with serving() as served:
        other = served.session.open(8, "other")
        client = served.client_of(other)
        assert [model.id for model in client.models.list()] == ["policy"]
        client.chat.completions.create(model="m", messages=ASKED)
        assert len(other.tree.turns) == 1 and not served.conversation.tree.turns
        served.session.close(other)
        with pytest.raises(openai.AuthenticationError, match="conversation that is going on"):
            client.chat.completions.create(model="m", messages=ASKED)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        with pytest.raises(openai.NotFoundError, match="agents in training have /v1/chat/completions"):
            served.client.completions.create(model="m", prompt="a")
        served.client.chat.completions.create(model="m", messages=ASKED)
        assert len(other.tree.turns) == 1 and len(served.conversation.tree.turns) == 1


def test_only_this_machine_can_connect():
    with serving() as served:
        assert served.url.startswith("http://127.0.0.1:")
