"""data.map_keys: rename the columns of a file before their format is recognised.

{"prompt": "problem", "query": "", "response": "answer"}        our column: the file's column; "" removes ours
{"ground_truth": "reward_model.ground_truth"}                    a value inside a column
{"messages": "talk", "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.data.reading.cells import cell_error
from posttrain.data.reading.records import Record

OPTIONAL = ("query", "system", "history", "input", "tools")  # columns that a record may lack
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
    """Maps our column names to those of a file, and the keys and roles of messages."""

    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | Mapping[str, Any]) -> KeyMap:
        """Read the option: a mapping, or JSON text."""
        if isinstance(text, str) and not text.strip():
            return cls()
        try:
            mapping = json.loads(text) if isinstance(text, str) else dict(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"data.map_keys: not valid JSON ({error}): {text}") from None
        if not isinstance(mapping, dict):
            raise UsageError(f'data.map_keys: expected {{"our column": "their column"}}, found {text}')
        inner = mapping.pop("tags", {})
        tags = dict(inner) if isinstance(inner, dict) else {"tags": inner}
        tags |= {key: mapping.pop(key) for key in TAGS if key in mapping}
        for key in tags:
            if key not in TAGS:
                raise UsageError(f"data.map_keys: unknown tag {key!r}; known are {', '.join(TAGS)}")
        for key, value in (mapping | tags).items():
            if not isinstance(value, str):
                raise UsageError(f"data.map_keys: {key}: expected a column name, found {value!r}")
        return cls(mapping, tags)

    def apply(self, record: Record) -> Record:
        """Return the record with our column names; renamed columns lose their old name."""
        if not self.columns and not self.tags:
            return record
        taken = {their: self._find(record, our, their) for our, their in self.columns.items() if their}
        kept = {name: value for name, value in record.values.items() if name not in taken and name not in self.columns}
        found = {our: taken[their] for our, their in self.columns.items() if their}
        values = {name: value for name, value in found.items() if value is not MISSING} | kept
        if self.tags:
            values = {name: self._rename_keys(value) for name, value in values.items()}
        return replace(record, values=values)

    def _find(self, record: Record, our: str, their: str) -> Any:
        if their in record.values:
            return record.values[their]
        value: Any = record.values
        for part in their.split("."):
            if not isinstance(value, dict) or part not in value:
                if our in OPTIONAL and "." not in their:
                    return MISSING
                columns = ", ".join(map(str, record.values))
                raise cell_error(
                    record,
                    their,
                    f'no such column, but data.map_keys has "{our}": "{their}"; the columns are {columns}',
                )
            value = value[part]
        return value

    def _rename_keys(self, value: Any) -> Any:
        """Rename the keys of messages to role and content; return other values unchanged."""
        if isinstance(value, list):
            return [self._rename_keys(item) for item in value]
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        if not isinstance(value, dict) or role_tag not in value or content_tag not in value:
            return value
        roles = {self.tags[tag]: role for tag, role in ROLE_TAGS.items() if tag in self.tags}
        role = value[role_tag]
        rest = {key: item for key, item in value.items() if key not in (role_tag, content_tag)}
        known = roles.get(role, role) if isinstance(role, str) else role
        return {**rest, "role": known, "content": value[content_tag]}


MISSING = object()
