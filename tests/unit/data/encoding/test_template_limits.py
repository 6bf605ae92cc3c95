"""Chat templates of a hostile model: loops, memory bombs and recursion are refused in one line, in bounded work."""

import pytest

from posttrain.config.sections import ModelConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.data.encoding import template_limits
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.templates import apply_template, shipped_templates
from posttrain.data.encoding.tokens import TokenEncoder
from posttrain.models.tokenizers import load_tokenizer

LONG = "{% set x = 'ab' * 4000000 %}"
LOOP = "{% for a in range(100000) %}"
TEMPLATES = {
    "nested loops": f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    "loops whose condition is never true": f"{LOOP}{{% for b in range(99999) if b < 0 %}}{{% endfor %}}{{% endfor %}}",
    "a loop that calls itself": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a product": "{{ 'x' * 10**10 }}",
    "a product of a list": "{{ [1] * 10**9 }}",
    "doubled texts": "{% set n = namespace(x='x') %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled texts by ~": "{% set n = namespace(x='x') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled lists": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "squared numbers": "{% set n = namespace(x=3) %}" + LOOP + "{% set n.x = n.x * n.x %}{% endfor %}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "much literal text": LOOP + "y" * 10_000 + "{% endfor %}",
    "much output": LONG + LOOP + "{{ x }}{% endfor %}",
    "a text of a list": LONG + "{{ [x] * 100000 }}",
    "JSON of a list": LONG + "{{ ([x] * 100000) | tojson }}",
    "a width": "{{ '%999999999d' % 1 }}",
    "a width as a value": "{{ '%*d' % (999999999, 1) }}",
    "a width of format": "{{ '{:>999999999}'.format(1) }}",
    "a width of the filter": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'x'.center(10**9) }}",
    "center by the filter": "{{ 'x' | center(10**9) }}",
    "indent": "{{ ('x\n' * 100000) | indent(10**6) }}",
    "replace": LONG + "{{ x.replace('a', x) }}",
    "replace by the filter": LONG + "{{ x | replace('a', x) }}",
    "join": LONG + "{{ ''.join([x] * 100000) }}",
    "join by the filter": LONG + "{{ ([x] * 100000) | join }}",
    "sums of ranges": LOOP + "{% set x = range(100000) | sum %}{% endfor %}",
    "slices": "{{ messages | slice(10**9) | list }}",
    "a long template": "{# " + "x" * 300_000 + " #}",
    "nested expressions": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig(path="pico"))


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_beyond_the_limits(case, tokenizer, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    tokenizer.chat_template = TEMPLATES[case]
    renderer = ChatRenderer(tokenizer, TokenEncoder(tokenizer))
    with pytest.raises(UsageError, match=r"^d\.jsonl:1: the chat template was stopped: it needs ") as caught:
        renderer.prompt([{"role": "user", "content": "a"}], False, "d.jsonl:1")
    assert "\n" not in str(caught.value)


def test_a_template_given_as_an_option(tokenizer):
    with pytest.raises(UsageError, match=r"^data\.chat_template .* the chat template was stopped"):
        apply_template(tokenizer, TEMPLATES["nested loops"])


def test_an_error_in_a_template_is_one_of_the_data(tokenizer):
    tokenizer.chat_template = "{{ 1 / 0 }}"
    renderer = ChatRenderer(tokenizer, TokenEncoder(tokenizer))
    with pytest.raises(DataError, match=r"^d\.jsonl:1: the chat template rejects the conversation: division by zero"):
        renderer.prompt([{"role": "user", "content": "a"}], False, "d.jsonl:1")


MANY = """
{%- for m in messages if m.role != 'tool' -%}
{{ loop.index ~ '/' ~ loop.length }}{% if loop.last %}!{% endif %}{{ '%s: ' % m.role }}{{ m.content.split('x')[-1] }}
{{- m.content | trim | replace('h', 'H') | upper }}{{ m | tojson(indent=2) }}{{ 3 * 'ab' + '{:>4}'.format(2 ** 3) }}
{{- messages | map(attribute='role') | unique | join(', ') }}{% continue %}
{%- endfor %}{{ [1, 2] + [3] }}{{ messages[::-1] | length }}{% generation %}g{% endgeneration %}"""


@pytest.mark.parametrize("name", [*shipped_templates(), MANY])
def test_limits_do_not_change_what_is_rendered(name, tokenizer):
    """Compares with the sandbox of transformers itself, compiled anew without the limits."""
    utils, limited = template_limits.chat_template_utils, template_limits.LimitedEnvironment
    tokenizer.chat_template = shipped_templates()[name].jinja if name != MANY else MANY
    messages = [{"role": role, "content": f" hexe {role}xh "} for role in ("user", "assistant") * 3]
    found = template_limits.render(tokenizer, messages, add_generation_prompt=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "ImmutableSandboxedEnvironment", limited.__base__)
        utils._compile_jinja_template.cache_clear()
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    utils._compile_jinja_template.cache_clear()
    assert found == expected


def test_long_conversations_are_within_the_limits(tokenizer):
    tokenizer.chat_template = shipped_templates()["qwen"].jinja
    messages = [{"role": role, "content": "hello " * 200} for role in ("user", "assistant") * 2000]
    assert template_limits.render(tokenizer, messages).count("hello") == 800_000


def test_other_code_renders_without_limits(tokenizer):
    tokenizer.chat_template = "{{ 'x' * 40000000 }}"
    with pytest.raises(UsageError, match="a text of 40,000,000 characters"):
        template_limits.render(tokenizer, [{"role": "user", "content": "a"}])
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)) == 40_000_000
