"""/v1/responses through the official client: the same completions as those of chat, as items and as events."""

import json

import pytest

from posttrain.data.encoding.tool_formats import MessageDelta
from posttrain.endpoint.responses_api import ResponsesFormat
from tests.unit.server.serving import serving
from tests.unit.server.test_server import client_of
from tests.unit.server.test_tools import ADD, ASKED, TOOLS, with_tools

openai = pytest.importorskip("openai")
FUNCTIONS = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
ADD_ONLY = {"type": "json_schema", "name": "sum", "schema": ADD, "strict": True}


@pytest.fixture(scope="module")
def client():
    with serving(with_tools(), max_tokens=300) as server, client_of(server) as found:
        yield found


def create(client, seed=1, **options):
    given = {"model": "pico", "input": ASKED, "max_output_tokens": 300, **options}
    return client.responses.create(**given, extra_body={"seed": seed})


def chat(client, seed=1, **options):
    given = {"model": "pico", "messages": ASKED, "max_tokens": 300, "seed": seed, **options}
    return client.chat.completions.create(**given)


def test_text_is_that_of_chat_completions(client):
    expected = chat(client, messages=[{"role": "system", "content": "Add."}, *ASKED], max_tokens=20, temperature=0.5)
    reply = create(client, instructions="Add.", input="12+30=", max_output_tokens=20, temperature=0.5)
    message = expected.choices[0].message
    assert reply.output_text == message.content and expected.choices[0].finish_reason == "length"
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (reply.instructions, reply.temperature, reply.max_output_tokens) == ("Add.", 0.5, 20)
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens) == (expected.usage.prompt_tokens, expected.usage.completion_tokens)


def test_calls_are_items_and_their_results_continue_the_conversation(client):
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    (called,) = chat(client, tools=TOOLS, **options).choices[0].message.tool_calls
    reply = create(client, tools=FUNCTIONS, **options)
    (item,) = reply.output
    assert (item.type, item.call_id, item.name) == ("function_call", called.id, called.function.name)
    assert (item.arguments, reply.status) == (called.function.arguments, "completed")
    chosen = create(
        client, tools=FUNCTIONS, tool_choice={"type": "function", "name": "flag"}, parallel_tool_calls=False
    )
    assert chosen.output[0].name == "flag"

    result = {"role": "tool", "tool_call_id": called.id, "content": "42"}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [called.model_dump()]}, result]
    expected = chat(client, messages=messages, tools=TOOLS, max_tokens=20)
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
    going_on = create(client, input=[*ASKED, item.to_dict(), output], tools=FUNCTIONS, max_output_tokens=20)
    assert going_on.usage.input_tokens == expected.usage.prompt_tokens
    assert going_on.output_text == expected.choices[0].message.content


def test_items_of_one_reply_are_one_message(client):
    """Reasoning, text and calls, as this server writes them, and as the client sends them back."""
    arguments = '{"on": true}'
    call = {"id": "call_1", "type": "function", "function": {"name": "flag", "arguments": arguments}}
    said = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "on"}
    again = {"role": "assistant", "content": "Done."}
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "flag", "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "on"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    messages = [*ASKED, said, result, again, {"role": "user", "content": "And?"}]
    expected = chat(client, messages=messages, tools=TOOLS, max_tokens=20)
    reply = create(client, input=[*ASKED, *items], tools=FUNCTIONS, max_output_tokens=20)
    assert reply.usage.input_tokens == expected.usage.prompt_tokens
    assert reply.output_text == expected.choices[0].message.content


def test_json(client):
    reply = create(client, text={"format": ADD_ONLY})
    assert set(json.loads(reply.output_text)) == {"x", "y"} and reply.status == "completed"
    assert reply.text.format.name == "sum"
    assert isinstance(json.loads(create(client, text={"format": {"type": "json_object"}}, seed=2).output_text), dict)


@pytest.mark.parametrize("options", [{"max_output_tokens": 20}, {"tools": FUNCTIONS, "tool_choice": "required"}])
def test_events_end_in_the_same_response(client, options):
    whole = create(client, **options)
    given = {"model": "pico", "input": ASKED, "max_output_tokens": 300, **options}
    with client.responses.stream(**given, extra_body={"seed": 1}) as stream:
        events = list(stream)
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{whole.status}"
    assert final.output_text == whole.output_text and final.usage == whole.usage and final.status == whole.status
    without_id = [
        {k: v for k, v in item.to_dict().items() if k not in ("id", "parsed_arguments")} for item in final.output
    ]
    assert without_id == [{k: v for k, v in item.to_dict().items() if k != "id"} for item in whole.output]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.type for item in whole.output]


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,x"}]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"previous_response_id": "resp_1"}, "send all items in input"),
        ({"tools": [{"type": "web_search"}]}, "type function only"),
        ({"input": [IMAGE]}, "reads text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "expected message, reasoning"),
        ({"input": []}, "expected a text, or a list of items"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, r"input, read as messages: messages\[0\]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format: expected"),
        ({"tools": FUNCTIONS, "tool_choice": 5}, "tool_choice: expected"),
        ({"reasoning": {"effort": "high"}}, "reasoning is not supported"),
        ({"background": True}, "background is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"extra_query": {}, "max_tool_calls": 3}, "max_tool_calls is not supported"),
    ],
)
def test_what_is_refused(client, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        create(client, **options)


def test_a_message_follows_reasoning_that_was_cut_off():
    """An empty one, whole and as a stream: a client that sends back no reasoning would lose the turn without it."""
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    message = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    whole = ResponsesFormat("m", 0, {}).whole([{"message": message, "finish_reason": "length"}], usage)
    stream = ResponsesFormat("m", 0, {})
    stream.chunk(0, MessageDelta(reasoning="hm"), None, "length", first=True)
    last = json.loads(stream.last(usage, show_usage=True).decode().partition("data: ")[2])["response"]
    for found in (whole, last):
        reasoning, answer = found["output"]
        assert (reasoning["type"], answer["type"], answer["content"][0]["text"]) == ("reasoning", "message", "")
        assert (reasoning["status"], answer["status"], found["status"]) == ("completed", "incomplete", "incomplete")
