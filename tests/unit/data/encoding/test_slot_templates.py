"""templates.json of MindSpeed-LLM: the same text as the templates that come with the package."""

import json

import pytest

from posttrain.core.errors import UsageError
from posttrain.data.encoding.template_limits import render
from posttrain.data.encoding.templates import load_template
from tests.unit.data.made import byte_level

CHATML = "<|im_start|>user\n{{content}}<|im_end|>\n<|im_start|>assistant\n"
ENTRIES = [
    {
        "name": "qwen",
        "format_user": {"slots": [CHATML]},
        "format_system": {"slots": ["<|im_start|>system\n{{content}}<|im_end|>\n"]},
        "format_separator": {"slots": ["\n"]},
        "default_system": "You are a helpful assistant.",
        "stop_words": ["<|im_end|>"],
        "replace_eos": True,
    },
    {
        "name": "default",
        "format_user": {"slots": ["Human: {{content}}\nAssistant:"]},
        "format_system": {"slots": ["{{content}}\n"]},
        "format_separator": {"slots": ["\n"]},
    },
    {
        "name": "deepseek3",
        "format_user": {"slots": ["<｜User｜>{{content}}<｜Assistant｜>"]},
        "format_prefix": {"slots": [["bos_token"]]},
    },
    {"name": "baichuan2", "format_user": {"slots": ["<reserved_106>{{content}}<reserved_107>"]}, "efficient_eos": True},
    {
        "name": "llama2",
        "format_user": {"slots": [["bos_token"], "[INST] {{content}} [/INST]"]},
        "format_system": {"slots": ["<<SYS>>\n{{content}}\n<</SYS>>\n\n"]},
        "template_class": "Llama2Template",
    },
    {"name": "thinking", "format_user": {"slots": ["{{content}}"]}, "template_class": "ReasoningTemplate"},
    {"name": "odd", "format_user": {"slots": [{"tool": "x"}]}},
]
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "7+8?"},
    {"role": "assistant", "content": "15"},
]
SYSTEM = [{"role": "system", "content": "S"}]


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "templates.json"
    place.write_text(json.dumps(ENTRIES), encoding="utf-8")
    return place


@pytest.mark.parametrize("name", ["qwen", "default", "deepseek3", "baichuan2"])
@pytest.mark.parametrize("talk", [TALK, SYSTEM + TALK], ids=["without system", "with system"])
def test_a_template_of_the_file_writes_what_ours_of_that_name_writes(file, name, talk):
    theirs, ours = load_template(f"{file}:{name}"), load_template(name)
    assert render(byte_level(theirs.jinja), talk).rstrip() == render(byte_level(ours.jinja), talk).rstrip()
    assert theirs.end_of_turn == ours.end_of_turn


def test_the_system_message_of_llama2_is_part_of_the_first_turn(file):
    text = render(byte_level(load_template(f"{file}:llama2").jinja), SYSTEM + TALK)
    assert text == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST]Ho</s><s>[INST] 7+8? [/INST]15</s>"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("thinking", "template_class ReasoningTemplate is not supported"),
        ("odd", "format_user: unknown slot {'tool': 'x'}"),
        ("qwn", "no template and no file 'qwn'. Did you mean qwen?"),
    ],
)
def test_what_cannot_be_written_as_a_chat_template_is_refused(file, name, message):
    with pytest.raises(UsageError) as error:
        load_template(f"{file}:{name}")
    assert message in str(error.value)


def test_one_of_the_templates_has_to_be_chosen(file):
    with pytest.raises(UsageError, match=r"templates\.json:NAME, from qwen, default"):
        load_template(str(file))
