"""data.map_keys: columns that have other names in a file than here, renamed before anything looks at them.

{"prompt": "problem", "query": "", "response": "answer"}        our column: theirs; "" leaves ours out
{"ground_truth": "reward_model.ground_truth"}                    a value inside a column
{"messages": "talk", "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.data.reading.examples import fault
from posttrain.data.reading.records import Record

OPTIONAL = ("query", "system", "history", "input", "tools")  # a row may well be without
ROLE_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}
TAGS = ("role_tag", "content_tag", *ROLE_TAGS)


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Our columns and theirs, and how messages are spelled."""

    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | Mapping[str, Any]) -> KeyMap:
        """From the option: a mapping, or JSON text."""
        if isinstance(text, str) and not text.strip():
            return cls()
        try:
            mapping = json.loads(text) if isinstance(text, str) else dict(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"data.map_keys: cannot be read as JSON: {error}: {text}") from None
        if not isinstance(mapping, dict):
            raise UsageError(f'data.map_keys: expected {{"our column": "their column"}}, found {text}')
        inner = mapping.pop("tags", {})
        tags = dict(inner) if isinstance(inner, dict) else {"tags": inner}
        tags |= {key: mapping.pop(key) for key in TAGS if key in mapping}
        for key in tags:
            if key not in TAGS:
                raise UsageError(f"data.map_keys: no such tag {key!r}; known are {', '.join(TAGS)}")
        for key, value in (mapping | tags).items():
            if not isinstance(value, str):
                raise UsageError(f"data.map_keys: {key}: expected the name of a column, found {value!r}")
        return cls(mapping, tags)

    def apply(self, row: Record) -> Record:
        """The row under our names. A column that was renamed is gone under its old name."""
        if not self.columns and not self.tags:
            return row
        taken = {their: self._value(row, our, their) for our, their in self.columns.items() if their}
        kept = {name: value for name, value in row.values.items() if name not in taken and name not in self.columns}
        found = {our: taken[their] for our, their in self.columns.items() if their}
        values = {name: value for name, value in found.items() if value is not MISSING} | kept
        if self.tags:
            values = {name: self._spelled(value) for name, value in values.items()}
        return replace(row, values=values)

    def _value(self, row: Record, our: str, their: str) -> Any:
        if their in row.values:
            return row.values[their]
        value: Any = row.values
        for part in their.split("."):
            if not isinstance(value, dict) or part not in value:
                if our in OPTIONAL and "." not in their:
                    return MISSING
                columns = ", ".join(map(str, row.values))
                raise fault(row, their, f'no such column, but data.map_keys has "{our}": "{their}"; columns: {columns}')
            value = value[part]
        return value

    def _spelled(self, value: Any) -> Any:
        """Messages with our role and content; all else as it is."""
        if isinstance(value, list):
            return [self._spelled(item) for item in value]
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        if not isinstance(value, dict) or role_tag not in value or content_tag not in value:
            return value
        roles = {self.tags[tag]: role for tag, role in ROLE_TAGS.items() if tag in self.tags}
        role = value[role_tag]
        rest = {key: item for key, item in value.items() if key not in (role_tag, content_tag)}
        known = roles.get(role, role) if isinstance(role, str) else role
        return {**rest, "role": known, "content": value[content_tag]}


MISSING = object()
