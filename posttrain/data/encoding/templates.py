"""Chat templates by name or from a file, put into a tokenizer so that they are saved, and used, with the model."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posttrain.core.errors import UsageError
from posttrain.data.encoding.tokens import whole_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = """
{%- for message in messages %}
  {%- if message.role != ('user', 'assistant')[loop.index0 % 2] %}
    {{- raise_exception("message " ~ loop.index0 ~ " is the " ~ message.role ~ "'s; data.chat_template has a place "
      ~ "only for questions of the user and answers of the assistant in turn. Use a chat template") }}
  {%- elif message.role == 'user' %}
    {{- BEFORE + message.content + AFTER }}
  {%- else %}
    {{- message.content }}{{- eos_token }}
  {%- endif %}
{%- endfor %}"""
FIELDS = ("template", "end_of_turn", "stop", "system")
ENDS = re.compile(r"\A\{#- turns end with: (\[.*?\]) #\}")


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template and the texts at which the assistant's turn ends, where that is not the end token."""

    name: str
    template: str
    end_of_turn: str = ""
    stop: tuple[str, ...] = ()
    system: str = ""

    @property
    def jinja(self) -> str:
        """All of it as one Jinja text: it stands alone, and a comment tells `turn_ends` what it says of ends."""
        ends = [text for text in (self.end_of_turn, *self.stop) if text]
        comment = "{#- turns end with: " + json.dumps(ends, ensure_ascii=False) + " #}" if ends else ""
        system = "{%- set default_system = " + literal(self.system) + " %}" if self.system else ""
        return comment + system + self.template


def turn_ends(chat_template: Any) -> tuple[str, ...]:
    """The texts that end a turn, if the chat template is one of these; the tokenizer need not have tokens for them."""
    found = ENDS.match(chat_template) if isinstance(chat_template, str) else None
    return tuple(json.loads(found.group(1))) if found else ()


def load_template(name: str) -> Template:
    """By name, from `FILE.yaml:NAME`, a file that holds one Jinja template, such a template, or a text with {}."""
    known = shipped()
    if name in known:
        return known[name]
    if "{%" in name:
        return Template("given", name)
    if "{}" in name:
        return question_template(name)
    file, _, entry = name.rpartition(":")
    if file and Path(file).is_file():
        return chosen(read_templates(Path(file)), entry, file)
    if not Path(name).is_file():
        raise unknown(name, known, "data.chat_template")
    if Path(name).suffix not in (".yaml", ".yml"):
        return Template(name, read_text(Path(name)))
    inside = read_templates(Path(name))
    if len(inside) != 1:
        raise UsageError(f"data.chat_template {name}: which one? Say {name}:NAME; there are {', '.join(inside)}")
    return next(iter(inside.values()))


def question_template(text: str) -> Template:
    """A text with {} as a chat template: each question in it, each answer ended by EOS."""
    before, *rest = text.replace("\\n", "\n").split("{}")  # a shell passes "\n" as two characters; nobody means these
    if len(rest) != 1:
        example = '"Human: {}\\nAssistant: "'
        raise UsageError(f"data.chat_template {text!r} needs {{}} once, for the question, as in {example}")
    return Template(text, QUESTION.replace("BEFORE", literal(before)).replace("AFTER", literal(rest[0])))


def literal(text: str) -> str:
    """The text as Jinja writes it; JSON's escapes are Jinja's too, but not those of letters."""
    return json.dumps(text, ensure_ascii=False)


def apply_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make `name` the tokenizer's chat template, and its end-of-turn the end token; without a name nothing changes."""
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    if not name:
        return
    template = load_template(name)
    tokenizer.chat_template = template.jinja
    if template.end_of_turn != tokenizer.eos_token and template.end_of_turn in whole_tokens(tokenizer):
        tokenizer.eos_token = template.end_of_turn
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise UsageError(f"data.chat_template {name}: line {error.lineno}: {error.message}") from None
    except TemplateError:
        pass  # it may want other messages than this one


def template_stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens at which generation must stop: the end token, and those that the chat template names."""
    tokens = whole_tokens(tokenizer)
    texts = [text for text in turn_ends(tokenizer.chat_template) if text in tokens]
    ids = [tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(text) for text in texts)]
    return list(dict.fromkeys(token for token in ids if token is not None))


# Files


@cache
def shipped() -> dict[str, Template]:
    """The templates that come with the package."""
    file = resources.files("posttrain.data.encoding").joinpath("templates.yaml")
    return parse(file.read_text(encoding="utf-8"), "templates.yaml")


def read_templates(file: Path) -> dict[str, Template]:
    """The templates of a user's YAML file."""
    return parse(read_text(file), str(file))


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.chat_template {file}: cannot be read: {error}") from None


def parse(text: str, where: str) -> dict[str, Template]:
    """`name: {template: ..., end_of_turn: ...}`; whatever else is there is refused."""
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"data.chat_template {where}: cannot be read as YAML: {error}") from None
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f"data.chat_template {where}: expected `NAME:` with `template:` under it")
    return {str(name): template_of(str(name), fields, f"{where}:{name}") for name, fields in entries.items()}


def template_of(name: str, fields: Any, where: str) -> Template:
    if not isinstance(fields, dict) or not isinstance(fields.get("template"), str):
        raise UsageError(f"data.chat_template {where}: has no text `template:`")
    for field, value in fields.items():
        if field not in FIELDS:
            near = difflib.get_close_matches(str(field), FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIELDS)}"
            raise UsageError(f"data.chat_template {where}: no such field {field!r}; {hint}")
        texts = value if field == "stop" and isinstance(value, list) else [value]
        if not all(isinstance(text, str) and text for text in texts):
            raise UsageError(f"data.chat_template {where}: {field}: expected text, found {value!r}")
    stop = fields.get("stop", ())
    return Template(**{**fields, "name": name, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def chosen(templates: dict[str, Template], name: str, file: str) -> Template:
    if name not in templates:
        raise unknown(name, templates, f"data.chat_template {file}")
    return templates[name]


def unknown(name: str, known: dict[str, Template], where: str) -> UsageError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UsageError(f"{where}: no template and no file {name!r}.{hint} There are: {', '.join(known)}")
