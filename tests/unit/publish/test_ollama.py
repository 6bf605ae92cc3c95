"""Ollama's Modelfile: the form of known chat templates is found, and others get none."""

import pytest

from posttrain.data.encoding.template_limits import render
from posttrain.data.encoding.templates import apply_template
from posttrain.models.pico import build_tokenizer
from posttrain.publish.ollama import CHECKED, UnknownTemplateError, modelfile, turn_format

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}
{%- set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}{% for message in messages %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- (first if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
LLAMA2 = """{% for message in messages %}{% if message.role == 'user' %}
{{- bos_token + '[INST] ' + message.content + ' [/INST]' }}{% elif message.role == 'assistant' %}
{{- ' ' + message.content + ' ' + eos_token }}
{%- else %}{{ raise_exception('no system messages') }}{% endif %}{% endfor %}"""


THINK = """{% for m in messages %}{{ '|' + m.role + '|' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '|assistant|<think>' }}{% endif %}"""
# As Mistral's: the system message is a part of the last user message.
MISTRAL = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message.role == 'user' %}
{{- '[INST]' + (system + '\n\n' if system is defined and loop.last else '') + message.content + '[/INST]' }}
{%- else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"""


def tokenizer_with(template):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def named(name):
    tokenizer = build_tokenizer()
    apply_template(tokenizer, name)
    return tokenizer


KNOWN = (build_tokenizer(), named("chatml"), named("qwen"), named("llama3"))


@pytest.mark.parametrize(
    "tokenizer", [*KNOWN, *(tokenizer_with(template) for template in (GEMMA, LLAMA2, THINK, MISTRAL))], ids=range(8)
)
def test_conversations_are_rendered_as_the_chat_template_does(tokenizer):
    found = turn_format(tokenizer)
    for roles in CHECKED:
        messages = [{"role": role, "content": f"{role} says {n}"} for n, role in enumerate(roles)]
        if "system" not in roles or found.start_with_system is not None:
            assert found.render(messages) == render(tokenizer, messages, add_generation_prompt=True)


def test_the_modelfile():
    tokenizer = named("qwen")
    text, remarks = modelfile(tokenizer, "model-q8_0.gguf", [tokenizer.eos_token_id])
    assert text.startswith('FROM ./model-q8_0.gguf\nTEMPLATE """') and not remarks
    assert "You are a helpful assistant." in text and "{{ .System }}" in text
    assert text.endswith(f'PARAMETER stop "{tokenizer.eos_token}"\n')
    _, remarks = modelfile(tokenizer_with(LLAMA2), "x.gguf", [6])
    assert "refuses system messages" in remarks[0]
    text, remarks = modelfile(tokenizer_with(MISTRAL), "x.gguf", [6])
    assert "{{ if and $.System $last }}" in text and "[INST]{{ $.System }}\n\n{{ else }}" in text
    _, remarks = modelfile(tokenizer_with(GEMMA), "x.gguf", [6])
    assert "trims" in remarks[0]


def test_a_bos_token_that_the_runtime_adds_is_not_in_the_template():
    tokenizer = build_tokenizer()
    assert 'TEMPLATE """{{ if .System }}<s>' in modelfile(tokenizer, "x.gguf", [6])[0]
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    assert "<s>" not in modelfile(tokenizer, "x.gguf", [6])[0]
    # "<s>[INST] " and "</s>[INST] " have "s>[INST] " in common; LLAMA2 has a BOS token before each user message.
    mistral = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    mistral += "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    tokenizer.eos_token = "</s>"
    for template in (mistral, LLAMA2):
        tokenizer.chat_template = template
        assert "}}[INST] {{ .Content }}" in modelfile(tokenizer, "x.gguf", [6])[0]
        messages = [{"role": role, "content": role} for role in CHECKED[-2]]
        rendered = render(tokenizer, messages, add_generation_prompt=True)
        assert "<s>" + turn_format(tokenizer).render(messages) == rendered


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}", "date"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "chat template"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}", "render"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "leaves out"),
        ("{% for m in messages %}{{ m.role + m.content }}{% if m.role == 'assistant' and loop.index > 3 %}!{% endif %}"
         "{% endfor %}", "plain sequence"),
    ],
)  # fmt: skip
def test_unknown_templates_get_none(template, reason):
    with pytest.raises(UnknownTemplateError, match=reason):
        turn_format(tokenizer_with(template))
