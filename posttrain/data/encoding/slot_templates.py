"""Reads templates.json of MindSpeed-LLM and MindSpeed-RL: templates made of slots, as chat templates.

    {"name": "qwen", "format_user": {"slots": ["<|im_start|>user\\n{{content}}<|im_end|>\\n<|im_start|>assistant\\n"]},
     "format_separator": {"slots": ["\\n"]}, "default_system": "...", "stop_words": ["<|im_end|>"], "replace_eos": true}

A slot is a text with {{content}}, {"token": TEXT}, or ["bos_token"]. The parts are written in this order: prefix,
system, then for each turn of the user the separator (from the second turn on), the user's text and the completion.
"""

from __future__ import annotations

import json
import re
from typing import Any

from posttrain.core.errors import UsageError

PLACES = re.compile(r"(\{\{(?:content|idx)\}\})")
ROLES = {
    "system": "format_system",
    "user": "format_user",
    "assistant": "format_assistant",
    "tool": "format_observation",
}
KNOWN = (
    *ROLES.values(),
    *("name", "format_separator", "format_prefix", "format_function", "format_tools", "default_system", "stop_words"),
    *("efficient_eos", "replace_eos", "force_system", "template_class"),
)
CLASSES = (None, "", "Template", "Llama2Template")


def read_slot_templates(text: str, where: str) -> dict[str, dict[str, Any]]:
    """Return name -> fields of our template files; what cannot be written as a chat template is refused when chosen."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"data.chat_template {where}: not valid JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        raise UsageError(f"data.chat_template {where}: expected a list of templates with `name` and `format_user`")
    return {str(entry["name"]): entry for entry in entries}


def template_fields(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields `template`, `end_of_turn`, `stop` and `system` for the slots of an entry."""
    if unknown := [name for name in entry if name not in KNOWN]:
        raise UsageError(f"data.chat_template {where}: unknown field {unknown[0]!r}; known are {', '.join(KNOWN)}")
    if entry.get("template_class") not in CLASSES:
        raise UsageError(
            f"data.chat_template {where}: template_class {entry['template_class']} is not supported; use the model's "
            "own chat template, or one of posttrain's"
        )
    stop = [str(word) for word in entry.get("stop_words") or []]
    ends = stop[0] if entry.get("replace_eos") and stop else ""
    fields: dict[str, Any] = {"template": _jinja(entry, ends, where)}
    if ends:
        fields["end_of_turn"] = ends
    if stop:
        fields["stop"] = stop
    if entry.get("default_system"):
        fields["system"] = str(entry["default_system"])
    return fields


def _jinja(entry: dict[str, Any], ends: str, where: str) -> str:
    """Return the template; `ends`: the text that replaces the end-of-sequence token."""
    inside = entry.get("template_class") == "Llama2Template"  # the system's text is part of the user's
    slots = {role: _slots(entry, name, where) for role, name in ROLES.items()}
    if "format_assistant" not in entry:
        after = [] if entry.get("efficient_eos") else [_literal(ends) if ends else "eos_token"]
        slots["assistant"] = ["content", *after]
    system = _written(slots["system"] or ["content"])
    lines = [
        "{%- set ns = namespace(turn=0, before='') %}",
        "{%- set first = messages[0].role == 'system' %}",
        "{%- set system = messages[0].content if first else (default_system if default_system is defined else '') %}",
        _written(_slots(entry, "format_prefix", where)),
        "{%- set content = system %}",
        "{%- if content %}",
        "{%- set ns.before %}" + system + "{%- endset %}" if inside else system,
        "{%- endif %}",
        "{%- for message in (messages[1:] if first else messages) %}",
    ]
    separator = _written(_slots(entry, "format_separator", where))
    for place, role in enumerate(("user", "tool", "assistant")):
        lines.append(f"{{%- {'if' if not place else 'elif'} message.role == '{role}' %}}")
        if not slots[role] and role == "tool":
            lines.append('{{- raise_exception("this template has no messages of tools") }}')
            continue
        lines.append(
            "{%- set content = ns.before ~ message.content %}"
            if role == "user"
            else "{%- set content = message.content %}"
        )
        if role != "assistant":
            lines.append("{%- set idx = ns.turn %}{%- if ns.turn %}" + separator + "{%- endif %}")
        lines.append(_written(slots[role] or ["content"]))
        if role != "assistant":
            lines.append("{%- set ns.turn = ns.turn + 1 %}{%- set ns.before = '' %}")
    lines += ['{%- else %}{{- raise_exception("unknown role " ~ message.role) }}', "{%- endif %}", "{%- endfor %}"]
    return "".join(lines)


def _slots(entry: dict[str, Any], name: str, where: str) -> list[str]:
    """Return the slots of a part as Jinja expressions."""
    part = entry.get(name) or {}
    found: list[str] = []
    for slot in part.get("slots") or [] if isinstance(part, dict) else [None]:
        if isinstance(slot, str):
            for piece in PLACES.split(slot):
                found += [piece[2:-2]] if PLACES.fullmatch(piece) else [_literal(piece)] if piece else []
        elif isinstance(slot, dict) and list(slot) == ["token"]:
            found.append(_literal(str(slot["token"])))
        elif isinstance(slot, list) and len(slot) == 1 and slot[0] in ("bos_token", "eos_token"):
            found.append(slot[0])
        else:
            raise UsageError(f"data.chat_template {where}: {name}: unknown slot {slot!r}")
    return found


def _written(expressions: list[str]) -> str:
    return "".join(f"{{{{- {expression} }}}}" for expression in expressions)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
