"""What a template writes of a message with tool calls is read back as the same message, in pieces of any size."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.encoding.template_limits import render
from posttrain.data.encoding.templates import shipped_templates
from posttrain.data.encoding.tool_formats import (
    FORMATS,
    MessageDelta,
    MessageParser,
    format_of,
    parse_message,
    writes_reasoning,
)
from posttrain.models.pico import build_tokenizer
from tests.chat_templates import TOOL_TEMPLATES
from tests.unit.rollout.test_conversations import call_text

TEMPLATES = {**TOOL_TEMPLATES, "shipped qwen": shipped_templates()["qwen"].jinja}
EXPECTED = {"qwen3": "hermes", "pico": "hermes", "thinker": "hermes", "shipped qwen": "hermes"}
ASKED = [{"role": "user", "content": "How much?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
TOKENIZER = build_tokenizer()
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "f"', "<|python_tag|>")


def generated(template, message):
    """The text of a message, from the generation prompt to the end of turn."""
    TOKENIZER.chat_template = template
    prompt = render(TOKENIZER, ASKED, tools=TOOLS, add_generation_prompt=True)
    whole = render(TOKENIZER, [*ASKED, message], tools=TOOLS)
    if not whole.startswith(prompt):  # the prompt opens <think>, which the template leaves out of the message
        prompt = prompt.removesuffix("<think>\n")
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].rstrip("\n")
    for end in ("<|im_end|>", "<|eot_id|>", "<|end|>"):
        text = text.removesuffix(end)
    return text


names = st.from_regex(r"[a-z][a-z_]{0,7}", fullmatch=True)
leaves = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text('ab"\\{}[]<>/ é世\n', max_size=8)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3)
texts = st.text("abc é世.\n", max_size=12).map(str.strip)


def pieces_of(text, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(texts, calls, st.sets(st.integers(0, 80), max_size=8))
def test_round_trip(name, content, called, cuts):
    template = TEMPLATES[name]
    format = format_of(template)
    assert format.name == EXPECTED.get(name, name)
    if format.name == "llama3":
        called, content = called[:1], "" if called else content  # what its template can write
    if format.name == "mistral" and called:
        content = ""
    written = [
        {"id": f"{place:09}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for place, (function, arguments) in enumerate(called)
    ]
    message = {"role": "assistant", "content": content, **({"tool_calls": written} if written else {})}
    parser = MessageParser(format, thinks=writes_reasoning(template))
    found = MessageDelta()
    for piece in pieces_of(generated(template, message), cuts):
        found += parser.add(piece)
    found += parser.finish()
    assert found.content == content and not found.reasoning
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == called
    if format.name == "mistral":
        assert [call.id for call in found.calls] == [call["id"] for call in written]


@settings(max_examples=60, deadline=None)
@given(texts, texts, st.sets(st.integers(0, 60), max_size=6))
def test_reasoning_is_separate(reasoning, content, cuts):
    for text, opened in (
        (f"<think>\n{reasoning}\n</think>\n\n{content}", False),
        (f"{reasoning}</think>{content}", True),
    ):
        parser = MessageParser(None, thinks=True, in_reasoning=opened)
        found = MessageDelta()
        for piece in pieces_of(text, cuts):
            found += parser.add(piece)
        assert (found + parser.finish()) == MessageDelta(content, reasoning)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from([*'a{}[]"\n', *MARKS])).map("".join),
    st.sets(st.integers(0, 60), max_size=6),
)
def test_what_is_no_call_is_content_in_all_pieces(format, text, cuts):
    whole = parse_message(text, format)
    parser = MessageParser(format)
    found = MessageDelta()
    for piece in pieces_of(text, cuts):
        found += parser.add(piece)
    assert found + parser.finish() == whole
    if not whole.calls:
        assert whole.content == text  # nothing is lost


DEEP = '{"a": ' * 400 + "1" + "}" * 400
LOST = ['{"a": 1e999}', r'{"a": "\ud800"}', DEEP, '{"a": ' + "[" * 400 + "]" * 400 + "}"]


@pytest.mark.parametrize("arguments", LOST, ids=lambda text: text[:16])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_arguments_that_no_client_can_send_back_are_no_call(format, arguments):
    """Numbers without a value in JSON, half of a surrogate pair, and what is nested so deeply that readers fail."""
    text = call_text(format, [{}], (", ", ": "))
    assert [call.arguments for call in format.read(text)] == ["{}"]
    before, _, after = text.rpartition("{}")
    spoiled = f"{before}{arguments}{after}"
    assert parse_message(spoiled, format) == MessageDelta(spoiled)


@pytest.mark.parametrize("text", ['{"name": "", "arguments": {}}', '{"name": "f", "arguments": {}, "id": "\\ud800"}'])
def test_a_call_has_a_name_and_text_that_can_be_sent(text):
    with pytest.raises(ValueError, match=r"without a name|surrogates not allowed"):
        FORMATS[0].read(f"<tool_call>{text}</tool_call>")


def test_reasoning_before_a_call_and_one_call_only():
    text = '<think>\nhm\n</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = parse_message(text * 1 + '\n<tool_call>{"name": "g", "arguments": {}}</tool_call>', FORMATS[0], thinks=True)
    assert (found.reasoning, found.content, [call.name for call in found.calls]) == ("hm", "So:", ["f", "g"])
    single = parse_message(text + '<tool_call>{"name": "g", "arguments": {}}</tool_call>', FORMATS[0], several=False)
    assert [call.name for call in single.calls] == ["f"]


def test_formats_that_are_not_known():
    assert format_of(None) is None and format_of(shipped_templates()["chatml"].jinja) is None
    assert format_of("{{ message.tool_calls }}<tool_call>\n<function=name>") is None
    assert not writes_reasoning(shipped_templates()["qwen_r1"].jinja)  # an instruction; the thinking is content
    assert writes_reasoning(TOOL_TEMPLATES["deepseek3"]) and writes_reasoning(TOOL_TEMPLATES["qwen3"])
