"""Load chat templates by name or from a file and set them in a tokenizer, so that they are saved with the model."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from posttrain.core.errors import UsageError
from posttrain.core.lazy import PreTrainedTokenizerBase
from posttrain.data.encoding.slot_templates import read_slot_templates, template_fields
from posttrain.data.encoding.tokens import whole_tokens

SINGLE_TURN = """
{%- for message in messages %}
  {%- if message.role != ('user', 'assistant')[loop.index0 % 2] %}
    {{- raise_exception("message " ~ loop.index0 ~ " has the role " ~ message.role ~ "; this data.chat_template "
      ~ "supports only alternating messages of user and assistant. Use a full chat template") }}
  {%- elif message.role == 'user' %}
    {{- BEFORE + message.content + AFTER }}
  {%- else %}
    {{- message.content }}{{- eos_token }}
  {%- endif %}
{%- endfor %}"""
FIELDS = ("template", "end_of_turn", "stop", "system")
ENDS_COMMENT = re.compile(r"\A\{#- turns end with: (\[.*?\]) #\}")


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template and the texts that end the assistant's turn, where that is not the EOS token."""

    name: str
    template: str
    end_of_turn: str = ""
    stop: tuple[str, ...] = ()
    system: str = ""

    @property
    def jinja(self) -> str:
        """The template as one Jinja text; a comment in it holds the end-of-turn texts for `turn_ends`."""
        ends = [text for text in (self.end_of_turn, *self.stop) if text]
        comment = "{#- turns end with: " + json.dumps(ends, ensure_ascii=False) + " #}" if ends else ""
        system = "{%- set default_system = " + jinja_literal(self.system) + " %}" if self.system else ""
        return comment + system + self.template


def turn_ends(chat_template: Any) -> tuple[str, ...]:
    """Return the texts that end a turn, if the chat template names any; they need not be tokens."""
    found = ENDS_COMMENT.match(chat_template) if isinstance(chat_template, str) else None
    return tuple(json.loads(found.group(1))) if found else ()


def load_template(name: str) -> Template:
    """Load a template by name, from `FILE:NAME`, a file with one template, a Jinja text, or a text with {}.

    FILE is YAML in our form, or templates.json of MindSpeed-LLM.
    """
    known = shipped_templates()
    if name in known:
        return known[name]
    if "{%" in name:
        return Template("given", name)
    if "{}" in name:
        return template_from_text(name)
    file, _, entry = name.rpartition(":")
    if file and Path(file).is_file() and Path(file).suffix == ".json":
        entries = read_slot_templates(read_text(Path(file)), file)
        if entry not in entries:
            raise unknown_template(entry, entries, f"data.chat_template {file}")
        return parse_template(entry, template_fields(entries[entry], name), name)
    if file and Path(file).is_file():
        return choose(read_templates(Path(file)), entry, file)
    if not Path(name).is_file():
        raise unknown_template(name, known, "data.chat_template")
    if Path(name).suffix == ".json":
        names = ", ".join(read_slot_templates(read_text(Path(name)), name))
        raise UsageError(f"data.chat_template {name}: choose one of its templates with {name}:NAME, from {names}")
    if Path(name).suffix not in (".yaml", ".yml"):
        return Template(name, read_text(Path(name)))
    inside = read_templates(Path(name))
    if len(inside) != 1:
        raise UsageError(
            f"data.chat_template {name}: the file has several templates; choose one with {name}:NAME, "
            f"from {', '.join(inside)}"
        )
    return next(iter(inside.values()))


def template_from_text(text: str) -> Template:
    """Make a chat template of a text with {}: each user message is inserted, each completion ends with EOS."""
    before, *rest = text.replace("\\n", "\n").split("{}")  # a shell passes "\n" as two characters
    if len(rest) != 1:
        example = '"Human: {}\\nAssistant: "'
        raise UsageError(f"data.chat_template {text!r} needs {{}} exactly once, for the user message, as in {example}")
    return Template(text, SINGLE_TURN.replace("BEFORE", jinja_literal(before)).replace("AFTER", jinja_literal(rest[0])))


def jinja_literal(text: str) -> str:
    """Return a text as a Jinja literal; Jinja has JSON's escapes, except those of letters."""
    return json.dumps(text, ensure_ascii=False)


def apply_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the tokenizer's chat template, and its EOS token to the end-of-turn; an empty name changes nothing."""
    if not name:
        return
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    from posttrain.data.encoding.template_limits import render

    template = load_template(name)
    tokenizer.chat_template = template.jinja
    if template.end_of_turn != tokenizer.eos_token and template.end_of_turn in whole_tokens(tokenizer):
        tokenizer.eos_token = template.end_of_turn
    try:
        render(tokenizer, [{"role": "user", "content": "a"}])
    except UsageError as error:
        raise UsageError(f"data.chat_template {name[:80]}: {error}") from None
    except TemplateSyntaxError as error:
        raise UsageError(f"data.chat_template {name}: line {error.lineno}: {error.message}") from None
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError):
        pass  # the template may require other messages


def template_stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that stop generation: EOS, and those that the chat template names."""
    tokens = whole_tokens(tokenizer)
    texts = [text for text in turn_ends(tokenizer.chat_template) if text in tokens]
    ids = [tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(text) for text in texts)]
    return list(dict.fromkeys(token for token in ids if token is not None))


# Files


@cache
def shipped_templates() -> dict[str, Template]:
    """Return the templates that come with the package."""
    file = resources.files("posttrain.data.encoding").joinpath("templates.yaml")
    return parse_templates(file.read_text(encoding="utf-8"), "templates.yaml")


def read_templates(file: Path) -> dict[str, Template]:
    """Read the templates of a user's YAML file."""
    return parse_templates(read_text(file), str(file))


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.chat_template {file}: cannot be read: {error}") from None


def parse_templates(text: str, where: str) -> dict[str, Template]:
    """Parse `name: {template: ..., end_of_turn: ...}`; other fields are refused."""
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"data.chat_template {where}: not valid YAML: {error}") from None
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f"data.chat_template {where}: expected `NAME:` with `template:` under it")
    return {str(name): parse_template(str(name), fields, f"{where}:{name}") for name, fields in entries.items()}


def parse_template(name: str, fields: Any, where: str) -> Template:
    if not isinstance(fields, dict) or not isinstance(fields.get("template"), str):
        raise UsageError(f"data.chat_template {where}: has no `template:` text")
    for field, value in fields.items():
        if field not in FIELDS:
            near = difflib.get_close_matches(str(field), FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIELDS)}"
            raise UsageError(f"data.chat_template {where}: unknown field {field!r}; {hint}")
        texts = value if field == "stop" and isinstance(value, list) else [value]
        if not all(isinstance(text, str) and text for text in texts):
            raise UsageError(f"data.chat_template {where}: {field}: expected text, found {value!r}")
    stop = fields.get("stop", ())
    return Template(**{**fields, "name": name, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def choose(templates: dict[str, Template], name: str, file: str) -> Template:
    if name not in templates:
        raise unknown_template(name, templates, f"data.chat_template {file}")
    return templates[name]


def unknown_template(name: str, known: Collection[str], where: str) -> UsageError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UsageError(f"{where}: no template and no file {name!r}.{hint} The templates are {', '.join(known)}")
