"""Tools, response formats, reasoning and prompt log-probabilities, through the official client."""

import json
import re

import numpy as np
import pytest

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.core.types import Sample
from posttrain.endpoint import tools
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.protocol import read_chat, read_completion
from posttrain.engines.base import GenerationRequest, Sampling, seed_for
from posttrain.engines.grammar import GrammarCompiler
from posttrain.inference.model import InferenceModel
from posttrain.server.prompts import PromptReader
from tests.chat_templates import THINKER
from tests.unit.server.serving import ask, pico, serving
from tests.unit.server.test_server import client_of, streamed

ASKED = [{"role": "user", "content": "12+30="}]
X = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {"type": "object", "properties": {"x": X, "y": X}, "required": ["x", "y"], "additionalProperties": False}
FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "flag", "parameters": FLAG}},
]


def with_tools(template=THINKER):
    data = DataConfig(max_length=2**20, on_overlong="error", chat_template=template)
    return InferenceModel(ModelConfig(path="pico"), data)


@pytest.fixture(scope="module")
def alone():
    return with_tools()


@pytest.fixture(scope="module")
def server():
    with serving(with_tools(), max_tokens=300) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as found:
        yield found


def create(client, **options):
    return client.chat.completions.create(**{"model": "pico", "messages": ASKED, "max_tokens": 300, **options})


def joined(stream):
    """Content, calls and finish reason of a stream with one choice."""
    content, calls, finish = "", {}, None
    for chunk in stream:
        (choice,) = chunk.choices
        content, finish = content + (choice.delta.content or ""), choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            calls.setdefault(call.index, []).append(call)
    return content, [calls[index] for index in sorted(calls)], finish


def test_a_tool_that_must_be_called(client):
    reply = create(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1).choices[0]
    (call,) = reply.message.tool_calls
    assert reply.finish_reason == "tool_calls" and reply.message.content is None and call.type == "function"
    assert call.function.name in ("add", "flag") and re.fullmatch("call_[0-9a-f]{24}", call.id)
    keys = {"add": {"x", "y"}, "flag": {"on"}}[call.function.name]
    assert set(json.loads(call.function.arguments)) == keys
    again = create(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1, stream=True)
    content, (((told,)),), finish = joined(again)
    assert (content, finish) == ("", "tool_calls") and told.id == call.id
    assert (told.function.name, told.function.arguments) == (call.function.name, call.function.arguments)


def test_a_named_tool_and_several_choices(client):
    chosen = {"type": "function", "function": {"name": "flag"}}
    reply = create(client, tools=TOOLS, tool_choice=chosen, parallel_tool_calls=False, n=3, seed=3)
    for choice in reply.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "flag" and json.loads(call.function.arguments) in ({"on": True}, {"on": False})
    assert len({choice.message.tool_calls[0].id for choice in reply.choices}) == 3


def test_several_calls_in_one_message(client):
    """A model with random weights calls again and again; all calls are complete when it ends."""
    counts = set()
    for seed in range(2):
        reply = create(client, tools=TOOLS[1:], tool_choice="required", seed=seed, temperature=1.3).choices[0]
        if reply.finish_reason == "tool_calls":
            counts.add(len(reply.message.tool_calls))
            assert all(json.loads(call.function.arguments)["on"] in (True, False) for call in reply.message.tool_calls)
        else:
            assert reply.finish_reason == "length"
    assert counts


def test_the_conversation_goes_on_with_the_result(client, alone):
    first = create(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1).choices[0].message
    messages = [*ASKED, first.model_dump(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"}]
    reply = create(client, messages=messages, tools=TOOLS, max_tokens=5)
    call = first.tool_calls[0].function
    called = {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
    expected = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [called]}, {"role": "tool", "content": "42"}]
    text = alone.tokenizer.apply_chat_template(expected, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert reply.usage.prompt_tokens == len(alone.tokenizer(text)["input_ids"])


def test_without_constraint_the_completion_is_the_engines_own(client, alone):
    """tool_choice auto and none leave the distribution as it is; none leaves the tools out of the prompt."""
    plain = create(client, seed=5, max_tokens=20)
    none = create(client, tools=TOOLS, tool_choice="none", seed=5, max_tokens=20)
    auto = create(client, tools=TOOLS, seed=5, max_tokens=20)
    assert plain.choices[0].message.content == none.choices[0].message.content
    assert plain.usage.prompt_tokens == none.usage.prompt_tokens < auto.usage.prompt_tokens
    assert auto.choices[0].message.content and auto.choices[0].message.tool_calls is None


def test_strict_tools_leave_free_text_free(client):
    strict = [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}]
    reply = create(client, tools=strict, seed=5, max_tokens=20).choices[0]
    assert reply.message.content and reply.message.tool_calls is None


def test_json(client):
    schema = {"type": "object", "properties": {"sum": X, "ok": {"enum": ["yes", "no"]}}}
    schema |= {"required": ["sum", "ok"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    for seed in range(3):
        reply = create(client, response_format=wanted, seed=seed).choices[0]
        found = json.loads(reply.message.content)
        assert reply.finish_reason == "stop" and set(found) == {"sum", "ok"} and found["sum"] in range(100)
    told, finishes, _ = streamed(create(client, response_format=wanted, seed=2, stream=True))
    assert told[0] == reply.message.content and finishes == {0: "stop"}
    text = create(client, response_format={"type": "json_object"}, seed=1, max_tokens=40).choices[0].message.content
    assert text.startswith("{")


def test_log_probabilities_are_those_of_the_masked_distribution(client, alone):
    """Each is the model's own, divided by the probability of all tokens that the grammar allowed."""
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "yet", "no"]}}}
    options = {"response_format": wanted, "logprobs": True, "top_logprobs": 20, "seed": 4}
    entries = create(client, **options).choices[0].logprobs.content
    text = "".join(entry.token for entry in entries)
    assert json.loads(text) in ("yes", "yet", "no")
    prompt, tokens = alone.encode(ASKED).tokens, alone.tokenizer(text)["input_ids"]
    for place, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        before = np.concatenate([prompt, np.array(tokens[:place], dtype=np.int32)])
        allowed = {text.token for text in entry.top_logprobs}
        ids = [alone.tokenizer(option)["input_ids"][0] for option in allowed]
        own = {}
        for option in ids:
            sample = Sample(tokens=np.append(before, np.int32(option)), mask=np.arange(len(before) + 1) >= len(before))
            own[option] = float(alone.learner.logprobs([sample])[0][-1])
        total = np.logaddexp.reduce(list(own.values()))
        assert entry.logprob == pytest.approx(own[token] - total, abs=1e-4)
        if place == 1:
            assert allowed == {"y", "n"}


def test_reasoning(alone):
    """What stands in <think> is reasoning_content; a template that opens it in the prompt is recognised."""
    opened = THINKER.replace("{{- '<|assistant|>' -}}", "{{- '<|assistant|><think>' -}}")
    assert opened != THINKER
    with serving(with_tools(opened), max_tokens=60) as server, client_of(server) as client:
        message = create(client, seed=1, max_tokens=30).choices[0].message
        assert message.reasoning_content and message.content == ""
        stream = create(client, seed=1, max_tokens=30, stream=True)
        told = [chunk.choices[0].delta for chunk in stream]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in told) == message.reasoning_content
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}
        reader = PromptReader(with_tools(opened), name="pico", max_tokens=50, max_length=500)
        body = json.dumps({"messages": ASKED, "response_format": wanted}).encode()
        request, _ = reader.read(body, read_chat)
        assert request.parsing.in_reasoning
        spoken = alone.tokenizer("thinking...</think>\n1")["input_ids"]
        assert request.constraint.matcher.validate_tokens([*spoken, alone.tokenizer.eos_token_id]) == len(spoken) + 1


@pytest.mark.parametrize("tokens", [0, 1])
def test_echo_with_the_prompts_log_probabilities(client, alone, tokens):
    """What lm-eval's local-completions asks for."""
    prompts = [alone.tokenizer(text)["input_ids"] for text in ("<s>hello", "ab<|end|>é")]
    options = {"model": "pico", "echo": True, "logprobs": 3, "temperature": 0, "max_tokens": tokens, "seed": 1234}
    reply = client.completions.create(prompt=prompts, **options)
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        found = choice.logprobs
        (own,) = alone.learner.logprobs([Sample(tokens=np.array(prompt, np.int32), mask=np.arange(len(prompt)) > 0)])
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(prompt)] == pytest.approx(own[1:].tolist(), abs=1e-4)
        assert len(found.token_logprobs) == len(found.tokens) == len(prompt) + tokens
        for logprob, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
            assert 1 <= len(top) <= 3 and logprob <= max(top.values()) + 1e-5
        assert choice.text.startswith(alone.tokenizer.decode(prompt, skip_special_tokens=True))
        assert found.text_offset == sorted(found.text_offset)
    told, _, _ = streamed(client.completions.create(prompt=prompts, **options, stream=True))
    assert [told[index] for index in range(2)] == [choice.text for choice in reply.choices]
    plain = client.completions.create(model="pico", prompt="ab", echo=True, max_tokens=3, seed=1)
    assert plain.choices[0].text.startswith("ab")


DEEP = {"type": "object"}
for _ in range(tools.MAX_SCHEMA_DEPTH):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


def schema_format(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": TOOLS * 70}, "at most 128"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "a name of its own"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "function.name"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice: expected"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "the tools are add, flag"),
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
        (schema_format([]), "expected a JSON schema"),
        (schema_format(DEEP), "nested more than"),
        (schema_format({"enum": ["a" * 200] * 400}), "65,536 characters"),
        (schema_format({"type": "strin"}), "Invalid type"),
        (schema_format({"type": "object", "properties": {str(k): {"type": "null"} for k in range(1500)}}), "grammar"),
        (schema_format({"not": {"type": "string"}}), "Unimplemented"),
        (schema_format({"$ref": "http://localhost/secret"}), "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format: expected"),
        ({"messages": [*ASKED, {"role": "user", "content": "a", "tool_calls": [1]}]}, "of the assistant"),
        (
            {
                "messages": [
                    *ASKED,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "JSON text of an object",
        ),
        (
            {
                "messages": [
                    *ASKED,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 600 + "1" + "}" * 600}}],
                    },
                ]
            },
            "not too deeply nested",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused(server, more, words):
    status, _, answer = ask(server.port, "POST", "/v1/chat/completions", {"messages": ASKED, "max_tokens": 9, **more})
    assert status == 400 and words in answer["error"]["message"], answer


def test_templates_without_tools_refuse_them():
    reader = PromptReader(with_tools("chatml"), name="pico", max_tokens=9, max_length=99)
    with pytest.raises(ApiError, match="writes no tool calls"):
        reader.read(json.dumps({"messages": ASKED, "tools": TOOLS}).encode(), read_chat)


def test_prompts_are_not_scored_for_adapters():
    model = with_tools()
    model.adapters = ("mine",)
    reader = PromptReader(model, name="pico", max_tokens=20, max_length=99)
    body = {"model": "mine", "prompt": "ab", "echo": True, "logprobs": 1}
    with pytest.raises(ApiError, match="not of its adapters"):
        reader.read(json.dumps(body).encode(), read_completion)
    assert reader.read(json.dumps({**body, "model": "pico"}).encode(), read_completion)[0].echo


def test_constrained_and_free_requests_share_a_batch(alone):
    """A constraint changes its own completion only."""
    compiler = GrammarCompiler(alone.tokenizer, alone.encoder.vocab_size, alone.stop_ids)
    prompt, sampling = alone.encode(ASKED).tokens, Sampling(max_tokens=12, stop_ids=alone.stop_ids)
    requests = [GenerationRequest(prompt=prompt, seed=seed_for(0, 0, k)) for k in range(4)]
    free = alone.generate(requests, sampling)
    for request in requests[1::2]:
        request.constraint = compiler.compile('start: "abc" /[de]+/')
    import torch

    with torch.inference_mode():
        scheduler = alone.engine.open_scheduler(64, 16, lambda active: None)
        numbers = [scheduler.submit(request, sampling) for request in requests]
        samples = {}
        while scheduler.busy:
            samples |= scheduler.step()
    for number, before in zip(numbers[::2], free[::2], strict=True):
        assert samples[number].tokens.tolist() == before.tokens.tolist()
    for number in numbers[1::2]:
        text = alone.tokenizer.decode(samples[number].tokens[samples[number].mask], skip_special_tokens=True)
        assert re.fullmatch("abc[de]+", text)
    alone.engine.sleep()


def test_echo_counts_a_stop_token_that_ends_the_completion():
    """lm-eval takes the log-probability of the last token away, as that of the one token after the prompt."""
    model = pico()
    model.stop_ids = tuple(range(len(model.tokenizer)))  # whatever comes next ends the completion
    prompt = model.tokenizer("hello")["input_ids"]
    body = {"model": "pico", "prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1}
    with serving(model) as server:
        _, _, reply = ask(server.port, "POST", "/v1/completions", body)
        _, _, without = ask(server.port, "POST", "/v1/completions", {**body, "echo": False})
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"] == "hello"
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(prompt) + 1 and logprobs["tokens"][-1] == ""
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    assert logprobs["text_offset"][-1] == len("hello")
    assert without["choices"][0]["logprobs"]["tokens"] == []
